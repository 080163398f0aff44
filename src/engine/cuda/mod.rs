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
//! In fp16 and bf16 the activation is part of the matrix product before it, or a kernel after it where that was faster when
//! the two were timed. Either way GELU is the approximation by tanh: it differs from GELU by erf, which `gelu` means in a
//! config.json, by at most 4.7e-4, less than what rounding the larger values to fp16 does. fp32 computes every activation
//! as it is defined.

mod arguments;
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
use self::gemm::{Epilogue, Plans};
use self::kernels::DeviceType;
use self::weights::Weights;
use super::{Dtype, Engine, Runner};
use crate::error::{Error, Result};
use crate::head::HeadSpec;
use crate::model::{self, EncoderSpec, HiddenAct};

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
    /// How the feed-forward layer's activation is computed. fp32 is always exact.
    pub activation: ActivationPlace,
}

/// How the feed-forward layer's activation is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationPlace {
    /// As `Fused` or as `Apart`, for each number of rows what is faster when the plan is made. GELU by tanh.
    #[default]
    Fastest,
    /// Within the matrix product before it. GELU by tanh.
    Fused,
    /// By a kernel after it. GELU by tanh.
    Apart,
    /// By a kernel after it, as `hidden_act` defines it.
    Exact,
}

/// A loaded model.
pub(super) struct CudaModel {
    spec: EncoderSpec,
    head: HeadSpec,
    dtype: DeviceType,
    activation: ActivationPlace,
    /// What the kernel of activations computes in every layer; `None` where the plan says whether it runs.
    apart: Option<HiddenAct>,
    /// Query rows of a tile of attention.
    tile_rows: usize,
    /// Tokens of the passes that memory is allocated for at load.
    pass_tokens: usize,
    /// Whether `pass_tokens` was measured.
    measured: bool,
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
    let activation = if dtype == DeviceType::F32 { ActivationPlace::Exact } else { options.activation };
    let fused = if spec.hidden_act == HiddenAct::Relu { Epilogue::BiasRelu } else { Epilogue::BiasGelu };
    let (intermediate, apart) = match activation {
        ActivationPlace::Fastest => (vec![fused, Epilogue::Bias], None),
        ActivationPlace::Fused => (vec![fused], None),
        ActivationPlace::Apart => (vec![Epilogue::Bias], fused.activation()),
        ActivationPlace::Exact => (vec![Epilogue::Bias], Some(spec.hidden_act)),
    };
    let device = Device::open(options.device)?;
    let pass_tokens = options.pass_tokens.unwrap_or_else(|| efficient_pass(&device, spec));
    let weights = Weights::load(&device, spec, weights, dtype, &intermediate)?;
    let mut model = Arc::new(CudaModel {
        spec: spec.clone(),
        head: *head,
        dtype,
        activation,
        apart,
        tile_rows,
        pass_tokens,
        measured: false,
        plans: Plans::default(),
        weights,
        device,
    });
    if options.pass_tokens.is_none() {
        let measured = runner::measure_pass(&model, pass_tokens);
        // What measured is gone, so that nothing else holds the model.
        if let (Some(tokens), Some(model)) = (measured?, Arc::get_mut(&mut model)) {
            (model.pass_tokens, model.measured) = (tokens, true);
        }
    }
    Ok(Arc::new(CudaEngine(model)))
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

/// Tokens of a pass that fills every multiprocessor with 128 x 256 tiles of an `h`-wide product, without a rest: what is
/// taken where no measurement can say it.
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
            ActivationPlace::Fastest => "activation where it is faster",
            ActivationPlace::Fused => "activation within the matrix product",
            ActivationPlace::Apart => "activation after the matrix product",
            ActivationPlace::Exact => "exact activation",
        };
        let measured = if model.measured { ", best pass measured" } else { "" };
        format!(
            "CUDA device {} ({}, compute capability {major}.{minor}), {}, {activation}, {} MiB of weights{measured}",
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
