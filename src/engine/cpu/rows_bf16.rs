//! What happens to rows in bf16: rounding, and what follows a matrix product. All of it for AVX-512.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::exec::SharedRows;
use super::low::stride;
use super::simd::{activate, load, load_some, store_bf16};
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
