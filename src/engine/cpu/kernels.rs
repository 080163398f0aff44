//! The kernels of one instruction set, as a table of functions. [`Kernels::best`] looks at the CPU once, when a model
//! loads; the tests run every table that the machine can run.
#![allow(unsafe_code)]

use std::ops::Range;

use super::exec::{SharedRows, part};
use super::int8::{self, Int8Kernels};
use super::low::{self, LowKernels};
use super::rows::Epilogue;
#[cfg(target_arch = "x86_64")]
use super::{tile_amx, tile_bf16};
use crate::engine::Dtype;

/// The most columns of a tile; weights are packed in panels of as many as one has ([`Kernels::panel`]).
pub(super) const PANEL: usize = 32;
/// Most rows of a tile in registers of vectors.
pub(super) const TILE_ROWS: usize = 12;
/// Most rows of any tile: two registers of AMX.
pub(super) const MOST_ROWS: usize = 32;
/// Most panels of any [`Blocking`].
pub(super) const MOST_PANELS: usize = 8;

/// `out [rows, w] = a [rows, k] * b [k, w]`, `w` being the table's [`Kernels::panel`]. Each number of `out` is one chain
/// of multiply-adds in the order of `k`, so it does not depend on the other rows.
///
/// A step of the product takes four bytes of each row of `a`: one fp32 number, two bf16 or four int8 ([`per_step`]).
/// `b` holds as many numbers of each column side by side.
pub(super) struct Tile<'a, A = f32, B = A> {
    /// From 1 to as many as the kernel takes.
    pub rows: usize,
    /// Steps.
    pub k: usize,
    /// Rows of `k` steps, `lda` numbers apart.
    pub a: &'a [A],
    pub lda: usize,
    /// `[k, w, per step]`.
    pub b: &'a [B],
    /// Rows of `w` numbers, `ldo` apart.
    pub out: &'a mut [f32],
    pub ldo: usize,
    /// What a later tile reads, asked for on the way: it comes from memory while this one is computed.
    pub next: &'a [B],
    /// Which part of all steps these are.
    pub piece: Piece,
}

/// Where a product's steps are taken in several pieces, sums wait in `out` from one to the next.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub first: bool,
    pub last: bool,
}

/// In which order a linear layer's tiles are computed.
#[derive(Clone, Copy)]
pub(super) struct Blocking {
    /// Most rows of a tile.
    pub rows: usize,
    /// Panels that all tiles of a sweep use before the next ones are, at most [`MOST_PANELS`].
    pub panels: usize,
    /// Most steps of a piece, whole multiplications.
    pub steps: usize,
}

impl Blocking {
    /// In registers of vectors: a panel stays in the cache while the rows pass by.
    pub(super) const VECTORS: Self = Self { rows: TILE_ROWS, panels: 1, steps: usize::MAX };
}

/// How many numbers of this type one step of a tile takes.
pub(super) const fn per_step<T>() -> usize {
    4 / size_of::<T>()
}

impl<'a, A, B> Tile<'a, A, B> {
    /// All steps of a product that no other follows at once.
    #[inline(always)]
    pub(super) fn whole(
        rows: usize,
        k: usize,
        (a, lda): (&'a [A], usize),
        b: &'a [B],
        (out, ldo): (&'a mut [f32], usize),
    ) -> Self {
        Self { rows, k, a, lda, b, out, ldo, next: &[], piece: Piece { first: true, last: true } }
    }

    /// Of a tile in registers of vectors, `W` columns wide. Panics unless the slices hold what the shapes say.
    #[inline(always)]
    pub(super) fn check<const W: usize>(&self) {
        assert!(self.piece.first && self.piece.last, "only AMX has tiles in pieces");
        self.check_rows::<W, TILE_ROWS>();
    }

    /// Panics unless the slices hold what the shapes say, for `W` columns and at most `ROWS` rows.
    #[inline(always)]
    pub(super) fn check_rows<const W: usize, const ROWS: usize>(&self) {
        assert!(
            (1..=ROWS).contains(&self.rows)
                && self.a.len() >= (self.rows - 1) * self.lda + self.k * per_step::<A>()
                && self.b.len() >= self.k * W * per_step::<B>()
                && self.out.len() >= (self.rows - 1) * self.ldo + W,
            "a tile's shapes do not fit its slices"
        );
    }
}

/// The cache lines of [`Tile::next`], spread over the steps of a tile. All at once, they would wait for each other and
/// the tile for them.
#[cfg(target_arch = "x86_64")]
pub(super) struct Ahead<'a> {
    lines: std::slice::Chunks<'a, u8>,
    /// Steps from one request to the next, and lines a request.
    every: usize,
    lines_at_once: usize,
    /// The steps that are left.
    steps: Range<usize>,
}

#[cfg(target_arch = "x86_64")]
impl<'a> Ahead<'a> {
    /// Of part `i` of `parts` of `next`, over `steps` steps.
    #[inline(always)]
    pub(super) fn new<T>(next: &'a [T], i: usize, parts: usize, steps: usize) -> Self {
        /// The fewest steps between two requests.
        const EVERY: usize = 8;
        let part = &next[part(next.len(), parts, i)];
        // SAFETY: the bytes of plain numbers.
        let bytes = unsafe { std::slice::from_raw_parts(part.as_ptr().cast(), size_of_val(part)) };
        let lines = bytes.len().div_ceil(64);
        let every = steps.checked_div(lines).map_or(steps, |every| every.max(EVERY));
        let requests = steps.div_ceil(every.max(1)).max(1);
        Self { lines: bytes.chunks(64), every, lines_at_once: lines.div_ceil(requests), steps: 0..steps }
    }

    /// Asks for what is due now; returns the steps until something else is, `None` at the end.
    #[inline(always)]
    pub(super) fn stretch(&mut self) -> Option<Range<usize>> {
        if self.steps.is_empty() {
            return None;
        }
        for _ in 0..self.lines_at_once {
            let Some(line) = self.lines.next() else { break };
            // SAFETY: a hint that reads nothing, of an instruction that every x86-64 has.
            unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.as_ptr().cast()) };
        }
        let start = self.steps.start;
        self.steps.start = self.steps.end.min(start + self.every);
        Some(start..self.steps.start)
    }
}

/// Unsafe as `rows::epilogue` is.
type EpilogueKernel = unsafe fn(Epilogue, &[[f32; 32]], &[f32], &SharedRows<'_>, usize, usize);

/// One instruction set's kernels. What they compute is said where their plain form is, in `rows.rs`.
pub(super) struct Kernels {
    pub name: &'static str,
    /// Columns of a tile, 16 or 32.
    pub panel: usize,
    /// Bytes of rows that one sweep over a linear layer's weights uses: they stay in the second-level cache beside the
    /// panel that is used and the one that comes next.
    pub sweep: usize,
    pub tile: fn(Tile<'_>),
    pub layer_norm: fn(&mut [f32], &[f32], &[f32], f32),
    pub softmax: fn(&mut [f32], f32) -> (f32, f32),
    pub epilogue: EpilogueKernel,
    /// Ends a thread's work with the tiles.
    pub release: fn(),
    /// For int8, where it is faster than fp32.
    pub int8: Option<&'static Int8Kernels>,
    /// For bf16, where the CPU has instructions for it.
    pub low: Option<&'static LowKernels>,
}

/// Calls `$f::<R> $args` for the number of rows `R`, one of the constants `$r`.
#[cfg(target_arch = "x86_64")]
macro_rules! with_rows {
    ($rows:expr, [$($r:literal)*], $f:ident $args:tt) => {
        match $rows {
            $($r => $f::<$r> $args,)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use with_rows;

/// Compiles the loops of `rows.rs` for one instruction set and makes its table.
macro_rules! table {
    ($table:ident, $module:ident, $fma:literal, $panel:expr, $sweep:expr, $tile:path, $int8:expr $(, $feature:literal)?) => {
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
                panel: $panel,
                sweep: $sweep,
                tile: $tile,
                // SAFETY: as above.
                layer_norm: |x, gamma, beta, eps| unsafe { layer_norm_here(x, gamma, beta, eps) },
                // SAFETY: as above.
                softmax: |scores, before| unsafe { softmax_here(scores, before) },
                // SAFETY: as above, and the caller's promise is passed on.
                epilogue: |kind, tile, bias, c, row, column| unsafe {
                    epilogue_here(kind, tile, bias, c, row, column)
                },
                release: || {},
                int8: $int8,
                low: None,
            };
        }
    };
}

#[cfg(target_arch = "x86_64")]
table!(
    AVX512,
    avx512,
    true,
    PANEL,
    384 << 10,
    crate::engine::cpu::tile_avx512::tile,
    None,
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
);
// Columns that are one cache line wide follow each other in memory as they are read. CPUs without AVX-512 often have a
// second-level cache of 512 KiB only.
#[cfg(target_arch = "x86_64")]
table!(
    AVX2,
    avx2,
    true,
    crate::engine::cpu::tile_avx2::WIDTH,
    192 << 10,
    crate::engine::cpu::tile_avx2::tile,
    Some(&int8::AVX2),
    "avx2,fma"
);
table!(PORTABLE, portable, false, PANEL, 384 << 10, crate::engine::cpu::tile_portable::tile, None);

#[cfg(target_arch = "x86_64")]
static AVX512_VNNI: Kernels = Kernels { name: "avx512_vnni", int8: Some(&int8::AVX512_VNNI), ..avx512::AVX512 };
#[cfg(target_arch = "x86_64")]
static AVX512_BF16: Kernels = Kernels { name: "avx512_bf16", low: Some(&low::AVX512_BF16), ..AVX512_VNNI };
#[cfg(target_arch = "x86_64")]
static AMX: Kernels =
    Kernels { name: "amx", release: tile_amx::release, int8: Some(&int8::AMX), low: Some(&low::AMX), ..AVX512_BF16 };

/// A thread's work with the tiles, until it is dropped.
pub(super) struct Tiles(fn());

impl Drop for Tiles {
    fn drop(&mut self) {
        (self.0)();
    }
}

impl Kernels {
    /// To be held while a thread runs tiles.
    pub(super) fn tiles(&self) -> Tiles {
        Tiles(self.release)
    }

    /// The fastest table that this CPU can run with kernels for `dtype`; the fastest of all where there are none.
    pub(super) fn best(dtype: Dtype) -> &'static Self {
        let all = Self::all();
        let fits = |kernels: &&&Self| match dtype {
            Dtype::Int8 => kernels.int8.is_some(),
            Dtype::Bf16 => kernels.low.is_some(),
            _ => true,
        };
        all.iter().find(fits).unwrap_or(&all[0])
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
            let vnni_here = avx512_here && is_x86_feature_detected!("avx512vnni");
            let bf16_here = vnni_here && is_x86_feature_detected!("avx512bf16");
            if bf16_here && tile_amx::available() {
                all.push(&AMX);
            }
            if bf16_here && tile_bf16::is_fast() {
                all.push(&AVX512_BF16);
            }
            if vnni_here {
                all.push(&AVX512_VNNI);
                if bf16_here && !tile_bf16::is_fast() {
                    all.push(&AVX512_BF16);
                }
            } else if avx512_here {
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
