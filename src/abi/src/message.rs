//! JSON messages of the server.

use std::ptr::NonNull;

use crate::error::{Error, Result};
use crate::host;
use crate::sys;

/// A message that we own.
pub(crate) struct Message(NonNull<sys::TRITONSERVER_Message>);

impl Message {
    /// Takes ownership of the message that `call` writes.
    ///
    /// # Safety
    /// As [`host::get`]; the message written is the caller's to delete.
    pub(crate) unsafe fn from_call(
        call: impl FnOnce(*mut *mut sys::TRITONSERVER_Message) -> *mut sys::TRITONSERVER_Error,
    ) -> Result<Self> {
        // SAFETY: by this function's contract.
        unsafe { host::get_handle("message", call) }.map(Self)
    }

    /// A message that holds `json`.
    pub(crate) fn new(json: &str) -> Result<Self> {
        // SAFETY: the call copies `json.len()` bytes and gives us the message.
        unsafe {
            Self::from_call(|out| sys::TRITONSERVER_MessageNewFromSerializedJson(out, json.as_ptr().cast(), json.len()))
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut sys::TRITONSERVER_Message {
        self.0.as_ptr()
    }

    pub(crate) fn json(&self) -> Result<String> {
        // SAFETY: a live message of ours.
        unsafe { json_of(self.0) }
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        // SAFETY: ours, deleted once; on error it is still ours.
        unsafe { host::give_back("message", || sys::TRITONSERVER_MessageDelete(self.0.as_ptr())) };
    }
}

/// The JSON text of a message, copied.
///
/// # Safety
/// `message` is live.
pub(crate) unsafe fn json_of(message: NonNull<sys::TRITONSERVER_Message>) -> Result<String> {
    let mut size = 0;
    // SAFETY: a live message by this function's contract; both out-parameters are valid places.
    let base = unsafe {
        host::get(std::ptr::null(), |base| sys::TRITONSERVER_MessageSerializeToJson(message.as_ptr(), base, &mut size))
    }?;
    if base.is_null() || size == 0 {
        return Ok(String::new());
    }
    // SAFETY: the server wrote `size` readable bytes at `base`, which live as long as the message.
    let bytes = unsafe { std::slice::from_raw_parts(base.cast::<u8>(), size) };
    let text = std::str::from_utf8(bytes).map_err(|_| Error::internal("a JSON message of the server is not UTF-8"))?;
    Ok(text.to_string())
}
