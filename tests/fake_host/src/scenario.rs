//! What a test wants to happen.

use std::path::PathBuf;

use crate::sys;

/// A life of a plugin: one model, its instances, and batches of requests.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The backend's name.
    pub backend: String,
    /// The backend's configuration, as JSON.
    pub backend_config: String,
    /// The model's name.
    pub model: String,
    /// The model's version.
    pub version: u64,
    /// The model's directory, which holds the version's.
    pub directory: PathBuf,
    /// The model's configuration, as JSON.
    pub config: String,
    /// Whether the plugin may complete the configuration.
    pub auto_complete: bool,
    /// How many CPU instances are made; batches go to them in turn.
    pub instances: usize,
    /// Whether the model is reloaded after the batches, and serves them again: as in the server, the new model is
    /// loaded before the old one goes.
    pub reload: bool,
    /// The requests of each call of Execute.
    pub batches: Vec<Vec<RequestSpec>>,
}

impl Scenario {
    /// A model named `model` with `{"name": model}` and no more for a configuration, auto-complete, one instance,
    /// no requests.
    pub fn new(backend: &str, model: &str, directory: impl Into<PathBuf>) -> Self {
        Self {
            backend: backend.to_string(),
            backend_config: r#"{"cmdline":{"auto-complete-config":"true"}}"#.to_string(),
            model: model.to_string(),
            version: 1,
            directory: directory.into(),
            config: format!(
                r#"{{"name":"{model}","backend":"{backend}","version_policy":{{"latest":{{"num_versions":1}}}},"max_batch_size":0,"input":[],"output":[],"instance_group":[],"parameters":{{}}}}"#
            ),
            auto_complete: true,
            instances: 1,
            reload: false,
            batches: Vec::new(),
        }
    }

    /// The same with another model configuration.
    #[must_use]
    pub fn config(mut self, json: &str) -> Self {
        self.config = json.to_string();
        self
    }

    /// The same with one more batch.
    #[must_use]
    pub fn batch(mut self, requests: impl IntoIterator<Item = RequestSpec>) -> Self {
        self.batches.push(requests.into_iter().collect());
        self
    }
}

/// Where the server puts the outputs of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Placement {
    /// Ordinary, aligned memory.
    #[default]
    Aligned,
    /// At an odd address, as a client's offset into its shared memory can have it.
    Misaligned,
    /// In GPU memory: see [`FakeCuda`](crate::FakeCuda).
    Gpu,
    /// In memory of this device that whatever runs there can follow, as it is with a software CUDA device.
    Device(i64),
}

/// A request.
#[derive(Clone, Debug, Default)]
pub struct RequestSpec {
    /// The client's id.
    pub id: String,
    /// Whether the client has gone away.
    pub cancelled: bool,
    /// The inputs.
    pub inputs: Vec<InputSpec>,
    /// The outputs that the client asks for.
    pub outputs: Vec<String>,
    /// Where they go.
    pub placement: Placement,
    /// Whether it may have several responses, as the requests of a decoupled model.
    pub decoupled: bool,
    /// The client goes away when it has got so many responses that are not final.
    pub cancelled_after: Option<usize>,
    /// The sequence that it belongs to.
    pub sequence: SequenceSpec,
}

/// A sequence, for the models that have them.
#[derive(Clone, Debug, Default)]
pub struct SequenceSpec {
    /// Its id where that is a number; 0 is none.
    pub number: u64,
    /// Its id where that is a string.
    pub text: Option<std::ffi::CString>,
    /// The bits START and END.
    pub flags: u32,
}

impl RequestSpec {
    /// A request with one input and these outputs.
    pub fn new(input: InputSpec, outputs: &[&str]) -> Self {
        Self { inputs: vec![input], outputs: outputs.iter().map(|name| name.to_string()).collect(), ..Self::default() }
    }

    /// The same with one more input.
    #[must_use]
    pub fn input(mut self, input: InputSpec) -> Self {
        self.inputs.push(input);
        self
    }

    /// The same with its outputs elsewhere.
    #[must_use]
    pub fn placed(mut self, placement: Placement) -> Self {
        self.placement = placement;
        self
    }

    /// The same, in the sequence with this number.
    #[must_use]
    pub fn in_sequence(mut self, number: u64, flags: u32) -> Self {
        self.sequence = SequenceSpec { number, text: None, flags };
        self
    }

    /// The same, in the sequence with this string.
    #[must_use]
    pub fn in_named_sequence(mut self, text: impl Into<Vec<u8>>, flags: u32) -> Self {
        let text = std::ffi::CString::new(text).unwrap_or_default();
        self.sequence = SequenceSpec { number: 0, text: Some(text), flags };
        self
    }

    /// The same, and the client has gone away.
    #[must_use]
    pub fn cancelled(mut self) -> Self {
        self.cancelled = true;
        self
    }

    /// The same, of a decoupled model.
    #[must_use]
    pub fn decoupled(mut self) -> Self {
        self.decoupled = true;
        self
    }

    /// The same, and the client goes away when it has got `parts` responses of a decoupled model.
    #[must_use]
    pub fn cancelled_after(mut self, parts: usize) -> Self {
        self.cancelled_after = Some(parts);
        self
    }
}

/// An input of a request.
#[derive(Clone, Debug)]
pub struct InputSpec {
    /// Its name.
    pub name: String,
    /// Its type.
    pub datatype: sys::TRITONSERVER_DataType,
    /// Its shape, with the batch dimension.
    pub shape: Vec<i64>,
    /// Its data, in one or more buffers.
    pub buffers: Vec<BufferSpec>,
}

/// A buffer of an input.
#[derive(Clone, Debug)]
pub struct BufferSpec {
    /// What it holds.
    pub bytes: Vec<u8>,
    /// Whether it lies in GPU memory.
    pub on_gpu: bool,
}

impl InputSpec {
    /// An input of any type, in one buffer.
    pub fn raw(name: &str, datatype: sys::TRITONSERVER_DataType, shape: &[i64], bytes: Vec<u8>) -> Self {
        Self {
            name: name.to_string(),
            datatype,
            shape: shape.to_vec(),
            buffers: vec![BufferSpec { bytes, on_gpu: false }],
        }
    }

    /// A BYTES input of shape `[texts, 1]`; the texts need not be UTF-8.
    pub fn texts<T: AsRef<[u8]>>(name: &str, texts: &[T]) -> Self {
        let mut bytes = Vec::new();
        for text in texts {
            let text = text.as_ref();
            bytes.extend((text.len() as u32).to_le_bytes());
            bytes.extend(text);
        }
        Self::raw(name, sys::TRITONSERVER_TYPE_BYTES, &[texts.len() as i64, 1], bytes)
    }

    /// An INT64 input.
    pub fn int64(name: &str, shape: &[i64], values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::raw(name, sys::TRITONSERVER_TYPE_INT64, shape, bytes)
    }

    /// An INT32 input.
    pub fn int32(name: &str, shape: &[i64], values: &[i32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::raw(name, sys::TRITONSERVER_TYPE_INT32, shape, bytes)
    }

    /// The same data in buffers of `size` bytes, with an empty one in between.
    #[must_use]
    pub fn in_pieces_of(mut self, size: usize) -> Self {
        let data: Vec<u8> = self.buffers.into_iter().flat_map(|buffer| buffer.bytes).collect();
        let piece = |bytes: &[u8]| BufferSpec { bytes: bytes.to_vec(), on_gpu: false };
        self.buffers = data.chunks(size).map(piece).collect();
        self.buffers.insert(self.buffers.len().min(1), piece(&[]));
        self
    }

    /// The same in GPU memory: see [`FakeCuda`](crate::FakeCuda).
    #[must_use]
    pub fn on_gpu(mut self) -> Self {
        for buffer in &mut self.buffers {
            buffer.on_gpu = true;
        }
        self
    }
}
