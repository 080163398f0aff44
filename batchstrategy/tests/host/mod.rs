//! The few calls of the server that the library makes, on plain structs: fast enough to measure against.

#![allow(dead_code, missing_docs)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use triton_abi::sys::*;

use batchstrategy as _;

/// A model as its backend has left it: `state` is what `TRITONBACKEND_ModelState` gives.
#[repr(C)]
pub struct Model {
    pub backend: CString,
    pub state: *mut c_void,
}

/// What the backend `rust` keeps at a model, field by field: the layout that the two libraries share.
#[repr(C)]
pub struct State {
    pub magic: [u8; 8],
    pub version: u64,
    pub budget: *const [u64; 4],
}

impl State {
    pub fn new(budget: &[u64; 4]) -> Self {
        Self { magic: *b"RustTok\x01", version: 1, budget }
    }
}

/// A budget of `tokens`: rows are cut at 512, have 2 special tokens, and 4 bytes a token.
pub fn budget(tokens: u64) -> [u64; 4] {
    [tokens, 512, 2, 4 << 16]
}

pub struct Input {
    pub datatype: TRITONSERVER_DataType,
    pub shape: Vec<i64>,
    pub bytes: u64,
}

pub struct Request {
    pub inputs: Vec<Input>,
}

impl Request {
    /// `texts` of one input, `[rows, 1]`.
    pub fn texts(lengths: &[u64]) -> Self {
        Self { inputs: vec![Self::input(lengths)] }
    }

    pub fn pairs(first: &[u64], second: &[u64]) -> Self {
        Self { inputs: vec![Self::input(second), Self::input(first)] }
    }

    pub fn ids(shape: &[i64]) -> Self {
        let bytes = 8 * shape.iter().product::<i64>() as u64;
        let input = || Input { datatype: TRITONSERVER_TYPE_INT64, shape: shape.to_vec(), bytes };
        Self { inputs: vec![input(), input()] }
    }

    fn input(lengths: &[u64]) -> Input {
        Input {
            datatype: TRITONSERVER_TYPE_BYTES,
            shape: vec![lengths.len() as i64, 1],
            bytes: lengths.iter().map(|length| length + 4).sum(),
        }
    }
}

/// Makes every look at a model, or at a request's inputs, fail.
pub static FAIL: AtomicBool = AtomicBool::new(false);
pub static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

// The library's functions, as the server finds them.
unsafe extern "C" {
    pub fn TRITONBACKEND_ModelBatcherInitialize(
        batcher: *mut *mut TRITONBACKEND_Batcher,
        model: *mut TRITONBACKEND_Model,
    ) -> *mut TRITONSERVER_Error;
    pub fn TRITONBACKEND_ModelBatcherFinalize(batcher: *mut TRITONBACKEND_Batcher) -> *mut TRITONSERVER_Error;
    pub fn TRITONBACKEND_ModelBatchInitialize(
        batcher: *const TRITONBACKEND_Batcher,
        userp: *mut *mut c_void,
    ) -> *mut TRITONSERVER_Error;
    pub fn TRITONBACKEND_ModelBatchIncludeRequest(
        request: *mut TRITONBACKEND_Request,
        userp: *mut c_void,
        should_include: *mut bool,
    ) -> *mut TRITONSERVER_Error;
    pub fn TRITONBACKEND_ModelBatchFinalize(userp: *mut c_void) -> *mut TRITONSERVER_Error;
}

/// A scheduler of one model: calls in the server's order.
pub struct Scheduler {
    pub batcher: *mut TRITONBACKEND_Batcher,
    /// Where the server keeps the userp, in its payload.
    payloads: [*mut c_void; 2],
    current: usize,
}

impl Scheduler {
    pub fn new(model: &Model) -> Self {
        let mut batcher = null_mut();
        let model = std::ptr::from_ref(model).cast_mut().cast();
        // SAFETY: valid pointers, to what the functions of this module take them for; here and below.
        assert!(unsafe { TRITONBACKEND_ModelBatcherInitialize(&mut batcher, model) }.is_null());
        Self { batcher, payloads: [null_mut(); 2], current: 0 }
    }

    /// The payload is full or taken: another one.
    pub fn next_payload(&mut self) {
        self.current = 1 - self.current;
        self.payloads[self.current] = null_mut();
        self.begin();
        // As the server: the first scan begins again.
        self.end();
        self.begin();
    }

    pub fn begin(&mut self) {
        let userp = &mut self.payloads[self.current];
        // SAFETY: as above.
        assert!(unsafe { TRITONBACKEND_ModelBatchInitialize(self.batcher, userp) }.is_null());
    }

    pub fn include(&mut self, request: &Request) -> bool {
        let mut included = false;
        let request = std::ptr::from_ref(request).cast_mut().cast();
        // SAFETY: as above.
        let error =
            unsafe { TRITONBACKEND_ModelBatchIncludeRequest(request, self.payloads[self.current], &mut included) };
        assert!(error.is_null());
        included
    }

    pub fn end(&mut self) {
        // SAFETY: as above.
        assert!(unsafe { TRITONBACKEND_ModelBatchFinalize(self.payloads[self.current]) }.is_null());
        self.payloads[self.current] = null_mut();
    }

    /// One scan over a queue: how many requests of its head were included.
    pub fn scan(&mut self, queue: &[Request]) -> usize {
        self.begin();
        let count = queue.iter().take_while(|request| self.include(request)).count();
        self.end();
        count
    }
}

fn failure() -> *mut TRITONSERVER_Error {
    Box::into_raw(Box::new(0u64)).cast()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONBACKEND_ModelBackend(
    model: *mut TRITONBACKEND_Model,
    backend: *mut *mut TRITONBACKEND_Backend,
) -> *mut TRITONSERVER_Error {
    if FAIL.load(Ordering::Relaxed) {
        return failure();
    }
    // SAFETY: the library passes places to write to; a model stands for its backend.
    unsafe { *backend = model.cast() };
    null_mut()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONBACKEND_BackendName(
    backend: *mut TRITONBACKEND_Backend,
    name: *mut *const c_char,
) -> *mut TRITONSERVER_Error {
    // SAFETY: as above; the handle is a `Model`.
    unsafe { *name = (*backend.cast::<Model>()).backend.as_ptr() };
    null_mut()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONBACKEND_ModelState(
    model: *mut TRITONBACKEND_Model,
    state: *mut *mut c_void,
) -> *mut TRITONSERVER_Error {
    // SAFETY: as above.
    unsafe { *state = (*model.cast::<Model>()).state };
    null_mut()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONBACKEND_RequestInputCount(
    request: *mut TRITONBACKEND_Request,
    count: *mut u32,
) -> *mut TRITONSERVER_Error {
    if FAIL.load(Ordering::Relaxed) {
        return failure();
    }
    // SAFETY: as above; the handle is a `Request`.
    unsafe { *count = (*request.cast::<Request>()).inputs.len() as u32 };
    null_mut()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONBACKEND_RequestInputByIndex(
    request: *mut TRITONBACKEND_Request,
    index: u32,
    input: *mut *mut TRITONBACKEND_Input,
) -> *mut TRITONSERVER_Error {
    // SAFETY: as above.
    let inputs = unsafe { &(*request.cast::<Request>()).inputs };
    let Some(found) = inputs.get(index as usize) else { return failure() };
    // SAFETY: as above.
    unsafe { *input = std::ptr::from_ref(found).cast_mut().cast() };
    null_mut()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONBACKEND_InputProperties(
    input: *mut TRITONBACKEND_Input,
    _name: *mut *const c_char,
    datatype: *mut TRITONSERVER_DataType,
    shape: *mut *const i64,
    dims: *mut u32,
    byte_size: *mut u64,
    buffers: *mut u32,
) -> *mut TRITONSERVER_Error {
    // SAFETY: as above; the handle is an `Input`.
    unsafe {
        let input = &*input.cast::<Input>();
        *datatype = input.datatype;
        *shape = input.shape.as_ptr();
        *dims = input.shape.len() as u32;
        *byte_size = input.bytes;
        *buffers = 1;
    }
    null_mut()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ErrorNew(_: TRITONSERVER_Error_Code, _: *const c_char) -> *mut TRITONSERVER_Error {
    failure()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ErrorDelete(error: *mut TRITONSERVER_Error) {
    // SAFETY: made by `failure`.
    drop(unsafe { Box::from_raw(error.cast::<u64>()) });
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ErrorCode(_: *mut TRITONSERVER_Error) -> TRITONSERVER_Error_Code {
    TRITONSERVER_ERROR_INTERNAL
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ErrorMessage(_: *mut TRITONSERVER_Error) -> *const c_char {
    c"injected".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_LogIsEnabled(_: TRITONSERVER_LogLevel) -> bool {
    true
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_LogMessage(
    _: TRITONSERVER_LogLevel,
    _: *const c_char,
    _: c_int,
    message: *const c_char,
) -> *mut TRITONSERVER_Error {
    // SAFETY: a NUL-terminated string.
    let message = unsafe { std::ffi::CStr::from_ptr(message) }.to_string_lossy().into_owned();
    LOG.lock().expect("no panic under it").push(message);
    null_mut()
}
