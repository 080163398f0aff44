//! The AVX2 fp32 tile: up to 6 rows x 16 columns at a time in 12 of the 16 vector registers, four such blocks a tile.
#![allow(unsafe_code)]

use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps};

use super::kernels::Tile;

/// Only in the table of kernels that is given out where the CPU has AVX2 and FMA.
pub(super) fn tile(mut t: Tile<'_>) {
    t.check();
    let mut first = 0;
    while first < t.rows {
        let rows = (t.rows - first).min(6);
        for half in [0, 16] {
            macro_rules! block {
                ($($r:literal)*) => {
                    match rows {
                        // SAFETY: the CPU has AVX2 and FMA, and `check` has compared the lengths with what is used.
                        $($r => unsafe { block::<$r>(&mut t, first, half) },)*
                        rows => unreachable!("a block of {rows} rows"),
                    }
                };
            }
            block!(1 2 3 4 5 6);
        }
        first += rows;
    }
}

/// Rows `first .. first + R`, columns `column .. column + 16` of the tile.
///
/// # Safety
/// `t.check()` has passed, `first + R <= t.rows`, `column <= 16`.
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const R: usize>(t: &mut Tile<'_>, first: usize, column: usize) {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: `b` has `k` rows of 32, `a` `rows` rows of `k` numbers that are `lda` apart, `out` `rows` rows of 32 that
    // are `ldo` apart.
    unsafe {
        let a = t.a.as_ptr().add(first * t.lda);
        let b = t.b.as_ptr().add(column);
        for k in 0..t.k {
            let (b0, b1) = (_mm256_loadu_ps(b.add(k * 32)), _mm256_loadu_ps(b.add(k * 32 + 8)));
            for (r, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_ps(*a.add(r * t.lda + k));
                sums[0] = _mm256_fmadd_ps(x, b0, sums[0]);
                sums[1] = _mm256_fmadd_ps(x, b1, sums[1]);
            }
        }
        let out = t.out.as_mut_ptr().add(first * t.ldo + column);
        for (r, sums) in sums.iter().enumerate() {
            _mm256_storeu_ps(out.add(r * t.ldo), sums[0]);
            _mm256_storeu_ps(out.add(r * t.ldo + 8), sums[1]);
        }
    }
}
