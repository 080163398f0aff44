//! Requests with their inputs, responses with their outputs.

use std::ffi::{CString, c_char, c_void};

use crate::cuda;
use crate::host::{Buffer, Failure, Host, OutputObject, ResponseObject, array, host, host_calls, put, text};
use crate::report::{Answer, OutputTensor};
use crate::scenario::Placement;
use crate::sys::*;

/// What fresh output memory holds, and the guards around it.
const UNTOUCHED: u8 = 0xEE;
const GUARD: usize = 64;

host_calls! { |host|
    fn TRITONBACKEND_RequestId(request: *mut TRITONBACKEND_Request, id: *mut *const c_char) {
        put(id, host.requests.get(request)?.id.as_ptr());
    }

    fn TRITONBACKEND_RequestIsCancelled(request: *mut TRITONBACKEND_Request, cancelled: *mut bool) {
        let parts = host.outcomes.entry(request.addr()).or_default().parts.len();
        let spec = &host.requests.get(request)?.spec;
        put(cancelled, spec.cancelled || spec.cancelled_after.is_some_and(|after| parts >= after));
    }

    fn TRITONBACKEND_RequestFlags(request: *mut TRITONBACKEND_Request, flags: *mut u32) {
        put(flags, host.requests.get(request)?.spec.sequence.flags);
    }

    fn TRITONBACKEND_RequestCorrelationId(request: *mut TRITONBACKEND_Request, id: *mut u64) {
        let sequence = &host.requests.get(request)?.spec.sequence;
        if sequence.text.is_some() {
            return Err(Failure::new(
                TRITONSERVER_ERROR_INVALID_ARG, "correlation ID in request is not an unsigned int",
            ));
        }
        put(id, sequence.number);
    }

    fn TRITONBACKEND_RequestCorrelationIdString(
        request: *mut TRITONBACKEND_Request, id: *mut *const c_char,
    ) {
        let sequence = &host.requests.get(request)?.spec.sequence;
        let text = sequence.text.as_ref().ok_or_else(|| {
            Failure::new(TRITONSERVER_ERROR_INVALID_ARG, "correlation ID in request is not a string")
        })?;
        put(id, text.as_ptr());
    }

    fn TRITONBACKEND_RequestInput(
        request: *mut TRITONBACKEND_Request, name: *const c_char,
        input: *mut *mut TRITONBACKEND_Input,
    ) {
        let name = text(name);
        let inputs = &host.requests.get(request)?.inputs;
        let found = inputs.iter().find(|(other, _)| other.to_bytes() == name.as_bytes());
        put(input, found.map_or(std::ptr::null_mut(), |(_, input)| *input));
        if found.is_none() {
            return Err(Failure::new(
                TRITONSERVER_ERROR_INVALID_ARG, format!("unknown request input name {name}"),
            ));
        }
    }

    fn TRITONBACKEND_RequestInputCount(request: *mut TRITONBACKEND_Request, count: *mut u32) {
        put(count, host.requests.get(request)?.inputs.len() as u32);
    }

    fn TRITONBACKEND_RequestInputByIndex(
        request: *mut TRITONBACKEND_Request, index: u32, input: *mut *mut TRITONBACKEND_Input,
    ) {
        let inputs = &host.requests.get(request)?.inputs;
        let (_, found) = inputs.get(index as usize).ok_or_else(|| Failure::misuse("no such input"))?;
        put(input, *found);
    }

    fn TRITONBACKEND_RequestOutputCount(request: *mut TRITONBACKEND_Request, count: *mut u32) {
        put(count, host.requests.get(request)?.outputs.len() as u32);
    }

    fn TRITONBACKEND_RequestOutputName(
        request: *mut TRITONBACKEND_Request, index: u32, name: *mut *const c_char,
    ) {
        let outputs = &host.requests.get(request)?.outputs;
        let output = outputs.get(index as usize).ok_or_else(|| Failure::misuse("no such output"))?;
        put(name, output.as_ptr());
    }

    fn TRITONBACKEND_RequestRelease(request: *mut TRITONBACKEND_Request, flags: u32) {
        if flags != TRITONSERVER_REQUEST_RELEASE_ALL {
            return Err(Failure::misuse("a request is not released wholly"));
        }
        host.release(request)?;
    }

    fn TRITONBACKEND_InputProperties(
        input: *mut TRITONBACKEND_Input, name: *mut *const c_char,
        datatype: *mut TRITONSERVER_DataType, shape: *mut *const i64, dims: *mut u32,
        byte_size: *mut u64, buffer_count: *mut u32,
    ) {
        let (request, index) = host.input(input)?;
        let request = host.requests.get(request)?;
        let spec = &request.spec.inputs[index];
        let c_name = request.inputs.iter().find(|(_, handle)| *handle == input);
        put(name, c_name.map_or(std::ptr::null(), |(name, _)| name.as_ptr()));
        put(datatype, spec.datatype);
        put(shape, spec.shape.as_ptr());
        put(dims, spec.shape.len() as u32);
        put(byte_size, spec.buffers.iter().map(|buffer| buffer.bytes.len() as u64).sum());
        put(buffer_count, spec.buffers.len() as u32);
    }

    fn TRITONBACKEND_InputBuffer(
        input: *mut TRITONBACKEND_Input, index: u32, buffer: *mut *const c_void,
        byte_size: *mut u64, memory: *mut TRITONSERVER_MemoryType, memory_id: *mut i64,
    ) {
        let (request, input_index) = host.input(input)?;
        let spec = &host.requests.get(request)?.spec.inputs[input_index];
        let data = spec
            .buffers
            .get(index as usize)
            .ok_or_else(|| Failure::misuse("no such buffer"))?;
        let base = data.bytes.as_ptr();
        put(buffer, if data.on_gpu { cuda::device_pointer(base) } else { base }.cast());
        put(byte_size, data.bytes.len() as u64);
        put(memory, if data.on_gpu { TRITONSERVER_MEMORY_GPU } else { TRITONSERVER_MEMORY_CPU });
        put(memory_id, 0);
    }

    fn TRITONBACKEND_ResponseNew(
        response: *mut *mut TRITONBACKEND_Response, request: *mut TRITONBACKEND_Request,
    ) {
        let placement = host.requests.get(request)?.spec.placement;
        let object = ResponseObject {
            request: request.addr(),
            placement,
            outputs: Vec::new(),
            parameters: Default::default(),
        };
        put(response, host.insert(|host| &mut host.responses, object));
    }

    fn TRITONBACKEND_ResponseDelete(response: *mut TRITONBACKEND_Response) {
        let (response, _) = host.take_response(response)?;
        let outcome = host.outcomes.entry(response.request).or_default();
        if !outcome.answers.is_empty() {
            return Err(Failure::misuse("a response is deleted after the final one was sent"));
        }
    }

    fn TRITONBACKEND_ResponseSetStringParameter(
        response: *mut TRITONBACKEND_Response, name: *const c_char, value: *const c_char,
    ) {
        host.responses.get(response)?.parameters.insert(text(name), text(value));
    }

    fn TRITONBACKEND_ResponseSetIntParameter(
        response: *mut TRITONBACKEND_Response, name: *const c_char, value: i64,
    ) {
        host.responses.get(response)?.parameters.insert(text(name), value.to_string());
    }

    fn TRITONBACKEND_ResponseSetBoolParameter(
        response: *mut TRITONBACKEND_Response, name: *const c_char, value: bool,
    ) {
        host.responses.get(response)?.parameters.insert(text(name), value.to_string());
    }

    fn TRITONBACKEND_ResponseOutput(
        response: *mut TRITONBACKEND_Response, output: *mut *mut TRITONBACKEND_Output,
        name: *const c_char, datatype: TRITONSERVER_DataType, shape: *const i64, dims: u32,
    ) {
        let placement = host.responses.get(response)?.placement;
        let object = OutputObject {
            name: text(name),
            datatype,
            shape: array(shape, u64::from(dims)),
            placement,
            buffer: None,
        };
        let handle = host.insert(|host| &mut host.outputs, object);
        host.responses.get(response)?.outputs.push(handle);
        put(output, handle);
    }

    fn TRITONBACKEND_OutputBuffer(
        output: *mut TRITONBACKEND_Output, buffer: *mut *mut c_void, byte_size: u64,
        memory: *mut TRITONSERVER_MemoryType, memory_id: *mut i64,
    ) {
        let output = host.outputs.get(output)?;
        if output.buffer.is_some() {
            return Err(Failure::misuse("a second buffer for one output"));
        }
        let size = byte_size as usize;
        let mut bytes = vec![UNTOUCHED; size + 2 * GUARD];
        let offset = match output.placement {
            Placement::Misaligned => 1,
            Placement::Aligned | Placement::Gpu | Placement::Device(_) => 0,
        };
        let start = GUARD + bytes.as_ptr().wrapping_add(GUARD).align_offset(16) % 16 - offset;
        let base = bytes.as_mut_ptr().wrapping_add(start);
        let on_gpu = output.placement == Placement::Gpu;
        put(buffer, if on_gpu { cuda::device_pointer(base).cast_mut() } else { base }.cast());
        let (kind, id) = match output.placement {
            Placement::Gpu => (TRITONSERVER_MEMORY_GPU, 0),
            Placement::Device(device) => (TRITONSERVER_MEMORY_GPU, device),
            Placement::Aligned | Placement::Misaligned => (TRITONSERVER_MEMORY_CPU, 0),
        };
        put(memory, kind);
        put(memory_id, id);
        output.buffer = Some(Buffer { memory: bytes, start, size });
    }
}

/// Takes the response also where it fails, so that it is not one of the functions above.
#[unsafe(no_mangle)]
extern "C" fn TRITONBACKEND_ResponseSend(
    response: *mut TRITONBACKEND_Response,
    flags: u32,
    error: *mut TRITONSERVER_Error,
) -> *mut TRITONSERVER_Error {
    let mut host = host();
    let result = match host.note("TRITONBACKEND_ResponseSend") {
        Ok(()) => host.send(response, flags, error),
        Err(fault) => host.take_response(response).and(Err(fault)),
    };
    result.map_or_else(|failure| host.new_error(failure), |()| std::ptr::null_mut())
}

/// As [`addresses`], for the one that is not in it.
pub(crate) fn send_address() -> usize {
    TRITONBACKEND_ResponseSend as *const () as usize
}

impl Host {
    /// The request that an input belongs to, and its place there.
    fn input(&mut self, input: *mut TRITONBACKEND_Input) -> Result<(*const TRITONBACKEND_Request, usize), Failure> {
        let input = self.inputs.get(input)?;
        Ok((std::ptr::without_provenance(input.request), input.index))
    }

    /// Makes a request alive.
    pub(crate) fn new_request(&mut self, spec: &crate::scenario::RequestSpec) -> *mut TRITONBACKEND_Request {
        let c_string = |text: &str| CString::new(text).unwrap_or_default();
        let object = crate::host::RequestObject {
            spec: spec.clone(),
            id: c_string(&spec.id),
            inputs: Vec::new(),
            outputs: spec.outputs.iter().map(|name| c_string(name)).collect(),
        };
        let request: *mut TRITONBACKEND_Request = self.insert(|host| &mut host.requests, object);
        let inputs = spec
            .inputs
            .iter()
            .enumerate()
            .rev()
            .map(|(index, input)| {
                let object = crate::host::InputObject { request: request.addr(), index };
                (c_string(&input.name), self.insert(|host| &mut host.inputs, object))
            })
            .collect();
        if let Ok(object) = self.requests.get(request) {
            object.inputs = inputs;
        }
        self.outcomes.insert(request.addr(), Default::default());
        request
    }

    pub(crate) fn release(&mut self, request: *mut TRITONBACKEND_Request) -> Result<(), Failure> {
        let object = self.requests.remove(request)?;
        for (_, input) in object.inputs {
            self.inputs.remove(input)?;
        }
        if self.responses.values().any(|response| response.request == request.addr()) {
            return Err(Failure::misuse("a request is released before its response"));
        }
        self.outcomes.entry(request.addr()).or_default().releases += 1;
        Ok(())
    }

    fn take_response(
        &mut self,
        response: *mut TRITONBACKEND_Response,
    ) -> Result<(ResponseObject, Vec<OutputTensor>), Failure> {
        let object = self.responses.remove(response)?;
        let outputs = object
            .outputs
            .iter()
            .map(|handle| self.outputs.remove(*handle).and_then(tensor))
            .collect::<Result<_, _>>()?;
        Ok((object, outputs))
    }

    fn send(
        &mut self,
        response: *mut TRITONBACKEND_Response,
        flags: u32,
        error: *mut TRITONSERVER_Error,
    ) -> Result<(), Failure> {
        let (response, outputs) = self.take_response(response)?;
        let error = if error.is_null() {
            None
        } else {
            let (code, message) = self.errors.get(error)?;
            Some((*code, message.to_string_lossy().into_owned()))
        };
        let request = std::ptr::without_provenance::<TRITONBACKEND_Request>(response.request);
        let decoupled = self.requests.get(request)?.spec.decoupled;
        let outcome = self.outcomes.entry(response.request).or_default();
        if !outcome.answers.is_empty() {
            return Err(Failure::misuse("a response after the final one"));
        }
        let answer = Answer { error, outputs, parameters: response.parameters };
        match flags {
            TRITONSERVER_RESPONSE_COMPLETE_FINAL => outcome.answers.push(answer),
            0 if decoupled => outcome.parts.push(answer),
            _ => return Err(Failure::misuse("the only response is not the final one")),
        }
        Ok(())
    }
}

/// Reads an output for the client, after a look at its guards.
fn tensor(output: OutputObject) -> Result<OutputTensor, Failure> {
    let bytes = match output.buffer {
        None => None,
        Some(Buffer { memory, start, size }) => {
            let (before, rest) = memory.split_at(start);
            let (bytes, after) = rest.split_at(size);
            if before.iter().chain(after).any(|byte| *byte != UNTOUCHED) {
                return Err(Failure::misuse(format!("memory around output {} was written to", output.name)));
            }
            Some(bytes.to_vec())
        }
    };
    Ok(OutputTensor { name: output.name, datatype: output.datatype, shape: output.shape, bytes })
}
