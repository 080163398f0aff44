//! A model's weights in the layout that the kernels want, made once and shared by all runners.

use super::aligned::Aligned;
use super::kernels::Kernels;
use super::linear::{Format, Linear};
use crate::error::Result;
use crate::model::{EncoderSpec, Norm, Tensor, Weights};

/// LayerNorm's scale and shift, each `[h]`.
pub(super) struct PackedNorm {
    pub gamma: Vec<f32>,
    pub beta: Vec<f32>,
}

/// One layer.
pub(super) struct PackedLayer {
    /// Query, key and value side by side, `h` to `3 h`; the query is scaled by `1 / sqrt(head_dim)`.
    pub qkv: Linear,
    pub attention_output: Linear,
    pub attention_norm: PackedNorm,
    pub intermediate: Linear,
    pub output: Linear,
    pub output_norm: PackedNorm,
}

/// All weights. Nothing in it refers to the checkpoint.
pub(super) struct PackedWeights {
    /// `[vocab_size, h]`
    pub word: Aligned<f32>,
    /// `[max_position_embeddings, h]`
    pub position: Aligned<f32>,
    /// `[type_vocab_size, h]`
    pub token_type: Aligned<f32>,
    pub norm: PackedNorm,
    pub layers: Vec<PackedLayer>,
    /// Pooler and classifier, in fp32 always.
    pub classifier: Option<(Linear, Linear)>,
}

impl PackedWeights {
    /// Packs all weights for `kernels`, the layers' in `format`.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory.
    pub(super) fn pack(spec: &EncoderSpec, weights: &Weights<'_>, format: Format, kernels: &Kernels) -> Result<Self> {
        let scale = 1.0 / (spec.head_dim() as f32).sqrt();
        let first = norm(&weights.embeddings.norm);
        let mut layers: Vec<PackedLayer> = Vec::with_capacity(weights.layers.len());
        for layer in &weights.layers {
            let input = layers.last().map_or(&first, |before| &before.output_norm);
            let qkv = [(layer.query, scale), (layer.key, 1.0), (layer.value, 1.0)];
            let qkv = Linear::pack(&qkv, Some(input), format, kernels)?;
            let attention_norm = norm(&layer.attention_norm);
            layers.push(PackedLayer {
                qkv,
                attention_output: Linear::pack(&[(layer.attention_output, 1.0)], None, format, kernels)?,
                intermediate: Linear::pack(&[(layer.intermediate, 1.0)], Some(&attention_norm), format, kernels)?,
                attention_norm,
                output: Linear::pack(&[(layer.output, 1.0)], None, format, kernels)?,
                output_norm: norm(&layer.output_norm),
            });
        }
        let classifier = match &weights.classifier {
            None => None,
            Some(head) => {
                let pack = |linear| Linear::pack(&[(linear, 1.0)], None, Format::F32, kernels);
                Some((pack(head.pooler)?, pack(head.classifier)?))
            }
        };
        Ok(Self {
            word: table(weights.embeddings.word)?,
            position: table(weights.embeddings.position)?,
            token_type: table(weights.embeddings.token_type)?,
            norm: first,
            layers,
            classifier,
        })
    }
}

fn norm(norm: &Norm<'_>) -> PackedNorm {
    PackedNorm { gamma: norm.weight.to_f32(), beta: norm.bias.to_f32() }
}

fn table(tensor: Tensor<'_>) -> Result<Aligned<f32>> {
    let mut rows = Aligned::zeroed(tensor.len())?;
    tensor.read(0, &mut rows);
    Ok(rows)
}
