//! Triton's log. Never user text.
//!
//! ```text
//! triton_abi::log_warn!("model {name}: no labels, LABEL falls back to LABEL_0, LABEL_1, ...");
//! ```

use std::fmt;

use crate::error::{c_string, check};
use crate::sys;

/// The server's log levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What an operator wants to see once.
    Info,
    /// It works, but differently from what was asked.
    Warn,
    /// Something failed.
    Error,
    /// Only with `--log-verbose=1`.
    Verbose,
}

impl Level {
    fn to_raw(self) -> sys::TRITONSERVER_LogLevel {
        match self {
            Level::Info => sys::TRITONSERVER_LOG_INFO,
            Level::Warn => sys::TRITONSERVER_LOG_WARN,
            Level::Error => sys::TRITONSERVER_LOG_ERROR,
            Level::Verbose => sys::TRITONSERVER_LOG_VERBOSE,
        }
    }
}

/// Whether a message of this level would be written. Cheap: one call, no formatting.
pub fn enabled(level: Level) -> bool {
    // SAFETY: any level value is allowed.
    unsafe { sys::TRITONSERVER_LogIsEnabled(level.to_raw()) }
}

/// Writes one message; the macros call it.
pub fn write(level: Level, file: &str, line: u32, message: fmt::Arguments<'_>) {
    if !enabled(level) {
        return;
    }
    let file = c_string(file);
    let message = c_string(&message.to_string());
    let line = i32::try_from(line).unwrap_or(0);
    // SAFETY: both strings are NUL-terminated and live through the call; the error it returns is ours. A message
    // that cannot be written is lost: there is nowhere else to say so.
    let _ = unsafe { check(sys::TRITONSERVER_LogMessage(level.to_raw(), file.as_ptr(), line, message.as_ptr())) };
}

/// Writes an INFO message to the server's log; arguments as of `format!`.
#[macro_export]
macro_rules! log_info {
    ($($arg:tt)+) => { $crate::log::write($crate::log::Level::Info, file!(), line!(), format_args!($($arg)+)) };
}

/// Writes a WARNING message to the server's log; arguments as of `format!`.
#[macro_export]
macro_rules! log_warn {
    ($($arg:tt)+) => { $crate::log::write($crate::log::Level::Warn, file!(), line!(), format_args!($($arg)+)) };
}

/// Writes an ERROR message to the server's log; arguments as of `format!`.
#[macro_export]
macro_rules! log_error {
    ($($arg:tt)+) => { $crate::log::write($crate::log::Level::Error, file!(), line!(), format_args!($($arg)+)) };
}

/// Writes a message that only `--log-verbose=1` shows; arguments as of `format!`.
#[macro_export]
macro_rules! log_verbose {
    ($($arg:tt)+) => { $crate::log::write($crate::log::Level::Verbose, file!(), line!(), format_args!($($arg)+)) };
}
