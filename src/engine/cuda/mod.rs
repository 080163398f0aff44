//! The engine for NVIDIA GPUs: packed tokens `[T, h]` with no padding, weights once for each device, matrix products by
//! cublasLt, everything else by kernels of our own.
//!
//! From the top: `runner` (one pass of one instance: memory, copies, errors), `encoder` (embeddings and layers), `head`
//! (pooling, classifier), `lists` (what the kernels read beside the hidden states), `gemm` (matrix products and their
//! plans), `kernels` (launches), `weights` (checkpoint to device), `exchange` and `memory` (copies, buffers, streams),
//! `device` (the context, and what its errors mean), `probe` (whether this machine has what all that needs).
//!
//! Work of a pass is enqueued in one stream, of the instance, and waited for once. Device memory is allocated at load and
//! when a pass is larger than any before.
//!
//! In fp16 and bf16 the activation is part of the matrix product before it, where GELU is the approximation by tanh: it
//! differs from GELU by erf, which `gelu` means in a config.json, by at most 4.7e-4, less than what rounding the larger
//! values to fp16 does. fp32 computes every activation as it is defined.

mod device;
mod encoder;
mod exchange;
mod gemm;
mod head;
pub mod kernels;
mod lists;
mod memory;
mod probe;
mod runner;
mod weights;

use std::sync::Arc;

use self::device::Device;
use self::gemm::Plans;
use self::kernels::DeviceType;
use self::weights::{Activation, Weights};
use super::{Dtype, Engine, Runner};
use crate::error::{Error, Result};
use crate::head::HeadSpec;
use crate::model::{self, EncoderSpec};

pub use self::probe::{devices, required_symbols};

/// How a model runs on a CUDA device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// The device's number.
    pub device: u32,
    /// Number format.
    pub dtype: Dtype,
    /// Tokens of the passes that memory is allocated for at load, where the user fixed them.
    pub pass_tokens: Option<usize>,
    /// Whether every activation is computed as it is defined, in every format, for the price of one more kernel a layer.
    pub exact_activation: bool,
}

/// A loaded model.
pub(super) struct CudaModel {
    spec: EncoderSpec,
    head: HeadSpec,
    dtype: DeviceType,
    activation: Activation,
    /// Query rows of a tile of attention.
    tile_rows: usize,
    /// Tokens of the passes that memory is allocated for at load.
    pass_tokens: usize,
    plans: Plans,
    weights: Weights,
    device: Arc<Device>,
}

/// Converts `weights` and copies them to the device. What is returned does not refer to the checkpoint.
///
/// # Errors
/// `Unsupported` where there is no such device, no kernel for the model's dimensions or for the number format;
/// `Unavailable` when the device has no room; `Invalid`, with the tensor's name, for weights that fp16 cannot hold.
pub fn load(
    spec: &EncoderSpec,
    head: &HeadSpec,
    weights: &model::Weights<'_>,
    options: CudaOptions,
) -> Result<Arc<dyn Engine>> {
    let dtype = device_type(options.dtype)?;
    let tile_rows = check_dimensions(spec, dtype)?;
    let activation =
        if options.exact_activation || dtype == DeviceType::F32 { Activation::Apart } else { Activation::Fused };
    let device = Device::open(options.device)?;
    let pass_tokens = options.pass_tokens.unwrap_or_else(|| efficient_pass(&device, spec));
    let weights = Weights::load(&device, spec, weights, dtype, activation)?;
    let model = CudaModel {
        spec: spec.clone(),
        head: *head,
        dtype,
        activation,
        tile_rows,
        pass_tokens,
        plans: Plans::default(),
        weights,
        device,
    };
    Ok(Arc::new(CudaEngine(Arc::new(model))))
}

/// Checks that there are kernels for the model's dimensions, and returns the query rows of a tile of attention.
fn check_dimensions(spec: &EncoderSpec, dtype: DeviceType) -> Result<usize> {
    let refuse = |what: String| Err(Error::unsupported(format!("config.json: the CUDA engine needs {what}")));
    let Some(tile_rows) = kernels::attention_tile_rows(dtype, spec.head_dim()) else {
        return refuse(format!(
            "hidden_size / num_attention_heads to be one of {:?}, not {} / {}",
            kernels::HEAD_DIMS,
            spec.hidden_size,
            spec.num_attention_heads
        ));
    };
    if !spec.intermediate_size.is_multiple_of(8) {
        return refuse(format!("intermediate_size to be a multiple of 8, not {}", spec.intermediate_size));
    }
    if spec.hidden_size > kernels::MAX_HIDDEN {
        return refuse(format!("hidden_size to be at most {}, not {}", kernels::MAX_HIDDEN, spec.hidden_size));
    }
    Ok(tile_rows)
}

fn device_type(dtype: Dtype) -> Result<DeviceType> {
    match dtype {
        Dtype::Auto | Dtype::Fp16 => Ok(DeviceType::F16),
        Dtype::Bf16 => Ok(DeviceType::Bf16),
        Dtype::Fp32 => Ok(DeviceType::F32),
        Dtype::Int8 => Err(Error::unsupported(
            "dtype 'int8' is not available in the CUDA engine; use auto, fp16, bf16 or fp32, or the engine cpu",
        )),
    }
}

/// As the parameter `dtype` spells it.
fn dtype_name(dtype: DeviceType) -> &'static str {
    match dtype {
        DeviceType::F16 => "fp16",
        DeviceType::Bf16 => "bf16",
        DeviceType::F32 => "fp32",
    }
}

/// Tokens of a pass that fills every multiprocessor with 128 x 256 tiles of an `h`-wide product, without a rest.
fn efficient_pass(device: &Device, spec: &EncoderSpec) -> usize {
    (device.multiprocessors * 128 * 256 / spec.hidden_size).next_multiple_of(128).clamp(2048, 16_384)
}

struct CudaEngine(Arc<CudaModel>);

impl Engine for CudaEngine {
    fn runner(&self) -> Result<Box<dyn Runner>> {
        Ok(Box::new(runner::CudaRunner::new(Arc::clone(&self.0))?))
    }

    /// Each instance has a stream of its own, so that copies and work of one overlap those of another.
    fn shares_passes(&self) -> bool {
        false
    }

    fn best_pass_tokens(&self) -> usize {
        self.0.pass_tokens
    }

    fn describe(&self) -> String {
        let model = &self.0;
        let (major, minor) = model.device.capability;
        let activation = match model.activation {
            Activation::Fused => "activation within the matrix product",
            Activation::Apart => "exact activation",
        };
        format!(
            "CUDA device {} ({}, compute capability {major}.{minor}), {}, {activation}, {} MiB of weights",
            model.device.ordinal,
            model.device.name,
            dtype_name(model.dtype),
            model.weights.memory.bytes().div_ceil(1 << 20)
        )
    }

    fn device(&self) -> Option<u32> {
        Some(self.0.device.ordinal)
    }

    fn device_bytes(&self) -> usize {
        self.0.weights.memory.bytes()
    }

    fn health(&self) -> Result<()> {
        self.0.device.check_lost()
    }
}
