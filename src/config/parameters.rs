//! The `parameters` of config.pbtxt: the table of known keys and their typed values. The README's table is the same.

use std::collections::BTreeMap;
use std::str::FromStr;

use super::windows::Combine;
use crate::engine::{Dtype, EngineChoice};
use crate::error::{Error, Result};
use crate::head::Pooling;
use crate::tokenize::Truncation;

/// Every key that this backend knows, with what it allows.
const KEYS: &[(&str, &str)] = &[
    ("task", "embed, classify, rerank, ner, fill_mask, sparse, multi_vector, tokenize"),
    ("engine", "auto, cpu, cuda, onnx"),
    ("dtype", "auto, fp32, bf16, fp16, fp8, int8"),
    ("device", "a device number"),
    ("pooling", "mean, cls, max, last"),
    ("normalize", "true, false"),
    ("max_length", "a number of tokens, 3 or more"),
    ("truncation", "right, left, error"),
    ("text_pair", "true, false"),
    ("max_batch_tokens", "a number of tokens, 1 or more"),
    ("window_stride", "a number of tokens; 0 is off"),
    ("window_combine", "mean, max"),
    ("aggregation", "none, simple, first, average, max"),
    ("calibration_file", "a file name in the version directory"),
    ("intra_op_thread_count", "a number of threads, 1 or more"),
    ("input_names", "ours:theirs,..."),
    ("output_names", "ours:theirs,..."),
];

/// What a model does with a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A vector for the text.
    Embed,
    /// Class scores for the text or the pair of texts.
    Classify,
    /// The text's token ids, with no model behind them.
    Tokenize,
}

/// The typed parameters; `None` where the user said nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters {
    /// `task`.
    pub task: Option<Task>,
    /// `engine`.
    pub engine: EngineChoice,
    /// `device`.
    pub device: Option<u32>,
    /// `dtype`.
    pub dtype: Option<Dtype>,
    /// `pooling`.
    pub pooling: Option<Pooling>,
    /// `normalize`.
    pub normalize: Option<bool>,
    /// `max_length`, tokens with the special ones.
    pub max_length: Option<usize>,
    /// `truncation`.
    pub truncation: Option<Truncation>,
    /// `text_pair`.
    pub text_pair: bool,
    /// `max_batch_tokens`.
    pub max_batch_tokens: Option<usize>,
    /// `window_stride`, tokens; 0 for no windows.
    pub window_stride: usize,
    /// `window_combine`.
    pub window_combine: Option<Combine>,
    /// `intra_op_thread_count`.
    pub intra_op_thread_count: Option<usize>,
    /// `input_names`: our name to the user's.
    pub input_names: BTreeMap<String, String>,
    /// `output_names`: our name to the user's.
    pub output_names: BTreeMap<String, String>,
}

impl Parameters {
    /// Reads the `(key, string_value)` pairs of config.pbtxt. Keys that begin with `TRITON_` belong to the server.
    ///
    /// # Errors
    /// `Invalid` for an unknown key (with the nearest known one) or a bad value (with what is allowed);
    /// `Unsupported` for a value that this version does not have.
    pub fn parse<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut all = Self::default();
        for (key, value) in pairs {
            if !key.starts_with("TRITON_") {
                all.set(key, value.trim())?;
            }
        }
        Ok(all)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let Some(&(_, allowed)) = KEYS.iter().find(|(known, _)| *known == key) else {
            return Err(unknown(key));
        };
        let bad = || Error::invalid(format!("parameter '{key}' is '{value}'; allowed: {allowed}"));
        match key {
            "task" => self.task = Some(task(value).ok_or_else(bad)??),
            "engine" => self.engine = engine(value).ok_or_else(bad)?,
            "device" => self.device = Some(value.parse().map_err(|_| bad())?),
            "dtype" => self.dtype = Some(dtype(value).ok_or_else(bad)??),
            "pooling" => self.pooling = Some(pooling(value).ok_or_else(bad)?),
            "normalize" => self.normalize = Some(value.parse().map_err(|_| bad())?),
            "max_length" => self.max_length = Some(at_least(3, value).ok_or_else(bad)?),
            "truncation" => self.truncation = Some(truncation(value).ok_or_else(bad)?),
            "text_pair" => self.text_pair = value.parse().map_err(|_| bad())?,
            "max_batch_tokens" => self.max_batch_tokens = Some(at_least(1, value).ok_or_else(bad)?),
            "intra_op_thread_count" => self.intra_op_thread_count = Some(at_least(1, value).ok_or_else(bad)?),
            "input_names" => self.input_names = renames(value).ok_or_else(bad)?,
            "output_names" => self.output_names = renames(value).ok_or_else(bad)?,
            "window_stride" => self.window_stride = at_least(0, value).ok_or_else(bad)?,
            "window_combine" => self.window_combine = Some(combine(value).ok_or_else(bad)?),
            _ => return Err(Error::unsupported(format!("parameter '{key}' is not available in this version"))),
        }
        Ok(())
    }
}

/// `--backend-config=rust,intra_op_thread_count=N`, the size of the process-wide pool, out of the server's JSON.
///
/// # Errors
/// `Invalid` for an unknown key or a bad value. The keys that every Triton server passes to every backend are let be.
pub fn pool_threads(backend_config: &str) -> Result<Option<usize>> {
    const SERVER: [&str; 4] =
        ["auto-complete-config", "backend-directory", "min-compute-capability", "default-max-batch-size"];
    let json: serde_json::Value = serde_json::from_str(backend_config)
        .map_err(|e| Error::internal(format!("the server's backend configuration is not valid JSON ({e})")))?;
    let mut threads = None;
    for (key, value) in json.get("cmdline").and_then(|c| c.as_object()).into_iter().flatten() {
        let value = value.as_str().unwrap_or("");
        match key.as_str() {
            "intra_op_thread_count" => {
                threads = Some(at_least(1, value).ok_or_else(|| {
                    Error::invalid(format!(
                        "--backend-config=rust,{key}={value}: allowed: a number of threads, 1 or more"
                    ))
                })?);
            }
            key if SERVER.contains(&key) => {}
            key => {
                return Err(Error::invalid(format!(
                    "--backend-config=rust,{key}: unknown key; allowed: intra_op_thread_count"
                )));
            }
        }
    }
    Ok(threads)
}

/// The unknown key with its nearest known one. The outer `Option`s below are "is it a word of the table at all".
fn unknown(key: &str) -> Error {
    let nearest = KEYS.iter().min_by_key(|(known, _)| edit_distance(key, known));
    let hint = nearest.map(|(known, allowed)| format!("; the nearest known key is '{known}' (allowed: {allowed})"));
    Error::invalid(format!("unknown parameter '{key}'{}", hint.unwrap_or_default()))
}

fn task(value: &str) -> Option<Result<Task>> {
    Some(match value {
        "embed" => Ok(Task::Embed),
        "classify" => Ok(Task::Classify),
        "tokenize" => Ok(Task::Tokenize),
        "rerank" | "ner" | "fill_mask" | "sparse" | "multi_vector" => {
            Err(not_here("task", value, "embed, classify, tokenize"))
        }
        _ => return None,
    })
}

fn engine(value: &str) -> Option<EngineChoice> {
    Some(match value {
        "auto" => EngineChoice::Auto,
        "cpu" => EngineChoice::Cpu,
        "cuda" => EngineChoice::Cuda,
        "onnx" => EngineChoice::Onnx,
        _ => return None,
    })
}

fn dtype(value: &str) -> Option<Result<Dtype>> {
    Some(match value {
        "auto" => Ok(Dtype::Auto),
        "fp32" => Ok(Dtype::Fp32),
        "bf16" => Ok(Dtype::Bf16),
        "fp16" => Ok(Dtype::Fp16),
        "int8" => Ok(Dtype::Int8),
        "fp8" => Err(not_here("dtype", value, "auto, fp32, bf16, fp16, int8")),
        _ => return None,
    })
}

/// A feature of the table that this version does not have.
fn not_here(key: &str, value: &str, available: &str) -> Error {
    Error::unsupported(format!("{key} '{value}' is not available in this version; available: {available}"))
}

fn pooling(value: &str) -> Option<Pooling> {
    Some(match value {
        "mean" => Pooling::Mean,
        "cls" => Pooling::Cls,
        "max" => Pooling::Max,
        "last" => Pooling::Last,
        _ => return None,
    })
}

fn truncation(value: &str) -> Option<Truncation> {
    Some(match value {
        "right" => Truncation::Right,
        "left" => Truncation::Left,
        "error" => Truncation::Error,
        _ => return None,
    })
}

fn combine(value: &str) -> Option<Combine> {
    Some(match value {
        "mean" => Combine::Mean,
        "max" => Combine::Max,
        _ => return None,
    })
}

fn at_least(min: usize, value: &str) -> Option<usize> {
    usize::from_str(value).ok().filter(|&n| n >= min)
}

fn renames(value: &str) -> Option<BTreeMap<String, String>> {
    value
        .split(',')
        .map(|pair| {
            let (ours, theirs) = pair.trim().split_once(':')?;
            let plain = |name: &str| !name.is_empty() && !name.contains(char::is_whitespace);
            (plain(ours) && plain(theirs)).then(|| (ours.to_owned(), theirs.to_owned()))
        })
        .collect()
}

/// Levenshtein's distance, on bytes: keys are ASCII.
fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn one(key: &str, value: &str) -> Result<Parameters> {
        Parameters::parse([(key, value)])
    }

    #[test]
    fn reads_what_the_table_allows() {
        let all = Parameters::parse([
            ("task", "classify"),
            ("engine", "cuda"),
            ("device", "1"),
            ("dtype", "fp16"),
            ("max_length", " 128 "),
            ("truncation", "left"),
            ("text_pair", "true"),
            ("output_names", "LOGITS:scores, LABEL:label"),
            ("TRITON_BATCH_STRATEGY_PATH", "anything"),
        ])
        .unwrap();
        assert_eq!((all.task, all.max_length, all.text_pair), (Some(Task::Classify), Some(128), true));
        assert_eq!((all.engine, all.device, all.dtype), (EngineChoice::Cuda, Some(1), Some(Dtype::Fp16)));
        assert_eq!(all.output_names["LABEL"], "label");
    }

    #[test]
    fn names_the_nearest_key() {
        let error = one("poolng", "mean").unwrap_err();
        assert!(error.message.contains("'poolng'") && error.message.contains("'pooling'"), "{error}");
        assert!(error.message.contains("mean, cls, max, last"), "{error}");
        assert!(one("max_batch_token", "1").unwrap_err().message.contains("'max_batch_tokens'"));
    }

    #[test]
    fn says_what_is_allowed_for_every_key() {
        for (key, allowed) in KEYS {
            let error = one(key, "\u{1}").unwrap_err();
            let refused = error.message.contains(allowed) || error.kind == ErrorKind::Unsupported;
            assert!(refused && error.message.contains(key), "{key}: {error}");
        }
    }

    #[test]
    fn refuses_by_name_what_is_not_here_yet() {
        for (key, value) in [("task", "ner"), ("dtype", "fp8")] {
            let error = one(key, value).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unsupported);
            assert!(error.message.contains(key) && error.message.contains("this version"), "{error}");
        }
    }

    #[test]
    fn pool_size_comes_from_the_command_line() {
        let config = r#"{"cmdline":{"auto-complete-config":"true","intra_op_thread_count":"3"}}"#;
        assert_eq!(pool_threads(config).unwrap(), Some(3));
        assert_eq!(pool_threads("{}").unwrap(), None);
        assert!(pool_threads(r#"{"cmdline":{"intra_op_thread_count":"0"}}"#).is_err());
        assert!(pool_threads(r#"{"cmdline":{"threads":"2"}}"#).unwrap_err().message.contains("intra_op_thread_count"));
    }
}
