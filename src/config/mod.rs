//! From config.pbtxt and the model's own files to one typed description of the model.

pub mod directory;
pub mod ids;
pub mod parameters;
pub mod sequence;
pub mod tokenize;
pub mod tokenizer;
pub mod triton;
pub mod windows;

#[cfg(test)]
mod tests;

use serde_json::Value as Json;

use crate::engine::{Dtype, EngineChoice};
use crate::error::{Error, Result};
use crate::head::{HeadSpec, Pooling};
use crate::model::{EncoderSpec, bert};
use crate::tokenize::Truncation;
use directory::Directory;
use ids::IdInputs;
use parameters::{Parameters, Task};
use tokenizer::TokenizerFile;
use triton::{TensorDeclaration, TritonConfig};
use windows::WindowSpec;

/// A model, described.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The encoder's dimensions.
    pub spec: EncoderSpec,
    /// The head.
    pub head: HeadSpec,
    /// Class names, `[num_labels]`; empty for an embed head.
    pub labels: Vec<String>,
    /// Tokens of one text (or pair) with the special ones.
    pub max_length: usize,
    /// What happens to a longer text.
    pub truncation: Truncation,
    /// The engine that the user asked for.
    pub engine: EngineChoice,
    /// The CUDA device, where the user fixed it.
    pub device: Option<u32>,
    /// What happens to it instead, where the user wants windows.
    pub windows: Option<WindowSpec>,
    /// Precision that the user asked for.
    pub dtype: Dtype,
    /// Tokens of one pass, where the user fixed it.
    pub max_batch_tokens: Option<usize>,
    /// The model's share of the thread pool, where the user capped it.
    pub threads: Option<usize>,
    /// The inputs, in the order [TEXT, TEXT_PAIR] or [INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS].
    pub inputs: Vec<TensorDeclaration>,
    /// The names of the raw-id inputs, where the model takes those and no texts.
    pub ids: Option<IdInputs>,
    /// The outputs, each with what it holds.
    pub outputs: Vec<(OutputKind, TensorDeclaration)>,
    /// tokenizer.json, as the reference loads it; `None` where the clients tokenize.
    pub tokenizer: Option<TokenizerFile>,
    /// The id of padding, which only an engine that pads looks at.
    pub pad_token_id: u32,
    /// What deserves a WARN at load.
    pub warnings: Vec<String>,
}

/// What an output holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// FP32 `[hidden_size]`.
    Embedding,
    /// FP32 `[num_labels]`.
    Logits,
    /// FP32 `[num_labels]`.
    Probabilities,
    /// BYTES `[1]`: the name of the most probable class.
    Label,
    /// FP32 `[1]`: its probability.
    Score,
    /// INT32 `[1]`: tokens after truncation, of all windows where there are some.
    TokenCount,
    /// INT32 `[1]`: the row of a window in its request.
    Row,
    /// INT32 `[1]`: the first character of a window in its text.
    WindowStart,
    /// INT32 `[1]`: the character behind its last one.
    WindowEnd,
}

impl ModelConfig {
    /// Resolves the parameters of config.pbtxt against the model's files: the user's word first, then the files'.
    ///
    /// # Errors
    /// `Invalid` or `Unsupported`, naming the parameter or the file and what is allowed.
    pub fn resolve(parameters: &Parameters, directory: &Directory, triton: &TritonConfig) -> Result<Self> {
        let spec = spec(&directory.config)?;
        let task = match parameters.task {
            Some(task) => task,
            None => directory.task()?,
        };
        let (head, labels) = match task {
            Task::Embed => (embed_head(parameters, directory), Vec::new()),
            Task::Classify => classify_head(parameters, directory)?,
            Task::Tokenize => return Err(Error::internal("a tokenizer has no encoder")),
        };
        let engine = engine(parameters, directory)?;
        let mut warnings = Vec::new();
        let model_type = directory.config["model_type"].as_str().unwrap_or("");
        let (tokenizer, ids, inputs) = match IdInputs::declared(parameters, triton)? {
            Some((ids, inputs)) => (None, Some(ids), inputs),
            None => {
                let tokenizer = TokenizerFile::read(&directory.encoder, directory.sentence.is_some(), model_type)?;
                (Some(tokenizer), None, inputs(parameters)?)
            }
        };
        let truncation = tokenizer.as_ref().map_or(Truncation::Error, |tokenizer| tokenizer.truncation);
        let truncation = parameters.truncation.unwrap_or(truncation);
        let windows = WindowSpec::resolve(parameters, triton, &head, truncation)?;
        // What the files say of it is about texts.
        let files = directory.max_length.filter(|_| ids.is_none());
        Ok(Self {
            max_length: max_length(parameters, files, &spec, &mut warnings)?,
            truncation,
            windows,
            engine,
            device: parameters.device,
            dtype: parameters.dtype.unwrap_or(Dtype::Auto),
            max_batch_tokens: parameters.max_batch_tokens,
            threads: parameters.intra_op_thread_count,
            inputs,
            ids,
            outputs: outputs(parameters, &head, &spec, windows)?,
            pad_token_id: pad_token_id(&directory.config, &spec),
            spec,
            head,
            labels,
            tokenizer,
            warnings,
        })
    }

    /// Whether the model takes pairs of texts.
    pub fn is_pair(&self) -> bool {
        self.ids.is_none() && self.inputs.len() > 1
    }
}

/// config.json's, where it is a token's; transformers' default is 0.
fn pad_token_id(config: &Json, spec: &EncoderSpec) -> u32 {
    let id = config["pad_token_id"].as_u64().filter(|&id| id < spec.vocab_size as u64);
    id.and_then(|id| u32::try_from(id).ok()).unwrap_or(0)
}

/// The encoder's dimensions, by the family that `model_type` names.
fn spec(config: &Json) -> Result<EncoderSpec> {
    match config["model_type"].as_str() {
        Some("bert") => bert::spec(config),
        Some(other) => Err(Error::unsupported(format!(
            "config.json: model_type '{other}' is not available in this version; available: bert"
        ))),
        None => Err(Error::invalid("config.json: 'model_type' is missing; available: bert")),
    }
}

/// model.onnx alone is for ONNX Runtime; beside a checkpoint it is only where the user says so.
fn engine(parameters: &Parameters, directory: &Directory) -> Result<EngineChoice> {
    let engine = match parameters.engine {
        EngineChoice::Auto if directory.has_onnx_alone() => EngineChoice::Onnx,
        engine => engine,
    };
    let no_meaning = |key: &str, engine: &str| {
        Err(Error::invalid(format!("parameter '{key}' has no meaning for engine '{engine}'; remove it")))
    };
    match engine {
        EngineChoice::Cpu if parameters.device.is_some() => no_meaning("device", "cpu"),
        EngineChoice::Onnx if parameters.device.is_some() => no_meaning("device", "onnx"),
        EngineChoice::Onnx if parameters.dtype.is_some() => no_meaning("dtype", "onnx"),
        _ => Ok(engine),
    }
}

/// A directory without modules.json is pooled by the mean and not normalized, as sentence-transformers does.
fn embed_head(parameters: &Parameters, directory: &Directory) -> HeadSpec {
    HeadSpec::Embed {
        pooling: parameters.pooling.or(directory.sentence.map(|s| s.pooling)).unwrap_or(Pooling::Mean),
        normalize: parameters.normalize.or(directory.sentence.map(|s| s.normalize)).unwrap_or(false),
    }
}

fn classify_head(parameters: &Parameters, directory: &Directory) -> Result<(HeadSpec, Vec<String>)> {
    for (key, given) in [("pooling", parameters.pooling.is_some()), ("normalize", parameters.normalize.is_some())] {
        if given {
            return Err(Error::invalid(format!("parameter '{key}' has no meaning for task 'classify'; remove it")));
        }
    }
    let labels = directory.labels()?;
    let head = HeadSpec::Classify { num_labels: labels.len(), activation: directory.activation(labels.len())? };
    Ok((head, labels))
}

/// The user's `max_length`, else the files', and never beyond the position table.
fn max_length(
    parameters: &Parameters,
    files: Option<usize>,
    spec: &EncoderSpec,
    warnings: &mut Vec<String>,
) -> Result<usize> {
    let positions = spec.max_position_embeddings;
    if let Some(tokens) = parameters.max_length {
        if tokens > positions {
            return Err(Error::invalid(format!(
                "parameter 'max_length' is {tokens}; allowed: 3 to {positions} (config.json, max_position_embeddings)"
            )));
        }
        return Ok(tokens);
    }
    let tokens = files.unwrap_or(positions);
    if tokens > positions {
        warnings.push(format!(
            "the model's files ask for {tokens} tokens, config.json has {positions} positions: texts are cut at {positions}"
        ));
    }
    Ok(tokens.min(positions))
}

fn inputs(parameters: &Parameters) -> Result<Vec<TensorDeclaration>> {
    let names: &[&str] = if parameters.text_pair { &["TEXT", "TEXT_PAIR"] } else { &["TEXT"] };
    let renamed = rename("input_names", &parameters.input_names, names)?;
    Ok(renamed.into_iter().map(|name| TensorDeclaration { name, data_type: "TYPE_STRING", dims: vec![1] }).collect())
}

fn outputs(
    parameters: &Parameters,
    head: &HeadSpec,
    spec: &EncoderSpec,
    windows: Option<WindowSpec>,
) -> Result<Vec<(OutputKind, TensorDeclaration)>> {
    use OutputKind::{Embedding, Label, Logits, Probabilities, Row, Score, TokenCount, WindowEnd, WindowStart};
    let mut table: Vec<(OutputKind, &str, &'static str, usize)> = match *head {
        HeadSpec::Embed { .. } => {
            vec![(Embedding, "EMBEDDING", "TYPE_FP32", spec.hidden_size), (TokenCount, "TOKEN_COUNT", "TYPE_INT32", 1)]
        }
        HeadSpec::Classify { num_labels, .. } => vec![
            (Logits, "LOGITS", "TYPE_FP32", num_labels),
            (Probabilities, "PROBABILITIES", "TYPE_FP32", num_labels),
            (Label, "LABEL", "TYPE_STRING", 1),
            (Score, "SCORE", "TYPE_FP32", 1),
            (TokenCount, "TOKEN_COUNT", "TYPE_INT32", 1),
        ],
    };
    match windows.map(|windows| windows.combine) {
        None => {}
        Some(Some(_)) => table.retain(|(kind, ..)| *kind != Logits),
        Some(None) => {
            let places = [(Row, "ROW"), (WindowStart, "WINDOW_START"), (WindowEnd, "WINDOW_END")];
            table.extend(places.map(|(kind, name)| (kind, name, "TYPE_INT32", 1)));
        }
    }
    let names: Vec<&str> = table.iter().map(|row| row.1).collect();
    let renamed = rename("output_names", &parameters.output_names, &names)?;
    let declared = table.into_iter().zip(renamed);
    Ok(declared
        .map(|((kind, _, data_type, width), name)| {
            (kind, TensorDeclaration { name, data_type, dims: vec![width as i64] })
        })
        .collect())
}

/// Our tensor names under the user's renaming.
fn rename(key: &str, renames: &std::collections::BTreeMap<String, String>, names: &[&str]) -> Result<Vec<String>> {
    let fail = |why: String| Error::invalid(format!("parameter '{key}': {why}"));
    if let Some(ours) = renames.keys().find(|ours| !names.contains(&ours.as_str())) {
        return Err(fail(format!("the model has no '{ours}'; it has {}", names.join(", "))));
    }
    let renamed: Vec<String> =
        names.iter().map(|&ours| renames.get(ours).cloned().unwrap_or_else(|| ours.to_owned())).collect();
    match renamed.iter().enumerate().find(|(i, name)| renamed[..*i].contains(name)) {
        Some((_, twice)) => Err(fail(format!("two tensors would be named '{twice}'"))),
        None => Ok(renamed),
    }
}
