//! Self-attention, sequence by sequence and head by head, with online softmax: scores exist for a block of at most 12
//! queries and 512 keys at a time.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::aligned::Aligned;
use super::exec::{Exec, SharedRows, part};
use super::kernels::{Kernels, MOST_ROWS, PANEL, TILE_ROWS, Tile};
use super::low::{LowKernels, steps, stride};
use super::scratch::Slots;
use crate::error::Result;

/// Keys whose scores are in memory at once, of one block of queries.
pub(super) const KEYS: usize = 512;

/// Numbers between two rows of scores: not a power of two, so that the rows do not compete for places in the cache.
pub(super) const SCORES: usize = KEYS + PANEL;

/// The working memory of one thread.
pub(super) struct AttentionScratch {
    /// `[ceil(S / w), d, w]`, the keys of one sequence and head, transposed in panels of `w`, the kernels' width.
    keys: Aligned<f32>,
    /// `[ceil(d / w), S, w]`, the values in panels.
    values: Aligned<f32>,
    /// `[12, SCORES]`.
    scores: Aligned<f32>,
    /// `[12, ceil(d / w) * w]`.
    sums: Aligned<f32>,
    low: LowScratch,
    /// There is room for so many tokens.
    tokens: usize,
}

/// The same for attention in bf16.
pub(super) struct LowScratch {
    /// `[ceil(S / 32), steps(d), 32, 2]`, the keys of one sequence and head, pairs transposed in panels.
    pub keys: Aligned<u16>,
    /// `[ceil(d / 32), steps(S), 32, 2]`, the values in panels, two tokens side by side.
    pub values: Aligned<u16>,
    /// `[rows, SCORES]`, as many rows as a tile has.
    pub scores: Aligned<f32>,
    /// `[rows, SCORES]`, their softmax.
    pub weights: Aligned<u16>,
    /// `[rows, ceil(d / 32) * 32]`.
    pub sums: Aligned<f32>,
}

impl AttentionScratch {
    pub(super) const fn new() -> Self {
        Self {
            keys: Aligned::new(),
            values: Aligned::new(),
            scores: Aligned::new(),
            sums: Aligned::new(),
            low: LowScratch {
                keys: Aligned::new(),
                values: Aligned::new(),
                scores: Aligned::new(),
                weights: Aligned::new(),
                sums: Aligned::new(),
            },
            tokens: 0,
        }
    }

    /// Makes room for a sequence of `len` tokens and heads of width `d`.
    fn grow(&mut self, len: usize, d: usize) -> Result<()> {
        self.keys.grow(len.next_multiple_of(PANEL) * d)?;
        self.values.grow(d.next_multiple_of(PANEL) * len)?;
        self.scores.grow(TILE_ROWS * SCORES)?;
        self.sums.grow(TILE_ROWS * d.next_multiple_of(PANEL))?;
        self.tokens = self.tokens.max(len);
        Ok(())
    }

    /// The same for [`Self::low`].
    fn grow_low(&mut self, len: usize, d: usize) -> Result<()> {
        let low = &mut self.low;
        low.keys.grow(len.next_multiple_of(PANEL) * steps::<u16>(d) * 2)?;
        low.values.grow(d.next_multiple_of(PANEL) * steps::<u16>(len) * 2)?;
        low.scores.grow(MOST_ROWS * SCORES)?;
        low.weights.grow(MOST_ROWS * SCORES)?;
        low.sums.grow(MOST_ROWS * d.next_multiple_of(PANEL))?;
        self.tokens = self.tokens.max(len);
        Ok(())
    }

    /// For how many tokens there is room.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }
}

/// What attention runs on.
#[derive(Clone, Copy)]
pub(super) struct Attention<'a> {
    pub kernels: &'a Kernels,
    /// `h`, a multiple of the number of heads.
    pub hidden: usize,
    pub heads: usize,
    /// The sequences' token ranges.
    pub sequences: &'a [Range<usize>],
    /// Only the first token of each sequence asks.
    pub first_only: bool,
}

/// Some queries of one sequence and head; query `i`'s result goes to row `first + i` of the context.
struct Head {
    tokens: Range<usize>,
    head: usize,
    queries: Range<usize>,
    first: usize,
}

/// The same in bf16.
pub(super) struct LowHead<'a> {
    /// From this head's column of the sequence's first token on: queries, keys and values, rows `stride` apart.
    pub query: &'a [u16],
    pub keys: &'a [u16],
    pub values: &'a [u16],
    pub stride: usize,
    /// Tokens of the sequence.
    pub len: usize,
    pub head_dim: usize,
    pub queries: Range<usize>,
    /// Query `i`'s result goes to row `first + i` and these columns.
    pub context: &'a SharedRows<'a, u16>,
    pub first: usize,
    pub columns: Range<usize>,
}

impl Attention<'_> {
    /// Writes the heads' results, side by side, to `context`: `[T, h]`, or `[B, h]` with `first_only`. `qkv` `[T, 3 h]`
    /// holds query (scaled by `1 / sqrt(d)` in its weights), key and value of each token.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory.
    pub(super) fn run(
        &self,
        exec: Exec<'_, '_>,
        scratch: &Slots<AttentionScratch>,
        qkv: &[f32],
        context: &mut [f32],
    ) -> Result<()> {
        let context = SharedRows::new(context, self.hidden);
        self.for_each_head(exec, scratch, |head, scratch| {
            scratch.grow(head.tokens.len(), self.hidden / self.heads)?;
            self.head(qkv, head, scratch, &context);
            Ok(())
        })
    }

    /// The same in bf16: rows of `stride(3 h)` and of `stride(h)`.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory.
    pub(super) fn run_low(
        &self,
        exec: Exec<'_, '_>,
        low: &LowKernels,
        scratch: &Slots<AttentionScratch>,
        qkv: &[u16],
        context: &mut [u16],
    ) -> Result<()> {
        let (h, d) = (self.hidden, self.hidden / self.heads);
        let context = SharedRows::new(context, stride(h));
        self.for_each_head(exec, scratch, |head, scratch| {
            let _tiles = self.kernels.tiles();
            scratch.grow_low(head.tokens.len(), d)?;
            let (stride, column) = (stride(3 * h), head.head * d);
            let sequence = &qkv[head.tokens.start * stride..head.tokens.end * stride];
            let head = LowHead {
                query: &sequence[column..],
                keys: &sequence[h + column..],
                values: &sequence[2 * h + column..],
                stride,
                len: head.tokens.len(),
                head_dim: d,
                queries: head.queries,
                context: &context,
                first: head.first,
                columns: column..column + d,
            };
            // SAFETY: these columns of these rows are this head's, and each query is in one task.
            unsafe { (low.head)(&head, &mut scratch.low) };
            Ok(())
        })
    }

    /// Calls `f` for all queries of all sequences and heads, split over the threads.
    fn for_each_head(
        &self,
        exec: Exec<'_, '_>,
        scratch: &Slots<AttentionScratch>,
        f: impl Fn(Head, &mut AttentionScratch) -> Result<()> + Sync,
    ) -> Result<()> {
        let failure = Mutex::new(None);
        let pairs = self.sequences.len() * self.heads;
        // One long text on many cores: its queries are split too, and each part packs the keys again.
        let parts = if pairs < 2 * exec.threads() { (2 * exec.threads()).div_ceil(pairs) } else { 1 };
        exec.for_each(pairs * parts, |task| {
            let (pair, i) = (task / parts, task % parts);
            let (sequence, head) = (pair / self.heads, pair % self.heads);
            let tokens = self.sequences[sequence].clone();
            let asked = if self.first_only { 1 } else { tokens.len() };
            let queries = part(asked, parts, i);
            if queries.is_empty() {
                return;
            }
            let first = if self.first_only { sequence } else { tokens.start };
            if let Err(error) = scratch.with(|scratch| f(Head { tokens, head, queries, first }, scratch)) {
                *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        });
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    fn head(&self, qkv: &[f32], head: Head, scratch: &mut AttentionScratch, context: &SharedRows<'_>) {
        let Head { tokens, head, queries, first } = head;
        let (h, d, len) = (self.hidden, self.hidden / self.heads, tokens.len());
        let w = self.kernels.panel;
        let width = d.next_multiple_of(w);
        let sequence = &qkv[tokens.start * 3 * h..tokens.end * 3 * h];
        let query = &sequence[head * d..];
        pack_keys(&sequence[h + head * d..], 3 * h, (len, d), w, &mut scratch.keys);
        pack_values(&sequence[2 * h + head * d..], 3 * h, (len, d), w, &mut scratch.values);

        let tiles = queries.len().div_ceil(TILE_ROWS);
        for tile in 0..tiles {
            let block = part(queries.len(), tiles, tile);
            let (start, rows) = (queries.start + block.start, block.len());
            let mut max = [f32::NEG_INFINITY; TILE_ROWS];
            let mut total = [0.0; TILE_ROWS];
            scratch.sums[..rows * width].fill(0.0);
            for keys in (0..len).step_by(KEYS).map(|key| key..len.min(key + KEYS)) {
                let panels = keys.start / w..keys.end.div_ceil(w);
                for (i, panel) in panels.enumerate() {
                    let b = &scratch.keys[panel * d * w..][..d * w];
                    let (a, out) = (&query[start * 3 * h..], &mut scratch.scores[i * w..]);
                    (self.kernels.tile)(Tile::whole(rows, d, (a, 3 * h), b, (out, SCORES)));
                }
                let mut rescale = [0.0; TILE_ROWS];
                for i in 0..rows {
                    let (now, sum) = (self.kernels.softmax)(&mut scratch.scores[i * SCORES..][..keys.len()], max[i]);
                    rescale[i] = (max[i] - now).exp();
                    total[i] = total[i] * rescale[i] + sum;
                    max[i] = now;
                }
                for panel in 0..width / w {
                    let mut out = [[0.0; PANEL]; TILE_ROWS];
                    let b = &scratch.values[(panel * len + keys.start) * w..][..keys.len() * w];
                    let (a, product) = (&scratch.scores[..], out.as_flattened_mut());
                    (self.kernels.tile)(Tile::whole(rows, keys.len(), (a, SCORES), b, (product, PANEL)));
                    for i in 0..rows {
                        let sums = &mut scratch.sums[i * width + panel * w..][..w];
                        sums.iter_mut().zip(&out[i]).for_each(|(s, x)| *s = *s * rescale[i] + x);
                    }
                }
            }
            for (i, total) in total.iter().enumerate().take(rows) {
                let scale = 1.0 / total;
                // SAFETY: these columns of this row are this head's, and this query is in no other task.
                let out = unsafe { context.columns(first + start + i, head * d..(head + 1) * d) };
                out.iter_mut().zip(&scratch.sums[i * width..]).for_each(|(o, s)| *o = s * scale);
            }
        }
    }
}

/// `keys`: rows of `d` that are `stride` apart, to `[ceil(len / w), d, w]`, zero past `len`.
fn pack_keys(keys: &[f32], stride: usize, (len, d): (usize, usize), w: usize, packed: &mut [f32]) {
    for (p, panel) in packed[..len.next_multiple_of(w) * d].chunks_exact_mut(d * w).enumerate() {
        let rows = (len - p * w).min(w);
        if rows < w {
            panel.fill(0.0);
        }
        for column in 0..rows {
            let key = &keys[(p * w + column) * stride..][..d];
            panel.chunks_exact_mut(w).zip(key).for_each(|(row, &x)| row[column] = x);
        }
    }
}

/// `values`: rows of `d` that are `stride` apart, to `[ceil(d / w), len, w]`, zero past `d`.
fn pack_values(values: &[f32], stride: usize, (len, d): (usize, usize), w: usize, packed: &mut [f32]) {
    for (p, panel) in packed[..d.next_multiple_of(w) * len].chunks_exact_mut(len * w).enumerate() {
        let columns = (d - p * w).min(w);
        for (i, row) in panel.chunks_exact_mut(w).enumerate() {
            row[..columns].copy_from_slice(&values[i * stride + p * w..][..columns]);
            row[columns..].fill(0.0);
        }
    }
}
