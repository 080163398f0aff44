//! What a model or an instance occupies, for the server's statistics.

use std::ptr::NonNull;

use crate::error::{Result, check};
use crate::host;
use crate::memory::Memory;
use crate::sys;

/// An entry of a report, which stays ours.
struct Attributes(NonNull<sys::TRITONSERVER_BufferAttributes>);

impl Attributes {
    fn new(memory: Memory, bytes: usize) -> Result<Self> {
        let (kind, id) = memory.to_raw();
        // SAFETY: what is made here is ours, and deleted when the value is dropped.
        let raw = unsafe {
            host::get_handle("buffer attributes", |out| sys::TRITONSERVER_BufferAttributesNew(out)).map(Self)
        }?;
        let at = raw.0.as_ptr();
        // SAFETY: a live object, in all three calls.
        unsafe {
            check(sys::TRITONSERVER_BufferAttributesSetMemoryType(at, kind))?;
            check(sys::TRITONSERVER_BufferAttributesSetMemoryTypeId(at, id))?;
            check(sys::TRITONSERVER_BufferAttributesSetByteSize(at, bytes))?;
        }
        Ok(raw)
    }
}

impl Drop for Attributes {
    fn drop(&mut self) {
        // SAFETY: ours, deleted once. On error it is still ours.
        unsafe { host::give_back("report", || sys::TRITONSERVER_BufferAttributesDelete(self.0.as_ptr())) };
    }
}

/// Reports `usage`, total bytes of each memory.
///
/// # Safety
/// `call` is one of the server's two report functions on a live handle; it copies what it is given.
pub(crate) unsafe fn report(
    usage: &[(Memory, usize)],
    call: impl FnOnce(*mut *mut sys::TRITONSERVER_BufferAttributes, u32) -> *mut sys::TRITONSERVER_Error,
) -> Result<()> {
    let entries = usage.iter().map(|&(memory, bytes)| Attributes::new(memory, bytes)).collect::<Result<Vec<_>>>()?;
    let mut raw: Vec<_> = entries.iter().map(|entry| entry.0.as_ptr()).collect();
    // SAFETY: by this function's contract; the entries live through the call.
    unsafe { check(call(raw.as_mut_ptr(), raw.len() as u32)) }
}
