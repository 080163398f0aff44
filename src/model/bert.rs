//! The BERT family: `config.json` with `model_type` "bert", tensors as `BertModel` and `BertForSequenceClassification`
//! of transformers name them.

use serde_json::Value as Json;

use super::{Checkpoint, Classifier, Embeddings, EncoderSpec, HiddenAct, Layer, Linear, Norm, Weights};
use crate::error::{Error, Result};
use crate::head::HeadSpec;

/// Reads the encoder's dimensions from `config.json`.
///
/// # Errors
/// `Invalid` with the key's name when one is missing or impossible; `Unsupported` for a variant that is not BERT as
/// published (decoders, relative positions).
pub fn spec(config: &Json) -> Result<EncoderSpec> {
    let spec = EncoderSpec {
        vocab_size: dimension(config, "vocab_size")?,
        hidden_size: dimension(config, "hidden_size")?,
        num_hidden_layers: dimension(config, "num_hidden_layers")?,
        num_attention_heads: dimension(config, "num_attention_heads")?,
        intermediate_size: dimension(config, "intermediate_size")?,
        max_position_embeddings: dimension(config, "max_position_embeddings")?,
        type_vocab_size: if config.get("type_vocab_size").is_some() {
            dimension(config, "type_vocab_size")?
        } else {
            2
        },
        layer_norm_eps: layer_norm_eps(config)?,
        hidden_act: hidden_act(config)?,
    };
    if !spec.hidden_size.is_multiple_of(spec.num_attention_heads) {
        return Err(Error::invalid(format!(
            "config.json: hidden_size {} is not a multiple of num_attention_heads {}",
            spec.hidden_size, spec.num_attention_heads
        )));
    }
    match config.get("position_embedding_type").and_then(Json::as_str) {
        None | Some("absolute") => {}
        Some(other) => {
            return Err(Error::unsupported(format!(
                "config.json: position_embedding_type '{other}' is not supported; only 'absolute' is"
            )));
        }
    }
    for key in ["is_decoder", "add_cross_attention"] {
        if config.get(key).and_then(Json::as_bool) == Some(true) {
            return Err(Error::unsupported(format!("config.json: {key}=true is not supported; only encoders are")));
        }
    }
    Ok(spec)
}

/// A dimension: a positive integer with a bound that keeps every product of two of them far from overflow.
fn dimension(config: &Json, key: &str) -> Result<usize> {
    const MAX: u64 = 1 << 24;
    match config.get(key) {
        None => Err(Error::invalid(format!("config.json: '{key}' is missing"))),
        Some(value) => match value.as_u64() {
            Some(n @ 1..=MAX) => Ok(n as usize),
            _ => Err(Error::invalid(format!("config.json: '{key}' must be an integer from 1 to {MAX}, not {value}"))),
        },
    }
}

fn layer_norm_eps(config: &Json) -> Result<f32> {
    match config.get("layer_norm_eps") {
        None => Ok(1e-12),
        Some(value) => match value.as_f64() {
            Some(eps) if (0.0..1.0).contains(&eps) => Ok(eps as f32),
            _ => {
                Err(Error::invalid(format!("config.json: 'layer_norm_eps' must be a number from 0 to 1, not {value}")))
            }
        },
    }
}

fn hidden_act(config: &Json) -> Result<HiddenAct> {
    match config.get("hidden_act").map(|v| v.as_str().unwrap_or("")) {
        None | Some("gelu") => Ok(HiddenAct::Gelu),
        Some("gelu_new" | "gelu_pytorch_tanh") => Ok(HiddenAct::GeluTanh),
        Some("relu") => Ok(HiddenAct::Relu),
        Some(other) => Err(Error::unsupported(format!(
            "config.json: hidden_act '{other}' is not supported; supported are gelu, gelu_new, gelu_pytorch_tanh, relu"
        ))),
    }
}

/// Finds every tensor that the encoder and its head need.
///
/// # Errors
/// `Invalid` with file and tensor named when one is missing or has another shape than the spec asks for.
pub fn weights<'a>(checkpoint: &'a Checkpoint, spec: &EncoderSpec, head: &HeadSpec) -> Result<Weights<'a>> {
    // Task models keep the encoder under "bert.", bare ones do not.
    const WORD: &str = "embeddings.word_embeddings.weight";
    let bare = checkpoint.find(WORD).is_some();
    let at = Source { checkpoint, prefix: if bare { "" } else { "bert." } };
    let (h, ff) = (spec.hidden_size, spec.intermediate_size);
    let embeddings = Embeddings {
        word: at.tensor(WORD, &[spec.vocab_size, h])?,
        position: at.tensor("embeddings.position_embeddings.weight", &[spec.max_position_embeddings, h])?,
        token_type: at.tensor("embeddings.token_type_embeddings.weight", &[spec.type_vocab_size, h])?,
        norm: at.norm("embeddings.LayerNorm", h)?,
    };
    let mut layers = Vec::new();
    for i in 0..spec.num_hidden_layers {
        let linear = |name: &str, out, input| at.linear(&format!("encoder.layer.{i}.{name}"), out, input);
        let norm = |name: &str| at.norm(&format!("encoder.layer.{i}.{name}"), h);
        layers.push(Layer {
            query: linear("attention.self.query", h, h)?,
            key: linear("attention.self.key", h, h)?,
            value: linear("attention.self.value", h, h)?,
            attention_output: linear("attention.output.dense", h, h)?,
            attention_norm: norm("attention.output.LayerNorm")?,
            intermediate: linear("intermediate.dense", ff, h)?,
            output: linear("output.dense", h, ff)?,
            output_norm: norm("output.LayerNorm")?,
        });
    }
    let classifier = match *head {
        HeadSpec::Embed { .. } => None,
        HeadSpec::Classify { num_labels, .. } => Some(Classifier {
            pooler: at.linear("pooler.dense", h, h)?,
            classifier: Source { checkpoint, prefix: "" }.linear("classifier", num_labels, h)?,
        }),
    };
    Ok(Weights { embeddings, layers, classifier })
}

/// A checkpoint with the prefix of its encoder's names.
struct Source<'a, 'p> {
    checkpoint: &'a Checkpoint,
    prefix: &'p str,
}

impl<'a> Source<'a, '_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<super::Tensor<'a>> {
        self.checkpoint.get(&format!("{}{name}", self.prefix), shape)
    }

    fn linear(&self, name: &str, out: usize, input: usize) -> Result<Linear<'a>> {
        Ok(Linear {
            weight: self.tensor(&format!("{name}.weight"), &[out, input])?,
            bias: self.tensor(&format!("{name}.bias"), &[out])?,
        })
    }

    /// Checkpoints converted from TensorFlow name LayerNorm's tensors gamma and beta.
    fn norm(&self, name: &str, width: usize) -> Result<Norm<'a>> {
        let old = self.checkpoint.find(&format!("{}{name}.gamma", self.prefix)).is_some();
        let (weight, bias) = if old { ("gamma", "beta") } else { ("weight", "bias") };
        Ok(Norm {
            weight: self.tensor(&format!("{name}.{weight}"), &[width])?,
            bias: self.tensor(&format!("{name}.{bias}"), &[width])?,
        })
    }
}
