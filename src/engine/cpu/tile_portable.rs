//! The tile of every other machine: the crate `gemm`, which has kernels of its own for NEON and older x86.
#![allow(unsafe_code)]

use super::kernels::{PANEL, Tile};

pub(super) fn tile(t: Tile<'_>) {
    t.check::<PANEL>();
    let (lda, ldo) = (t.lda as isize, t.ldo as isize);
    // SAFETY: `check` has compared the lengths with these shapes: out `[rows, 32]`, a `[rows, k]`, b `[k, 32]`.
    unsafe {
        gemm::gemm(
            t.rows,
            PANEL,
            t.k,
            t.out.as_mut_ptr(),
            1,
            ldo,
            false,
            t.a.as_ptr(),
            1,
            lda,
            t.b.as_ptr(),
            1,
            PANEL as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
