//! The AVX2 int8 tile, 16 columns: as the fp32 one, with four numbers of each row and column a step. Two products at a
//! time are summed in int16, which is exact as long as no two neighbours of a column are greater than [`PAIR`] together;
//! then all in int32.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::exec::part;
use super::int8::Scales;
use super::kernels::{Ahead, Tile, with_rows};
use super::tile_avx2::WIDTH;

/// 255 times 128 is less than 2^15; one is left for rounding.
pub(super) const PAIR: f32 = 127.0;

/// Only in the table of kernels that is given out where the CPU has AVX2.
pub(super) fn tile(mut t: Tile<'_, u8, i8>, scales: &Scales<'_>) {
    t.check::<WIDTH>();
    assert!(scales.rows.len() >= t.rows && scales.columns.len() >= WIDTH && scales.sums.len() >= WIDTH);
    let blocks = t.rows.div_ceil(6);
    for i in 0..blocks {
        let rows = part(t.rows, blocks, i);
        let ahead = Ahead::new(t.next, i, blocks, t.k);
        // SAFETY: the CPU has AVX2, and the lengths were compared with what is read and written.
        unsafe { with_rows!(rows.len(), [1 2 3 4 5 6], block(&mut t, scales, rows.start, ahead)) }
    }
}

/// Rows `first .. first + R` of the tile.
///
/// # Safety
/// `t.check::<WIDTH>()` has passed, `first + R <= t.rows`, and `scales` has as many rows and 16 columns.
#[target_feature(enable = "avx2")]
unsafe fn block<const R: usize>(t: &mut Tile<'_, u8, i8>, scales: &Scales<'_>, first: usize, mut ahead: Ahead<'_>) {
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[_mm256_setzero_si256(); 2]; R];
    // SAFETY: `b` has `k` rows of 16 times four numbers, `a` `rows` rows of `k` times four that are `lda` apart, `out`
    // `rows` rows of 16 that are `ldo` apart, `columns` and `sums` 16 numbers.
    unsafe {
        let a = t.a.as_ptr().add(first * t.lda);
        let b = t.b.as_ptr();
        while let Some(steps) = ahead.stretch() {
            for k in steps {
                let b0 = _mm256_loadu_si256(b.add(64 * k).cast());
                let b1 = _mm256_loadu_si256(b.add(64 * k + 32).cast());
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = _mm256_set1_epi32(a.add(r * t.lda + 4 * k).cast::<i32>().read_unaligned());
                    sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(_mm256_maddubs_epi16(x, b0), ones));
                    sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(_mm256_maddubs_epi16(x, b1), ones));
                }
            }
        }
        let out = t.out.as_mut_ptr().add(first * t.ldo);
        for (r, sums) in sums.iter().enumerate() {
            // The sum of `(q - zero) * w` is the sum of `q * w` less `zero` times the sum of `w`.
            let (zero, scale) = (_mm256_set1_epi32(scales.rows[first + r].zero), scales.rows[first + r].scale);
            for (half, &sum) in sums.iter().enumerate() {
                let sums_of_b = _mm256_loadu_si256(scales.sums.as_ptr().add(8 * half).cast());
                let sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(zero, sums_of_b));
                let scale =
                    _mm256_mul_ps(_mm256_set1_ps(scale), _mm256_loadu_ps(scales.columns.as_ptr().add(8 * half)));
                _mm256_storeu_ps(out.add(r * t.ldo + 8 * half), _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale));
            }
        }
    }
}
