//! A response: outputs in the server's memory. A request has one; of a decoupled model it may have several, and the last
//! one ends it.

use std::ffi::CStr;
use std::ptr::NonNull;

use crate::clock::ComputeTimes;
use crate::error::{Error, Result, c_string, check};
use crate::host;
use crate::memory::{self, Memory};
use crate::request::Request;
use crate::sys;
use crate::tensor::{DataType, element_count};
use crate::text;

/// An output of a response, by the order in which they were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(usize);

/// The response of a request, or of a decoupled model one after the other. It owns the request: sending the final
/// response, or failing it, answers and releases the request; dropping it answers with INTERNAL.
pub struct Response<'a> {
    // The order matters: an unsent response is deleted before its request is answered and released.
    raw: Option<RawResponse>,
    outputs: Vec<Output>,
    request: Request<'a>,
}

// SAFETY: Triton allows the calls on a response from any thread, one at a time; the buffers are only reached
// through `&mut self`.
unsafe impl Send for Response<'_> {}

impl<'a> Response<'a> {
    pub(crate) fn new(request: Request<'a>) -> Self {
        Self { raw: None, outputs: Vec::new(), request }
    }

    /// The request that this response is for.
    pub fn request(&self) -> &Request<'a> {
        &self.request
    }

    /// Adds an FP32 output, all zeros.
    pub fn add_f32(&mut self, name: &str, shape: &[i64]) -> Result<Slot> {
        self.add_words(name, DataType::Fp32, shape, None)
    }

    /// Adds an FP32 output that the caller can write on CUDA device `device`. Where the server's buffer lies in that
    /// device's memory, [`Self::device_address`] has its address, its content is undefined until the caller has written
    /// all of it, and it has no elements on the host. Elsewhere it is as of [`Self::add_f32`].
    pub fn add_f32_on(&mut self, device: u32, name: &str, shape: &[i64]) -> Result<Slot> {
        self.add_words(name, DataType::Fp32, shape, Some(device))
    }

    /// The device address of the first element of an output that is the caller's to write on its device, valid until
    /// the response is sent or dropped.
    ///
    /// # Panics
    /// When the slot is of another response.
    pub fn device_address(&self, slot: Slot) -> Option<u64> {
        let output = &self.outputs[slot.0];
        matches!(output.place, Place::Device).then(|| output.buffer.addr() as u64)
    }

    /// Adds an INT32 output, all zeros.
    pub fn add_i32(&mut self, name: &str, shape: &[i64]) -> Result<Slot> {
        self.add_words(name, DataType::Int32, shape, None)
    }

    /// Adds a BYTES output with these strings, as many as `shape` has elements.
    pub fn add_strings<S: AsRef<[u8]>>(&mut self, name: &str, shape: &[i64], strings: &[S]) -> Result<()> {
        if element_count(shape)? != strings.len() {
            return Err(Error::internal(format!("output '{name}': {} strings for shape {shape:?}", strings.len())));
        }
        let data = text::encode(strings)?;
        let (buffer, memory) = self.new_buffer(name, DataType::Bytes, shape, data.len())?;
        // SAFETY: the server gave `data.len()` writable bytes there, and nobody else has them.
        unsafe { memory::copy_from_host(&data, memory, buffer) }.map_err(|e| e.context(format!("output '{name}'")))
    }

    /// Adds an INT64 output with these numbers, as many as `shape` has elements.
    pub fn add_i64s(&mut self, name: &str, shape: &[i64], numbers: &[i64]) -> Result<()> {
        if element_count(shape)? != numbers.len() {
            return Err(Error::internal(format!("output '{name}': {} numbers for shape {shape:?}", numbers.len())));
        }
        // SAFETY: any number may be read as 8 bytes.
        let data = unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) };
        let (buffer, memory) = self.new_buffer(name, DataType::Int64, shape, data.len())?;
        // SAFETY: the server gave `data.len()` writable bytes there, and nobody else has them.
        unsafe { memory::copy_from_host(data, memory, buffer) }.map_err(|e| e.context(format!("output '{name}'")))
    }

    /// The elements of an FP32 output, none where it is written on its device; may be asked for again and again until
    /// the response is sent. Where the server's memory allows it, they are written there directly.
    ///
    /// # Panics
    /// When the slot is of another type or of another response.
    pub fn f32_mut(&mut self, slot: Slot) -> &mut [f32] {
        self.outputs[slot.0].f32_mut()
    }

    /// The elements of an INT32 output, as [`Self::f32_mut`].
    ///
    /// # Panics
    /// When the slot is of another type or of another response.
    pub fn i32_mut(&mut self, slot: Slot) -> &mut [i32] {
        self.outputs[slot.0].i32_mut()
    }

    /// All FP32 outputs at once, in the order in which they were added.
    pub fn all_f32_mut(&mut self) -> impl Iterator<Item = (Slot, &mut [f32])> {
        self.outputs
            .iter_mut()
            .enumerate()
            .filter(|(_, output)| output.datatype == DataType::Fp32)
            .map(|(index, output)| (Slot(index), output.f32_mut()))
    }

    /// Sets a parameter of the response to a string.
    pub fn set_string(&mut self, name: &str, value: &str) -> Result<()> {
        let (name, value) = (c_string(name), c_string(value));
        let raw = self.raw()?.as_ptr();
        // SAFETY: a live response and NUL-terminated strings, which are copied.
        unsafe { check(sys::TRITONBACKEND_ResponseSetStringParameter(raw, name.as_ptr(), value.as_ptr())) }
    }

    /// Sets a parameter of the response to a number.
    pub fn set_int(&mut self, name: &str, value: i64) -> Result<()> {
        let name = c_string(name);
        let raw = self.raw()?.as_ptr();
        // SAFETY: a live response and a NUL-terminated string, which is copied.
        unsafe { check(sys::TRITONBACKEND_ResponseSetIntParameter(raw, name.as_ptr(), value)) }
    }

    /// Sets a parameter of the response to a truth value.
    pub fn set_bool(&mut self, name: &str, value: bool) -> Result<()> {
        let name = c_string(name);
        let raw = self.raw()?.as_ptr();
        // SAFETY: a live response and a NUL-terminated string, which is copied.
        unsafe { check(sys::TRITONBACKEND_ResponseSetBoolParameter(raw, name.as_ptr(), value)) }
    }

    /// Sends what was added as a response that others follow, and begins the next one, which is empty: slots of before
    /// are void. Only a decoupled model may. After an error the request is still to be answered.
    pub fn send_part(&mut self) -> Result<()> {
        let sent = self.try_send(Flags::Part);
        self.outputs.clear();
        sent
    }

    /// Sends the response as the request's only or last one and releases the request. What cannot be sent becomes an
    /// error response.
    pub fn send_final(mut self, times: ComputeTimes) {
        match self.try_send(Flags::Final) {
            Ok(()) => self.request.answered_well(times),
            Err(error) => self.fail(&error),
        }
    }

    fn try_send(&mut self, flags: Flags) -> Result<()> {
        for output in &mut self.outputs {
            output.flush()?;
        }
        self.raw()?;
        match self.raw.take() {
            Some(raw) => raw.send(flags, None),
            None => Err(Error::internal("no response")),
        }
    }

    /// Answers with an error instead, and releases the request.
    pub fn fail(mut self, error: &Error) {
        // Not the response with outputs: with those it could enter the response cache.
        drop(self.raw.take());
        self.request.answer_with(error);
    }

    /// The server's response, made when it is first needed.
    fn raw(&mut self) -> Result<&RawResponse> {
        let raw = match self.raw.take() {
            Some(raw) => raw,
            None => RawResponse::for_request(&self.request)?,
        };
        Ok(self.raw.insert(raw))
    }

    fn new_buffer(
        &mut self,
        name: &str,
        datatype: DataType,
        shape: &[i64],
        byte_size: usize,
    ) -> Result<(*mut u8, Memory)> {
        let output = self.raw()?.add_output(&c_string(name), datatype, shape)?;
        let mut kind = sys::TRITONSERVER_MEMORY_CPU;
        let mut id = 0;
        // SAFETY: an output of the live response; valid places to write to.
        let buffer = unsafe {
            host::get(std::ptr::null_mut(), |out| {
                sys::TRITONBACKEND_OutputBuffer(output.as_ptr(), out, byte_size as u64, &mut kind, &mut id)
            })
        }?;
        if buffer.is_null() && byte_size > 0 {
            return Err(Error::unavailable(format!("output '{name}': the server gave no buffer of {byte_size} bytes")));
        }
        Ok((buffer.cast(), Memory::from_raw(kind, id)?))
    }

    fn add_words(&mut self, name: &str, datatype: DataType, shape: &[i64], device: Option<u32>) -> Result<Slot> {
        let count = element_count(shape)?;
        let byte_size = count
            .checked_mul(size_of::<u32>())
            .ok_or_else(|| Error::internal(format!("output '{name}' is too large")))?;
        let (buffer, memory) = self.new_buffer(name, datatype, shape, byte_size)?;
        let on_device = device.and_then(|device| i32::try_from(device).ok()).map(Memory::Gpu) == Some(memory);
        let place = if count == 0 {
            Place::Staged(Vec::new())
        } else if on_device && buffer.cast::<u32>().is_aligned() {
            Place::Device
        } else if matches!(memory, Memory::Gpu(_)) || !buffer.cast::<u32>().is_aligned() {
            let mut staging: Vec<u32> = Vec::new();
            staging.try_reserve_exact(count)?;
            staging.resize(count, 0);
            Place::Staged(staging)
        } else {
            // SAFETY: the server gave `byte_size` writable bytes there, which nobody else has. Their content is
            // undefined, so it is written before a reference to it is made.
            unsafe { std::ptr::write_bytes(buffer, 0, byte_size) };
            Place::Direct
        };
        self.outputs.push(Output { datatype, count, buffer, memory, place });
        Ok(Slot(self.outputs.len() - 1))
    }
}

/// An output of 4-byte elements.
struct Output {
    datatype: DataType,
    count: usize,
    buffer: *mut u8,
    memory: Memory,
    place: Place,
}

/// Where the elements are written.
enum Place {
    /// In the server's buffer.
    Direct,
    /// Here, and copied when the response is sent: the buffer is GPU memory, or not aligned (a client chooses
    /// the offset in its shared memory).
    Staged(Vec<u32>),
    /// In the server's buffer, by the caller, on the device whose memory it is.
    Device,
}

impl Output {
    fn f32_mut(&mut self) -> &mut [f32] {
        assert_eq!(self.datatype, DataType::Fp32, "type of the output");
        let (words, count) = self.words();
        // SAFETY: `count` aligned, initialised words; every bit pattern is an f32. The borrow of `self` keeps
        // the memory and keeps others out.
        unsafe { std::slice::from_raw_parts_mut(words.cast(), count) }
    }

    fn i32_mut(&mut self) -> &mut [i32] {
        assert_eq!(self.datatype, DataType::Int32, "type of the output");
        let (words, count) = self.words();
        // SAFETY: as above, for i32.
        unsafe { std::slice::from_raw_parts_mut(words.cast(), count) }
    }

    fn words(&mut self) -> (*mut u32, usize) {
        match &mut self.place {
            Place::Direct => (self.buffer.cast(), self.count),
            Place::Staged(staging) => (staging.as_mut_ptr(), staging.len()),
            Place::Device => (NonNull::dangling().as_ptr(), 0),
        }
    }

    fn flush(&mut self) -> Result<()> {
        let Place::Staged(staging) = &self.place else {
            return Ok(());
        };
        if staging.is_empty() {
            return Ok(());
        }
        // SAFETY: any word may be read as 4 bytes.
        let bytes = unsafe { std::slice::from_raw_parts(staging.as_ptr().cast(), size_of_val(staging.as_slice())) };
        // SAFETY: the server gave as many writable bytes; staging is our own memory.
        unsafe { memory::copy_from_host(bytes, self.memory, self.buffer) }
    }
}

/// Whether a response is the request's last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flags {
    /// Others follow.
    Part,
    /// It ends the request.
    Final,
}

/// A response object of the server's that was not sent yet.
pub(crate) struct RawResponse(NonNull<sys::TRITONBACKEND_Response>);

impl RawResponse {
    /// A new response. Each is tried for once; the caller decides about a second time.
    pub(crate) fn for_request(request: &Request<'_>) -> Result<Self> {
        // SAFETY: a request that is not released yet; the response is ours.
        unsafe { host::get_handle("response", |out| sys::TRITONBACKEND_ResponseNew(out, request.as_ptr())) }.map(Self)
    }

    fn as_ptr(&self) -> *mut sys::TRITONBACKEND_Response {
        self.0.as_ptr()
    }

    /// Adds an output, which has no buffer yet.
    pub(crate) fn add_output(
        &self,
        name: &CStr,
        datatype: DataType,
        shape: &[i64],
    ) -> Result<NonNull<sys::TRITONBACKEND_Output>> {
        let dims = u32::try_from(shape.len()).map_err(|_| Error::internal("an output has too many dimensions"))?;
        // SAFETY: a live response; the name and the shape are copied.
        unsafe {
            host::get_handle("output", |out| {
                sys::TRITONBACKEND_ResponseOutput(
                    self.as_ptr(),
                    out,
                    name.as_ptr(),
                    datatype.to_raw(),
                    shape.as_ptr(),
                    dims,
                )
            })
        }
    }

    /// Sends it; with an error it is an error response.
    pub(crate) fn send(self, flags: Flags, error: Option<&Error>) -> Result<()> {
        let flags = match flags {
            Flags::Part => 0,
            Flags::Final => sys::TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        };
        let error = error.map(Error::to_owned_raw);
        if error.as_ref().is_some_and(|e| e.as_ptr().is_null()) {
            // NULL would make it a success.
            return Err(Error::internal("the server makes no error object"));
        }
        let raw = self.as_ptr();
        // The call takes the response, also when it fails.
        std::mem::forget(self);
        let error_ptr = error.as_ref().map_or(std::ptr::null_mut(), |e| e.as_ptr());
        // SAFETY: a live response, given away here; the error stays ours.
        unsafe { check(sys::TRITONBACKEND_ResponseSend(raw, flags, error_ptr)) }
    }
}

impl Drop for RawResponse {
    fn drop(&mut self) {
        // SAFETY: ours and not sent; deleted once. On error it is still ours.
        unsafe { host::give_back("response", || sys::TRITONBACKEND_ResponseDelete(self.as_ptr())) };
    }
}
