//! A software CUDA device for tests.
//!
//! [`install`] loads stand-ins of the CUDA driver and of cublasLt, so that cudarc finds them: two devices whose kernels
//! are the engine's own sources, compiled for the CPU. What the hardware rejects is rejected, memory that is fresh holds
//! NaN, threads run in the order that a test asks for, and any call can be made to fail. README.md says what it finds
//! and what it cannot.
//!
//! There is one device state in the process. Tests that only compute take [`shared`]; tests that change settings, inject
//! faults, count, or lose a device take [`exclusive`].

mod control;
mod library;

pub use control::{Device, Exclusive, Order, PINNED, Shared, exclusive, shared};
pub use library::{directory, install};
