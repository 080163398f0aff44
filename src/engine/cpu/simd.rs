//! AVX-512 loads and stores with their bounds checked, and elementary functions, for the kernels of `rows_bf16.rs`,
//! `rows_int8.rs` and `attention_bf16.rs`. The functions are as exact as bf16 needs, and fast.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::transmute;

use crate::model::HiddenAct;

/// The first 16 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(x: &[f32]) -> __m512 {
    assert!(x.len() >= 16);
    // SAFETY: there are 16.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

/// The first 16 numbers, or as many as there are and zeros.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_some(x: &[f32]) -> __m512 {
    // SAFETY: only what the mask allows is read.
    unsafe { _mm512_maskz_loadu_ps(first(x.len()), x.as_ptr()) }
}

/// A mask of the first `n` lanes, of all from 16 on.
#[inline]
pub(super) fn first(n: usize) -> u16 {
    if n >= 16 { u16::MAX } else { (1 << n) - 1 }
}

/// Writes 16 numbers.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store(x: &mut [f32], v: __m512) {
    assert!(x.len() >= 16);
    // SAFETY: there is room for 16.
    unsafe { _mm512_storeu_ps(x.as_mut_ptr(), v) }
}

/// The first 16 of bf16 in fp32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn load_bf16(x: &[u16]) -> __m512 {
    assert!(x.len() >= 16);
    // SAFETY: there are 16.
    let half = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
}

/// Writes 16 numbers, or as many as there is room for, rounded to bf16. NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) fn store_bf16(x: &mut [u16], v: __m512) {
    // SAFETY: the two vector types are the same bits; only what the mask allows is written.
    unsafe {
        let rounded = transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
        _mm256_mask_storeu_epi16(x.as_mut_ptr().cast(), first(x.len()), rounded);
    }
}

/// `e^x`, relative error below 4e-6; below -86.6 it is `e^-86.6`. NaN gives NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn exp(x: __m512) -> __m512 {
    let t = _mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E));
    // -infinity less its rounding would be NaN, and a result that is not a normal number takes Intel's CPUs a hundred
    // cycles.
    let t = _mm512_max_ps(_mm512_set1_ps(-125.0), t);
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(t);
    let r = _mm512_sub_ps(t, n);
    // 2^r for |r| <= 1/2.
    let mut p = _mm512_set1_ps(0.009_570_102);
    for c in [0.055_917_863, 0.240_247_44, 0.693_121_8, 0.999_999_3] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(p, n)
}

/// The activation, absolute error below 1e-4. NaN gives NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn activate(act: HiddenAct, x: __m512) -> __m512 {
    match act {
        // `max` gives its second operand where one is NaN.
        HiddenAct::Relu => _mm512_max_ps(_mm512_setzero_ps(), x),
        HiddenAct::Gelu => {
            // x (1/2 + z P(z^2)), z = x within +-4.2, where it is 0 or x but for the error.
            let end = _mm512_set1_ps(4.2);
            let z = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), end), _mm512_min_ps(end, x));
            let z2 = _mm512_mul_ps(z, z);
            let mut p = _mm512_set1_ps(-9.017_527e-10);
            for c in
                [7.941_336e-8, -3.037_931e-6, 6.689_068e-5, -9.506_574e-4, 9.298_229e-3, -6.552_82e-2, 0.398_465_87]
            {
                p = _mm512_fmadd_ps(p, z2, _mm512_set1_ps(c));
            }
            _mm512_mul_ps(x, _mm512_fmadd_ps(z, p, _mm512_set1_ps(0.5)))
        }
        HiddenAct::GeluTanh => {
            // x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
            let x2 = _mm512_mul_ps(x, x);
            let u = _mm512_fmadd_ps(x2, _mm512_set1_ps(-1.595_769 * 0.044_715), _mm512_set1_ps(-1.595_769));
            let u = _mm512_min_ps(_mm512_set1_ps(80.0), _mm512_mul_ps(u, x));
            _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0), exp(u)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `f` on `x`; `None` where the CPU has no AVX-512.
    fn each(f: impl Fn(__m512) -> __m512, x: f32) -> f32 {
        #[target_feature(enable = "avx512f")]
        fn run(f: impl Fn(__m512) -> __m512, x: f32) -> f32 {
            _mm512_cvtss_f32(f(_mm512_set1_ps(x)))
        }
        // SAFETY: the tests below have looked.
        unsafe { run(f, x) }
    }

    #[test]
    fn functions_are_accurate() {
        if !is_x86_feature_detected!("avx512f") {
            return;
        }
        use super::super::math;
        for i in 0..=40_000 {
            let x = (i as f32 - 20_000.0) / 1000.0;
            // SAFETY: the CPU has AVX-512.
            let e = each(|x| unsafe { exp(x) }, 4.0 * x);
            let right = f64::from(4.0 * x).exp();
            assert!((f64::from(e) / right - 1.0).abs() < 2e-5, "exp({})", 4.0 * x);
            for act in [HiddenAct::Gelu, HiddenAct::GeluTanh, HiddenAct::Relu] {
                // SAFETY: as above.
                let y = each(|x| unsafe { activate(act, x) }, x);
                let right = match act {
                    HiddenAct::Gelu => math::gelu::<true>(x),
                    HiddenAct::GeluTanh => math::gelu_tanh::<true>(x),
                    HiddenAct::Relu => x.max(0.0),
                };
                assert!((y - right).abs() < 1e-4 * x.abs().max(1.0), "{act:?}({x}) = {y}, not {right}");
            }
        }
        // SAFETY: as above.
        let exp_of = |x| each(|x| unsafe { exp(x) }, x);
        assert_eq!(exp_of(0.0), 0.999_999_3);
        for small in [exp_of(f32::NEG_INFINITY), exp_of(-1e9), exp_of(-88.0)] {
            assert!(small.is_normal() && small < 3e-38);
        }
        assert!(exp_of(f32::NAN).is_nan());
        for act in [HiddenAct::Gelu, HiddenAct::GeluTanh, HiddenAct::Relu] {
            // SAFETY: as above.
            let of = |x| each(|x| unsafe { activate(act, x) }, x);
            assert!(of(f32::NAN).is_nan() && of(0.0) == 0.0 && of(-1e4).abs() < 0.1, "{act:?}");
            assert!((of(1e30) / 1e30 - 1.0).abs() < 1e-5, "{act:?}");
        }
    }
}
