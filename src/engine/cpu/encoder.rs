//! The encoder on one group of sequences: embeddings, then layer after layer, all in one thread's working memory.

use std::ops::Range;

use super::CpuModel;
use super::aligned::Aligned;
use super::attention::{Attention, AttentionScratch};
use super::exec::Exec;
use super::int8::Quantized;
use super::linear::{Format, Linear, Out, Rows};
use super::low::{LowKernels, stride};
use super::rows::Epilogue;
use super::scratch::Slots;
use super::weights::PackedNorm;
use crate::batch::PackedBatch;
use crate::error::Result;

/// The working memory of one group of `T` tokens, `B` sequences.
pub(super) struct GroupScratch {
    /// `[T, h]`, the residual stream; `[B, h]` at the end of a pass that needs first tokens only.
    pub x: Aligned<f32>,
    /// `[T, 3 h]` query, key, value, and later `[T, ff]`.
    pub wide: Aligned<f32>,
    /// `[T, h]`
    pub context: Aligned<f32>,
    pub low: LowScratch,
    /// Any layer's input in int8.
    pub quantized: Quantized,
    /// `[B, num_labels]`
    pub logits: Aligned<f32>,
    /// `[B]`, the sequences' tokens, counted from the group's first.
    pub sequences: Vec<Range<usize>>,
}

/// What takes the place of `wide` and `context` where bf16 does; rows are `stride(width)` long.
pub(super) struct LowScratch {
    /// `[T, h]`, `x` rounded.
    x: Aligned<u16>,
    /// `[T, 3 h]`
    qkv: Aligned<u16>,
    /// `[T, h]`
    context: Aligned<u16>,
    /// `[T, ff]`
    wide: Aligned<u16>,
}

impl GroupScratch {
    pub(super) const fn new() -> Self {
        Self {
            x: Aligned::new(),
            wide: Aligned::new(),
            context: Aligned::new(),
            low: LowScratch { x: Aligned::new(), qkv: Aligned::new(), context: Aligned::new(), wide: Aligned::new() },
            quantized: Quantized::new(),
            logits: Aligned::new(),
            sequences: Vec::new(),
        }
    }
}

impl CpuModel {
    /// Runs `group`, some sequences of `batch`, whose ids are known to be in range. The last hidden states are then
    /// in `scratch.x`, and what `[T, h]` part of it holds them is returned: all tokens, or with `first_only` the
    /// first token of each sequence.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory.
    pub(super) fn encode<'s>(
        &self,
        exec: Exec<'_, '_>,
        batch: &PackedBatch,
        group: Range<usize>,
        first_only: bool,
        scratch: &'s mut GroupScratch,
        attention: &Slots<AttentionScratch>,
    ) -> Result<&'s mut [f32]> {
        let h = self.spec.hidden_size;
        let start = batch.cu_seqlens[group.start] as usize;
        let tokens = batch.cu_seqlens[group.end] as usize - start;
        scratch.sequences.clear();
        scratch.sequences.extend(group.map(|i| {
            let range = batch.range(i);
            range.start - start..range.end - start
        }));
        // Not by single tokens, so that passes of similar sizes use the same memory.
        let room = tokens.next_multiple_of(64);
        let ff = self.spec.intermediate_size;
        scratch.x.grow(room * h)?;
        match self.low {
            None => {
                scratch.wide.grow(room * (3 * h).max(ff))?;
                scratch.context.grow(room * h)?;
            }
            Some(_) => {
                let low = &mut scratch.low;
                low.x.grow(room * stride(h))?;
                low.qkv.grow(room * stride(3 * h))?;
                low.context.grow(room * stride(h))?;
                low.wide.grow(room * stride(ff))?;
            }
        }
        if self.format == Format::Int8 {
            scratch.quantized.grow(room, h.max(ff))?;
        }
        self.embed(exec, batch, start, &scratch.sequences, &mut scratch.x[..tokens * h]);
        let rows = match self.low {
            None => self.layers(exec, first_only, scratch, attention)?,
            Some(low) => self.low_layers(exec, low, first_only, scratch, attention)?,
        };
        Ok(&mut scratch.x[..rows * h])
    }

    /// All layers on `scratch.x`, products in fp32 or int8 and the rest in fp32; returns how many rows it has then.
    fn layers(
        &self,
        exec: Exec<'_, '_>,
        first_only: bool,
        scratch: &mut GroupScratch,
        memory: &Slots<AttentionScratch>,
    ) -> Result<usize> {
        let (h, ff, act) = (self.spec.hidden_size, self.spec.intermediate_size, self.spec.hidden_act);
        let GroupScratch { x, wide, context, quantized, sequences, .. } = scratch;
        let mut rows = sequences.last().map_or(0, |last| last.end);
        let mut run = |layer: &Linear, a: &[f32], out: Out<'_>| {
            let a = match layer.int8(self.kernels) {
                Some((int8, smooth)) => quantized.fill(exec, (a, layer.k), smooth, int8.quantize),
                None => Rows::F32(a),
            };
            layer.run(self.kernels, exec, a, out);
        };
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let attention = self.attention(sequences, first_only && i + 1 == self.weights.layers.len());
            let qkv = &mut wide[..rows * 3 * h];
            run(&layer.qkv, &x[..rows * h], Out::F32(Epilogue::Store, qkv));
            if attention.first_only {
                rows = keep_first_tokens(x, h, sequences);
            }
            let context = &mut context[..rows * h];
            attention.run(exec, memory, qkv, context)?;

            let (x, wide) = (&mut x[..rows * h], &mut wide[..rows * ff]);
            run(&layer.attention_output, context, Out::F32(Epilogue::Add, x));
            self.norm(exec, &layer.attention_norm, x);
            run(&layer.intermediate, x, Out::F32(Epilogue::Act(act), wide));
            run(&layer.output, wide, Out::F32(Epilogue::Add, x));
            self.norm(exec, &layer.output_norm, x);
        }
        Ok(rows)
    }

    /// The same with products in bf16 or int8 and what is between them in bf16. The residual stream and the norms stay
    /// fp32.
    fn low_layers(
        &self,
        exec: Exec<'_, '_>,
        kernels: &LowKernels,
        first_only: bool,
        scratch: &mut GroupScratch,
        memory: &Slots<AttentionScratch>,
    ) -> Result<usize> {
        let (h, ff, act) = (self.spec.hidden_size, self.spec.intermediate_size, self.spec.hidden_act);
        let GroupScratch { x, low, quantized, sequences, .. } = scratch;
        let LowScratch { x: rounded, qkv, context, wide } = low;
        let mut rows = sequences.last().map_or(0, |last| last.end);
        // Runs `layer` on rows of the residual stream, which is rounded already where it is to be bf16.
        let run = |layer: &Linear, x: &[f32], rounded: &[u16], quantized: &mut Quantized, out: Out<'_>| {
            let a = match layer.int8(self.kernels) {
                Some((int8, smooth)) => quantized.fill(exec, (x, h), smooth, int8.quantize),
                None => Rows::Bf16(rounded),
            };
            layer.run(self.kernels, exec, a, out);
        };
        // The same on rows of bf16.
        let run_low = |layer: &Linear, a: &[u16], quantized: &mut Quantized, out: Out<'_>| {
            let a = match layer.int8(self.kernels) {
                Some((_, smooth)) => quantized.fill(exec, (a, stride(layer.k)), smooth, kernels.quantize),
                None => Rows::Bf16(a),
            };
            layer.run(self.kernels, exec, a, out);
        };
        // LayerNorm (but for the first, which `embed` has done), and its result rounded.
        let norm = |norm: Option<&PackedNorm>, x: &mut [f32], rounded: &mut [u16]| {
            exec.for_row_blocks_of_two((x, h), (rounded, stride(h)), |_, x, rounded| {
                if let Some(norm) = norm {
                    (self.kernels.layer_norm)(x, &norm.gamma, &norm.beta, self.spec.layer_norm_eps);
                }
                if self.format == Format::Bf16 {
                    (kernels.round)(x, h, rounded);
                }
            });
        };
        norm(None, &mut x[..rows * h], &mut rounded[..rows * stride(h)]);
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let attention = self.attention(sequences, first_only && i + 1 == self.weights.layers.len());
            let qkv = &mut qkv[..rows * stride(3 * h)];
            run(&layer.qkv, &x[..rows * h], &rounded[..rows * stride(h)], quantized, Out::Bf16(None, qkv));
            if attention.first_only {
                rows = keep_first_tokens(x, h, sequences);
            }
            let context = &mut context[..rows * stride(h)];
            attention.run_low(exec, kernels, memory, qkv, context)?;

            let (x, rounded) = (&mut x[..rows * h], &mut rounded[..rows * stride(h)]);
            let wide = &mut wide[..rows * stride(ff)];
            run_low(&layer.attention_output, context, quantized, Out::F32(Epilogue::Add, x));
            norm(Some(&layer.attention_norm), x, rounded);
            run(&layer.intermediate, x, rounded, quantized, Out::Bf16(Some(act), wide));
            run_low(&layer.output, wide, quantized, Out::F32(Epilogue::Add, x));
            norm(Some(&layer.output_norm), x, rounded);
        }
        Ok(rows)
    }

    fn attention<'a>(&'a self, sequences: &'a [Range<usize>], first_only: bool) -> Attention<'a> {
        let (hidden, heads) = (self.spec.hidden_size, self.spec.num_attention_heads);
        Attention { kernels: self.kernels, hidden, heads, sequences, first_only }
    }

    fn norm(&self, exec: Exec<'_, '_>, norm: &PackedNorm, x: &mut [f32]) {
        exec.for_row_blocks(x, self.spec.hidden_size, |_, rows| {
            (self.kernels.layer_norm)(rows, &norm.gamma, &norm.beta, self.spec.layer_norm_eps);
        });
    }

    /// `x [T, h]`: the norm of the sum of each token's word, position and segment vectors. The group's first token is
    /// token `start` of the batch.
    fn embed(&self, exec: Exec<'_, '_>, batch: &PackedBatch, start: usize, sequences: &[Range<usize>], x: &mut [f32]) {
        let h = self.spec.hidden_size;
        let weights = &self.weights;
        let row = |table: &'_ Aligned<f32>, i: usize| -> Range<usize> {
            debug_assert!((i + 1) * h <= table.len());
            i * h..(i + 1) * h
        };
        exec.for_row_blocks(x, h, |first, rows| {
            let mut sequence = sequences.partition_point(|s| s.end <= first);
            for (i, out) in rows.chunks_exact_mut(h).enumerate() {
                let token = first + i;
                if token >= sequences[sequence].end {
                    sequence += 1;
                }
                let word = batch.input_ids[start + token] as usize;
                let segment = batch.token_type_ids[start + token] as usize;
                let place = token - sequences[sequence].start;
                let word = &weights.word[row(&weights.word, word)];
                let segment = &weights.token_type[row(&weights.token_type, segment)];
                let place = &weights.position[row(&weights.position, place)];
                for (((o, &w), &s), &p) in out.iter_mut().zip(word).zip(segment).zip(place) {
                    *o = w + s + p;
                }
            }
            (self.kernels.layer_norm)(rows, &weights.norm.gamma, &weights.norm.beta, self.spec.layer_norm_eps);
        });
    }
}

/// What follows the last attention concerns each row alone: of `x` `[T, h]` only the first token of each sequence goes
/// on. Returns how many there are.
fn keep_first_tokens(x: &mut [f32], h: usize, sequences: &[Range<usize>]) -> usize {
    for (i, sequence) in sequences.iter().enumerate() {
        x.copy_within(sequence.start * h..(sequence.start + 1) * h, i * h);
    }
    sequences.len()
}
