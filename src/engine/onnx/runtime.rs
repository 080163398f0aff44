//! ONNX Runtime in this process: its library, opened when the first model needs it and from a place that we name, and the one
//! environment that all models share, with one pool of threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use ort::environment::{Environment, GlobalThreadPoolOptions};
use ort::logging::LogLevel;

use super::guarded;
use crate::error::{Error, Result};

/// The library's file, which `make install` lays beside the backend.
pub const LIBRARY: &str = "libonnxruntime.so";

/// Takes what ONNX Runtime has to say.
pub type Log = fn(level: LogLevel, text: &str);

/// The environment of this process. It lives as long as the process: ONNX Runtime allows no second one.
static ENVIRONMENT: Mutex<Option<Environment>> = Mutex::new(None);

/// The environment, made at the first call, of the library in `directory` and with `threads` threads that sleep when they
/// have nothing to do.
///
/// # Errors
/// `Invalid` when the library is not there, cannot be loaded or is too old.
pub(super) fn environment(directory: &Path, threads: usize, log: Log) -> Result<Environment> {
    let mut environment = ENVIRONMENT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(environment) = &*environment {
        return Ok(environment.clone());
    }
    let library = directory.join(LIBRARY);
    if !library.is_file() {
        return Err(Error::invalid(format!(
            "engine 'onnx': {LIBRARY} is not beside the backend; 'make install' lays it there"
        )));
    }
    let made = guarded("loading ONNX Runtime", || {
        // The text of a failure holds the path.
        let builder = ort::init_from(&library).map_err(|e| {
            log(LogLevel::Error, &e.to_string());
            Error::invalid(format!(
                "engine 'onnx': {LIBRARY} beside the backend cannot be loaded, or is older than 1.17"
            ))
        })?;
        let pool = GlobalThreadPoolOptions::default()
            .with_intra_threads(threads)
            .and_then(|pool| pool.with_inter_threads(1))
            .and_then(|pool| pool.with_spin_control(false));
        let logger = move |level: LogLevel, _: &str, _: &str, _: &str, text: &str| {
            // Called from C++, which no panic may reach.
            let _ = catch_unwind(AssertUnwindSafe(|| log(level, text)));
        };
        let built = pool.and_then(|pool| {
            builder
                .with_name("rust")
                .with_telemetry(false)
                .with_logger(Arc::new(logger))
                .with_global_thread_pool(pool)
                .build()
        });
        let built = built.map_err(|e| Error::internal(format!("engine 'onnx': {}", e.message())))?;
        built.set_log_level(LogLevel::Warning);
        Ok(built)
    })?;
    Ok(environment.insert(made).clone())
}
