//! The AVX-512 fp32 tile: up to 12 rows x 32 columns in 24 of the 32 vector registers.
#![allow(unsafe_code)]

use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps};

use super::kernels::{Ahead, PANEL, Tile, with_rows};

/// Only in the table of kernels that is given out where the CPU has AVX-512.
pub(super) fn tile(t: Tile<'_>) {
    t.check::<PANEL>();
    // SAFETY: the CPU has AVX-512, and `check` has compared the lengths with what is read and written.
    unsafe { with_rows!(t.rows, [1 2 3 4 5 6 7 8 9 10 11 12], rows(t)) }
}

/// # Safety
/// `t.check()` has passed and `t.rows == R`.
#[target_feature(enable = "avx512f")]
unsafe fn rows<const R: usize>(t: Tile<'_>) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let (a, mut b) = (t.a.as_ptr(), t.b.as_ptr());
    let mut ahead = Ahead::new(t.next, 0, 1, t.k);
    while let Some(steps) = ahead.stretch() {
        for k in steps {
            // SAFETY: `b` has `k` rows of 32, `a` `R` rows of `k` numbers that are `lda` apart.
            unsafe {
                let (b0, b1) = (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*a.add(r * t.lda + k));
                    sums[0] = _mm512_fmadd_ps(x, b0, sums[0]);
                    sums[1] = _mm512_fmadd_ps(x, b1, sums[1]);
                }
                b = b.add(32);
            }
        }
    }
    let out = t.out.as_mut_ptr();
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: `out` has `R` rows of 32 numbers that are `ldo` apart.
        unsafe {
            _mm512_storeu_ps(out.add(r * t.ldo), sums[0]);
            _mm512_storeu_ps(out.add(r * t.ldo + 16), sums[1]);
        }
    }
}
