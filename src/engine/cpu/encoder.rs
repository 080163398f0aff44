//! The encoder on one group of sequences: embeddings, then layer after layer, all in one thread's working memory.

use std::ops::Range;

use super::CpuModel;
use super::aligned::Aligned;
use super::attention::{Attention, AttentionScratch};
use super::exec::Exec;
use super::rows::Epilogue;
use super::scratch::Slots;
use super::weights::{PackedLayer, PackedNorm};
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
    /// `[B, num_labels]`
    pub logits: Aligned<f32>,
    /// `[B]`, the sequences' tokens, counted from the group's first.
    pub sequences: Vec<Range<usize>>,
}

impl GroupScratch {
    pub(super) const fn new() -> Self {
        Self {
            x: Aligned::new(),
            wide: Aligned::new(),
            context: Aligned::new(),
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
        scratch.x.grow(room * h)?;
        scratch.wide.grow(room * (3 * h).max(self.spec.intermediate_size))?;
        scratch.context.grow(room * h)?;

        let mut rows = tokens;
        self.embed(exec, batch, start, &scratch.sequences, &mut scratch.x[..rows * h]);
        for (i, layer) in self.weights.layers.iter().enumerate() {
            let first_only = first_only && i + 1 == self.weights.layers.len();
            let qkv = &mut scratch.wide[..rows * 3 * h];
            layer.qkv.run(self.kernels, exec, &scratch.x[..rows * h], Epilogue::Store, qkv);
            if first_only {
                // What follows attention concerns each row alone: the other rows end here.
                rows = scratch.sequences.len();
                for (i, sequence) in scratch.sequences.iter().enumerate() {
                    scratch.x.copy_within(sequence.start * h..(sequence.start + 1) * h, i * h);
                }
            }
            let context = &mut scratch.context[..rows * h];
            let heads = self.spec.num_attention_heads;
            let sequences = &scratch.sequences;
            Attention { kernels: self.kernels, qkv, hidden: h, heads, sequences, first_only }
                .run(exec, attention, context)?;
            self.after_attention(exec, layer, &mut scratch.x[..rows * h], context, &mut scratch.wide);
        }
        Ok(&mut scratch.x[..rows * h])
    }

    /// `x [rows, h]`: `x = norm(x + output(context))`, then `x = norm(x + feed_forward(x))`.
    fn after_attention(
        &self,
        exec: Exec<'_, '_>,
        layer: &PackedLayer,
        x: &mut [f32],
        context: &[f32],
        wide: &mut [f32],
    ) {
        let rows = x.len() / self.spec.hidden_size;
        layer.attention_output.run(self.kernels, exec, context, Epilogue::Add, x);
        self.norm(exec, &layer.attention_norm, x);
        let wide = &mut wide[..rows * self.spec.intermediate_size];
        layer.intermediate.run(self.kernels, exec, x, Epilogue::Act(self.spec.hidden_act), wide);
        layer.output.run(self.kernels, exec, wide, Epilogue::Add, x);
        self.norm(exec, &layer.output_norm, x);
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
