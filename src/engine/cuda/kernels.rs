//! Typed launchers of the kernels in `kernels/*.cu`, which the build script compiles for every supported GPU. What a kernel
//! computes is said at the top of its file, what it takes in [`super::arguments`]. A launch of nothing does nothing.
#![allow(unsafe_code)]

use std::ffi::{CString, c_void};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUdeviceptr, CUfunction, CUmodule, CUstream};

pub use super::arguments::{
    AddLayerNorm, Attention, AttentionShort, Classify, DeviceType, EmbedLayerNorm, GatherRows, HEAD_DIMS, MAX_HIDDEN,
    Pool, SHORT_ROWS, attention_tile_rows,
};
use crate::head::{Activation, Pooling};
use crate::model::HiddenAct;

/// Shared memory that a block gets without asking for more.
const SHARED_BYTES: u32 = 48 << 10;

/// The fatbin, aligned for the driver, which reads its header as words.
#[repr(C, align(16))]
struct Aligned<T: ?Sized>(T);
static FATBIN: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));

/// One function for each type of elements.
type ByType = [CUfunction; DeviceType::ALL.len()];

/// The kernels, loaded into one context.
pub struct Kernels {
    module: CUmodule,
    embed_layer_norm: ByType,
    add_layer_norm: ByType,
    activation: ByType,
    pool: ByType,
    classify: ByType,
    gather_rows: CUfunction,
    /// By width of a head.
    attention: [ByType; HEAD_DIMS.len()],
    /// By width of a head; fp16 and bf16.
    attention_short: [[CUfunction; 2]; HEAD_DIMS.len()],
}

// SAFETY: handles of the driver, which any thread may use that has their context current.
unsafe impl Send for Kernels {}
// SAFETY: as above; nothing is changed through them.
unsafe impl Sync for Kernels {}

/// Launches `$function` with these places as its parameters, which the driver copies before it returns.
macro_rules! launch {
    ($function:expr, $grid:expr, $threads:expr, $shared:expr, $stream:expr, [$($parameter:expr),* $(,)?]) => {{
        let mut parameters = [$((&raw const $parameter).cast_mut().cast::<c_void>()),*];
        let (columns, rows): (u32, u32) = $grid;
        if columns == 0 || rows == 0 {
            return Ok(());
        }
        // SAFETY: a function of the loaded module, and a place of the right type for each of its parameters; the caller
        // vouches for what the addresses among them refer to.
        unsafe { result::launch_kernel($function, (columns, rows, 1), ($threads, 1, 1), $shared, $stream, &mut parameters) }
    }};
}

impl Kernels {
    /// Loads the kernels into the current context.
    ///
    /// # Errors
    /// The driver's, among them that there is no code for this GPU.
    ///
    /// # Panics
    /// When there is no CUDA driver.
    pub fn load() -> Result<Self, DriverError> {
        // SAFETY: the image is a whole fatbin, aligned, and stays where it is.
        let module = unsafe { result::module::load_data(FATBIN.0.as_ptr().cast()) }?;
        let mut kernels = Self {
            module,
            embed_layer_norm: [std::ptr::null_mut(); 3],
            add_layer_norm: [std::ptr::null_mut(); 3],
            activation: [std::ptr::null_mut(); 3],
            pool: [std::ptr::null_mut(); 3],
            classify: [std::ptr::null_mut(); 3],
            gather_rows: std::ptr::null_mut(),
            attention: [[std::ptr::null_mut(); 3]; 3],
            attention_short: [[std::ptr::null_mut(); 2]; 3],
        };
        kernels.find()?;
        Ok(kernels)
    }

    fn find(&mut self) -> Result<(), DriverError> {
        let module = self.module;
        let function = |name: String| {
            let name = CString::new(name).unwrap_or_default();
            // SAFETY: the module is loaded.
            unsafe { result::module::get_function(module, name) }
        };
        for (i, dtype) in DeviceType::ALL.map(DeviceType::name).into_iter().enumerate() {
            self.embed_layer_norm[i] = function(format!("embed_layer_norm_{dtype}"))?;
            self.add_layer_norm[i] = function(format!("add_layer_norm_{dtype}"))?;
            self.activation[i] = function(format!("activation_{dtype}"))?;
            self.pool[i] = function(format!("pool_{dtype}"))?;
            self.classify[i] = function(format!("classify_{dtype}"))?;
            for (j, head_dim) in HEAD_DIMS.into_iter().enumerate() {
                self.attention[j][i] = function(format!("attention_{dtype}_hd{head_dim}"))?;
                if let Some(short) = self.attention_short[j].get_mut(i) {
                    *short = function(format!("attention_short_{dtype}_hd{head_dim}"))?;
                }
            }
        }
        self.gather_rows = function("gather_rows".into())?;
        Ok(())
    }

    /// Launches `embed_layer_norm`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The addresses refer to device memory as [`EmbedLayerNorm`] says, which lives until the stream is past the launch, as
    /// does `self`; the context is current and the stream is of it.
    pub unsafe fn embed_layer_norm(
        &self,
        dtype: DeviceType,
        a: &EmbedLayerNorm,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        let function = self.embed_layer_norm[dtype as usize];
        launch!(
            function,
            (a.tokens.div_ceil(4), 1),
            128,
            0,
            stream,
            [
                a.out,
                a.input_ids,
                a.token_type_ids,
                a.position_ids,
                a.word,
                a.position,
                a.token_type,
                a.gamma,
                a.beta,
                a.eps,
                a.tokens,
                a.hidden
            ]
        )
    }

    /// Launches `add_layer_norm`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As for [`Self::embed_layer_norm`], with [`AddLayerNorm`].
    pub unsafe fn add_layer_norm(
        &self,
        dtype: DeviceType,
        a: &AddLayerNorm,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        let function = self.add_layer_norm[dtype as usize];
        launch!(
            function,
            (a.rows.div_ceil(4), 1),
            128,
            0,
            stream,
            [a.out, a.x, a.bias, a.residual, a.gamma, a.beta, a.eps, a.rows, a.hidden]
        )
    }

    /// Launches `attention`.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_VALUE` for a width of heads that there is no kernel for.
    ///
    /// # Safety
    /// As for [`Self::embed_layer_norm`], with [`Attention`].
    pub unsafe fn attention(&self, dtype: DeviceType, a: &Attention, stream: CUstream) -> Result<(), DriverError> {
        let function = self.attention[head(a.head_dim)?][dtype as usize];
        // The queries of a tile, and two stages of keys and values.
        let shared = match (dtype, a.head_dim) {
            (DeviceType::F32, _) => 0,
            (_, 128) => (64 + 4 * 32) * a.head_dim * 2,
            _ => (128 + 4 * 64) * a.head_dim * 2,
        };
        let hidden = a.heads * a.head_dim;
        launch!(
            function,
            (a.tile_count, a.heads),
            128,
            shared,
            stream,
            [a.context, a.qkv, a.cu_seqlens, a.tiles, hidden, a.scale]
        )
    }

    /// Launches `attention_short`.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_VALUE` for fp32, for a width of heads that there is no kernel for, and for
    /// sequences that are too long.
    ///
    /// # Safety
    /// As for [`Self::embed_layer_norm`], with [`AttentionShort`]; no sequence is longer than `longest`.
    pub unsafe fn attention_short(
        &self,
        dtype: DeviceType,
        a: &AttentionShort,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        let function = *self.attention_short[head(a.head_dim)?].get(dtype as usize).ok_or(INVALID_VALUE)?;
        if a.longest as usize > SHORT_ROWS {
            return Err(INVALID_VALUE);
        }
        let rows = a.longest.next_multiple_of(16);
        let warp_bytes = 3 * rows * a.head_dim * 2;
        let warps = [4, 2, 1].into_iter().find(|warps| warps * warp_bytes <= SHARED_BYTES).ok_or(INVALID_VALUE)?;
        let pairs = a.sequence_count.checked_mul(a.heads).ok_or(INVALID_VALUE)?;
        let hidden = a.heads * a.head_dim;
        launch!(
            function,
            (pairs.div_ceil(warps), 1),
            32 * warps,
            warps * warp_bytes,
            stream,
            [a.context, a.qkv, a.cu_seqlens, a.sequences, a.sequence_count, hidden, a.heads, rows, a.scale]
        )
    }

    /// Launches `activation` on the `n` elements at `x`, a multiple of 8, in place.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_VALUE` when `n` is not a multiple of 8.
    ///
    /// # Safety
    /// As for [`Self::embed_layer_norm`].
    pub unsafe fn activation(
        &self,
        dtype: DeviceType,
        x: CUdeviceptr,
        n: u64,
        activation: HiddenAct,
        stream: CUstream,
    ) -> Result<(), DriverError> {
        let function = self.activation[dtype as usize];
        if !n.is_multiple_of(8) {
            return Err(INVALID_VALUE);
        }
        let kind: u32 = match activation {
            HiddenAct::Gelu => 0,
            HiddenAct::GeluTanh => 1,
            HiddenAct::Relu => 2,
        };
        // Beyond it a thread takes several turns.
        let blocks = n.div_ceil(8 * 256).min(1 << 20) as u32;
        launch!(function, (blocks, 1), 256, 0, stream, [x, n, kind])
    }

    /// Launches `gather_rows`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As for [`Self::embed_layer_norm`], with [`GatherRows`].
    pub unsafe fn gather_rows(&self, dtype: DeviceType, a: &GatherRows, stream: CUstream) -> Result<(), DriverError> {
        let pieces = a.hidden * dtype.bytes() as u32 / 16;
        launch!(self.gather_rows, (a.rows.div_ceil(4), 1), 128, 0, stream, [a.out, a.x, a.index, a.rows, pieces])
    }

    /// Launches `pool`.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As for [`Self::embed_layer_norm`], with [`Pool`].
    pub unsafe fn pool(&self, dtype: DeviceType, a: &Pool, stream: CUstream) -> Result<(), DriverError> {
        let function = self.pool[dtype as usize];
        let mode: u32 = match a.pooling {
            Pooling::Mean => 0,
            Pooling::Cls => 1,
            Pooling::Max => 2,
            Pooling::Last => 3,
        };
        let normalize = u32::from(a.normalize);
        launch!(
            function,
            (a.rows, 1),
            256,
            0,
            stream,
            [
                a.out_addresses,
                a.sequences,
                a.hidden_states,
                a.cu_seqlens,
                a.rows,
                a.hidden,
                mode,
                normalize,
                a.not_finite
            ]
        )
    }

    /// Launches `classify`.
    ///
    /// # Errors
    /// The driver's; `CUDA_ERROR_INVALID_VALUE` for rows wider than [`MAX_HIDDEN`].
    ///
    /// # Safety
    /// As for [`Self::embed_layer_norm`], with [`Classify`].
    pub unsafe fn classify(&self, dtype: DeviceType, a: &Classify, stream: CUstream) -> Result<(), DriverError> {
        let function = self.classify[dtype as usize];
        if a.hidden as usize > MAX_HIDDEN {
            return Err(INVALID_VALUE);
        }
        let activation: u32 = match a.activation {
            Activation::Softmax => 0,
            Activation::Sigmoid => 1,
            Activation::Identity => 2,
        };
        launch!(
            function,
            (a.rows, 1),
            256,
            a.hidden * 4,
            stream,
            [
                a.logits_addresses,
                a.probabilities_addresses,
                a.pooled,
                a.weight,
                a.bias,
                a.rows,
                a.classes,
                a.hidden,
                activation,
                a.not_finite
            ]
        )
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded once, and unloaded until that works. Where it fails twice the context is gone, and the module too.
        let _ = unsafe { result::module::unload(self.module).or_else(|_| result::module::unload(self.module)) };
    }
}

const INVALID_VALUE: DriverError = DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_INVALID_VALUE);

/// The index of a head's width.
fn head(head_dim: u32) -> Result<usize, DriverError> {
    HEAD_DIMS.iter().position(|&d| d == head_dim as usize).ok_or(INVALID_VALUE)
}
