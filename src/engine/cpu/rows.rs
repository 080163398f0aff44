//! The loops over a row: LayerNorm, softmax, and what follows a matrix product. Plain Rust in blocks of 16 lanes, which
//! the compiler turns into vector code of each instruction set (`kernels.rs`). Sums run in a fixed order, so a row's
//! result depends on nothing but the row.
#![allow(unsafe_code)]

use super::exec::SharedRows;
use super::math::{exp, fma, gelu, gelu_tanh};
use crate::model::HiddenAct;

const LANES: usize = 16;

/// What happens to the tile of a matrix product on its way to memory; `bias` is added in every case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Epilogue {
    /// `c = tile + bias`
    Store,
    /// `c += tile + bias`: the residual is there already.
    Add,
    /// `c = act(tile + bias)`
    Act(HiddenAct),
}

/// Sums 16 lanes pairwise.
#[inline(always)]
fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// LayerNorm of each row of `x` `[rows, h]` in place: `(x - mean) / sqrt(variance + eps) * gamma + beta`, with `gamma`
/// and `beta` `[h]`.
#[inline(always)]
pub(super) fn layer_norm<const FMA: bool>(x: &mut [f32], gamma: &[f32], beta: &[f32], eps: f32) {
    let h = gamma.len();
    for row in x.chunks_exact_mut(h) {
        let (blocks, rest) = row.as_chunks::<LANES>();
        let mut lanes = [0.0; LANES];
        for block in blocks {
            for i in 0..LANES {
                lanes[i] += block[i];
            }
        }
        let mean = (sum_lanes(lanes) + rest.iter().sum::<f32>()) / h as f32;
        let mut lanes = [0.0; LANES];
        for block in blocks {
            for i in 0..LANES {
                let d = block[i] - mean;
                lanes[i] = fma::<FMA>(d, d, lanes[i]);
            }
        }
        let variance = (sum_lanes(lanes) + rest.iter().map(|&x| (x - mean) * (x - mean)).sum::<f32>()) / h as f32;
        let scale = 1.0 / (variance + eps).sqrt();
        for ((x, &g), &b) in row.iter_mut().zip(gamma).zip(beta) {
            *x = fma::<FMA>((*x - mean) * scale, g, b);
        }
    }
}

/// One block of an online softmax: `scores` become `exp(score - m)` where `m` is the maximum of `before` and of the
/// scores. Returns `m` and the sum of the results.
#[inline(always)]
pub(super) fn softmax<const FMA: bool>(scores: &mut [f32], before: f32) -> (f32, f32) {
    let (blocks, rest) = scores.as_chunks::<LANES>();
    let mut lanes = [before; LANES];
    for block in blocks {
        for i in 0..LANES {
            lanes[i] = if block[i] > lanes[i] { block[i] } else { lanes[i] };
        }
    }
    let max = rest.iter().chain(&lanes).fold(before, |a, &b| if b > a { b } else { a });
    let (blocks, rest) = scores.as_chunks_mut::<LANES>();
    let mut lanes = [0.0; LANES];
    for block in blocks {
        for i in 0..LANES {
            block[i] = exp::<FMA>(block[i] - max);
            lanes[i] += block[i];
        }
    }
    // The same lanes for the rest, so that a score's place alone decides in which order it is added.
    for (x, lane) in rest.iter_mut().zip(&mut lanes) {
        *x = exp::<FMA>(*x - max);
        *lane += *x;
    }
    (max, sum_lanes(lanes))
}

/// The way of a tile `[rows, bias.len()]`, in rows of 32, into `c` at `row` and `column .. column + bias.len()`.
///
/// # Safety
/// No other task uses that piece of `c`.
#[inline(always)]
pub(super) unsafe fn epilogue<const FMA: bool>(
    epilogue: Epilogue,
    tile: &[[f32; 32]],
    bias: &[f32],
    c: &SharedRows<'_>,
    row: usize,
    column: usize,
) {
    /// The functions are items and not closures or references to one: items are inlined for certain, and so compiled
    /// for the instruction set.
    #[inline(always)]
    unsafe fn each<const ADD: bool>(
        tile: &[[f32; 32]],
        bias: &[f32],
        c: &SharedRows<'_>,
        (row, column): (usize, usize),
        f: impl Fn(f32) -> f32 + Copy,
    ) {
        /// Whole panels of a known width; whether `c` and `bias` are that.
        #[inline(always)]
        fn whole<const ADD: bool, const W: usize>(
            tile: &[f32; 32],
            bias: &[f32],
            c: &mut [f32],
            f: impl Fn(f32) -> f32,
        ) -> bool {
            let (Ok(c), Ok(bias)) = (<&mut [f32; W]>::try_from(c), <&[f32; W]>::try_from(bias)) else { return false };
            for j in 0..W {
                let y = f(tile[j] + bias[j]);
                c[j] = if ADD { c[j] + y } else { y };
            }
            true
        }
        for (i, tile) in tile.iter().enumerate() {
            // SAFETY: as the caller of `epilogue` promises.
            let c = unsafe { c.columns(row + i, column..column + bias.len()) };
            if !whole::<ADD, 32>(tile, bias, c, f) && !whole::<ADD, 16>(tile, bias, c, f) {
                for ((c, &t), &b) in c.iter_mut().zip(tile).zip(bias) {
                    let y = f(t + b);
                    *c = if ADD { *c + y } else { y };
                }
            }
        }
    }
    #[inline(always)]
    fn identity(x: f32) -> f32 {
        x
    }
    /// Not `max`, which would turn NaN into 0.
    #[inline(always)]
    fn relu(x: f32) -> f32 {
        if x < 0.0 { 0.0 } else { x }
    }
    let at = (row, column);
    // SAFETY: as the caller promises.
    unsafe {
        match epilogue {
            Epilogue::Store => each::<false>(tile, bias, c, at, identity),
            Epilogue::Add => each::<true>(tile, bias, c, at, identity),
            Epilogue::Act(HiddenAct::Gelu) => each::<false>(tile, bias, c, at, gelu::<FMA>),
            Epilogue::Act(HiddenAct::GeluTanh) => each::<false>(tile, bias, c, at, gelu_tanh::<FMA>),
            Epilogue::Act(HiddenAct::Relu) => each::<false>(tile, bias, c, at, relu),
        }
    }
}
