//! The Triton backend C ABI behind a safe interface: everything in this project that calls Triton, or is
//! called by it, is here.
//!
//! A backend implements [`Backend`] and names itself with [`export_backend!`]; the macro defines the C entry
//! points in the calling crate (this one exports no symbol, so that two plugins can share it: the other is a batching
//! library, see [`batcher`]). Triton then calls, in this order:
//!
//! 1. [`Backend::initialize`] once for the server,
//! 2. [`Backend::load_model`] for each model, [`Backend::load_instance`] for each of its instances,
//! 3. [`Backend::execute`] with one [`Batch`] of [`Request`]s after another, on one thread for each instance,
//! 4. the drops, in the opposite order.
//!
//! Three rules hold throughout:
//!
//! * **Every request is answered once and released once.** A [`Request`] is owned. It ends in
//!   [`Request::fail`], in [`Response::send_final`] or in [`Response::fail`]; one that is dropped on the way,
//!   because of a panic for instance, is answered with INTERNAL. Of a decoupled model it may have other responses
//!   before ([`Response::send_part`]); still one, the last, ends it.
//! * **No panic reaches C.** Each entry point catches it, keeps its text, and returns an error.
//! * **Memory of others is copied in, never viewed.** A request's tensors may lie in shared memory that its
//!   client can still change; what was checked would not stay checked.

mod backend;
mod batch;
pub mod batcher;
mod budget;
mod clock;
#[doc(hidden)]
pub mod entry;
mod error;
mod guard;
mod host;
mod instance;
pub mod log;
mod memory;
mod message;
pub mod metrics;
mod model;
mod plugin;
mod request;
mod response;
mod sequence;
#[doc(hidden)]
pub mod sys;
mod tensor;
mod text;
mod usage;

pub use backend::{Backend, BackendHandle, InstanceGroup};
pub use batch::{Batch, BatchReport};
pub use budget::TokenBudget;
pub use clock::{ComputeTimes, now_ns};
pub use error::{Code, Error, Result};
pub use guard::catch;
pub use instance::{InstanceHandle, Kind};
pub use memory::Memory;
pub use model::ModelHandle;
pub use plugin::plugin_directory;
pub use request::{Input, Request};
pub use response::{Response, Slot};
pub use sequence::{SequenceFlags, SequenceId};
pub use tensor::DataType;
pub use text::Texts;
