//! Linear layers on packed weights, in any of the formats: `c = epilogue(a W^T + bias)`.
#![allow(unsafe_code)]

use std::ops::Range;

use super::aligned::{Aligned, Number};
use super::exec::{Exec, SharedRows, part};
use super::int8::{Int8Kernels, RowScale, Scales, Smooth};
use super::kernels::{Blocking, Kernels, MOST_PANELS, MOST_ROWS, PANEL, Piece, TILE_ROWS, Tile, per_step};
use super::low::{LowKernels, UNIT, steps, stride};
use super::rows::Epilogue;
use super::weights::PackedNorm;
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
        /// What is done to the input.
        smooth: Smooth,
        /// As in [`Int8Kernels`].
        pair: f32,
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
#[derive(Clone, Copy)]
struct Block([[f32; PANEL]; MOST_ROWS]);

impl Block {
    const ZERO: Self = Self([[0.0; PANEL]; MOST_ROWS]);
}

impl Linear {
    /// Packs `parts`, whose outputs follow one another, for `kernels`; each is multiplied by its factor. `norm` is the
    /// layer norm that makes the input, where one does. In int8 the input suits the last part best: of query, key and
    /// value it is the value whose errors the answers feel.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory.
    pub(super) fn pack(
        parts: &[(model::Linear<'_>, f32)],
        norm: Option<&PackedNorm>,
        format: Format,
        kernels: &Kernels,
    ) -> Result<Self> {
        let k = parts[0].0.weight.shape()[1];
        let n = parts.iter().map(|(part, _)| part.bias.len()).sum::<usize>();
        let panel = kernels.panel;
        let columns = n.next_multiple_of(panel);
        let mut panels = match format {
            Format::F32 => Panels::F32(Aligned::zeroed(columns * k)?, panel * k),
            Format::Bf16 => {
                let k = steps::<u16>(k) * per_step::<u16>();
                Panels::Bf16(Aligned::zeroed(columns * k)?, panel * k)
            }
            Format::Int8 => Panels::Int8 {
                panels: Aligned::zeroed(columns * steps::<i8>(k) * per_step::<i8>())?,
                len: panel * steps::<i8>(k) * per_step::<i8>(),
                scales: vec![0.0; columns],
                sums: vec![0; columns],
                smooth: norm
                    .map_or_else(|| Smooth::none(k), |norm| Smooth::of(norm, &greatest(&parts[parts.len() - 1].0, k))),
                pair: int8(kernels).pair,
            },
        };
        let mut row = vec![0.0; k];
        let mut bias = Vec::with_capacity(columns);
        for (part, factor) in parts {
            let biases = part.bias.to_f32();
            for (i, own) in biases.iter().enumerate() {
                part.weight.read(i * k, &mut row);
                row.iter_mut().for_each(|x| *x *= factor);
                let offset = panels.set(bias.len(), panel, &mut row);
                bias.push(own * factor + offset);
            }
        }
        bias.resize(columns, 0.0);
        Ok(Self { k, n, panel, panels, bias })
    }

    /// In int8, its kernels and what is done to the input before it is quantized.
    pub(super) fn int8(&self, kernels: &Kernels) -> Option<(&'static Int8Kernels, &Smooth)> {
        match &self.panels {
            Panels::Int8 { smooth, .. } => Some((int8(kernels), smooth)),
            _ => None,
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
        let plan = Plan::new(&self.panels, k, kernels);
        exec.for_each(row_parts * panel_parts, |task| {
            let rows = part(rows, row_parts, task / panel_parts);
            let panels = part(n.div_ceil(self.panel), panel_parts, task % panel_parts);
            let blocks = rows.len().div_ceil((kernels.sweep / (width * size)).max(plan.rows));
            // One for each panel where sums wait for the next piece.
            let (mut one, mut many);
            let sums: &mut [Block] = if plan.pieces == 1 {
                one = [Block::ZERO];
                &mut one
            } else {
                many = [Block::ZERO; MOST_PANELS];
                &mut many
            };
            let _tiles = kernels.tiles();
            for i in 0..blocks {
                let block = part(rows.len(), blocks, i);
                let tiles = block.len().div_ceil(plan.rows);
                for group in panels.clone().step_by(plan.panels) {
                    let group = group..panels.end.min(group + plan.panels);
                    for tile in 0..tiles {
                        let at = part(block.len(), tiles, tile);
                        let first = rows.start + block.start + at.start;
                        for (piece, steps) in plan.pieces() {
                            for panel in group.clone() {
                                let sums = &mut sums[(panel - group.start) % sums.len()];
                                let later = Later { panel: panel + group.len(), tile, tiles };
                                let rows = first..first + at.len();
                                self.product(kernels, a, rows, (panel, steps.clone(), piece), later, &mut sums.0);
                                if piece.last {
                                    // SAFETY: this piece of `c` belongs to this task: the grid of parts does not
                                    // overlap.
                                    unsafe { self.finish(kernels, &sums.0[..at.len()], &c, first, panel) };
                                }
                            }
                        }
                    }
                }
            }
        });
    }

    /// What follows the product.
    ///
    /// # Safety
    /// No other task uses this panel's columns of these rows of `c`.
    #[inline(always)]
    unsafe fn finish(&self, kernels: &Kernels, sums: &[[f32; PANEL]], c: &SharedOut<'_>, first: usize, panel: usize) {
        let columns = panel * self.panel..self.n.min((panel + 1) * self.panel);
        // SAFETY: as the caller promises.
        unsafe {
            match c {
                SharedOut::F32(epilogue, c) => {
                    let bias = &self.bias[columns.clone()];
                    (kernels.epilogue)(*epilogue, sums, bias, c, first, columns.start);
                }
                SharedOut::Bf16(low, act, c) => {
                    let bias = &self.bias[panel * self.panel..][..self.panel];
                    (low.epilogue)(*act, sums, bias, c, first, columns.start);
                }
            }
        }
    }

    /// `out = a W^T` for the rows of a tile, one panel and some steps, added to what the steps before have given.
    #[inline(always)]
    fn product(
        &self,
        kernels: &Kernels,
        a: Rows<'_>,
        rows: Range<usize>,
        (panel, steps, piece): (usize, Range<usize>, Piece),
        later: Later,
        out: &mut [[f32; PANEL]; MOST_ROWS],
    ) {
        let (first, rows, k, out, ldo) = (rows.start, rows.len(), steps.len(), out.as_flattened_mut(), PANEL);
        match (&self.panels, a) {
            (Panels::F32(panels, len), Rows::F32(a)) => {
                let (b, next) = later.of(panels, *len, self.panel, panel, &steps);
                (kernels.tile)(Tile { rows, k, a: &a[first * self.k..], lda: self.k, b, out, ldo, next, piece });
            }
            (Panels::Bf16(panels, len), Rows::Bf16(a)) => {
                let (lda, a_start) = (stride(self.k), 2 * steps.start);
                let (b, next) = later.of(panels, *len, self.panel, panel, &steps);
                (low(kernels).tile)(Tile { rows, k, a: &a[first * lda + a_start..], lda, b, out, ldo, next, piece });
            }
            (Panels::Int8 { panels, len, scales, sums, .. }, Rows::Int8(a, row_scales)) => {
                let (lda, a_start) = (stride(self.k), 4 * steps.start);
                let (b, next) = later.of(panels, *len, self.panel, panel, &steps);
                let columns = panel * self.panel..(panel + 1) * self.panel;
                let scales =
                    Scales { rows: &row_scales[first..], columns: &scales[columns.clone()], sums: &sums[columns] };
                let tile = Tile { rows, k, a: &a[first * lda + a_start..], lda, b, out, ldo, next, piece };
                (int8(kernels).tile)(tile, &scales);
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

/// How the tiles of a layer follow one another: its kernels' [`Blocking`] for its own size.
struct Plan {
    rows: usize,
    panels: usize,
    steps: usize,
    pieces: usize,
}

impl Plan {
    fn new(panels: &Panels, k: usize, kernels: &Kernels) -> Self {
        /// Weights that stay in the second-level cache.
        const GROUP: usize = 1 << 20;
        let (blocking, steps, panel) = match panels {
            Panels::F32(_, len) => (Blocking::VECTORS, k, 4 * len),
            Panels::Bf16(_, len) => (low(kernels).blocking, steps::<u16>(k), 2 * len),
            Panels::Int8 { len, .. } => (int8(kernels).blocking, steps::<i8>(k), *len),
        };
        let panels = (GROUP / panel).clamp(1, blocking.panels);
        Self { rows: blocking.rows, panels, steps, pieces: steps.div_ceil(blocking.steps) }
    }

    /// The steps, cut into pieces of whole multiplications.
    #[inline(always)]
    fn pieces(&self) -> impl Iterator<Item = (Piece, Range<usize>)> {
        let (all, unit) = (self.steps, if self.pieces == 1 { self.steps } else { UNIT });
        (0..self.pieces).map(move |i| {
            let units = part(all / unit, self.pieces, i);
            (Piece { first: i == 0, last: i + 1 == self.pieces }, units.start * unit..units.end * unit)
        })
    }
}

/// What is to be asked for while a tile is computed: its part of the same steps of a later panel.
struct Later {
    panel: usize,
    tile: usize,
    tiles: usize,
}

impl Later {
    /// These steps of `panel`, and of the later one what this tile asks for. A panel is `len` long.
    #[inline(always)]
    fn of<'a, T>(
        &self,
        panels: &'a [T],
        len: usize,
        w: usize,
        panel: usize,
        steps: &Range<usize>,
    ) -> (&'a [T], &'a [T]) {
        let a_step = w * per_step::<T>();
        let of = |panel: usize| panels.get(panel * len + steps.start * a_step..panel * len + steps.end * a_step);
        let next = of(self.panel).unwrap_or_default();
        (of(panel).unwrap_or_default(), &next[part(next.len(), self.tiles, self.tile)])
    }
}

/// The kernels of bf16: a model is only loaded where there are some for its format.
#[inline(always)]
fn low(kernels: &Kernels) -> &'static LowKernels {
    kernels.low.expect("a model in bf16 has kernels for it")
}

/// The same of int8.
#[inline(always)]
fn int8(kernels: &Kernels) -> &'static Int8Kernels {
    kernels.int8.expect("a model in int8 has kernels for it")
}

/// The greatest magnitude of each input's weights, `[k]`.
fn greatest(linear: &model::Linear<'_>, k: usize) -> Vec<f32> {
    let (mut row, mut all) = (vec![0.0_f32; k], vec![0.0_f32; k]);
    for i in 0..linear.bias.len() {
        linear.weight.read(i * k, &mut row);
        all.iter_mut().zip(&row).for_each(|(all, x)| *all = all.max(x.abs()));
    }
    all
}

impl Panels {
    /// Sets the weights `[k]` of one output in its panel, of `width` outputs. Returns what is to be added to its bias
    /// for what is done to the input. Leaves `row` changed.
    fn set(&mut self, output: usize, width: usize, row: &mut [f32]) -> f32 {
        /// Spreads `row` over the steps of its column.
        fn spread<T: Number>(
            panels: &mut [T],
            (output, width): (usize, usize),
            row: &[f32],
            len: usize,
            number: impl Fn(f32) -> T,
        ) {
            let a_step = per_step::<T>();
            let panel = &mut panels[output / width * len..][..len];
            let columns = panel.chunks_exact_mut(a_step).skip(output % width).step_by(width);
            for (place, numbers) in columns.zip(row.chunks(a_step)) {
                place.iter_mut().zip(numbers).for_each(|(place, &x)| *place = number(x));
            }
        }
        let at = (output, width);
        match self {
            Self::F32(panels, len) => spread(panels, at, row, *len, |x| x),
            Self::Bf16(panels, len) => spread(panels, at, row, *len, |x| half::bf16::from_f32(x).to_bits()),
            Self::Int8 { panels, len, scales, sums, smooth, pair } => {
                let mut offset = 0.0;
                for ((w, factor), shift) in row.iter_mut().zip(&smooth.factor).zip(&smooth.offset) {
                    *w /= factor;
                    offset -= *w * shift;
                }
                let max = row.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
                let pairs = row.chunks(2).map(|pair| pair.iter().map(|x| x.abs()).sum::<f32>());
                let max_pair = pairs.fold(0.0_f32, f32::max);
                // One weight that is not finite must show in the results.
                let broken: f32 = row.iter().map(|x| x * 0.0).sum();
                let scale = if max > 0.0 { (max / 127.0).max(max_pair / *pair) + broken } else { 1.0 + broken };
                let number = |x: f32| (x / scale).round() as i8;
                spread(panels, at, row, *len, number);
                scales[output] = scale;
                sums[output] = row.iter().map(|&x| i32::from(number(x))).sum();
                return offset;
            }
        }
        0.0
    }
}
