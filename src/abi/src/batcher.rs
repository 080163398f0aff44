//! Batching libraries (`batchstrategy.so`): which requests of the queue share a batch.
//!
//! Triton asks, on the thread of a model's scheduler and under its lock, whether the next request of the queue joins the
//! batch that is being formed. A library implements [`BatchStrategy`] and names itself with
//! [`export_batcher!`](crate::export_batcher); what a request costs is all that it decides. The rest is here, because
//! doing it otherwise hangs the queue of a real server:
//!
//! * **The first request of a batch is always included.** Refusing it makes the scheduler look at it again at once, for
//!   ever. So does an error, so none is returned, and a panic includes the request.
//! * **A batch that waits for an instance keeps growing**, in what looks like a new batch; that is recognized.
//! * **Nothing is freed.** When a model is unloaded the server finalizes the batcher and only then joins the scheduler's
//!   thread, which may still use it. A batcher is 64 bytes; link the library with `-z nodelete`.
//!
//! Only models of a backend that gives a [`TokenBudget`] are batched by cost.

#[doc(hidden)]
pub mod entry;
mod pending;

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::budget::TokenBudget;
use crate::error::Result;
use crate::host;
use crate::request::properties;
use crate::sys;
use crate::tensor::DataType;

/// What requests cost. Called under the scheduler's lock: no allocation, no log, no lock.
pub trait BatchStrategy {
    /// What a batch may hold; a single request may be more.
    fn limit(budget: &TokenBudget) -> u64 {
        budget.max_batch_tokens()
    }

    /// What this request adds to a batch.
    fn cost(budget: &TokenBudget, request: &QueuedRequest<'_>) -> u64;
}

/// A request in the scheduler's queue: the server's, to be looked at only.
pub struct QueuedRequest<'q> {
    raw: NonNull<sys::TRITONBACKEND_Request>,
    _queue_is_locked: PhantomData<&'q ()>,
}

/// What can be said of an input without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputSize {
    /// Its element type.
    pub datatype: DataType,
    /// How many elements, those of all rows.
    pub elements: u64,
    /// How many bytes, in all buffers; of BYTES with the four bytes of each element's length.
    pub bytes: u64,
}

impl QueuedRequest<'_> {
    /// # Safety
    /// `raw` is a live request, and stays so through the lifetime that the caller chooses.
    unsafe fn new(raw: NonNull<sys::TRITONBACKEND_Request>) -> Self {
        Self { raw, _queue_is_locked: PhantomData }
    }

    /// The sizes of its inputs, in any order. What the server does not tell is left out.
    pub fn inputs(&self) -> impl Iterator<Item = InputSize> {
        let raw = self.raw.as_ptr();
        // SAFETY: a live request.
        let count = unsafe { host::get(0, |out| sys::TRITONBACKEND_RequestInputCount(raw, out)) }.unwrap_or(0);
        (0..count).filter_map(move |index| self.input(index).ok())
    }

    fn input(&self, index: u32) -> Result<InputSize> {
        // SAFETY: a live request, whose inputs live as long.
        unsafe {
            let input =
                host::get_handle("input", |out| sys::TRITONBACKEND_RequestInputByIndex(self.raw.as_ptr(), index, out))?;
            let found = properties(input)?;
            let dim = |dim: &i64| u64::try_from(*dim).unwrap_or(0);
            let elements = found.shape.iter().map(dim).fold(1, u64::saturating_mul);
            Ok(InputSize { datatype: DataType::from_raw(found.datatype)?, elements, bytes: found.byte_size })
        }
    }
}

/// Defines the five C functions that Triton looks up in a batching library, for one type that implements
/// [`BatchStrategy`]. To be used once, in the crate that is built as the `cdylib`.
#[macro_export]
macro_rules! export_batcher {
    ($strategy:ty) => {
        #[allow(unsafe_code, non_snake_case)]
        const _: () = {
            use ::std::ffi::c_void;
            use $crate::batcher::entry;
            use $crate::sys;

            type Failure = *mut sys::TRITONSERVER_Error;

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelBatcherInitialize(
                batcher: *mut *mut sys::TRITONBACKEND_Batcher,
                model: *mut sys::TRITONBACKEND_Model,
            ) -> Failure {
                // SAFETY: called by the server with its own model, as documented there.
                unsafe { entry::batcher_initialize(batcher, model) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelBatcherFinalize(
                batcher: *mut sys::TRITONBACKEND_Batcher,
            ) -> Failure {
                entry::batcher_finalize(batcher)
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelBatchInitialize(
                batcher: *const sys::TRITONBACKEND_Batcher,
                userp: *mut *mut c_void,
            ) -> Failure {
                // SAFETY: as above, with what ModelBatcherInitialize gave, or NULL.
                unsafe { entry::batch_initialize(batcher, userp) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelBatchIncludeRequest(
                request: *mut sys::TRITONBACKEND_Request,
                userp: *mut c_void,
                should_include: *mut bool,
            ) -> Failure {
                // SAFETY: as above, with what ModelBatchInitialize gave, or NULL.
                unsafe { entry::include_request::<$strategy>(request, userp, should_include) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelBatchFinalize(userp: *mut c_void) -> Failure {
                entry::batch_finalize(userp)
            }
        };
    };
}
