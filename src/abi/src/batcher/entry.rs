//! The entry points: what [`export_batcher!`](crate::export_batcher) calls. Not for use by hand.
//!
//! None returns an error. A batcher is never freed (see the module above this one), and serves as the `userp` of its
//! batches: a model has one scheduler thread, which forms one batch at a time.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::pending::Pending;
use super::{BatchStrategy, QueuedRequest};
use crate::budget::{Header, TokenBudget};
use crate::error::Result;
use crate::guard::{self, catch};
use crate::host;
use crate::sys;

/// The backend whose models' state is ours to read.
const BACKEND: &str = "rust";

type Failure = *mut sys::TRITONSERVER_Error;

const SUCCESS: Failure = ptr::null_mut();

/// Of one model; behind the server's `TRITONBACKEND_Batcher`.
struct Batcher {
    /// In the model's state: it lives until the model is finalized, which the server does after the scheduler's thread
    /// has ended.
    budget: NonNull<TokenBudget>,
    pending: Pending,
    /// The one made before, of any model: so all stay reachable for who looks for leaks.
    earlier: *mut Batcher,
}

static LATEST: AtomicPtr<Batcher> = AtomicPtr::new(ptr::null_mut());

/// Keeps a new batcher for ever.
fn keep(budget: NonNull<TokenBudget>) -> *mut Batcher {
    let new = Box::into_raw(Box::new(Batcher { budget, pending: Pending::new(), earlier: ptr::null_mut() }));
    let swap = LATEST.fetch_update(Ordering::AcqRel, Ordering::Acquire, |latest| {
        // SAFETY: made above; nobody else has it yet.
        unsafe { (*new).earlier = latest };
        Some(new)
    });
    debug_assert!(swap.is_ok());
    new
}

/// # Safety
/// The server's contract of `TRITONBACKEND_ModelBatcherInitialize`.
pub unsafe fn batcher_initialize(
    batcher: *mut *mut sys::TRITONBACKEND_Batcher,
    model: *mut sys::TRITONBACKEND_Model,
) -> Failure {
    if batcher.is_null() {
        return SUCCESS;
    }
    // Without a batcher every request is included.
    // SAFETY: a place to write to, by the server's contract.
    unsafe { *batcher = ptr::null_mut() };
    let found = catch("ModelBatcherInitialize", || {
        guard::install_hook();
        let Some(model) = NonNull::new(model) else { return Ok(None) };
        // SAFETY: live through the call, and loaded: its backend has set its state.
        unsafe { find_budget(model) }
    });
    match found {
        // SAFETY: as above.
        Ok(Some(budget)) => unsafe { *batcher = keep(budget).cast() },
        Ok(None) => crate::log_warn!(
            "batchstrategy.so: the model has no token budget: its backend is not '{BACKEND}', or another version of it. \
             Batches are formed as without this library"
        ),
        Err(error) => crate::log_warn!("batchstrategy.so: batches are formed as without it: {error}"),
    }
    SUCCESS
}

/// # Safety
/// A live model whose backend has initialized it.
unsafe fn find_budget(model: NonNull<sys::TRITONBACKEND_Model>) -> Result<Option<NonNull<TokenBudget>>> {
    // SAFETY: a live model, and its backend, which outlives it. Only a backend of that name is asked for its state, and
    // ours begins with a header.
    unsafe {
        let backend = host::get_handle("backend", |out| sys::TRITONBACKEND_ModelBackend(model.as_ptr(), out))?;
        if host::get_string(|out| sys::TRITONBACKEND_BackendName(backend.as_ptr(), out))? != BACKEND {
            return Ok(None);
        }
        let state = host::get_state::<Header>(|out| sys::TRITONBACKEND_ModelState(model.as_ptr(), out))?;
        Ok(NonNull::new(Header::find(state).cast_mut()))
    }
}

/// Frees nothing: the scheduler's thread may still be using the batcher.
pub fn batcher_finalize(_: *mut sys::TRITONBACKEND_Batcher) -> Failure {
    SUCCESS
}

/// # Safety
/// The server's contract of `TRITONBACKEND_ModelBatchInitialize`.
pub unsafe fn batch_initialize(batcher: *const sys::TRITONBACKEND_Batcher, userp: *mut *mut c_void) -> Failure {
    if userp.is_null() {
        return SUCCESS;
    }
    let batcher = batcher.cast::<Batcher>();
    // SAFETY: a place to write to, and NULL or a batcher that `keep` made, by the server's contract.
    unsafe {
        *userp = batcher.cast_mut().cast();
        if let Some(batcher) = batcher.as_ref() {
            // The server keeps the pointer in its payload: its place tells one payload from the next.
            batcher.pending.begin(userp.addr());
        }
    }
    SUCCESS
}

/// # Safety
/// The server's contract of `TRITONBACKEND_ModelBatchIncludeRequest`.
pub unsafe fn include_request<S: BatchStrategy>(
    request: *mut sys::TRITONBACKEND_Request,
    userp: *mut c_void,
    should_include: *mut bool,
) -> Failure {
    if should_include.is_null() {
        return SUCCESS;
    }
    // What stands after a panic, and where something is missing.
    // SAFETY: a place to write to, by the server's contract.
    unsafe { *should_include = true };
    // SAFETY: NULL or a batcher that `keep` made, by the server's contract.
    let (Some(batcher), Some(request)) = (unsafe { userp.cast::<Batcher>().as_ref() }, NonNull::new(request)) else {
        return SUCCESS;
    };
    // The panic is in the log.
    let _ = catch("ModelBatchIncludeRequest", || {
        // SAFETY: the scheduler holds its lock: the request stays where it is, and the model is not finalized.
        let (queued, budget) = unsafe { (QueuedRequest::new(request), batcher.budget.as_ref()) };
        let included = batcher.pending.include(request.addr().get(), S::cost(budget, &queued), S::limit(budget));
        // SAFETY: as above.
        unsafe { *should_include = included };
        Ok(())
    });
    SUCCESS
}

/// The batch is the batcher's own; the next one begins in [`batch_initialize`].
pub fn batch_finalize(_: *mut c_void) -> Failure {
    SUCCESS
}
