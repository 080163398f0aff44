//! Engines: what runs a model. An [`Engine`] holds a model's weights once; each Triton instance asks it for a
//! [`Runner`], which owns the scratch memory of one pass at a time.

mod check;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod onnx;

use crate::batch::PackedBatch;
use crate::error::Result;
use crate::head::Value;

/// The engine that the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// What suits the files, model.onnx alone being for ONNX Runtime, and the instance: KIND_GPU the CUDA engine, KIND_CPU the CPU engine, KIND_MODEL the CUDA engine where
    /// there is a device for it.
    #[default]
    Auto,
    /// The native CPU engine.
    Cpu,
    /// The CUDA engine.
    Cuda,
    /// ONNX Runtime, with the user's model.onnx.
    Onnx,
}

/// The number format of weights and matrix products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dtype {
    /// The fastest that keeps a cosine of 0.9999 to fp32 on this machine.
    #[default]
    Auto,
    /// fp32.
    Fp32,
    /// bf16 products, fp32 sums.
    Bf16,
    /// fp16 products, fp32 sums.
    Fp16,
    /// int8 products: activations quantized by row, weights by output.
    Int8,
}

/// The weights of one model, loaded once and shared by all of its instances.
pub trait Engine: Send + Sync {
    /// A new runner on the shared weights.
    ///
    /// # Errors
    /// `Unavailable` when its scratch memory cannot be had.
    fn runner(&self) -> Result<Box<dyn Runner>>;

    /// Whether the rows of all instances may run in the same passes, on any runner, into host memory. Otherwise each
    /// instance runs its own.
    fn shares_passes(&self) -> bool;

    /// The token count of a pass at which the engine is most efficient: the default of `max_batch_tokens`.
    fn best_pass_tokens(&self) -> usize;

    /// What runs, in a few words for the log.
    fn describe(&self) -> String;

    /// The CUDA device on which it runs, whose memory a [`Slot::Device`] may name; `None` for the CPU.
    fn device(&self) -> Option<u32> {
        None
    }

    /// Bytes of the device that the weights occupy.
    fn device_bytes(&self) -> usize {
        0
    }

    /// Whether passes can still succeed; may be asked beside them.
    ///
    /// # Errors
    /// `Internal` when the device is lost.
    fn health(&self) -> Result<()> {
        Ok(())
    }
}

/// Runs passes, one after another.
pub trait Runner: Send {
    /// Runs the encoder and the head on `batch` and fills every slot of `outputs`, which are ordered by `sequence`.
    /// A value that no slot asks for is not computed.
    ///
    /// # Errors
    /// `Unavailable` when memory ran out: the next smaller pass may work. `Internal` when the result is not finite
    /// or the device failed. The content of the slots is undefined after an error.
    fn run(&mut self, batch: &PackedBatch, outputs: &mut [Output<'_>]) -> Result<()>;

    /// Bytes of the device that the runner has allocated for itself.
    fn device_bytes(&self) -> usize {
        0
    }
}

/// A place for one row of one output.
pub struct Output<'a> {
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// What to write there.
    pub value: Value,
    /// Where: exactly as many fp32 elements as the value has.
    pub slot: Slot<'a>,
}

/// Memory that an engine writes.
pub enum Slot<'a> {
    /// Host memory.
    Host(&'a mut [f32]),
    /// Memory of a device, only ever given to an engine that runs on that device.
    Device {
        /// Device address of the first element.
        address: u64,
        /// Number of fp32 elements.
        len: usize,
    },
}
