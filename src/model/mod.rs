//! What an encoder is, apart from any engine: its dimensions and its tensors under canonical names. A model family is
//! one file here, which reads its `config.json` and knows the names of its tensors.

pub mod bert;
mod checkpoint;

pub use checkpoint::{Checkpoint, Tensor};

use crate::error::{Error, Result};

/// The dimensions of a BERT-class encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderSpec {
    /// Rows of the word embedding table; every token id is below it.
    pub vocab_size: usize,
    /// Width of a token's vector, `h`.
    pub hidden_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Attention heads; `hidden_size` is a multiple of it.
    pub num_attention_heads: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Rows of the position embedding table: the longest sequence that the encoder can take.
    pub max_position_embeddings: usize,
    /// Rows of the segment embedding table.
    pub type_vocab_size: usize,
    /// Epsilon of every LayerNorm.
    pub layer_norm_eps: f32,
    /// Activation of the feed-forward layer.
    pub hidden_act: HiddenAct,
}

impl EncoderSpec {
    /// Width of one attention head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// Checks one sequence before anything is looked up for it: its ids and segments `[S]` and its length.
    ///
    /// # Errors
    /// `Invalid` with the first number that is out of range.
    pub fn check_sequence(&self, input_ids: &[u32], token_type_ids: &[u32]) -> Result<()> {
        if input_ids.len() > self.max_position_embeddings {
            return Err(Error::invalid(format!(
                "a text of {} tokens is too long: the model takes at most {}",
                input_ids.len(),
                self.max_position_embeddings
            )));
        }
        let check = |what: &str, ids: &[u32], bound: usize| match ids.iter().find(|&&id| id as usize >= bound) {
            Some(id) => Err(Error::invalid(format!("{what} {id} is out of range: the model has {bound}"))),
            None => Ok(()),
        };
        check("token id", input_ids, self.vocab_size)?;
        check("token type id", token_type_ids, self.type_vocab_size)
    }
}

/// Activation of the feed-forward layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HiddenAct {
    /// `x * Phi(x)` by erf.
    Gelu,
    /// The tanh approximation of GELU (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

/// `y = x W^T + b`, as PyTorch stores it.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[out, in]`.
    pub weight: Tensor<'a>,
    /// `[out]`.
    pub bias: Tensor<'a>,
}

/// LayerNorm's scale and shift, each `[hidden_size]`.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// Scale.
    pub weight: Tensor<'a>,
    /// Shift.
    pub bias: Tensor<'a>,
}

/// The embedding tables.
#[derive(Clone, Copy, Debug)]
pub struct Embeddings<'a> {
    /// `[vocab_size, hidden_size]`.
    pub word: Tensor<'a>,
    /// `[max_position_embeddings, hidden_size]`.
    pub position: Tensor<'a>,
    /// `[type_vocab_size, hidden_size]`.
    pub token_type: Tensor<'a>,
    /// Applied to the sum of the three.
    pub norm: Norm<'a>,
}

/// One post-norm transformer layer: `x = norm(x + attention(x))`, then `x = norm(x + feed_forward(x))`.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// `[hidden_size, hidden_size]`.
    pub query: Linear<'a>,
    /// `[hidden_size, hidden_size]`.
    pub key: Linear<'a>,
    /// `[hidden_size, hidden_size]`.
    pub value: Linear<'a>,
    /// `[hidden_size, hidden_size]`.
    pub attention_output: Linear<'a>,
    /// After attention and its residual.
    pub attention_norm: Norm<'a>,
    /// `[intermediate_size, hidden_size]`.
    pub intermediate: Linear<'a>,
    /// `[hidden_size, intermediate_size]`.
    pub output: Linear<'a>,
    /// After the feed-forward layer and its residual.
    pub output_norm: Norm<'a>,
}

/// The classification head: `logits = classifier(tanh(pooler(first token)))`.
#[derive(Clone, Copy, Debug)]
pub struct Classifier<'a> {
    /// `[hidden_size, hidden_size]`.
    pub pooler: Linear<'a>,
    /// `[num_labels, hidden_size]`.
    pub classifier: Linear<'a>,
}

/// All tensors of a model, borrowed from its checkpoint, every shape checked against the spec.
#[derive(Clone, Debug)]
pub struct Weights<'a> {
    /// The embedding tables.
    pub embeddings: Embeddings<'a>,
    /// `[num_hidden_layers]`.
    pub layers: Vec<Layer<'a>>,
    /// Present where the head is a classifier.
    pub classifier: Option<Classifier<'a>>,
}
