//! The AVX512-BF16 tile: as the fp32 one, with two numbers of each row and column a step, summed in fp32.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __cpuid, __m512bh, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::mem::transmute;

use super::kernels::{Ahead, PANEL, Tile, with_rows};

/// Whether the CPU multiplies bf16 faster than fp32 with this. Intel's take twice as long for one such instruction as
/// for one of fp32 that does half the work, and spend as long again (measured on a Xeon with AMX: 107 GFLOP/s a core in
/// bf16, 215 in fp32).
pub(super) fn is_fast() -> bool {
    let vendor = __cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() != b"GenuineIntel"
}

/// Only in the table of kernels that is given out where the CPU has AVX512-BF16.
pub(super) fn tile(t: Tile<'_, u16>) {
    t.check::<PANEL>();
    // SAFETY: the CPU has AVX512-BF16, and `check` has compared the lengths with what is read and written.
    unsafe { with_rows!(t.rows, [1 2 3 4 5 6 7 8 9 10 11 12], rows(t)) }
}

/// # Safety
/// `t.check()` has passed and `t.rows == R`.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows<const R: usize>(t: Tile<'_, u16>) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    let (a, mut b) = (t.a.as_ptr(), t.b.as_ptr());
    let mut ahead = Ahead::new(t.next, 0, 1, t.k);
    while let Some(steps) = ahead.stretch() {
        for k in steps {
            // SAFETY: `b` has `k` rows of 32 pairs, `a` `R` rows of `k` pairs that are `lda` numbers apart. The two
            // vector types are the same bits.
            unsafe {
                let b0: __m512bh = transmute(_mm512_loadu_si512(b.cast()));
                let b1: __m512bh = transmute(_mm512_loadu_si512(b.add(32).cast()));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let pair = a.add(r * t.lda + 2 * k).cast::<i32>().read_unaligned();
                    let x: __m512bh = transmute(_mm512_set1_epi32(pair));
                    sums[0] = _mm512_dpbf16_ps(sums[0], x, b0);
                    sums[1] = _mm512_dpbf16_ps(sums[1], x, b1);
                }
                b = b.add(64);
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
