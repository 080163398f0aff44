//! The host's state, and what all of its functions have in common.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::report::{InstanceGroup, Outcome};
use crate::scenario::{Placement, RequestSpec};
use crate::sys;

/// One call of the host that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which call, from 0.
    pub call: usize,
    /// With which error code.
    pub code: sys::TRITONSERVER_Error_Code,
}

/// The objects of one kind that are alive.
pub(crate) struct Table<T> {
    kind: &'static str,
    live: BTreeMap<usize, T>,
}

impl<T> Table<T> {
    const fn new(kind: &'static str) -> Self {
        Self { kind, live: BTreeMap::new() }
    }

    /// The object behind a handle. A handle that is not alive is the plugin's misuse.
    pub(crate) fn get<H>(&mut self, handle: *const H) -> Result<&mut T, Failure> {
        let kind = self.kind;
        self.live.get_mut(&handle.addr()).ok_or_else(|| Failure::misuse(format!("use of a {kind} that is not alive")))
    }

    pub(crate) fn remove<H>(&mut self, handle: *const H) -> Result<T, Failure> {
        let kind = self.kind;
        self.live.remove(&handle.addr()).ok_or_else(|| Failure::misuse(format!("second release of a {kind}")))
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.live.values()
    }
}

pub(crate) struct BackendObject {
    pub(crate) name: CString,
    pub(crate) config: *mut sys::TRITONSERVER_Message,
    pub(crate) state: *mut c_void,
}

pub(crate) struct ModelObject {
    pub(crate) backend: *mut sys::TRITONBACKEND_Backend,
    pub(crate) name: CString,
    pub(crate) version: u64,
    pub(crate) directory: CString,
    pub(crate) config: String,
    pub(crate) auto_complete: bool,
    pub(crate) state: *mut c_void,
}

pub(crate) struct InstanceObject {
    pub(crate) model: *mut sys::TRITONBACKEND_Model,
    pub(crate) name: CString,
    pub(crate) kind: sys::TRITONSERVER_InstanceGroupKind,
    pub(crate) device: i32,
    pub(crate) state: *mut c_void,
}

pub(crate) struct RequestObject {
    pub(crate) spec: RequestSpec,
    pub(crate) id: CString,
    /// In reverse order of the specification: the server does not keep the configuration's order either.
    pub(crate) inputs: Vec<(CString, *mut sys::TRITONBACKEND_Input)>,
    pub(crate) outputs: Vec<CString>,
}

pub(crate) struct InputObject {
    pub(crate) request: usize,
    pub(crate) index: usize,
}

pub(crate) struct ResponseObject {
    pub(crate) request: usize,
    pub(crate) placement: Placement,
    pub(crate) outputs: Vec<*mut sys::TRITONBACKEND_Output>,
    pub(crate) parameters: BTreeMap<String, String>,
}

pub(crate) struct OutputObject {
    pub(crate) name: String,
    pub(crate) datatype: sys::TRITONSERVER_DataType,
    pub(crate) shape: Vec<i64>,
    pub(crate) placement: Placement,
    pub(crate) buffer: Option<Buffer>,
}

/// An output's memory, with guards around it that must stay as they are.
pub(crate) struct Buffer {
    pub(crate) memory: Vec<u8>,
    pub(crate) start: usize,
    pub(crate) size: usize,
}

pub(crate) struct MetricObject {
    pub(crate) family: usize,
    pub(crate) kind: sys::TRITONSERVER_MetricKind,
    pub(crate) labels: Vec<String>,
    pub(crate) updates: Vec<f64>,
}

/// Everything the host knows. Pointers in it are handles, never followed.
pub(crate) struct Host {
    next_handle: usize,
    pub(crate) errors: Table<(sys::TRITONSERVER_Error_Code, CString)>,
    pub(crate) messages: Table<Vec<u8>>,
    pub(crate) parameters: Table<String>,
    pub(crate) families: Table<(sys::TRITONSERVER_MetricKind, String)>,
    pub(crate) metrics: Table<MetricObject>,
    pub(crate) metric_args: Table<Vec<f64>>,
    pub(crate) backends: Table<BackendObject>,
    pub(crate) attributes: Table<Vec<InstanceGroup>>,
    pub(crate) models: Table<ModelObject>,
    pub(crate) instances: Table<InstanceObject>,
    pub(crate) requests: Table<RequestObject>,
    pub(crate) inputs: Table<InputObject>,
    pub(crate) responses: Table<ResponseObject>,
    pub(crate) outputs: Table<OutputObject>,
    pub(crate) fault: Option<Fault>,
    pub(crate) calls: Vec<&'static str>,
    pub(crate) misuses: Vec<String>,
    pub(crate) logs: Vec<(sys::TRITONSERVER_LogLevel, String)>,
    pub(crate) metric_values: BTreeMap<String, Vec<f64>>,
    /// What became of each request, by its handle; kept after its release.
    pub(crate) outcomes: BTreeMap<usize, Outcome>,
    pub(crate) batch_rows: Vec<u64>,
    pub(crate) usage: Table<Usage>,
    /// What the model reported last.
    pub(crate) memory_usage: Vec<Usage>,
}

/// Bytes of a memory: its type, its number, its size.
pub(crate) type Usage = (sys::TRITONSERVER_MemoryType, i64, usize);

// SAFETY: the pointers in it are numbers to the host.
unsafe impl Send for Host {}

static HOST: Mutex<Host> = Mutex::new(Host::new());

/// The host, locked; a test that failed before does not matter.
pub(crate) fn host() -> MutexGuard<'static, Host> {
    HOST.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Host {
    const fn new() -> Self {
        Self {
            // Handles look like nothing that can be followed.
            next_handle: 0x10,
            errors: Table::new("error"),
            messages: Table::new("message"),
            parameters: Table::new("parameter"),
            families: Table::new("metric family"),
            metrics: Table::new("metric"),
            metric_args: Table::new("metric arguments object"),
            backends: Table::new("backend"),
            attributes: Table::new("attributes object"),
            models: Table::new("model"),
            instances: Table::new("instance"),
            requests: Table::new("request"),
            inputs: Table::new("input"),
            responses: Table::new("response"),
            outputs: Table::new("output"),
            fault: None,
            calls: Vec::new(),
            misuses: Vec::new(),
            logs: Vec::new(),
            metric_values: BTreeMap::new(),
            outcomes: BTreeMap::new(),
            batch_rows: Vec::new(),
            usage: Table::new("buffer attributes object"),
            memory_usage: Vec::new(),
        }
    }

    /// Forgets everything but the handles that were given out.
    pub(crate) fn reset(&mut self, fault: Option<Fault>) {
        let next_handle = self.next_handle;
        *self = Self::new();
        self.next_handle = next_handle;
        self.fault = fault;
    }

    /// The kinds of which something is alive, with their numbers.
    pub(crate) fn alive(&self) -> Vec<(&'static str, usize)> {
        let counts = [
            (self.errors.kind, self.errors.live.len()),
            (self.messages.kind, self.messages.live.len()),
            (self.parameters.kind, self.parameters.live.len()),
            (self.families.kind, self.families.live.len()),
            (self.metrics.kind, self.metrics.live.len()),
            (self.metric_args.kind, self.metric_args.live.len()),
            (self.backends.kind, self.backends.live.len()),
            (self.attributes.kind, self.attributes.live.len()),
            (self.models.kind, self.models.live.len()),
            (self.instances.kind, self.instances.live.len()),
            (self.requests.kind, self.requests.live.len()),
            (self.inputs.kind, self.inputs.live.len()),
            (self.responses.kind, self.responses.live.len()),
            (self.outputs.kind, self.outputs.live.len()),
            (self.usage.kind, self.usage.live.len()),
        ];
        counts.into_iter().filter(|(_, count)| *count > 0).collect()
    }

    /// Puts an object into one of the tables, under a new handle.
    pub(crate) fn insert<T, H>(&mut self, table: impl FnOnce(&mut Self) -> &mut Table<T>, object: T) -> *mut H {
        self.next_handle += 1;
        let handle = self.next_handle;
        table(self).live.insert(handle, object);
        std::ptr::without_provenance_mut(handle)
    }

    pub(crate) fn new_error(&mut self, failure: Failure) -> *mut sys::TRITONSERVER_Error {
        if failure.misuse {
            self.misuses.push(failure.message.clone());
        }
        let message = CString::new(failure.message).unwrap_or_default();
        self.insert(|host| &mut host.errors, (failure.code, message))
    }

    /// Notes a call, and tells whether it is the one that has to fail.
    pub(crate) fn note(&mut self, name: &'static str) -> Result<(), Failure> {
        let number = self.calls.len();
        self.calls.push(name);
        match self.fault {
            Some(fault) if fault.call == number => {
                Err(Failure { code: fault.code, message: format!("fault injected into {name}"), misuse: false })
            }
            _ => Ok(()),
        }
    }
}

/// Why a call fails.
pub(crate) struct Failure {
    pub(crate) code: sys::TRITONSERVER_Error_Code,
    pub(crate) message: String,
    /// The plugin did what it must not do.
    misuse: bool,
}

impl Failure {
    pub(crate) fn new(code: sys::TRITONSERVER_Error_Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), misuse: false }
    }

    pub(crate) fn misuse(message: impl Into<String>) -> Self {
        Self { code: sys::TRITONSERVER_ERROR_INTERNAL, message: message.into(), misuse: true }
    }
}

/// Runs one function of the host: counts it, fails it where it is its turn.
pub(crate) fn call(
    name: &'static str,
    work: impl FnOnce(&mut Host) -> Result<(), Failure>,
) -> *mut sys::TRITONSERVER_Error {
    let mut host = host();
    let result = host.note(name).and_then(|()| work(&mut host));
    match result {
        Ok(()) => std::ptr::null_mut(),
        Err(mut failure) => {
            if failure.misuse {
                failure.message = format!("{name}: {}", failure.message);
            }
            host.new_error(failure)
        }
    }
}

/// Writes an answer to where the plugin wants it; NULL where a call allows it.
pub(crate) fn put<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the plugin passes valid places of the declared type; this is the ABI's contract.
        unsafe { place.write(value) };
    }
}

/// A string that the plugin passes.
pub(crate) fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the plugin passes NUL-terminated strings; this is the ABI's contract.
    unsafe { std::ffi::CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// An array that the plugin passes.
pub(crate) fn array<T: Copy>(pointer: *const T, count: u64) -> Vec<T> {
    if pointer.is_null() || count == 0 {
        return Vec::new();
    }
    // SAFETY: the plugin passes as many elements as it says; this is the ABI's contract.
    unsafe { std::slice::from_raw_parts(pointer, count as usize) }.to_vec()
}

/// Defines functions of the ABI that can fail. Each is counted; its type is compared with the header's.
macro_rules! host_calls {
    (|$host:ident| $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($arg: $type),*) -> *mut $crate::sys::TRITONSERVER_Error {
                $crate::host::call(stringify!($name), |$host| {
                    $body
                    #[allow(unreachable_code)]
                    Ok(())
                })
            }
            const _: [unsafe extern "C" fn($($type),*) -> *mut $crate::sys::TRITONSERVER_Error; 2] =
                [$name, $crate::sys::$name];
        )*
        /// Where these functions are: naming them keeps the linker from leaving them out.
        pub(crate) fn addresses() -> Vec<usize> {
            vec![$($name as *const () as usize),*]
        }
    };
}
pub(crate) use host_calls;
