//! Which engine an instance runs on, and the engines of one model: its weights are loaded once for each place that an
//! instance asks for, and shared by all instances there.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use triton_abi::{Kind, Memory, log_error, log_verbose, log_warn, plugin_directory};

use crate::config::ModelConfig;
use crate::engine::onnx::{self, LogLevel, OnnxOptions};
use crate::engine::{Engine, EngineChoice, cpu};
use crate::error::{Error, Result};
use crate::model::{Checkpoint, Weights, bert};
use crate::pool::Pool;

/// Where a model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the processor, by the native engine.
    Cpu,
    /// On the CUDA device of this number.
    Cuda(u32),
    /// By ONNX Runtime, on the processor or on the CUDA device of this number.
    Onnx(Option<u32>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu | Self::Onnx(None) => f.write_str("the CPU"),
            Self::Cuda(device) | Self::Onnx(Some(device)) => write!(f, "CUDA device {device}"),
        }
    }
}

impl Place {
    /// Where an instance of this kind runs; `own` is its device where the kind is [`Kind::Gpu`], `fixed` the parameter
    /// `device`. `cuda` tells which devices the CUDA engine can use, or why none; it is asked only where that decides.
    ///
    /// # Errors
    /// `Invalid` for a `device` that is not usable or contradicts the instance group; `cuda`'s reason where CUDA is asked
    /// for.
    pub fn of_instance(
        engine: EngineChoice,
        fixed: Option<u32>,
        (kind, own): (Kind, u32),
        cuda: impl FnOnce() -> Result<Vec<u32>>,
    ) -> Result<Self> {
        let device = if kind == Kind::Gpu { own } else { fixed.unwrap_or(0) };
        let asked = match (engine, kind) {
            (EngineChoice::Cpu, _) | (EngineChoice::Auto, Kind::Cpu) => return Ok(Self::Cpu),
            // Which of its providers there are is ONNX Runtime's to say.
            (EngineChoice::Onnx, Kind::Gpu) => return Ok(Self::Onnx(Some(own))),
            (EngineChoice::Onnx, Kind::Cpu | Kind::Model) => return Ok(Self::Onnx(None)),
            (EngineChoice::Auto, Kind::Model) if fixed.is_none() => {
                return Ok(cuda().ok().and_then(|devices| devices.first().copied()).map_or(Self::Cpu, Self::Cuda));
            }
            (EngineChoice::Auto, Kind::Model) => "parameter 'device'",
            (EngineChoice::Auto, Kind::Gpu) => "KIND_GPU",
            (EngineChoice::Cuda, _) => "engine 'cuda'",
        };
        if let Some(other) = fixed.filter(|&other| other != device) {
            return Err(Error::invalid(format!(
                "parameter 'device' is {other}, and instance_group has an instance on device {device}; remove one of them"
            )));
        }
        let usable = cuda().map_err(|error| error.within(asked))?;
        if !usable.contains(&device) {
            return Err(Error::invalid(format!("{asked}: device {device} cannot be used; usable: {usable:?}")));
        }
        Ok(Self::Cuda(device))
    }
}

/// The CUDA devices that the engine can use.
///
/// # Errors
/// `Unsupported` with the reason where there is none.
#[cfg(feature = "cuda")]
pub fn cuda_devices() -> Result<Vec<u32>> {
    crate::engine::cuda::devices()
}

/// As above, in a build without the CUDA engine.
#[cfg(not(feature = "cuda"))]
pub fn cuda_devices() -> Result<Vec<u32>> {
    Err(Error::unsupported("this build has no CUDA engine: it was made without the feature 'cuda'"))
}

/// The engines of one model.
pub struct Engines {
    /// Where the checkpoint is.
    directory: PathBuf,
    threads: usize,
    pool: Arc<Pool>,
    /// Held while an engine is loaded: a second instance waits for the first one's weights.
    loading: Mutex<()>,
    loaded: Mutex<Vec<(Place, Arc<dyn Engine>)>>,
}

impl Engines {
    /// Of the checkpoint in `directory`; the CPU engine takes at most `threads` of `pool`.
    pub fn new(directory: PathBuf, threads: usize, pool: Arc<Pool>) -> Self {
        Self { directory, threads, pool, loading: Mutex::new(()), loaded: Mutex::new(Vec::new()) }
    }

    /// The engine of a place, loaded when it is first asked for. It stays until the model is unloaded: instance groups
    /// can change while a model is loaded, and come back.
    ///
    /// # Errors
    /// What is wrong with the checkpoint or with the number format, by name; `Unavailable` without enough memory.
    pub fn get(&self, place: Place, config: &ModelConfig) -> Result<Arc<dyn Engine>> {
        let _loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, engine)) = self.loaded().iter().find(|(other, _)| *other == place) {
            return Ok(Arc::clone(engine));
        }
        let engine = self.load(place, config)?;
        self.loaded().push((place, Arc::clone(&engine)));
        Ok(engine)
    }

    fn loaded(&self) -> MutexGuard<'_, Vec<(Place, Arc<dyn Engine>)>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether every engine can still run passes; may be asked beside them.
    ///
    /// # Errors
    /// `Internal` when the device of one is lost.
    pub fn health(&self) -> Result<()> {
        self.loaded().iter().try_for_each(|(_, engine)| engine.health())
    }

    /// Bytes of weights on each device.
    pub fn device_memory(&self) -> Vec<(Memory, usize)> {
        let on_device = |engine: &Arc<dyn Engine>| Some((Memory::Gpu(engine.device()? as i32), engine.device_bytes()));
        self.loaded().iter().filter_map(|(_, engine)| on_device(engine)).collect()
    }

    /// The checkpoint is unmapped when its weights are packed or on their device.
    fn load(&self, place: Place, config: &ModelConfig) -> Result<Arc<dyn Engine>> {
        if let Place::Onnx(device) = place {
            return self.load_onnx(device, config);
        }
        let checkpoint = Checkpoint::open(&self.directory)?;
        let weights = bert::weights(&checkpoint, &config.spec, &config.head)?;
        if let Place::Cuda(device) = place {
            return load_cuda(config, &weights, device);
        }
        let options = cpu::CpuOptions { dtype: config.dtype, threads: self.threads };
        cpu::load(&config.spec, &config.head, &weights, options, Arc::clone(&self.pool))
    }

    fn load_onnx(&self, device: Option<u32>, config: &ModelConfig) -> Result<Arc<dyn Engine>> {
        let options = OnnxOptions {
            library: plugin_directory().map_err(|e| Error::internal(e.message()))?,
            pool_threads: self.pool.threads(),
            own_threads: config.threads.map(|_| self.threads),
            device,
            log: |level, text| match level {
                LogLevel::Error | LogLevel::Fatal => log_error!("ONNX Runtime: {text}"),
                LogLevel::Warning => log_warn!("ONNX Runtime: {text}"),
                LogLevel::Info | LogLevel::Verbose => log_verbose!("ONNX Runtime: {text}"),
            },
        };
        onnx::load(&self.directory, &config.spec, &config.head, config.pad_token_id, &options)
    }
}

#[cfg(feature = "cuda")]
fn load_cuda(config: &ModelConfig, weights: &Weights<'_>, device: u32) -> Result<Arc<dyn Engine>> {
    use crate::engine::cuda::{self, CudaOptions};
    let (dtype, pass_tokens) = (config.dtype, config.max_batch_tokens);
    cuda::load(
        &config.spec,
        &config.head,
        weights,
        CudaOptions { device, dtype, pass_tokens, ..CudaOptions::default() },
    )
}

#[cfg(not(feature = "cuda"))]
fn load_cuda(_: &ModelConfig, _: &Weights<'_>, _: u32) -> Result<Arc<dyn Engine>> {
    cuda_devices().and(Err(Error::unsupported("this build has no CUDA engine")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn place(engine: EngineChoice, fixed: Option<u32>, kind: Kind, own: u32) -> Result<Place> {
        Place::of_instance(engine, fixed, (kind, own), || Ok(vec![0, 2]))
    }

    fn without_cuda(engine: EngineChoice, kind: Kind) -> Result<Place> {
        Place::of_instance(engine, None, (kind, 0), || Err(Error::unsupported("there is none")))
    }

    #[test]
    fn the_instance_decides_where_the_user_says_nothing() {
        use EngineChoice::Auto;
        assert_eq!(place(Auto, None, Kind::Cpu, 0), Ok(Place::Cpu));
        assert_eq!(place(Auto, None, Kind::Gpu, 2), Ok(Place::Cuda(2)));
        assert_eq!(place(Auto, None, Kind::Model, 0), Ok(Place::Cuda(0)));
        assert_eq!(without_cuda(Auto, Kind::Model), Ok(Place::Cpu));
        assert_eq!(without_cuda(Auto, Kind::Cpu), Ok(Place::Cpu));
    }

    #[test]
    fn the_users_word_wins() {
        use EngineChoice::{Auto, Cpu, Cuda};
        for kind in [Kind::Cpu, Kind::Gpu, Kind::Model] {
            assert_eq!(without_cuda(Cpu, kind), Ok(Place::Cpu));
        }
        assert_eq!(place(Cuda, None, Kind::Cpu, 0), Ok(Place::Cuda(0)));
        assert_eq!(place(Cuda, Some(2), Kind::Cpu, 0), Ok(Place::Cuda(2)));
        assert_eq!(place(Auto, Some(2), Kind::Model, 0), Ok(Place::Cuda(2)));
        assert_eq!(place(Cuda, Some(2), Kind::Gpu, 2), Ok(Place::Cuda(2)));
    }

    #[test]
    fn onnx_runtime_is_asked_whether_it_has_a_gpu() {
        use EngineChoice::Onnx;
        assert_eq!(without_cuda(Onnx, Kind::Cpu), Ok(Place::Onnx(None)));
        assert_eq!(without_cuda(Onnx, Kind::Model), Ok(Place::Onnx(None)));
        assert_eq!(place(Onnx, None, Kind::Gpu, 2), Ok(Place::Onnx(Some(2))));
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        use EngineChoice::{Auto, Cuda};
        let contradiction = place(Auto, Some(0), Kind::Gpu, 2).unwrap_err();
        assert!(contradiction.message.contains("'device' is 0") && contradiction.message.contains("device 2"));
        let missing = place(Cuda, Some(1), Kind::Cpu, 0).unwrap_err();
        assert!(missing.message.contains("device 1") && missing.message.contains("[0, 2]"), "{missing}");
        for (engine, kind, asked) in [(Cuda, Kind::Cpu, "engine 'cuda'"), (Auto, Kind::Gpu, "KIND_GPU")] {
            let error = without_cuda(engine, kind).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unsupported);
            assert!(error.message.contains(asked) && error.message.contains("there is none"), "{error}");
        }
    }
}
