//! The kernels of bf16, as a table beside that of fp32 (`kernels.rs`): for AVX-512 with BF16, and for AMX beside it. Where
//! both are missing, models run in fp32, and what int8 leaves over does too.
//!
//! Matrices of bf16 and int8 have rows of [`stride`] numbers, zeros past their width (or what zero is quantized to), so
//! that a tile is always written whole.
#![allow(unsafe_code)]

use super::attention::{LowHead, LowScratch};
use super::exec::SharedRows;
use super::int8::QuantizeKernel;
use super::kernels::{Blocking, Tile, per_step};
use crate::model::HiddenAct;

/// The row length of a bf16 or int8 matrix that is `width` wide.
///
/// A row of them is whole cache lines long, as AMX reads it.
pub(super) const fn stride(width: usize) -> usize {
    width.next_multiple_of(64)
}

/// The steps that AMX takes in one multiplication.
pub(super) const UNIT: usize = 16;

/// The steps of a tile that has `k` bf16 or int8 inputs: whole multiplications of AMX.
pub(super) const fn steps<T>(k: usize) -> usize {
    k.div_ceil(per_step::<T>()).next_multiple_of(UNIT)
}

/// Unsafe as `rows_bf16::epilogue` is.
type EpilogueKernel = unsafe fn(Option<HiddenAct>, &[[f32; 32]], &[f32], &SharedRows<'_, u16>, usize, usize);

/// What each computes is said where it is defined.
pub(super) struct LowKernels {
    pub blocking: Blocking,
    pub tile: fn(Tile<'_, u16>),
    pub round: fn(&[f32], usize, &mut [u16]),
    /// Rows of `stride(k)` to int8.
    pub quantize: QuantizeKernel<u16>,
    pub epilogue: EpilogueKernel,
    pub head: unsafe fn(&LowHead<'_>, &mut LowScratch),
}

#[cfg(target_arch = "x86_64")]
pub(super) static AVX512_BF16: LowKernels = LowKernels {
    blocking: Blocking::VECTORS,
    tile: super::tile_bf16::tile,
    // SAFETY: the table is only given out where the CPU has the instructions.
    round: |x, width, out| unsafe { super::rows_bf16::round(x, width, out) },
    // SAFETY: as above.
    quantize: |x, smooth, out, scales| unsafe { super::rows_int8::quantize_bf16(x, smooth, out, scales) },
    // SAFETY: as above, and the caller's promise is passed on.
    epilogue: |act, tile, bias, c, row, column| unsafe { super::rows_bf16::epilogue(act, tile, bias, c, row, column) },
    // SAFETY: as above, and the caller's promise is passed on.
    head: |head, scratch| unsafe { super::attention_bf16::head::<false>(head, scratch) },
};

#[cfg(target_arch = "x86_64")]
pub(super) static AMX: LowKernels = LowKernels {
    blocking: super::tile_amx::BLOCKING,
    tile: super::tile_amx::tile_bf16,
    // SAFETY: as above.
    head: |head, scratch| unsafe { super::attention_bf16::head::<true>(head, scratch) },
    ..AVX512_BF16
};
