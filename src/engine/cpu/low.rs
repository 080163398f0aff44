//! The kernels of bf16 and int8, as a table beside that of fp32 (`kernels.rs`). One instruction set has them: AVX-512
//! with BF16 and VNNI. Where it is missing, models run in fp32.
//!
//! Matrices of bf16 and int8 have rows of [`stride`] numbers, zeros past their width (or what zero is quantized to), so
//! that a tile is always written whole.
#![allow(unsafe_code)]

use super::attention::{LowHead, LowScratch};
use super::exec::SharedRows;
use super::kernels::{PANEL, Tile};
use crate::model::HiddenAct;

/// The row length of a bf16 or int8 matrix that is `width` wide.
pub(super) const fn stride(width: usize) -> usize {
    width.next_multiple_of(PANEL)
}

/// What the numbers `q` of an int8 row stand for: `(q - zero) * scale`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct RowScale {
    pub scale: f32,
    pub zero: i32,
}

/// What the int8 numbers of a tile stand for: `a = (q - zero) * scale` by row, `b = q * scale` by column.
pub(super) struct Scales<'a> {
    /// One for each row.
    pub rows: &'a [RowScale],
    /// `[32]`
    pub columns: &'a [f32],
    /// `[32]`, each column's sum of `q`.
    pub sums: &'a [i32],
}

/// Unsafe as `rows_bf16::epilogue` is.
type EpilogueKernel = unsafe fn(Option<HiddenAct>, &[[f32; 32]], &[f32], &SharedRows<'_, u16>, usize, usize);

/// What each computes is said where it is defined.
pub(super) struct LowKernels {
    pub tile_bf16: fn(Tile<'_, u16>),
    pub tile_int8: fn(Tile<'_, u8, i8>, &Scales<'_>),
    pub round: fn(&[f32], usize, &mut [u16]),
    pub quantize: fn(&[u16], usize, &mut [u8], &mut [RowScale]),
    pub epilogue: EpilogueKernel,
    pub head: unsafe fn(&LowHead<'_>, &mut LowScratch),
}

/// Whether this CPU has these instructions.
#[cfg(target_arch = "x86_64")]
pub(super) fn here() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512bf16")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(target_arch = "x86_64")]
pub(super) static AVX512_BF16: LowKernels = LowKernels {
    tile_bf16: super::tile_bf16::tile,
    tile_int8: super::tile_int8::tile,
    // SAFETY of each: the table is only given out where `here` has said that the CPU has the instructions; a caller's
    // promise is passed on.
    round: |x, width, out| unsafe { super::rows_bf16::round(x, width, out) },
    // SAFETY: as above.
    quantize: |x, width, out, scales| unsafe { super::rows_bf16::quantize(x, width, out, scales) },
    // SAFETY: as above.
    epilogue: |act, tile, bias, c, row, column| unsafe { super::rows_bf16::epilogue(act, tile, bias, c, row, column) },
    // SAFETY: as above.
    head: |head, scratch| unsafe { super::attention_bf16::head(head, scratch) },
};
