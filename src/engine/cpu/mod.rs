//! The native CPU engine: packed tokens `[T, h]` with no padding, weights packed once, work spread over the process's
//! pool. It needs no other library.
//!
//! From the top: `runner` (one pass: checks, groups, heads), `plan` (who runs which sequences), `encoder` (the layers
//! on one group), `linear` and `attention` (operations that know how to be split over threads), `rows` and `math` (what
//! happens to a row), `kernels` (one table of functions for each instruction set) and `tile_*` (matrix products).
//!
//! Every number of a row is computed in an order that depends on nothing but the row's own sequence, so a text's
//! answer is the same, bit by bit, alone and among others, on one thread and on many.

mod aligned;
mod attention;
#[cfg(target_arch = "x86_64")]
mod attention_bf16;
mod encoder;
mod exec;
mod int8;
mod kernels;
mod linear;
mod low;
mod math;
mod plan;
mod rows;
#[cfg(target_arch = "x86_64")]
mod rows_bf16;
#[cfg(target_arch = "x86_64")]
mod rows_int8;
mod runner;
mod scratch;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg(target_arch = "x86_64")]
mod tile_amx;
#[cfg(target_arch = "x86_64")]
mod tile_avx2;
#[cfg(target_arch = "x86_64")]
mod tile_avx512;
#[cfg(target_arch = "x86_64")]
mod tile_bf16;
#[cfg(target_arch = "x86_64")]
mod tile_int8;
#[cfg(target_arch = "x86_64")]
mod tile_int8_avx2;
mod tile_portable;
mod weights;

use std::sync::Arc;

use self::kernels::Kernels;
use self::linear::Format;
use self::low::LowKernels;
use self::weights::PackedWeights;
use super::{Dtype, Engine, Runner};
use crate::error::{Error, Result};
use crate::head::HeadSpec;
use crate::model::{EncoderSpec, Weights};
use crate::pool::Pool;

/// How a model runs on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Number format.
    pub dtype: Dtype,
    /// The most threads that one pass uses; 0 means all of the pool.
    pub threads: usize,
}

/// A loaded model.
pub(crate) struct CpuModel {
    spec: EncoderSpec,
    head: HeadSpec,
    weights: PackedWeights,
    /// Of the layers' matrix products.
    format: Format,
    kernels: &'static Kernels,
    /// What is not a product in fp32 or int8 runs in bf16.
    low: Option<&'static LowKernels>,
    pool: Arc<Pool>,
    /// The most threads that one pass uses.
    threads: usize,
}

/// Packs `weights` for this CPU. What is returned does not refer to the checkpoint.
///
/// # Errors
/// `Unavailable` when there is no memory; `Unsupported` for a number format that there are no kernels for.
pub fn load(
    spec: &EncoderSpec,
    head: &HeadSpec,
    weights: &Weights<'_>,
    options: CpuOptions,
    pool: Arc<Pool>,
) -> Result<Arc<dyn Engine>> {
    Ok(Arc::new(CpuEngine(Arc::new(CpuModel::load(spec, head, weights, options, pool, Kernels::best(options.dtype))?))))
}

impl CpuModel {
    fn load(
        spec: &EncoderSpec,
        head: &HeadSpec,
        weights: &Weights<'_>,
        options: CpuOptions,
        pool: Arc<Pool>,
        kernels: &'static Kernels,
    ) -> Result<Self> {
        let format = format(options.dtype, kernels)?;
        let all = pool.threads();
        let threads = if options.threads == 0 { all } else { options.threads.min(all) };
        let weights = PackedWeights::pack(spec, weights, format, kernels)?;
        let low = kernels.low.filter(|_| format != Format::F32);
        Ok(Self { spec: spec.clone(), head: *head, weights, format, kernels, low, pool, threads })
    }
}

/// The format that a dtype means with these kernels.
fn format(dtype: Dtype, kernels: &Kernels) -> Result<Format> {
    let refused = |text: &str| Err(Error::unsupported(format!("dtype {text}")));
    match dtype {
        Dtype::Fp32 => Ok(Format::F32),
        Dtype::Auto if kernels.low.is_none() => Ok(Format::F32),
        Dtype::Auto => Ok(Format::Bf16),
        Dtype::Bf16 if kernels.low.is_some() => Ok(Format::Bf16),
        Dtype::Int8 if kernels.int8.is_some() => Ok(Format::Int8),
        Dtype::Bf16 => {
            refused("'bf16' is not available on this CPU: it needs avx512_bf16 and avx512_vnni; use auto, fp32 or int8")
        }
        Dtype::Int8 => {
            refused("'int8' is not available on this CPU: it needs avx2 and fma, or avx512_vnni; use auto or fp32")
        }
        Dtype::Fp16 => refused("'fp16' is not available on the CPU; use auto, fp32, bf16 or int8, or the engine cuda"),
    }
}

struct CpuEngine(Arc<CpuModel>);

impl Engine for CpuEngine {
    fn runner(&self) -> Result<Box<dyn Runner>> {
        Ok(Box::new(runner::CpuRunner::new(Arc::clone(&self.0))))
    }

    fn shares_passes(&self) -> bool {
        true
    }

    fn best_pass_tokens(&self) -> usize {
        (2 * plan::GROUP_TOKENS * self.0.threads).clamp(512, 8192)
    }

    fn describe(&self) -> String {
        let format = match self.0.format {
            Format::F32 => "fp32",
            Format::Bf16 => "bf16",
            Format::Int8 => "int8",
        };
        format!("CPU, {format} with {} kernels, up to {} threads", self.0.kernels.name, self.0.threads)
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_minilm;
