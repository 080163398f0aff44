//! What a model's own files say: config.json, modules.json and the files of sentence-transformers beside it, read as
//! sentence-transformers and transformers read them.

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::parameters::Task;
use crate::error::{Error, Result};
use crate::head::{Activation, Pooling};

/// A version directory, read.
#[derive(Clone, Debug)]
pub struct Directory {
    /// Where config.json, tokenizer.json and the checkpoint are.
    pub encoder: PathBuf,
    /// config.json.
    pub config: Json,
    /// The modules after the encoder, where there is a modules.json.
    pub sentence: Option<SentenceModules>,
    /// Tokens with special ones, as the reference cuts; `None` where no file but config.json limits it.
    pub max_length: Option<usize>,
}

/// What modules.json adds to the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentenceModules {
    /// From the pooling module's config.json.
    pub pooling: Pooling,
    /// Whether there is a Normalize module.
    pub normalize: bool,
}

impl Directory {
    /// Reads the version directory `root`.
    ///
    /// # Errors
    /// `Invalid` with the file's name when one is missing or malformed; `Unsupported` with the module's name when
    /// modules.json asks for one that this version does not have.
    pub fn read(root: &Path) -> Result<Self> {
        let (encoder, sentence) = encoder(root)?;
        let Some(config) = read_json(&encoder, "config.json")? else {
            return Err(Error::invalid(
                "config.json: not found in the version directory; put the Hugging Face files of the model there",
            ));
        };
        if !config.is_object() {
            return Err(Error::invalid("config.json: is not a JSON object"));
        }
        let max_length = max_length(&encoder, sentence.is_some())?;
        Ok(Self { encoder, config, sentence, max_length })
    }

    /// The task that the files imply: modules.json is an embedding model, else the architecture decides.
    ///
    /// # Errors
    /// `Unsupported` with the architecture's name when it implies a task that this version does not have.
    pub fn task(&self) -> Result<Task> {
        let architecture = self.architecture();
        if self.sentence.is_some() || architecture.is_empty() || architecture.ends_with("Model") {
            return Ok(Task::Embed);
        }
        if architecture.ends_with("ForSequenceClassification") {
            return Ok(Task::Classify);
        }
        Err(Error::unsupported(format!(
            "config.json: architecture '{architecture}' is not available in this version; available: BertModel and \
             sentence-transformers directories (embed), BertForSequenceClassification (classify)"
        )))
    }

    /// Whether there is a model.onnx and no checkpoint.
    pub fn has_onnx_alone(&self) -> bool {
        let has = |name: &str| self.encoder.join(name).exists();
        has("model.onnx") && !has("model.safetensors") && !has("model.safetensors.index.json")
    }

    /// The first of `architectures`, or "".
    pub fn architecture(&self) -> &str {
        self.config["architectures"][0].as_str().unwrap_or("")
    }

    /// The class names, `[num_labels]`: `id2label`, else LABEL_0, LABEL_1 ... as transformers names them. Where
    /// `num_labels` disagrees with `id2label`, it wins and the names are lost, as there.
    ///
    /// # Errors
    /// `Invalid` when `id2label` or `num_labels` is malformed.
    pub fn labels(&self) -> Result<Vec<String>> {
        const MAX: u64 = 1 << 20;
        let names = match self.config.get("id2label").filter(|m| !m.is_null()) {
            None => None,
            Some(map) => Some(class_names(map).ok_or_else(|| {
                Error::invalid("config.json: 'id2label' must map \"0\", \"1\" ... to names, without a gap")
            })?),
        };
        let count = match self.config.get("num_labels").filter(|n| !n.is_null()) {
            None => names.as_ref().map_or(2, Vec::len),
            Some(n) => n.as_u64().filter(|n| (1..=MAX).contains(n)).ok_or_else(|| {
                Error::invalid(format!("config.json: 'num_labels' must be an integer from 1 to {MAX}, not {n}"))
            })? as usize,
        };
        Ok(names.filter(|n| n.len() == count).unwrap_or_else(|| (0..count).map(|i| format!("LABEL_{i}")).collect()))
    }

    /// How logits become probabilities: the rule of transformers' text-classification pipeline.
    ///
    /// # Errors
    /// `Invalid` for one class of a single-label problem, which transformers refuses too.
    pub fn activation(&self, num_labels: usize) -> Result<Activation> {
        match self.config["problem_type"].as_str() {
            Some("regression") => Ok(Activation::Identity),
            Some("multi_label_classification") => Ok(Activation::Sigmoid),
            Some("single_label_classification") if num_labels == 1 => {
                Err(Error::invalid("config.json: problem_type 'single_label_classification' needs more than one label"))
            }
            _ if num_labels == 1 => Ok(Activation::Sigmoid),
            _ => Ok(Activation::Softmax),
        }
    }
}

/// `id2label` as a list, where its keys are 0, 1 ... without a gap.
fn class_names(map: &Json) -> Option<Vec<String>> {
    let map = map.as_object().filter(|m| !m.is_empty())?;
    (0..map.len()).map(|i| Some(map.get(&i.to_string())?.as_str()?.to_owned())).collect()
}

/// Where the encoder's files are, and the modules after it, where there is a modules.json.
pub(super) fn encoder(root: &Path) -> Result<(PathBuf, Option<SentenceModules>)> {
    match read_json(root, "modules.json")? {
        None => Ok((root.to_path_buf(), None)),
        Some(modules) => {
            check_sentence_config(root)?;
            sentence_modules(root, &modules)
        }
    }
}

/// Reads modules.json: a Transformer, a Pooling, and perhaps a Normalize.
fn sentence_modules(root: &Path, modules: &Json) -> Result<(PathBuf, Option<SentenceModules>)> {
    let bad = |why: &str| Error::invalid(format!("modules.json: {why}"));
    let mut encoder = None;
    let mut pooling = None;
    let mut normalize = false;
    for module in modules.as_array().ok_or_else(|| bad("is not a list"))? {
        let kind = module["type"].as_str().ok_or_else(|| bad("a module has no 'type'"))?;
        let path = module["path"].as_str().unwrap_or("");
        if path.starts_with('/') || path.split('/').any(|part| part == "..") {
            return Err(bad("a module's 'path' leads out of the version directory"));
        }
        match kind.rsplit('.').next().unwrap_or(kind) {
            "Transformer" => encoder = Some(root.join(path)),
            "Pooling" => pooling = Some(read_pooling(root, path)?),
            "Normalize" => normalize = true,
            other => {
                return Err(Error::unsupported(format!(
                    "modules.json: module '{other}' is not available in this version; available: Transformer, \
                     Pooling, Normalize"
                )));
            }
        }
    }
    let encoder = encoder.ok_or_else(|| bad("has no Transformer module"))?;
    let pooling = pooling.ok_or_else(|| bad("has no Pooling module"))?;
    Ok((encoder, Some(SentenceModules { pooling, normalize })))
}

/// Reads a pooling module's config.json, in the old form (one flag a mode) and the new (`pooling_mode`).
fn read_pooling(root: &Path, path: &str) -> Result<Pooling> {
    let name = format!("{path}/config.json");
    let Some(config) = read_json(root, &name)? else {
        return Err(Error::invalid(format!("{name}: not found, though modules.json names it")));
    };
    let modes = match config.get("pooling_mode") {
        Some(Json::String(mode)) => vec![mode.as_str()],
        Some(Json::Array(modes)) => modes.iter().filter_map(Json::as_str).collect(),
        _ => {
            let on = |(flag, _): &(&str, &str)| config.get(flag).and_then(Json::as_bool) == Some(true);
            const FLAGS: [(&str, &str); 6] = [
                ("pooling_mode_cls_token", "cls"),
                ("pooling_mode_max_tokens", "max"),
                ("pooling_mode_mean_tokens", "mean"),
                ("pooling_mode_lasttoken", "lasttoken"),
                ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
                ("pooling_mode_weightedmean_tokens", "weightedmean"),
            ];
            FLAGS.iter().filter(|f| on(f)).map(|(_, mode)| *mode).collect()
        }
    };
    match modes[..] {
        // The reference's default where no flag is set.
        [] | ["mean"] => Ok(Pooling::Mean),
        ["cls"] => Ok(Pooling::Cls),
        ["max"] => Ok(Pooling::Max),
        ["lasttoken"] => Ok(Pooling::Last),
        _ => Err(Error::unsupported(format!(
            "{name}: pooling '{}' is not available in this version; available: one of mean, cls, max, lasttoken",
            modes.join("+")
        ))),
    }
}

/// Refuses what config_sentence_transformers.json can ask for beyond the modules, rather than answer differently.
fn check_sentence_config(root: &Path) -> Result<()> {
    const FILE: &str = "config_sentence_transformers.json";
    let Some(config) = read_json(root, FILE)? else { return Ok(()) };
    let refuse = |what: String| Err(Error::unsupported(format!("{FILE}: {what} is not available in this version")));
    if let Some(kind @ ("CrossEncoder" | "SparseEncoder" | "MultiVectorEncoder")) = config["model_type"].as_str() {
        return refuse(format!("model_type '{kind}'"));
    }
    if !config["truncate_dim"].is_null() {
        return refuse("truncate_dim".to_owned());
    }
    match config["default_prompt_name"].as_str() {
        Some(name) if config["prompts"][name].as_str().is_some_and(|p| !p.is_empty()) => {
            refuse(format!("default_prompt_name '{name}'"))
        }
        _ => Ok(()),
    }
}

/// `max_seq_length` of sentence_bert_config.json (read only where there is a modules.json), else the tokenizer's
/// `model_max_length`, which is often a placeholder of 1e30: no limit.
pub(super) fn max_length(encoder: &Path, sentence: bool) -> Result<Option<usize>> {
    let sentence_files =
        ["sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"];
    let sources = sentence_files
        .iter()
        .filter(|_| sentence)
        .map(|file| (*file, "max_seq_length"))
        .chain([("tokenizer_config.json", "model_max_length"), ("tokenizer_config.json", "max_len")]);
    for (file, key) in sources {
        let Some(json) = read_json(encoder, file)? else { continue };
        match json.get(key).filter(|v| !v.is_null()) {
            None => {}
            Some(value) => match value.as_f64() {
                Some(n) if n >= f64::from(1 << 24) => return Ok(None),
                Some(n) if n >= 1.0 => return Ok(Some(n as usize)),
                _ => return Err(Error::invalid(format!("{file}: '{key}' must be a positive integer, not {value}"))),
            },
        }
    }
    Ok(None)
}

/// Parses a JSON file of the model; `None` where there is none.
pub(super) fn read_json(directory: &Path, name: &str) -> Result<Option<Json>> {
    /// Far above any published file (the largest tokenizers are about 35 MB).
    const MAX_BYTES: u64 = 256 << 20;
    let fail = |why: String| Error::invalid(format!("{name}: {why}"));
    let path = directory.join(name);
    let size = match std::fs::metadata(&path) {
        // Opening a pipe would wait for a writer.
        Ok(metadata) if !metadata.is_file() => return Err(fail("is not a file".to_owned())),
        Ok(metadata) => metadata.len(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(fail(format!("cannot be read ({})", e.kind()))),
    };
    if size > MAX_BYTES {
        return Err(fail(format!("is larger than {} MiB, the most that is read", MAX_BYTES >> 20)));
    }
    let bytes = std::fs::read(&path).map_err(|e| fail(format!("cannot be read ({})", e.kind())))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|e| fail(format!("is not valid JSON ({e})")))
}
