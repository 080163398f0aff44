//! Linear layers on packed weights, in any of the formats: `c = epilogue(a W^T + bias)`.
#![allow(unsafe_code)]

use std::ops::Range;

use super::aligned::{Aligned, Number};
use super::exec::{Exec, SharedRows, part};
use super::kernels::{Kernels, PANEL, TILE_ROWS, Tile, per_step};
use super::low::{LowKernels, RowScale, Scales, stride};
use super::rows::Epilogue;
use crate::error::Result;
use crate::model::{self, HiddenAct};

/// The number format of weights and matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    F32,
    Bf16,
    Int8,
}

/// Weights and bias of a linear layer, packed once.
pub(super) struct Linear {
    /// Inputs and outputs.
    pub k: usize,
    pub n: usize,
    /// Outputs of a panel, `w`.
    panel: usize,
    panels: Panels,
    /// `[ceil(n / w) * w]`, zero past `n`.
    bias: Vec<f32>,
}

/// `[ceil(n / w), steps, w, numbers a step]`: panel `p` holds the outputs `w p .. w p + w`, zero past `n`, and each step
/// so many of the `k` inputs as fill four bytes, zero past `k`. With the length of a panel.
enum Panels {
    F32(Aligned<f32>, usize),
    Bf16(Aligned<u16>, usize),
    Int8 {
        panels: Aligned<i8>,
        len: usize,
        /// Of each output.
        scales: Vec<f32>,
        /// The sum of each output's numbers.
        sums: Vec<i32>,
    },
}

/// The rows that a linear layer runs on, `[rows, k]` in fp32 or rows of `stride(k)`.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    Int8(&'a [u8], &'a [RowScale]),
}

/// Where its results go.
pub(super) enum Out<'a> {
    /// `[rows, n]`
    F32(Epilogue, &'a mut [f32]),
    /// Rows of `stride(n)`, after the activation.
    Bf16(Option<HiddenAct>, &'a mut [u16]),
}

/// The same for the tasks of one operation.
enum SharedOut<'a> {
    F32(Epilogue, SharedRows<'a>),
    Bf16(&'static LowKernels, Option<HiddenAct>, SharedRows<'a, u16>),
}

/// A tile's result, whose rows begin at cache lines.
#[repr(align(64))]
struct Block([[f32; PANEL]; TILE_ROWS]);

impl Linear {
    /// Packs `parts`, whose outputs follow one another, for `kernels`; each is multiplied by its factor.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory.
    pub(super) fn pack(parts: &[(model::Linear<'_>, f32)], format: Format, kernels: &Kernels) -> Result<Self> {
        let k = parts[0].0.weight.shape()[1];
        let n = parts.iter().map(|(part, _)| part.bias.len()).sum::<usize>();
        let panel = if format == Format::F32 { kernels.panel } else { PANEL };
        let columns = n.next_multiple_of(panel);
        let mut panels = match format {
            Format::F32 => Panels::F32(Aligned::zeroed(columns * k)?, panel * k),
            Format::Bf16 => {
                let k = k.next_multiple_of(2);
                Panels::Bf16(Aligned::zeroed(columns * k)?, PANEL * k)
            }
            Format::Int8 => Panels::Int8 {
                panels: Aligned::zeroed(columns * k.next_multiple_of(4))?,
                len: PANEL * k.next_multiple_of(4),
                scales: vec![0.0; columns],
                sums: vec![0; columns],
            },
        };
        let mut row = vec![0.0; k];
        let mut bias = Vec::with_capacity(columns);
        for (part, factor) in parts {
            for i in 0..part.bias.len() {
                part.weight.read(i * k, &mut row);
                row.iter_mut().for_each(|x| *x *= factor);
                panels.set(bias.len() + i, panel, &row);
            }
            bias.extend(part.bias.to_f32().iter().map(|x| x * factor));
        }
        bias.resize(columns, 0.0);
        Ok(Self { k, n, panel, panels, bias })
    }

    /// Of the weights, and of the rows that it runs on.
    pub(super) fn format(&self) -> Format {
        match self.panels {
            Panels::F32(..) => Format::F32,
            Panels::Bf16(..) => Format::Bf16,
            Panels::Int8 { .. } => Format::Int8,
        }
    }

    /// `epilogue(a W^T + bias)` of each row of `a`.
    pub(super) fn run(&self, kernels: &Kernels, exec: Exec<'_, '_>, a: Rows<'_>, out: Out<'_>) {
        let (k, n) = (self.k, self.n);
        let (a_len, width, size) = match a {
            Rows::F32(a) => (a.len(), k, 4),
            Rows::Bf16(a) => (a.len(), stride(k), 2),
            Rows::Int8(a, scales) => (a.len().min(scales.len() * stride(k)), stride(k), 1),
        };
        let rows = a_len / width;
        let (c, c_len) = match out {
            Out::F32(epilogue, c) => {
                let len = c.len() / n;
                (SharedOut::F32(epilogue, SharedRows::new(c, n)), len)
            }
            Out::Bf16(act, c) => {
                let len = c.len() / stride(n);
                (SharedOut::Bf16(low(kernels), act, SharedRows::new(c, stride(n))), len)
            }
        };
        assert!(a_len == rows * width && c_len == rows, "a linear layer's shapes do not fit");
        let (row_parts, panel_parts) = self.split(exec.threads(), rows);
        exec.for_each(row_parts * panel_parts, |task| {
            let mut rows = part(rows, row_parts, task / panel_parts);
            let panels = part(n.div_ceil(self.panel), panel_parts, task % panel_parts);
            let step = (kernels.sweep / (width * size)).next_multiple_of(TILE_ROWS).max(TILE_ROWS);
            let mut out = Block([[0.0; PANEL]; TILE_ROWS]);
            while !rows.is_empty() {
                let block = rows.start..rows.end.min(rows.start + step);
                rows.start = block.end;
                let tiles = block.len().div_ceil(TILE_ROWS);
                for panel in panels.clone() {
                    let columns = panel * self.panel..n.min((panel + 1) * self.panel);
                    for tile in 0..tiles {
                        let at = part(block.len(), tiles, tile);
                        let first = block.start + at.start;
                        // Meanwhile the next panel comes from memory, a part with each tile.
                        self.panels.prefetch(panel + 1, tile, tiles);
                        self.product(kernels, a, first..first + at.len(), panel, &mut out.0);
                        let out = &out.0[..at.len()];
                        // SAFETY: this piece of `c` belongs to this task: the grid of parts does not overlap.
                        unsafe {
                            match &c {
                                SharedOut::F32(epilogue, c) => {
                                    let bias = &self.bias[columns.clone()];
                                    (kernels.epilogue)(*epilogue, out, bias, c, first, columns.start);
                                }
                                SharedOut::Bf16(low, act, c) => {
                                    let bias = &self.bias[panel * PANEL..][..PANEL];
                                    (low.epilogue)(*act, out, bias, c, first, columns.start);
                                }
                            }
                        }
                    }
                }
            }
        });
    }

    /// `out = a W^T` for at most 12 rows of `a` and one panel.
    #[inline(always)]
    fn product(
        &self,
        kernels: &Kernels,
        a: Rows<'_>,
        rows: Range<usize>,
        panel: usize,
        out: &mut [[f32; PANEL]; TILE_ROWS],
    ) {
        fn of<T>(panels: &[T], panel: usize, len: usize) -> &[T] {
            &panels[panel * len..][..len]
        }
        let (first, rows, out, ldo) = (rows.start, rows.len(), out.as_flattened_mut(), PANEL);
        match (&self.panels, a) {
            (Panels::F32(panels, len), Rows::F32(a)) => {
                let (k, b) = (self.k, of(panels, panel, *len));
                (kernels.tile)(Tile { rows, k, a: &a[first * k..], lda: k, b, out, ldo });
            }
            (Panels::Bf16(panels, len), Rows::Bf16(a)) => {
                let (k, lda) = (self.k.div_ceil(2), stride(self.k));
                let b = of(panels, panel, *len);
                (low(kernels).tile_bf16)(Tile { rows, k, a: &a[first * lda..], lda, b, out, ldo });
            }
            (Panels::Int8 { panels, len, scales, sums }, Rows::Int8(a, row_scales)) => {
                let (k, lda) = (self.k.div_ceil(4), stride(self.k));
                let b = of(panels, panel, *len);
                let columns = panel * PANEL..(panel + 1) * PANEL;
                let scales =
                    Scales { rows: &row_scales[first..], columns: &scales[columns.clone()], sums: &sums[columns] };
                (low(kernels).tile_int8)(Tile { rows, k, a: &a[first * lda..], lda, b, out, ldo }, &scales);
            }
            _ => unreachable!("a linear layer runs on rows of its own format"),
        }
    }

    /// Into how many parts of the rows and of the panels to cut the work for `threads`: by panels, so that each
    /// thread reads its own part of the weights, and by rows as well where there are too few panels.
    fn split(&self, threads: usize, rows: usize) -> (usize, usize) {
        if threads == 1 {
            return (1, 1);
        }
        // Three tasks a thread: one that is late holds up the others by a third of its share.
        let wanted = 3 * threads;
        let panel_parts = self.n.div_ceil(self.panel).min(wanted);
        let row_parts = wanted.div_ceil(panel_parts).min(rows.div_ceil(4 * TILE_ROWS));
        (row_parts, panel_parts)
    }
}

/// The kernels of bf16 and int8: a model in these formats is only loaded where there are some.
#[inline(always)]
fn low(kernels: &Kernels) -> &'static LowKernels {
    kernels.low.expect("a model in bf16 or int8 has kernels for it")
}

impl Panels {
    /// Asks for part `i` of `parts` of a panel to come into the second-level cache.
    #[inline(always)]
    fn prefetch(&self, panel: usize, i: usize, parts: usize) {
        fn of<T>(all: &[T], len: usize, panel: usize, i: usize, parts: usize) {
            let Some(panel) = all.get(panel * len..(panel + 1) * len) else { return };
            for line in panel[part(len, parts, i)].chunks(64 / size_of::<T>()) {
                // SAFETY: a hint that reads nothing, of an instruction that every x86-64 has.
                #[cfg(target_arch = "x86_64")]
                unsafe {
                    use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
                    _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
                }
                #[cfg(not(target_arch = "x86_64"))]
                let _ = line;
            }
        }
        match self {
            Self::F32(all, len) => of(all, *len, panel, i, parts),
            Self::Bf16(all, len) => of(all, *len, panel, i, parts),
            Self::Int8 { panels, len, .. } => of(panels, *len, panel, i, parts),
        }
    }

    /// Sets the weights `[k]` of one output in its panel, of `width` outputs.
    fn set(&mut self, output: usize, width: usize, row: &[f32]) {
        /// Spreads `row` over the steps of its column.
        fn spread<T: Number>(
            panels: &mut [T],
            (output, width): (usize, usize),
            row: &[f32],
            number: impl Fn(f32) -> T,
        ) {
            let (a_step, k) = (per_step::<T>(), row.len());
            let len = k.next_multiple_of(a_step) * width;
            let panel = &mut panels[output / width * len..][..len];
            let columns = panel.chunks_exact_mut(a_step).skip(output % width).step_by(width);
            for (place, numbers) in columns.zip(row.chunks(a_step)) {
                place.iter_mut().zip(numbers).for_each(|(place, &x)| *place = number(x));
            }
        }
        let at = (output, width);
        match self {
            Self::F32(panels, _) => spread(panels, at, row, |x| x),
            Self::Bf16(panels, _) => spread(panels, at, row, |x| half::bf16::from_f32(x).to_bits()),
            Self::Int8 { panels, scales, sums, .. } => {
                let max = row.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
                // One weight that is not finite must show in the results.
                let broken: f32 = row.iter().map(|x| x * 0.0).sum();
                let scale = if max > 0.0 { max / 127.0 + broken } else { 1.0 + broken };
                let number = |x: f32| (x / scale).round() as i8;
                spread(panels, at, row, number);
                scales[output] = scale;
                sums[output] = row.iter().map(|&x| i32::from(number(x))).sum();
            }
        }
    }
}
