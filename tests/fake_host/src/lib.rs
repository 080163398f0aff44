//! A stand-in for tritonserver in tests.
//!
//! It defines every function that `include/triton_abi.h` declares, so that test executables link, and it drives a
//! plugin through its life as the server does: see [`run()`]. Meanwhile it counts objects, watches for misuse of
//! handles, and can fail any one call. [`sweep`] fails each call in turn.
//!
//! Handles are numbers that are never used twice, so a second release, or a use after a release, is always seen.
//!
//! A test that opens a plugin with [`Plugin::open`] has to be linked with `-rdynamic`
//! (`cargo::rustc-link-arg-tests=-rdynamic` in its package's build script): the plugin finds the TRITON* functions
//! in the test's executable, as it finds the real ones in the server's process. There is one host in the process:
//! [`run()`] takes turns where tests run in parallel.

mod cuda;
mod host;
mod model_calls;
mod plugin;
mod report;
mod request_calls;
mod run;
mod scenario;
mod server_calls;

pub use cuda::FakeCuda;
pub use host::Fault;
pub use plugin::Plugin;
pub use report::{Answer, InstanceGroup, Outcome, OutputTensor, Report};
pub use run::{run, sweep};
pub use scenario::{BufferSpec, InputSpec, Placement, RequestSpec, Scenario, SequenceSpec};
/// The codes and types of the ABI.
pub use triton_abi::sys;
