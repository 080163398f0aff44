//! The AVX512-VNNI tile: as the fp32 one, with four numbers of each row and column a step, summed exactly in int32.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mul_ps, _mm512_mullo_epi32,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_storeu_ps,
};

use super::int8::Scales;
use super::kernels::{Ahead, PANEL, Tile, with_rows};

/// Only in the table of kernels that is given out where the CPU has AVX512-VNNI.
pub(super) fn tile(t: Tile<'_, u8, i8>, scales: &Scales<'_>) {
    t.check::<PANEL>();
    assert!(scales.rows.len() >= t.rows && scales.columns.len() >= PANEL && scales.sums.len() >= PANEL);
    // SAFETY: the CPU has AVX512-VNNI, and the lengths were compared with what is read and written.
    unsafe { with_rows!(t.rows, [1 2 3 4 5 6 7 8 9 10 11 12], rows(t, scales)) }
}

/// # Safety
/// `t.check()` has passed, `t.rows == R`, and `scales` has as many rows and 32 columns.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn rows<const R: usize>(t: Tile<'_, u8, i8>, scales: &Scales<'_>) {
    // The sum of `(q - zero) * w` is the sum of `q * w` less `zero` times the sum of `w`.
    // SAFETY: `sums` and `columns` have 32 numbers.
    let (sums_of_b, columns) = unsafe {
        let (s, c) = (scales.sums.as_ptr(), scales.columns.as_ptr());
        (
            [_mm512_loadu_si512(s.cast()), _mm512_loadu_si512(s.add(16).cast())],
            [_mm512_loadu_ps(c), _mm512_loadu_ps(c.add(16))],
        )
    };
    let mut sums: [_; R] = std::array::from_fn(|r| {
        let zero = _mm512_set1_epi32(-scales.rows[r].zero);
        [_mm512_mullo_epi32(zero, sums_of_b[0]), _mm512_mullo_epi32(zero, sums_of_b[1])]
    });
    let (a, mut b) = (t.a.as_ptr(), t.b.as_ptr());
    let mut ahead = Ahead::new(t.next, 0, 1, t.k);
    while let Some(steps) = ahead.stretch() {
        for k in steps {
            // SAFETY: `b` has `k` rows of 32 times four numbers, `a` `R` rows of `k` times four that are `lda` apart.
            unsafe {
                let (b0, b1) = (_mm512_loadu_si512(b.cast()), _mm512_loadu_si512(b.add(64).cast()));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_epi32(a.add(r * t.lda + 4 * k).cast::<i32>().read_unaligned());
                    sums[0] = _mm512_dpbusd_epi32(sums[0], x, b0);
                    sums[1] = _mm512_dpbusd_epi32(sums[1], x, b1);
                }
                b = b.add(128);
            }
        }
    }
    let out = t.out.as_mut_ptr();
    for (r, sums) in sums.iter().enumerate() {
        let scale = _mm512_set1_ps(scales.rows[r].scale);
        for half in 0..2 {
            let product = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[half]), _mm512_mul_ps(scale, columns[half]));
            // SAFETY: `out` has `R` rows of 32 numbers that are `ldo` apart.
            unsafe { _mm512_storeu_ps(out.add(r * t.ldo + 16 * half), product) };
        }
    }
}
