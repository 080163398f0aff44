//! ONNX Runtime, for a user's own model.onnx: any task of ours on the graph that the user exported.
//!
//! A pass is packed, a graph wants rectangles. So the sequences of a pass run in groups of like length (`groups`), each
//! padded to its own longest and cut to size again, with a mask. Heads run here, on what the graph puts out: last hidden
//! states, or a pooled vector, or logits (`signature`).
//!
//! One session holds the weights for all instances. The crate `ort` lets one thread at a time run it, and its threads share
//! one pool: so one group runs at a time, on all of them, while other instances tokenize.

mod external;
mod groups;
mod runner;
mod runtime;
mod signature;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use ort::ep::{self, ExecutionProvider};
pub use ort::logging::LogLevel;
use ort::session::builder::SessionBuilder;
use ort::session::{HasSelectedOutputs, OutputSelector, RunOptions, Session};
use ort::value::{Outlet as SessionOutlet, TensorElementType, ValueType};

pub use self::runtime::{LIBRARY, Log};
use self::signature::{Element, Outlet, Signature};
use super::{Engine, Runner};
use crate::error::{Error, Result};
use crate::head::HeadSpec;
use crate::model::EncoderSpec;

/// The model's file.
pub const FILE: &str = "model.onnx";

/// Tokens of a pass for each thread: enough sequences to find others of their length.
const PASS_TOKENS: usize = 1024;

/// How a model runs.
#[derive(Clone, Debug)]
pub struct OnnxOptions {
    /// Where the library is.
    pub library: PathBuf,
    /// Threads of the pool that all models share.
    pub pool_threads: usize,
    /// Threads of a pool of the model's own, where the user asked for one.
    pub own_threads: Option<usize>,
    /// The CUDA device to run on, instead of the CPU.
    pub device: Option<u32>,
    /// Takes the library's messages.
    pub log: Log,
}

/// A loaded model.
pub(crate) struct OnnxModel {
    graph: Mutex<Graph>,
    signature: Signature,
    spec: EncoderSpec,
    head: HeadSpec,
    /// The id that stands in padding; the mask takes it out.
    pad_id: u32,
    threads: usize,
    device: Option<u32>,
}

/// The loaded graph.
struct Graph {
    session: Session,
    /// Asks for the one output that is needed.
    options: RunOptions<HasSelectedOutputs>,
}

/// Loads model.onnx in `directory`. `pad_id` is config.json's `pad_token_id`.
///
/// # Errors
/// `Invalid` or `Unsupported` for a file that is missing, not ONNX, has tensors outside of its directory, or inputs and
/// outputs that do not fit the task, each by name.
pub fn load(
    directory: &Path,
    spec: &EncoderSpec,
    head: &HeadSpec,
    pad_id: u32,
    options: &OnnxOptions,
) -> Result<Arc<dyn Engine>> {
    external::check(directory)?;
    let environment = runtime::environment(&options.library, options.pool_threads, options.log)?;
    let model = guarded("loading model.onnx", || {
        let mut builder = Session::builder(&environment)
            .and_then(|builder| configure(builder, options))
            .map_err(|e| Error::internal(format!("engine 'onnx': {}", e.message())))?;
        if let Some(device) = options.device {
            builder = on_cuda(builder, device)?;
        }
        let session = builder.commit_from_file(directory.join(FILE)).map_err(|e| {
            (options.log)(LogLevel::Error, e.message());
            // The text holds the path.
            Error::invalid(format!("{FILE}: ONNX Runtime cannot load it ({:?}); the server's log says why", e.code()))
        })?;
        let outlets = |all: &[SessionOutlet]| all.iter().map(outlet).collect::<Vec<_>>();
        let signature = Signature::find(&outlets(session.inputs()), &outlets(session.outputs()), head, spec)?;
        let selected = RunOptions::new()
            .map_err(|e| Error::internal(e.message()))?
            .with_outputs(OutputSelector::no_default().with(&signature.output));
        Ok(OnnxModel {
            graph: Mutex::new(Graph { session, options: selected }),
            signature,
            spec: spec.clone(),
            head: *head,
            pad_id,
            threads: options.own_threads.unwrap_or(options.pool_threads),
            device: options.device,
        })
    })?;
    Ok(Arc::new(OnnxEngine(Arc::new(model))))
}

/// Shapes change with every run, so plans of memory for shapes seen before would only pile up.
fn configure(builder: SessionBuilder, options: &OnnxOptions) -> ort::Result<SessionBuilder> {
    let builder = builder.with_log_level(LogLevel::Warning)?.with_memory_pattern(false)?;
    let Some(threads) = options.own_threads else { return Ok(builder) };
    let builder = builder.with_independent_thread_pool()?.with_intra_threads(threads)?;
    Ok(builder.with_config_entry("session.intra_op.allow_spinning", "0")?)
}

fn on_cuda(builder: SessionBuilder, device: u32) -> Result<SessionBuilder> {
    if !ep::CUDA::is_available().unwrap_or(false) {
        return Err(Error::unsupported(format!(
            "engine 'onnx' on KIND_GPU: the {LIBRARY} beside the backend has no CUDAExecutionProvider; lay the one of \
             onnxruntime-gpu there, or take KIND_CPU"
        )));
    }
    let provider = ep::CUDA::default().with_device_id(device as i32).build().error_on_failure();
    builder
        .with_execution_providers([provider])
        .map_err(|e| Error::invalid(format!("engine 'onnx': CUDA device {device} cannot be used ({})", e.message())))
}

fn outlet(outlet: &SessionOutlet) -> Outlet {
    let (element, dims) = match outlet.dtype() {
        ValueType::Tensor { ty, shape, .. } => {
            let element = match ty {
                TensorElementType::Int32 => Element::Int32,
                TensorElementType::Int64 => Element::Int64,
                TensorElementType::Float32 => Element::Fp32,
                _ => Element::Other,
            };
            (element, shape.to_vec())
        }
        _ => (Element::Other, Vec::new()),
    };
    Outlet { name: outlet.name().to_owned(), element, dims }
}

/// Runs `call` into the crate `ort`, which panics where it finds ONNX Runtime inconsistent.
fn guarded<T>(what: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Err(Error::internal(format!("engine 'onnx': {what} failed"))))
}

struct OnnxEngine(Arc<OnnxModel>);

impl Engine for OnnxEngine {
    fn runner(&self) -> Result<Box<dyn Runner>> {
        Ok(Box::new(runner::OnnxRunner::new(Arc::clone(&self.0))))
    }

    fn shares_passes(&self) -> bool {
        true
    }

    fn best_pass_tokens(&self) -> usize {
        (PASS_TOKENS * self.0.threads).clamp(1024, 8192)
    }

    fn describe(&self) -> String {
        let place = self.0.device.map_or_else(|| "CPU".to_owned(), |device| format!("CUDA device {device}"));
        format!("ONNX Runtime on the {place}, output '{}' of {FILE}", self.0.signature.output)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::Pooling;
    use crate::model::HiddenAct;

    /// A small encoder.
    pub(super) const SPEC: EncoderSpec = EncoderSpec {
        vocab_size: 8,
        hidden_size: 4,
        num_hidden_layers: 1,
        num_attention_heads: 2,
        intermediate_size: 8,
        max_position_embeddings: 16,
        type_vocab_size: 2,
        layer_norm_eps: 1e-12,
        hidden_act: HiddenAct::Gelu,
    };

    /// A directory with the library of the pinned wheel under its name.
    fn library() -> tempfile::TempDir {
        let lib = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".venv/lib");
        let files = std::fs::read_dir(lib).into_iter().flatten().flatten();
        let capi = files.map(|python| python.path().join("site-packages/onnxruntime/capi")).find(|path| path.is_dir());
        let files = std::fs::read_dir(capi.expect("onnxruntime is not in .venv: run 'make deps'")).unwrap().flatten();
        let file = files.map(|file| file.path()).find(|path| path.to_string_lossy().contains("libonnxruntime.so"));
        let directory = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(file.expect("in the wheel"), directory.path().join(LIBRARY)).unwrap();
        directory
    }

    fn load_empty(library: &Path, device: Option<u32>) -> Error {
        let directory = tempfile::tempdir().unwrap();
        // No bytes are a message without fields, and a model without a graph.
        std::fs::write(directory.path().join(FILE), "").unwrap();
        let head = HeadSpec::Embed { pooling: Pooling::Mean, normalize: false };
        let library = library.to_path_buf();
        let options = OnnxOptions { library, pool_threads: 1, own_threads: None, device, log: |_, _| {} };
        load(directory.path(), &SPEC, &head, 0, &options).err().expect("refused")
    }

    #[test]
    fn what_is_missing_is_named() {
        let nowhere = tempfile::tempdir().unwrap();
        let library = library();
        // In this order: a library that is loaded stays.
        assert!(load_empty(nowhere.path(), None).message.contains("not beside the backend"));
        assert!(load_empty(library.path(), None).message.contains("ONNX Runtime cannot load it"));
        let error = load_empty(library.path(), Some(0));
        assert!(error.message.contains("no CUDAExecutionProvider") && error.message.contains("KIND_CPU"), "{error}");
    }
}
