//! The AVX2 fp32 tile, 16 columns: blocks of up to 6 rows in 12 of the 16 vector registers.
#![allow(unsafe_code)]

use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps};

use super::exec::part;
use super::kernels::{Ahead, Tile, with_rows};

/// Columns of the tile.
pub(super) const WIDTH: usize = 16;

/// Only in the table of kernels that is given out where the CPU has AVX2 and FMA.
pub(super) fn tile(mut t: Tile<'_>) {
    t.check::<WIDTH>();
    // Of like size: a block of few rows takes as long as one of four, since each sum waits for itself.
    let blocks = t.rows.div_ceil(6);
    for i in 0..blocks {
        let rows = part(t.rows, blocks, i);
        let ahead = Ahead::new(t.next, i, blocks, t.k);
        // SAFETY: the CPU has AVX2 and FMA, and `check` has compared the lengths with what is used.
        unsafe { with_rows!(rows.len(), [1 2 3 4 5 6], block(&mut t, rows.start, ahead)) }
    }
}

/// Rows `first .. first + R` of the tile.
///
/// # Safety
/// `t.check::<WIDTH>()` has passed, `first + R <= t.rows`.
#[target_feature(enable = "avx2,fma")]
unsafe fn block<const R: usize>(t: &mut Tile<'_>, first: usize, mut ahead: Ahead<'_>) {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    // SAFETY: `b` has `k` rows of 16, `a` `rows` rows of `k` numbers that are `lda` apart, `out` `rows` rows of 16 that
    // are `ldo` apart.
    unsafe {
        let a = t.a.as_ptr().add(first * t.lda);
        let b = t.b.as_ptr();
        while let Some(steps) = ahead.stretch() {
            for k in steps {
                let (b0, b1) = (_mm256_loadu_ps(b.add(k * WIDTH)), _mm256_loadu_ps(b.add(k * WIDTH + 8)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_ps(*a.add(r * t.lda + k));
                    sums[0] = _mm256_fmadd_ps(x, b0, sums[0]);
                    sums[1] = _mm256_fmadd_ps(x, b1, sums[1]);
                }
            }
        }
        let out = t.out.as_mut_ptr().add(first * t.ldo);
        for (r, sums) in sums.iter().enumerate() {
            _mm256_storeu_ps(out.add(r * t.ldo), sums[0]);
            _mm256_storeu_ps(out.add(r * t.ldo + 8), sums[1]);
        }
    }
}
