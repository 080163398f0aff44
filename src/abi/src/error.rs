//! Errors: a code that the server turns into an HTTP or gRPC status, and a message for people.

use std::ffi::{CStr, CString};
use std::fmt;

use crate::sys;

/// What kind of error; decides the HTTP and gRPC status that the client sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Not classified.
    Unknown,
    /// A fault of the server or the model (HTTP 500).
    Internal,
    /// Something named does not exist (404).
    NotFound,
    /// Bad input of this request, or a bad configuration (400).
    InvalidArg,
    /// Resources are exhausted; a later or smaller request may work (503).
    Unavailable,
    /// Not implemented (501).
    Unsupported,
    /// Exists already (409).
    AlreadyExists,
    /// The client went away (gRPC CANCELLED).
    Cancelled,
}

impl Code {
    fn to_raw(self) -> sys::TRITONSERVER_Error_Code {
        match self {
            Code::Unknown => sys::TRITONSERVER_ERROR_UNKNOWN,
            Code::Internal => sys::TRITONSERVER_ERROR_INTERNAL,
            Code::NotFound => sys::TRITONSERVER_ERROR_NOT_FOUND,
            Code::InvalidArg => sys::TRITONSERVER_ERROR_INVALID_ARG,
            Code::Unavailable => sys::TRITONSERVER_ERROR_UNAVAILABLE,
            Code::Unsupported => sys::TRITONSERVER_ERROR_UNSUPPORTED,
            Code::AlreadyExists => sys::TRITONSERVER_ERROR_ALREADY_EXISTS,
            Code::Cancelled => sys::TRITONSERVER_ERROR_CANCELLED,
        }
    }

    fn from_raw(raw: sys::TRITONSERVER_Error_Code) -> Self {
        match raw {
            sys::TRITONSERVER_ERROR_INTERNAL => Code::Internal,
            sys::TRITONSERVER_ERROR_NOT_FOUND => Code::NotFound,
            sys::TRITONSERVER_ERROR_INVALID_ARG => Code::InvalidArg,
            sys::TRITONSERVER_ERROR_UNAVAILABLE => Code::Unavailable,
            sys::TRITONSERVER_ERROR_UNSUPPORTED => Code::Unsupported,
            sys::TRITONSERVER_ERROR_ALREADY_EXISTS => Code::AlreadyExists,
            sys::TRITONSERVER_ERROR_CANCELLED => Code::Cancelled,
            _ => Code::Unknown,
        }
    }
}

/// An error on its way to the server or to a client.
///
/// The message names the model, the input and the row where there is one, what was wrong and what is allowed;
/// it holds no path and no user text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: Code,
    message: String,
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of any code.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// A fault of ours.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Code::Internal, message)
    }

    /// Something named does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Code::NotFound, message)
    }

    /// Bad input or configuration.
    pub fn invalid_arg(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArg, message)
    }

    /// Exhausted resources.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Code::Unavailable, message)
    }

    /// Not implemented.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Code::Unsupported, message)
    }

    /// The client went away.
    pub fn cancelled(message: impl Into<String>) -> Self {
        Self::new(Code::Cancelled, message)
    }

    /// The error's code.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The error's message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The same error with `context: ` before its message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// A new error object of the server's.
    pub(crate) fn to_owned_raw(&self) -> OwnedError {
        let message = c_string(&self.message);
        // SAFETY: the message is a NUL-terminated string, copied by the call.
        OwnedError(unsafe { sys::TRITONSERVER_ErrorNew(self.code.to_raw(), message.as_ptr()) })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<std::collections::TryReserveError> for Error {
    fn from(_: std::collections::TryReserveError) -> Self {
        Error::unavailable("out of memory")
    }
}

/// An error object of the server's that we have to delete or to hand back.
pub(crate) struct OwnedError(*mut sys::TRITONSERVER_Error);

impl OwnedError {
    pub(crate) fn as_ptr(&self) -> *mut sys::TRITONSERVER_Error {
        self.0
    }

    /// Gives the object to the server, as the value that an entry point returns.
    pub(crate) fn into_raw(self) -> *mut sys::TRITONSERVER_Error {
        let raw = self.0;
        std::mem::forget(self);
        raw
    }
}

impl Drop for OwnedError {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the pointer came from the server, is ours, and is deleted once.
            unsafe { sys::TRITONSERVER_ErrorDelete(self.0) };
        }
    }
}

/// Turns what a call of the server returned into a `Result`, and deletes the error object.
///
/// # Safety
/// `raw` is NULL or an error that the caller owns.
pub(crate) unsafe fn check(raw: *mut sys::TRITONSERVER_Error) -> Result<()> {
    if raw.is_null() {
        return Ok(());
    }
    let owned = OwnedError(raw);
    // SAFETY: a live error object, by this function's contract.
    let code = Code::from_raw(unsafe { sys::TRITONSERVER_ErrorCode(owned.as_ptr()) });
    // SAFETY: as above; the text lives as long as the object, which `owned` keeps.
    let message = unsafe { copy_c_str(sys::TRITONSERVER_ErrorMessage(owned.as_ptr())) };
    Err(Error { code, message })
}

/// Copies a C string; bytes that are not UTF-8 are replaced, NULL is the empty string.
///
/// # Safety
/// `text` is NULL or points to a NUL-terminated string that lives through the call.
pub(crate) unsafe fn copy_c_str(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A C string of any text; NUL, which C cannot hold, becomes U+FFFD.
pub(crate) fn c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_else(|_| CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default())
}
