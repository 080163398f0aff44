//! Quantizing rows to int8. In intrinsics, since as plain loops like those of `rows.rs` it took a sixth of a pass.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::int8::{RowScale, Smooth};
use super::low::stride;
use super::simd::{load, load_bf16, load_some};

/// Quantizes rows of `x` `[rows, k]` to as many of `stride(k)`: each `x * factor + offset` to 8 bits between the row's
/// own minimum and maximum (and zero, which is exact), rounded to the nearest. A row that is not finite gets the scale
/// NaN.
#[target_feature(enable = "avx2,fma")]
pub(super) fn quantize_avx2(x: &[f32], smooth: &Smooth, out: &mut [u8], scales: &mut [RowScale]) {
    let (k, zeros) = (smooth.k, _mm256_setzero_ps());
    for ((x, out), scale) in x.chunks_exact(k).zip(out.chunks_exact_mut(stride(k))).zip(scales) {
        let (mut min, mut max, mut broken) = (zeros, zeros, zeros);
        for i in 0..k.div_ceil(8) {
            let z = block8(x, smooth, 8 * i);
            min = _mm256_min_ps(min, z);
            max = _mm256_max_ps(max, z);
            // 0, or NaN for good where a number is not finite.
            broken = _mm256_fmadd_ps(z, zeros, broken);
        }
        let [min, max, broken] = [min, max, broken].map(|v| {
            let mut lanes = [0.0; 8];
            // SAFETY: there is room for 8.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), v) };
            lanes
        });
        let range = Range::new(
            min.into_iter().fold(0.0, f32::min),
            max.into_iter().fold(0.0, f32::max),
            broken.iter().sum::<f32>(),
        );
        *scale = range.scale();
        let (zero, per_step) = (_mm256_set1_ps(range.zero), _mm256_set1_ps(range.per_step));
        for i in 0..k.div_ceil(8) {
            let q = _mm256_cvtps_epi32(_mm256_fmadd_ps(block8(x, smooth, 8 * i), per_step, zero));
            // Both of these keep what is below 0 or above the maximum at 0 and at the maximum.
            let q = _mm_packus_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256::<1>(q));
            let q = _mm_packus_epi16(q, q);
            // SAFETY: `out` has 8 numbers.
            unsafe { _mm_storel_epi64(out[8 * i..8 * i + 8].as_mut_ptr().cast(), q) };
        }
    }
}

/// The 8 numbers of `x * factor + offset` from `i` on; 0 past the end of `x`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn block8(x: &[f32], smooth: &Smooth, i: usize) -> __m256 {
    let x = if let Some(x) = x.get(i..i + 8) {
        // SAFETY: there are 8.
        unsafe { _mm256_loadu_ps(x.as_ptr()) }
    } else {
        let mut some = [0.0; 8];
        some[..x.len() - i].copy_from_slice(&x[i..]);
        // SAFETY: as above.
        unsafe { _mm256_loadu_ps(some.as_ptr()) }
    };
    let (factor, offset) = (&smooth.factor[i..i + 8], &smooth.offset[i..i + 8]);
    // SAFETY: as above.
    unsafe { _mm256_fmadd_ps(x, _mm256_loadu_ps(factor.as_ptr()), _mm256_loadu_ps(offset.as_ptr())) }
}

/// The same for AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn quantize_avx512(x: &[f32], smooth: &Smooth, out: &mut [u8], scales: &mut [RowScale]) {
    let k = smooth.k;
    for ((x, out), scale) in x.chunks_exact(k).zip(out.chunks_exact_mut(stride(k))).zip(scales) {
        *scale = row(|i| load_some(&x[i.min(k)..]), smooth, out);
    }
}

/// The same for rows of bf16, `stride(k)` apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn quantize_bf16(x: &[u16], smooth: &Smooth, out: &mut [u8], scales: &mut [RowScale]) {
    let stride = stride(smooth.k);
    for ((x, out), scale) in x.chunks_exact(stride).zip(out.chunks_exact_mut(stride)).zip(scales) {
        *scale = row(|i| load_bf16(&x[i..]), smooth, out);
    }
}

/// One row, of which `x(i)` loads the 16 numbers from `i` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn row(x: impl Fn(usize) -> __m512, smooth: &Smooth, out: &mut [u8]) -> RowScale {
    let zeros = _mm512_setzero_ps();
    let (mut min, mut max, mut broken) = ([zeros; 2], [zeros; 2], [zeros; 2]);
    let z = |i: usize| _mm512_fmadd_ps(x(i), load(&smooth.factor[i..]), load(&smooth.offset[i..]));
    for i in (0..out.len()).step_by(32) {
        for half in 0..2 {
            let z = z(i + 16 * half);
            min[half] = _mm512_min_ps(min[half], z);
            max[half] = _mm512_max_ps(max[half], z);
            broken[half] = _mm512_fmadd_ps(z, zeros, broken[half]);
        }
    }
    let range = Range::new(
        _mm512_reduce_min_ps(_mm512_min_ps(min[0], min[1])),
        _mm512_reduce_max_ps(_mm512_max_ps(max[0], max[1])),
        _mm512_reduce_add_ps(_mm512_add_ps(broken[0], broken[1])),
    );
    let (zero, per_step) = (_mm512_set1_ps(range.zero), _mm512_set1_ps(range.per_step));
    for (i, out) in out.chunks_exact_mut(16).enumerate() {
        let q = _mm512_cvtps_epi32(_mm512_fmadd_ps(z(16 * i), per_step, zero));
        let q = _mm512_cvtusepi32_epi8(_mm512_max_epi32(q, _mm512_setzero_si512()));
        // SAFETY: `out` has 16 numbers.
        unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), q) };
    }
    range.scale()
}

/// The numbers that the 8 bits of a row stand for.
struct Range {
    step: f32,
    per_step: f32,
    zero: f32,
}

impl Range {
    /// From `min` to `max`, which are at most and at least 0. `broken` is NaN to make the scale that.
    fn new(min: f32, max: f32, broken: f32) -> Self {
        let range = max - min;
        // A row of zeros stays one.
        let (step, per_step) = if range == 0.0 { (1.0, 1.0) } else { (range / 255.0, 255.0 / range) };
        Self { step: step + broken, per_step, zero: (-min * per_step).round() }
    }

    fn scale(&self) -> RowScale {
        RowScale { scale: self.step, zero: self.zero as i32 }
    }
}
