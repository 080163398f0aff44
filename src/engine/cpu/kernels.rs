//! The kernels of one instruction set, as a table of functions. [`Kernels::best`] looks at the CPU once, when a model
//! loads; the tests run every table that the machine can run.
#![allow(unsafe_code)]

use super::exec::SharedRows;
use super::rows::Epilogue;

/// Columns of a tile; weights are packed in panels of as many.
pub(super) const PANEL: usize = 32;
/// Most rows of a tile.
pub(super) const TILE_ROWS: usize = 12;

/// `out [rows, 32] = a [rows, k] * b [k, 32]`. Each number of `out` is one chain of multiply-adds in the order of `k`,
/// so it does not depend on the other rows.
pub(super) struct Tile<'a> {
    /// 1 to [`TILE_ROWS`].
    pub rows: usize,
    pub k: usize,
    /// Rows of `k` numbers, `lda` apart.
    pub a: &'a [f32],
    pub lda: usize,
    /// `[k, 32]`.
    pub b: &'a [f32],
    /// Rows of 32 numbers, `ldo` apart.
    pub out: &'a mut [f32],
    pub ldo: usize,
}

impl Tile<'_> {
    /// Panics unless the slices hold what the shapes say.
    #[inline(always)]
    pub(super) fn check(&self) {
        assert!(
            (1..=TILE_ROWS).contains(&self.rows)
                && self.a.len() >= (self.rows - 1) * self.lda + self.k
                && self.b.len() >= self.k * PANEL
                && self.out.len() >= (self.rows - 1) * self.ldo + PANEL,
            "a tile's shapes do not fit its slices"
        );
    }
}

/// Unsafe as `rows::epilogue` is.
type EpilogueKernel = unsafe fn(Epilogue, &[[f32; 32]], &[f32], &SharedRows<'_>, usize, usize);

/// One instruction set's kernels. What they compute is said where their plain form is, in `rows.rs`.
pub(super) struct Kernels {
    pub name: &'static str,
    pub tile: fn(Tile<'_>),
    pub layer_norm: fn(&mut [f32], &[f32], &[f32], f32),
    pub softmax: fn(&mut [f32], f32) -> (f32, f32),
    pub epilogue: EpilogueKernel,
}

/// Compiles the loops of `rows.rs` for one instruction set and makes its table.
macro_rules! table {
    ($table:ident, $module:ident, $fma:literal, $tile:path $(, $feature:literal)?) => {
        mod $module {
            use super::super::rows;
            use super::*;

            $(#[target_feature(enable = $feature)])?
            fn layer_norm_here(x: &mut [f32], gamma: &[f32], beta: &[f32], eps: f32) {
                rows::layer_norm::<$fma>(x, gamma, beta, eps);
            }

            $(#[target_feature(enable = $feature)])?
            fn softmax_here(scores: &mut [f32], before: f32) -> (f32, f32) {
                rows::softmax::<$fma>(scores, before)
            }

            $(#[target_feature(enable = $feature)])?
            unsafe fn epilogue_here(
                kind: Epilogue,
                tile: &[[f32; 32]],
                bias: &[f32],
                c: &SharedRows<'_>,
                row: usize,
                column: usize,
            ) {
                // SAFETY: as the caller promises.
                unsafe { rows::epilogue::<$fma>(kind, tile, bias, c, row, column) }
            }

            // SAFETY of each: the table is only given out where the CPU has the feature.
            #[allow(unused_unsafe)]
            pub(super) static $table: Kernels = Kernels {
                name: stringify!($module),
                tile: $tile,
                // SAFETY: as above.
                layer_norm: |x, gamma, beta, eps| unsafe { layer_norm_here(x, gamma, beta, eps) },
                // SAFETY: as above.
                softmax: |scores, before| unsafe { softmax_here(scores, before) },
                // SAFETY: as above, and the caller's promise is passed on.
                epilogue: |kind, tile, bias, c, row, column| unsafe {
                    epilogue_here(kind, tile, bias, c, row, column)
                },
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
table!(AVX512, avx512, true, crate::engine::cpu::tile_avx512::tile, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma");
#[cfg(target_arch = "x86_64")]
table!(AVX2, avx2, true, crate::engine::cpu::tile_avx2::tile, "avx2,fma");
table!(PORTABLE, portable, false, crate::engine::cpu::tile_portable::tile);

impl Kernels {
    /// The fastest table that this CPU can run.
    pub(super) fn best() -> &'static Self {
        Self::all()[0]
    }

    /// Every table that this CPU can run, the fastest first.
    pub(super) fn all() -> Vec<&'static Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2_here = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512_here = avx2_here
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx512_here {
                all.push(&avx512::AVX512);
            }
            if avx2_here {
                all.push(&avx2::AVX2);
            }
        }
        all.push(&portable::PORTABLE);
        all
    }
}
