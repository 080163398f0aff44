//! int8: what its numbers stand for, and how a layer's input is made even before it is quantized.
//!
//! Activations are quantized row by row between the row's own minimum and maximum, so that a text does not feel its
//! batch-mates; weights output by output. Sums are exact in int32.
#![allow(unsafe_code)]

use super::aligned::Aligned;
use super::exec::Exec;
use super::kernels::{Blocking, Tile};
use super::linear::Rows;
use super::low::stride;
use super::weights::PackedNorm;
use crate::error::Result;

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
    /// `[w]`
    pub columns: &'a [f32],
    /// `[w]`, each column's sum of `q`.
    pub sums: &'a [i32],
}

pub(super) type QuantizeKernel<T> = fn(&[T], &Smooth, &mut [u8], &mut [RowScale]);

/// One instruction set's kernels.
pub(super) struct Int8Kernels {
    pub blocking: Blocking,
    pub tile: fn(Tile<'_, u8, i8>, &Scales<'_>),
    /// Two neighbours in a column of weights may be so great together, in magnitude; 254 is no limit.
    pub pair: f32,
    pub quantize: QuantizeKernel<f32>,
}

#[cfg(target_arch = "x86_64")]
pub(super) static AVX512_VNNI: Int8Kernels = Int8Kernels {
    blocking: Blocking::VECTORS,
    tile: super::tile_int8::tile,
    pair: 254.0,
    // SAFETY: the table is only given out where the CPU has AVX-512.
    quantize: |x, smooth, out, scales| unsafe { super::rows_int8::quantize_avx512(x, smooth, out, scales) },
};

#[cfg(target_arch = "x86_64")]
pub(super) static AMX: Int8Kernels =
    Int8Kernels { blocking: super::tile_amx::BLOCKING, tile: super::tile_amx::tile_int8, ..AVX512_VNNI };

#[cfg(target_arch = "x86_64")]
pub(super) static AVX2: Int8Kernels = Int8Kernels {
    blocking: Blocking::VECTORS,
    tile: super::tile_int8_avx2::tile,
    pair: super::tile_int8_avx2::PAIR,
    // SAFETY: the table is only given out where the CPU has AVX2 and FMA.
    quantize: |x, smooth, out, scales| unsafe { super::rows_int8::quantize_avx2(x, smooth, out, scales) },
};

/// A linear layer's input is quantized as `x * factor + offset`, and its weights and bias make up for it.
///
/// A layer norm's channels differ by a factor of a hundred, and one scale for the whole row would leave the small ones
/// with few bits. As SmoothQuant (Xiao et al. 2023) does, part of the difference is moved to the weights. How large a
/// channel gets is not measured on texts, but read off the norm: `gamma`, about `beta`.
pub(super) struct Smooth {
    /// Channels.
    pub k: usize,
    /// Both `[stride(k)]`, zero past `k`.
    pub factor: Vec<f32>,
    pub offset: Vec<f32>,
}

impl Smooth {
    /// Leaves `k` channels as they are.
    pub(super) fn none(k: usize) -> Self {
        Self::new((0..k).map(|_| (1.0, 0.0)))
    }

    /// For what comes out of `norm` and meets weights whose greatest magnitudes by channel are `weights` `[k]`.
    pub(super) fn of(norm: &PackedNorm, weights: &[f32]) -> Self {
        Self::new(norm.gamma.iter().zip(&norm.beta).zip(weights).map(|((gamma, beta), weight)| {
            let size = (gamma.abs() / weight).sqrt();
            // Not for a channel of zeros, or a broken one.
            let factor = if size > 0.0 && size.is_finite() { 1.0 / size } else { 1.0 };
            (factor, -factor * beta)
        }))
    }

    fn new(channels: impl ExactSizeIterator<Item = (f32, f32)>) -> Self {
        let k = channels.len();
        let (mut factor, mut offset): (Vec<f32>, Vec<f32>) = channels.unzip();
        factor.resize(stride(k), 0.0);
        offset.resize(stride(k), 0.0);
        Self { k, factor, offset }
    }
}

/// Room for the quantized input of one linear layer at a time.
pub(super) struct Quantized {
    /// `[T, stride(k)]`
    numbers: Aligned<u8>,
    /// `[T]`
    scales: Aligned<RowScale>,
}

impl Quantized {
    pub(super) const fn new() -> Self {
        Self { numbers: Aligned::new(), scales: Aligned::new() }
    }

    /// Makes room for `rows` of at most `width`.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory.
    pub(super) fn grow(&mut self, rows: usize, width: usize) -> Result<()> {
        self.numbers.grow(rows * stride(width))?;
        self.scales.grow(rows)
    }

    /// `x`, rows of `width` numbers of which the first `k` are a layer's input, as that layer takes them.
    pub(super) fn fill<T: Sync>(
        &mut self,
        exec: Exec<'_, '_>,
        (x, width): (&[T], usize),
        smooth: &Smooth,
        quantize: QuantizeKernel<T>,
    ) -> Rows<'_> {
        let (rows, stride) = (x.len() / width, stride(smooth.k));
        let (numbers, scales) = (&mut self.numbers[..rows * stride], &mut self.scales[..rows]);
        exec.for_row_blocks_of_two((numbers, stride), (scales, 1), |first, numbers, scales| {
            quantize(&x[first * width..][..scales.len() * width], smooth, numbers, scales);
        });
        Rows::Int8(numbers, scales)
    }
}
