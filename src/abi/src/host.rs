//! How this crate calls the server: out-parameters as return values, and releases that insist.

use std::ffi::{c_char, c_void};
use std::ptr::NonNull;

use crate::error::{self, Error, Result};
use crate::sys::TRITONSERVER_Error;

/// Runs a call of the server that writes its answer through a pointer.
///
/// # Safety
/// `call` returns NULL or an error that becomes ours, and writes a valid `T` if it writes at all.
pub(crate) unsafe fn get<T>(initial: T, call: impl FnOnce(*mut T) -> *mut TRITONSERVER_Error) -> Result<T> {
    let mut value = initial;
    // SAFETY: the returned pointer is NULL or an error of ours, by this function's contract.
    unsafe { error::check(call(&mut value)) }?;
    Ok(value)
}

/// As [`get`], for a handle that must not be NULL.
///
/// # Safety
/// As [`get`].
pub(crate) unsafe fn get_handle<T>(
    what: &str,
    call: impl FnOnce(*mut *mut T) -> *mut TRITONSERVER_Error,
) -> Result<NonNull<T>> {
    // SAFETY: NULL is a valid pointer value; the rest is this function's contract.
    let handle = unsafe { get(std::ptr::null_mut(), call) }?;
    NonNull::new(handle).ok_or_else(|| Error::internal(format!("the server gave no {what}")))
}

/// As [`get`], for a string, which is copied.
///
/// # Safety
/// As [`get`]; what is written is NULL or a NUL-terminated string that lives through this call.
pub(crate) unsafe fn get_string(call: impl FnOnce(*mut *const c_char) -> *mut TRITONSERVER_Error) -> Result<String> {
    // SAFETY: by this function's contract.
    unsafe { get(std::ptr::null(), call).map(|text| error::copy_c_str(text)) }
}

/// A call that gives something back to the server. On error it is still ours, so it is tried once more; after
/// that the loss is logged.
///
/// # Safety
/// `call` returns NULL or an error that becomes ours, and may be repeated after an error.
pub(crate) unsafe fn give_back(what: &str, call: impl Fn() -> *mut TRITONSERVER_Error) {
    // SAFETY: by this function's contract, both times.
    let result = unsafe { error::check(call()).or_else(|_| error::check(call())) };
    if let Err(error) = result {
        crate::log_error!("the server does not take back a {what}: {error}");
    }
}

/// Reads the state pointer that we put at a handle of the server's; tried twice, because without it the state
/// would leak.
///
/// # Safety
/// As [`get`]; `call` may be repeated.
pub(crate) unsafe fn get_state<T>(call: impl Fn(*mut *mut c_void) -> *mut TRITONSERVER_Error) -> Result<*mut T> {
    // SAFETY: NULL is a valid pointer value; the rest is this function's contract.
    let state = unsafe { get(std::ptr::null_mut(), &call).or_else(|_| get(std::ptr::null_mut(), &call)) }?;
    Ok(state.cast())
}
