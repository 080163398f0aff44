//! The task tokenize: described by the tokenizer's own files. A config.json beside them is asked for no more than how many
//! positions the model has.

use std::path::Path;

use serde_json::Value as Json;

use super::directory::{self, read_json};
use super::parameters::Parameters;
use super::rename;
use super::tokenizer::TokenizerFile;
use super::triton::TensorDeclaration;
use crate::engine::EngineChoice;
use crate::error::{Error, Result};
use crate::tokenize::TokenizeOptions;

/// A tokenizer, described.
#[derive(Clone, Debug)]
pub struct TokenizeConfig {
    /// tokenizer.json, as transformers loads it.
    pub file: TokenizerFile,
    /// Length, truncation, segments.
    pub options: TokenizeOptions,
    /// The id that shorter rows of a request are filled up with.
    pub pad_id: u32,
    /// The model's share of the thread pool, where the user capped it.
    pub threads: Option<usize>,
    /// The inputs, in the order [TEXT, TEXT_PAIR].
    pub inputs: Vec<TensorDeclaration>,
    /// The outputs, each with what it holds.
    pub outputs: Vec<(IdOutput, TensorDeclaration)>,
}

/// What an output of a tokenizer holds, INT64, for each of the `[length]` tokens of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdOutput {
    /// `[length]` ids.
    InputIds,
    /// `[length]`: 1 for a token, 0 for padding.
    AttentionMask,
    /// `[length]`: the segment.
    TokenTypeIds,
    /// `[length, 2]`: first character and the one after the last, in the text.
    Offsets,
}

impl TokenizeConfig {
    /// Resolves the parameters of config.pbtxt against the files in the version directory `root`.
    ///
    /// # Errors
    /// `Invalid` or `Unsupported`, naming the parameter or the file and what is allowed.
    pub fn resolve(parameters: &Parameters, root: &Path) -> Result<Self> {
        for (key, given) in [
            ("engine", parameters.engine != EngineChoice::Auto),
            ("device", parameters.device.is_some()),
            ("dtype", parameters.dtype.is_some()),
            ("pooling", parameters.pooling.is_some()),
            ("normalize", parameters.normalize.is_some()),
            ("max_batch_tokens", parameters.max_batch_tokens.is_some()),
            ("window_stride", parameters.window_stride > 0),
            ("window_combine", parameters.window_combine.is_some()),
        ] {
            if given {
                return Err(Error::invalid(format!("parameter '{key}' has no meaning for task 'tokenize'; remove it")));
            }
        }
        let (encoder, sentence) = directory::encoder(root)?;
        let config = read_json(&encoder, "config.json")?.unwrap_or(Json::Null);
        let file = TokenizerFile::read(&encoder, sentence.is_some(), config["model_type"].as_str().unwrap_or("bert"))?;
        if file.pads_left {
            return Err(Error::unsupported(
                "tokenizer_config.json: padding_side 'left' is not available in this version; available: right",
            ));
        }
        let Some(pad_id) = file.pad_id else {
            return Err(Error::invalid(
                "tokenizer_config.json: 'pad_token' is not in tokenizer.json; rows of one request are padded with it",
            ));
        };
        let positions = config["max_position_embeddings"].as_u64().filter(|_| config["model_type"] == "bert");
        let positions = positions.and_then(|positions| usize::try_from(positions).ok());
        let files = match (directory::max_length(&encoder, sentence.is_some())?, positions) {
            (Some(tokens), Some(positions)) => Some(tokens.min(positions)),
            (tokens, positions) => tokens.or(positions),
        };
        let Some(max_length) = parameters.max_length.or(files) else {
            return Err(Error::invalid(
                "no file says how many tokens a text may have (model_max_length in tokenizer_config.json, or a \
                 config.json); set the parameter 'max_length'",
            ));
        };
        Ok(Self {
            options: TokenizeOptions {
                max_length,
                truncation: parameters.truncation.unwrap_or(file.truncation),
                token_types: file.token_types,
            },
            pad_id,
            threads: parameters.intra_op_thread_count,
            inputs: super::inputs(parameters)?,
            outputs: outputs(parameters)?,
            file,
        })
    }
}

fn outputs(parameters: &Parameters) -> Result<Vec<(IdOutput, TensorDeclaration)>> {
    const TABLE: [(IdOutput, &str, &[i64]); 4] = [
        (IdOutput::InputIds, "INPUT_IDS", &[-1]),
        (IdOutput::AttentionMask, "ATTENTION_MASK", &[-1]),
        (IdOutput::TokenTypeIds, "TOKEN_TYPE_IDS", &[-1]),
        (IdOutput::Offsets, "OFFSETS", &[-1, 2]),
    ];
    let names = rename("output_names", &parameters.output_names, &TABLE.map(|(_, name, _)| name))?;
    let declared = TABLE.iter().zip(names);
    Ok(declared
        .map(|((kind, _, dims), name)| {
            (*kind, TensorDeclaration { name, data_type: "TYPE_INT64", dims: dims.to_vec() })
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tokenize::Truncation;

    fn resolve(files: &[(&str, Json)], parameters: &[(&str, &str)]) -> Result<TokenizeConfig> {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = json!({ "model": { "vocab": { "[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "<pad>": 4 } } });
        for (name, content) in [("tokenizer.json", tokenizer)].iter().chain(files) {
            std::fs::write(dir.path().join(name), content.to_string()).unwrap();
        }
        TokenizeConfig::resolve(&Parameters::parse(parameters.iter().copied())?, dir.path())
    }

    fn tokenizer(config: Json) -> [(&'static str, Json); 1] {
        [("tokenizer_config.json", config)]
    }

    #[test]
    fn the_tokenizers_own_files_are_enough() {
        let config = resolve(&tokenizer(json!({ "model_max_length": 100, "truncation_side": "left" })), &[]).unwrap();
        let options = TokenizeOptions { max_length: 100, truncation: Truncation::Left, token_types: true };
        assert_eq!((config.options, config.pad_id), (options, 3));
        let names: Vec<String> = config.outputs.iter().map(|(_, tensor)| tensor.to_string()).collect();
        assert_eq!(names[0], "INPUT_IDS TYPE_INT64 [-1]");
        assert_eq!(names[3], "OFFSETS TYPE_INT64 [-1, 2]");
        let named = resolve(&tokenizer(json!({ "model_max_length": 8, "pad_token": { "content": "<pad>" } })), &[]);
        assert_eq!(named.unwrap().pad_id, 4);
    }

    #[test]
    fn the_length_is_the_users_else_the_files_and_within_the_models_positions() {
        let placeholder = tokenizer(json!({ "model_max_length": 1e30 }));
        assert!(resolve(&placeholder, &[]).unwrap_err().message.contains("'max_length'"));
        assert_eq!(resolve(&placeholder, &[("max_length", "7")]).unwrap().options.max_length, 7);
        let model = ("config.json", json!({ "model_type": "bert", "max_position_embeddings": 64 }));
        let [placeholder] = placeholder;
        assert_eq!(resolve(&[placeholder, model.clone()], &[]).unwrap().options.max_length, 64);
        let [long] = tokenizer(json!({ "model_max_length": 100 }));
        assert_eq!(resolve(&[long, model], &[]).unwrap().options.max_length, 64);
    }

    #[test]
    fn what_has_no_meaning_is_refused_by_name() {
        for (config, parameters, word) in [
            (json!({ "model_max_length": 8 }), Some(("pooling", "mean")), "'pooling'"),
            (json!({ "model_max_length": 8 }), Some(("max_batch_tokens", "8")), "'max_batch_tokens'"),
            (json!({ "model_max_length": 8, "pad_token": "<none>" }), None, "'pad_token'"),
            (json!({ "model_max_length": 8, "padding_side": "left" }), None, "padding_side"),
        ] {
            let error = resolve(&tokenizer(config), parameters.as_slice()).unwrap_err();
            assert!(error.message.contains(word), "{error}");
        }
    }
}
