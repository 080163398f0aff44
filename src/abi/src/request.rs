//! A request: owned from Execute on, answered once, released once.

use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::clock::{ComputeTimes, now_ns};
use crate::error::{Code, Error, Result, c_string, check};
use crate::guard;
use crate::host;
use crate::memory::{self, Memory};
use crate::response::{Flags, RawResponse, Response};
use crate::sys;
use crate::tensor::{DataType, element_count};
use crate::text::Texts;

/// What all requests of a batch share.
#[derive(Clone, Copy)]
pub(crate) struct Owner<'a> {
    pub(crate) instance: NonNull<sys::TRITONBACKEND_ModelInstance>,
    /// The output that makes an error response uncacheable.
    pub(crate) uncacheable: Option<&'a CStr>,
    pub(crate) exec_start: u64,
}

/// A request that we own. Dropped without an answer, it is answered with INTERNAL.
pub struct Request<'a> {
    raw: NonNull<sys::TRITONBACKEND_Request>,
    owner: Owner<'a>,
    answered: bool,
}

// SAFETY: Triton allows the calls on a request from any thread, one at a time.
unsafe impl Send for Request<'_> {}

impl<'a> Request<'a> {
    /// # Safety
    /// `raw` is a live request that becomes ours and is wrapped once; the instance lives through `'a`.
    pub(crate) unsafe fn own(raw: NonNull<sys::TRITONBACKEND_Request>, owner: Owner<'a>) -> Self {
        Self { raw, owner, answered: false }
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::TRITONBACKEND_Request {
        self.raw.as_ptr()
    }

    /// The id that the client gave, or the empty string.
    pub fn id(&self) -> Result<String> {
        // SAFETY: a live request; the text is the server's and lives as long.
        unsafe { host::get_string(|out| sys::TRITONBACKEND_RequestId(self.as_ptr(), out)) }
    }

    /// Whether the client has gone away. Where the server cannot tell, it has not.
    pub fn is_cancelled(&self) -> bool {
        // SAFETY: a live request.
        unsafe { host::get(false, |out| sys::TRITONBACKEND_RequestIsCancelled(self.as_ptr(), out)) }.unwrap_or(false)
    }

    /// The input with this name.
    pub fn input(&self, name: &str) -> Result<Input<'_>> {
        let c_name = c_string(name);
        // SAFETY: a live request and a NUL-terminated name.
        let raw = unsafe {
            host::get_handle("input", |out| sys::TRITONBACKEND_RequestInput(self.as_ptr(), c_name.as_ptr(), out))
        }?;
        // SAFETY: an input of this request, which lives as long as it.
        unsafe { Input::new(raw, name) }
    }

    /// The input with this name, or `None` where the client did not send it.
    pub fn optional_input(&self, name: &str) -> Result<Option<Input<'_>>> {
        match self.input(name) {
            Ok(input) => Ok(Some(input)),
            Err(error) if error.code() == Code::InvalidArg => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The names of the outputs that the client wants; all of the model's where it named none.
    pub fn requested_outputs(&self) -> Result<Vec<String>> {
        // SAFETY: a live request.
        let count = unsafe { host::get(0, |out| sys::TRITONBACKEND_RequestOutputCount(self.as_ptr(), out)) }?;
        (0..count)
            .map(|index| {
                // SAFETY: a live request; the name is the server's and lives as long.
                unsafe { host::get_string(|out| sys::TRITONBACKEND_RequestOutputName(self.as_ptr(), index, out)) }
            })
            .collect()
    }

    /// The response of this request, to be filled.
    pub fn respond(self) -> Response<'a> {
        Response::new(self)
    }

    /// Answers with an error.
    pub fn fail(mut self, error: &Error) {
        self.answer_with(error);
    }

    /// Sends an error response; a failure on the way is tried once more.
    pub(crate) fn answer_with(&mut self, error: &Error) {
        let sent = self.try_answer_with(error, true).or_else(|_| self.try_answer_with(error, false));
        self.answered = true;
        if let Err(failure) = sent {
            crate::log_error!("a request stays without an answer: {failure}");
        }
        let at = now_ns();
        self.report(false, ComputeTimes { start: at, end: at });
    }

    fn try_answer_with(&self, error: &Error, first_try: bool) -> Result<()> {
        let response = RawResponse::for_request(self)?;
        if let Some(name) = self.owner.uncacheable {
            let added = response.add_output(name, DataType::Fp32, &[0]);
            if first_try {
                added?;
            }
        }
        response.send(Flags::Final, Some(error))
    }

    /// Marks the request as answered with a success.
    pub(crate) fn answered_well(&mut self, times: ComputeTimes) {
        self.answered = true;
        self.report(true, times);
    }

    fn report(&self, success: bool, times: ComputeTimes) {
        // SAFETY: the instance lives through `'a`, the request is not released yet.
        let reported = unsafe {
            check(sys::TRITONBACKEND_ModelInstanceReportStatistics(
                self.owner.instance.as_ptr(),
                self.as_ptr(),
                success,
                self.owner.exec_start,
                times.start,
                times.end,
                now_ns(),
            ))
        };
        if let Err(error) = reported {
            crate::log_error!("the statistics of a request are lost: {error}");
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        if !self.answered {
            let why = guard::current_panic()
                .map_or("the backend did not answer".to_string(), |text| format!("panic: {text}"));
            self.answer_with(&Error::internal(why));
        }
        // SAFETY: ours and live; released once, here. On error it is still ours.
        unsafe {
            host::give_back("request", || {
                sys::TRITONBACKEND_RequestRelease(self.as_ptr(), sys::TRITONSERVER_REQUEST_RELEASE_ALL)
            });
        }
    }
}

/// What the server says of an input.
pub(crate) struct Properties<'r> {
    pub(crate) datatype: sys::TRITONSERVER_DataType,
    pub(crate) shape: &'r [i64],
    pub(crate) byte_size: u64,
    pub(crate) buffer_count: u32,
}

/// # Safety
/// `raw` is an input that lives through `'r`.
pub(crate) unsafe fn properties<'r>(raw: NonNull<sys::TRITONBACKEND_Input>) -> Result<Properties<'r>> {
    let mut datatype = sys::TRITONSERVER_TYPE_INVALID;
    let mut shape = std::ptr::null();
    let (mut dims, mut byte_size, mut buffer_count) = (0, 0, 0);
    // SAFETY: a live input and valid places for all that is asked; NULL asks for no name.
    unsafe {
        check(sys::TRITONBACKEND_InputProperties(
            raw.as_ptr(),
            std::ptr::null_mut(),
            &mut datatype,
            &mut shape,
            &mut dims,
            &mut byte_size,
            &mut buffer_count,
        ))
    }?;
    let shape = if shape.is_null() || dims == 0 {
        &[]
    } else {
        // SAFETY: the server gave `dims` numbers there; they live as long as the input.
        unsafe { std::slice::from_raw_parts(shape, dims as usize) }
    };
    Ok(Properties { datatype, shape, byte_size, buffer_count })
}

/// An input tensor of a request.
pub struct Input<'r> {
    raw: NonNull<sys::TRITONBACKEND_Input>,
    name: String,
    datatype: DataType,
    shape: &'r [i64],
    byte_size: u64,
    buffer_count: u32,
    _request_lives: PhantomData<&'r ()>,
}

impl<'r> Input<'r> {
    /// # Safety
    /// `raw` is an input that lives through `'r`.
    unsafe fn new(raw: NonNull<sys::TRITONBACKEND_Input>, name: &str) -> Result<Self> {
        // SAFETY: by this function's contract.
        let Properties { datatype, shape, byte_size, buffer_count } = unsafe { properties(raw) }?;
        Ok(Self {
            raw,
            name: name.to_string(),
            datatype: DataType::from_raw(datatype)?,
            shape,
            byte_size,
            buffer_count,
            _request_lives: PhantomData,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its element type.
    pub fn datatype(&self) -> DataType {
        self.datatype
    }

    /// Its shape, with the request's own batch dimension first where the model has one.
    pub fn shape(&self) -> &'r [i64] {
        self.shape
    }

    /// Its raw bytes, gathered from all buffers, whatever memory they lie in.
    ///
    /// Always a copy: in shared memory the client can still change what we have checked.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let too_large = |_| Error::unavailable(format!("input '{}' is too large", self.name));
        let mut data: Vec<u8> = Vec::new();
        data.try_reserve_exact(usize::try_from(self.byte_size).map_err(too_large)?)?;
        for index in 0..self.buffer_count {
            let mut size = 0;
            let mut kind = sys::TRITONSERVER_MEMORY_CPU;
            let mut id = 0;
            // SAFETY: a live input, an index below its count, valid places to write to.
            let buffer = unsafe {
                host::get(std::ptr::null(), |out| {
                    sys::TRITONBACKEND_InputBuffer(self.raw.as_ptr(), index, out, &mut size, &mut kind, &mut id)
                })
            }?;
            let size = usize::try_from(size).map_err(too_large)?;
            if buffer.is_null() || size == 0 {
                continue;
            }
            let start = data.len();
            data.try_reserve(size)?;
            data.resize(start + size, 0);
            // SAFETY: the server gave `size` readable bytes there; the vector is our own memory.
            unsafe { memory::copy_to_host(Memory::from_raw(kind, id)?, buffer.cast(), &mut data[start..]) }
                .map_err(|e| e.context(format!("input '{}'", self.name)))?;
        }
        Ok(data)
    }

    /// The strings of a BYTES input; their number is checked against the shape, not their encoding.
    pub fn texts(&self) -> Result<Texts> {
        self.expect(self.datatype == DataType::Bytes, "BYTES")?;
        Texts::parse(&self.name, self.bytes()?, self.element_count()?)
    }

    /// The numbers of an INT32 or INT64 input.
    pub fn integers(&self) -> Result<Vec<i64>> {
        let wide = self.datatype == DataType::Int64;
        self.expect(wide || self.datatype == DataType::Int32, "INT32 or INT64")?;
        let data = self.bytes()?;
        let width = if wide { size_of::<i64>() } else { size_of::<i32>() };
        let count = self.element_count()?;
        if count.checked_mul(width) != Some(data.len()) {
            return Err(Error::invalid_arg(format!(
                "input '{}': {} bytes for {count} elements of {}",
                self.name,
                data.len(),
                self.datatype.name()
            )));
        }
        let mut numbers = Vec::new();
        numbers.try_reserve_exact(count)?;
        if wide {
            let (words, _) = data.as_chunks();
            numbers.extend(words.iter().map(|word| i64::from_le_bytes(*word)));
        } else {
            let (words, _) = data.as_chunks();
            numbers.extend(words.iter().map(|word| i64::from(i32::from_le_bytes(*word))));
        }
        Ok(numbers)
    }

    fn element_count(&self) -> Result<usize> {
        element_count(self.shape).map_err(|e| e.context(format!("input '{}'", self.name)))
    }

    fn expect(&self, right: bool, types: &str) -> Result<()> {
        if right {
            return Ok(());
        }
        Err(Error::invalid_arg(format!("input '{}' is {}, it must be {types}", self.name, self.datatype.name())))
    }
}
