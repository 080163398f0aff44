//! A software CUDA device for tests.
//!
//! [`install`] loads stand-ins of the CUDA driver and of cublasLt, so that cudarc finds them: two devices whose kernels
//! are the engine's own sources, compiled for the CPU. What the hardware rejects is rejected, memory that is fresh holds
//! NaN, threads run in the order that a test asks for, and any call can be made to fail. README.md says what it finds
//! and what it cannot.
//!
//! There is one device state in the process. Tests that only compute take [`shared`]; tests that change settings, inject
//! faults, count, or lose a device take [`exclusive`], in a module named `software`.
//!
//! The same tests run on a real card: with `TRITON_RUST_REAL_GPU=1` nothing is installed ([`is_real`]), so that cudarc
//! finds the machine's own libraries, and `--skip software::` leaves out what only this device can do.

mod control;
mod library;

pub use control::{Device, Exclusive, Order, PINNED, Shared, exclusive, shared};
pub use library::{directory, install, is_real};
