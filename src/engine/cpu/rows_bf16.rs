//! What happens to rows in bf16 and int8: rounding, quantizing, and what follows a matrix product. All of it for AVX-512.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::exec::SharedRows;
use super::low::{RowScale, stride};
use super::simd::{activate, load, load_bf16, load_some, store_bf16};
use crate::model::HiddenAct;

/// Rounds `x` `[rows, width]` to bf16 rows of `stride(width)`, zero past `width`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn round(x: &[f32], width: usize, out: &mut [u16]) {
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(stride(width))) {
        for (i, out) in out.chunks_exact_mut(16).enumerate() {
            store_bf16(out, load_some(x.get(16 * i..).unwrap_or_default()));
        }
    }
}

/// Quantizes the bf16 rows `x` of `stride(width)` to as many 8-bit numbers, each row between its own minimum and maximum
/// (and zero, which is exact), rounding to the nearest. A row that is not finite gets the scale NaN.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn quantize(x: &[u16], width: usize, out: &mut [u8], scales: &mut [RowScale]) {
    let rows = x.chunks_exact(stride(width)).zip(out.chunks_exact_mut(stride(width)));
    for ((x, out), scale) in rows.zip(scales) {
        let zeros = _mm512_setzero_ps();
        let (mut min, mut max, mut broken) = ([zeros; 2], [zeros; 2], [zeros; 2]);
        for x in x.chunks_exact(32) {
            for i in 0..2 {
                let x = load_bf16(&x[16 * i..]);
                min[i] = _mm512_min_ps(min[i], x);
                max[i] = _mm512_max_ps(max[i], x);
                // 0, or NaN for good where a number is not finite.
                broken[i] = _mm512_fmadd_ps(x, zeros, broken[i]);
            }
        }
        let (min, max) = (_mm512_min_ps(min[0], min[1]), _mm512_max_ps(max[0], max[1]));
        let (min, max) = (_mm512_reduce_min_ps(min), _mm512_reduce_max_ps(max));
        let broken = _mm512_reduce_add_ps(_mm512_add_ps(broken[0], broken[1]));
        let range = max - min;
        // A row of zeros stays one.
        let (step, per_step) = if range == 0.0 { (1.0, 1.0) } else { (range / 255.0, 255.0 / range) };
        let zero = (-min * per_step).round();
        *scale = RowScale { scale: step + broken, zero: zero as i32 };
        let (zero, per_step) = (_mm512_set1_ps(zero), _mm512_set1_ps(per_step));
        for (x, out) in x.chunks_exact(16).zip(out.chunks_exact_mut(16)) {
            let q = _mm512_cvtps_epi32(_mm512_fmadd_ps(load_bf16(x), per_step, zero));
            let q = _mm512_cvtusepi32_epi8(_mm512_max_epi32(q, _mm512_setzero_si512()));
            // SAFETY: `out` has 16 numbers.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), q) };
        }
    }
}

/// The way of a tile `[rows, 32]` into `c` at `row` and `column .. column + 32`: `c = act(tile + bias)` with `bias`
/// `[32]`, rounded.
///
/// # Safety
/// No other task uses that piece of `c`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn epilogue(
    act: Option<HiddenAct>,
    tile: &[[f32; 32]],
    bias: &[f32],
    c: &SharedRows<'_, u16>,
    row: usize,
    column: usize,
) {
    let bias = [load(bias), load(&bias[16..])];
    for (i, tile) in tile.iter().enumerate() {
        // SAFETY: as the caller promises.
        let c = unsafe { c.columns(row + i, column..column + 32) };
        for half in 0..2 {
            let x = _mm512_add_ps(load(&tile[16 * half..]), bias[half]);
            let x = match act {
                None => x,
                Some(act) => activate(act, x),
            };
            store_bf16(&mut c[16 * half..16 * half + 16], x);
        }
    }
}
