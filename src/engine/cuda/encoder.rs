//! The encoder on one pass: embeddings, then layer after layer, all enqueued in one stream.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::sys::CUstream;

use super::CudaModel;
use super::gemm::{Linear, Plan, Tools};
use super::kernels::{self, Kernels};
use super::lists::Lists;
use super::memory::ALIGNMENT;
use super::weights::Norm;
use crate::error::Result;
use crate::model::HiddenAct;

/// Rows that are computed where `rows` are needed: plans are made for these counts. Rows beyond the needed ones hold
/// whatever was there; no row depends on another's.
pub(super) fn bucket(rows: usize) -> usize {
    let step = match rows {
        0..=128 => 16,
        129..=1024 => 64,
        _ => 256,
    };
    rows.max(1).next_multiple_of(step)
}

/// Every bucket up to the one of `rows`, the largest first.
pub(super) fn buckets(rows: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(bucket(rows)), |&rows| {
        let step = match rows {
            0..=128 => 16,
            129..=1024 => 64,
            _ => 256,
        };
        Some(rows - step).filter(|&rows| rows > 0)
    })
}

/// Where the hidden states are, for a number of rows: device addresses in the arena of an instance.
#[derive(Clone, Copy)]
pub(super) struct Arena {
    /// `[rows, h]`, the residual stream.
    pub x: u64,
    /// `[rows, h]`
    pub context: u64,
    /// `[rows, 3 h]` query, key, value, and later `[rows, ff]`.
    pub wide: u64,
}

impl CudaModel {
    /// Bytes of an arena for `rows` rows, a bucket.
    pub(super) fn arena_bytes(&self, rows: usize) -> usize {
        let [x, context, wide] = self.arena_parts(rows);
        x + context + wide
    }

    /// The arena for `rows` rows, a bucket, at `address`.
    pub(super) fn arena(&self, address: u64, rows: usize) -> Arena {
        let [x, context, _] = self.arena_parts(rows).map(|bytes| bytes as u64);
        Arena { x: address, context: address + x, wide: address + x + context }
    }

    fn arena_parts(&self, rows: usize) -> [usize; 3] {
        let (h, ff) = (self.spec.hidden_size, self.spec.intermediate_size);
        [h, h, (3 * h).max(ff)].map(|width| (rows * width * self.dtype.bytes()).next_multiple_of(ALIGNMENT))
    }
}

/// One pass: `tokens` tokens of `sequences` sequences, whose lists are at the device address `lists_at`.
pub(super) struct Pass<'a> {
    pub model: &'a CudaModel,
    pub tools: Tools<'a>,
    pub arena: Arena,
    pub lists: &'a Lists,
    pub lists_at: u64,
    pub tokens: usize,
    pub sequences: usize,
    /// Whether the head needs first tokens only.
    pub first_only: bool,
}

impl Pass<'_> {
    /// The device address of a list.
    pub(super) fn list(&self, place: usize) -> u64 {
        self.lists_at + 4 * place as u64
    }

    /// Enqueues the encoder. The last hidden states are at `x` of what is returned: `[tokens, h]`, or with `first_only`
    /// `[sequences, h]`.
    ///
    /// # Errors
    /// Of the calls.
    pub(super) fn encode(&self, plans: &PassPlans) -> Result<Arena> {
        let layers = &self.model.weights.layers;
        let mut arena = self.arena;
        self.embed()?;
        for (i, layer) in layers.iter().enumerate() {
            let Arena { x, context, wide } = arena;
            layer.qkv.run(&self.tools, &plans.qkv, x, wide)?;
            let first_only = self.first_only && i + 1 == layers.len();
            self.attention(first_only)?;
            let (mut rows, mut own, mut input) = (self.tokens, &plans.all, context);
            if let Some(first) = plans.first.as_ref().filter(|_| first_only) {
                // The rest of the layer runs on first tokens: the context moves to where qkv was, and then the residual
                // stream to where the context was.
                self.gather(context, wide)?;
                self.gather(x, context)?;
                arena = Arena { x: context, context: x, wide };
                (rows, own, input) = (self.sequences, first, wide);
            }
            let Arena { x, wide, .. } = arena;
            layer.attention_output.run(&self.tools, &own.attention_output, input, x)?;
            self.norm(&layer.attention_norm, x, rows)?;
            layer.intermediate.run(&self.tools, &own.intermediate, x, wide)?;
            if let Some(activation) = self.model.apart.or_else(|| layer.intermediate.then(&own.intermediate)) {
                self.activation(activation, wide, rows)?;
            }
            layer.output.run(&self.tools, &own.output, wide, x)?;
            self.norm(&layer.output_norm, x, rows)?;
        }
        Ok(arena)
    }

    /// All plans of the pass, before anything is enqueued: making one overwrites the arena.
    ///
    /// # Errors
    /// `Unsupported` where cublasLt has no algorithm; of the calls.
    pub(super) fn plans(&self) -> Result<PassPlans> {
        let layer = &self.model.weights.layers[0];
        let Arena { x, context, wide } = self.arena;
        let of = |rows| -> Result<LayerPlans> {
            Ok(LayerPlans {
                attention_output: self.plan(&layer.attention_output, rows, context, x)?,
                intermediate: self.plan(&layer.intermediate, rows, x, wide)?,
                output: self.plan(&layer.output, rows, wide, x)?,
            })
        };
        let rows = bucket(self.tokens);
        Ok(PassPlans {
            qkv: self.plan(&layer.qkv, rows, x, wide)?,
            all: of(rows)?,
            first: if self.first_only { Some(of(bucket(self.sequences))?) } else { None },
        })
    }

    /// The plan for a product of the pass.
    pub(super) fn plan(&self, linear: &Linear, rows: usize, input: u64, output: u64) -> Result<Arc<Plan>> {
        self.model.plans.get(&self.tools, linear, rows, input, output)
    }

    /// `x [tokens, h]`: the norm of the sum of each token's word, position and segment vectors.
    fn embed(&self) -> Result<()> {
        let (weights, spec) = (&self.model.weights, &self.model.spec);
        self.launch("embeddings", |kernels, stream| {
            // SAFETY: tables, lists and arena have the sizes that the kernel's docs ask for; every id is in range, which
            // the runner has checked.
            unsafe {
                kernels.embed_layer_norm(
                    self.model.dtype,
                    &kernels::EmbedLayerNorm {
                        out: self.arena.x,
                        input_ids: self.list(self.lists.input_ids),
                        token_type_ids: self.list(self.lists.token_type_ids),
                        position_ids: self.list(self.lists.position_ids),
                        word: weights.word,
                        position: weights.position,
                        token_type: weights.token_type,
                        gamma: weights.norm.gamma,
                        beta: weights.norm.beta,
                        eps: spec.layer_norm_eps,
                        tokens: self.tokens as u32,
                        hidden: spec.hidden_size as u32,
                    },
                    stream,
                )
            }
        })
    }

    /// LayerNorm of `rows` rows at `x`, in place. Bias and residual were added by the product before.
    fn norm(&self, norm: &Norm, x: u64, rows: usize) -> Result<()> {
        let spec = &self.model.spec;
        self.launch("LayerNorm", |kernels, stream| {
            // SAFETY: `[rows, h]` are in the arena, gamma and beta are `[h]`.
            unsafe {
                kernels.add_layer_norm(
                    self.model.dtype,
                    &kernels::AddLayerNorm {
                        out: x,
                        x,
                        bias: 0,
                        residual: 0,
                        gamma: norm.gamma,
                        beta: norm.beta,
                        eps: spec.layer_norm_eps,
                        rows: rows as u32,
                        hidden: spec.hidden_size as u32,
                    },
                    stream,
                )
            }
        })
    }

    /// `arena.context` from `arena.wide`, which holds query, key and value: all of its rows, or with `first_only` at least
    /// those of first tokens.
    fn attention(&self, first_only: bool) -> Result<()> {
        let (spec, lists) = (&self.model.spec, self.lists);
        let scale = 1.0 / (spec.head_dim() as f32).sqrt();
        let tile_count = if first_only { lists.first_tile_count } else { lists.tile_count };
        if tile_count > 0 {
            self.launch("attention", |kernels, stream| {
                // SAFETY: context and qkv are `[tokens, h]` and `[tokens, 3 h]` in the arena; the lists name sequences
                // and rows of the pass.
                unsafe {
                    kernels.attention(
                        self.model.dtype,
                        &kernels::Attention {
                            context: self.arena.context,
                            qkv: self.arena.wide,
                            cu_seqlens: self.list(lists.cu_seqlens),
                            tiles: self.list(lists.tiles),
                            tile_count: tile_count as u32,
                            heads: spec.num_attention_heads as u32,
                            head_dim: spec.head_dim() as u32,
                            scale,
                        },
                        stream,
                    )
                }
            })?;
        }
        if lists.short_count > 0 {
            self.launch("attention of short sequences", |kernels, stream| {
                // SAFETY: as above; no listed sequence is longer than `longest`.
                unsafe {
                    kernels.attention_short(
                        self.model.dtype,
                        &kernels::AttentionShort {
                            context: self.arena.context,
                            qkv: self.arena.wide,
                            cu_seqlens: self.list(lists.cu_seqlens),
                            sequences: self.list(lists.short),
                            sequence_count: lists.short_count as u32,
                            longest: lists.short_longest as u32,
                            heads: spec.num_attention_heads as u32,
                            head_dim: spec.head_dim() as u32,
                            scale,
                        },
                        stream,
                    )
                }
            })?;
        }
        Ok(())
    }

    /// The rows of first tokens from `from` to `to`.
    fn gather(&self, from: u64, to: u64) -> Result<()> {
        self.launch("gathering first tokens", |kernels, stream| {
            // SAFETY: `[tokens, h]` and `[sequences, h]` in the arena, at different places; the list holds rows of the pass.
            unsafe {
                kernels.gather_rows(
                    self.model.dtype,
                    &kernels::GatherRows {
                        out: to,
                        x: from,
                        index: self.list(self.lists.cu_seqlens),
                        rows: self.sequences as u32,
                        hidden: self.model.spec.hidden_size as u32,
                    },
                    stream,
                )
            }
        })
    }

    /// The feed-forward layer's activation on `rows` rows at `wide`, where the product has not done it.
    fn activation(&self, activation: HiddenAct, wide: u64, rows: usize) -> Result<()> {
        let elements = rows as u64 * self.model.spec.intermediate_size as u64;
        self.launch("the activation", |kernels, stream| {
            // SAFETY: `[rows, ff]` are in the arena.
            unsafe { kernels.activation(self.model.dtype, wide, elements, activation, stream) }
        })
    }

    /// Enqueues a kernel.
    pub(super) fn launch(
        &self,
        what: &str,
        launch: impl FnOnce(&Kernels, CUstream) -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        let device = &self.model.device;
        launch(device.kernels(), self.tools.stream.raw()).map_err(|error| device.error(what, error))
    }
}

/// How the products of a pass run.
pub(super) struct PassPlans {
    qkv: Arc<Plan>,
    all: LayerPlans,
    /// Of the part of the last layer that runs on first tokens.
    first: Option<LayerPlans>,
}

impl PassPlans {
    /// Milliseconds of a layer's products, where all were timed.
    pub(super) fn milliseconds(&self) -> Option<f32> {
        let LayerPlans { attention_output, intermediate, output } = &self.all;
        [&self.qkv, attention_output, intermediate, output].into_iter().map(|plan| plan.milliseconds).sum()
    }
}

struct LayerPlans {
    attention_output: Arc<Plan>,
    intermediate: Arc<Plan>,
    output: Arc<Plan>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_hold_their_rows_and_are_few() {
        for rows in 1..20_000 {
            let bucket = bucket(rows);
            assert!(bucket >= rows && bucket.is_multiple_of(16) && bucket - rows < 256);
            assert!(rows < 128 || bucket as f64 / (rows as f64) < 1.5);
        }
        let all: Vec<usize> = buckets(16_384).collect();
        assert!(all.len() < 100 && all.contains(&16_384) && all.contains(&16));
        for rows in 1..=16_384 {
            assert!(all.contains(&bucket(rows)), "{rows}");
        }
    }
}
