//! The entry points: what [`export_backend!`](crate::export_backend) calls. Not for use by hand.
//!
//! Each runs in [`catch`], so that no panic gets out, and returns NULL or a new error, which the server deletes.
//! The state of the backend, of a model and of an instance is a box behind the pointer that the server keeps for
//! us at each handle. The server finalizes also what failed to initialize: no pointer means nothing to do.

use std::ffi::CString;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{Backend, BackendHandle};
use crate::batch::Batch;
use crate::budget::Header;
use crate::error::{Error, Result, c_string, check};
use crate::guard::{self, catch};
use crate::host;
use crate::instance::InstanceHandle;
use crate::memory;
use crate::model::ModelHandle;
use crate::sys;

/// The version of the backend API that `include/` describes.
const API_MAJOR: u32 = 1;
const API_MINOR: u32 = 19;

/// At `TRITONBACKEND_BackendState`.
struct BackendState<B: Backend> {
    backend: Arc<B>,
}

/// At `TRITONBACKEND_ModelState`, where a batching library of ours finds it too: its first field is for both.
#[repr(C)]
struct ModelState<B: Backend> {
    /// Points into `loaded`.
    shared: Header,
    loaded: Arc<Loaded<B>>,
}

/// A model and the backend it came from; dropped in this order, after the last instance.
struct Loaded<B: Backend> {
    model: B::Model,
    backend: Arc<B>,
}

/// At `TRITONBACKEND_ModelInstanceState`. The instance is dropped before its model.
struct InstanceState<B: Backend> {
    // Triton runs one Execute at a time on an instance. The lock costs nothing then, and keeps a server that
    // does otherwise from doing harm.
    instance: Mutex<B::Instance>,
    uncacheable: Option<CString>,
    loaded: Arc<Loaded<B>>,
}

type Failure = *mut sys::TRITONSERVER_Error;

fn to_failure(result: Result<()>) -> Failure {
    match result {
        Ok(()) => std::ptr::null_mut(),
        Err(error) => error.to_owned_raw().into_raw(),
    }
}

/// # Safety
/// `state` is what an initialize function of this module stored as a `T`, and is not finalized yet, or NULL.
unsafe fn state_ref<'a, T>(what: &str, state: *mut T) -> Result<&'a T> {
    // SAFETY: by this function's contract.
    unsafe { state.as_ref() }.ok_or_else(|| Error::internal(format!("the {what} has no state")))
}

/// # Safety
/// The server's contract of `TRITONBACKEND_Initialize`.
pub unsafe fn initialize<B: Backend>(raw: *mut sys::TRITONBACKEND_Backend) -> Failure {
    to_failure(catch("Initialize", || {
        check_api_version()?;
        guard::install_hook();
        // SAFETY: live through the call.
        let host = unsafe { BackendHandle::new(raw) }?;
        let backend = Arc::new(B::initialize(&host)?);
        let state = Box::into_raw(Box::new(BackendState { backend }));
        // SAFETY: a live handle; the pointer is ours to interpret.
        let stored = unsafe { check(sys::TRITONBACKEND_BackendSetState(raw, state.cast())) };
        if stored.is_err() {
            // SAFETY: made above, and stored nowhere.
            drop(unsafe { Box::from_raw(state) });
        }
        stored
    }))
}

fn check_api_version() -> Result<()> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: valid places to write to.
    unsafe { check(sys::TRITONBACKEND_ApiVersion(&mut major, &mut minor)) }?;
    if major == API_MAJOR && minor >= API_MINOR {
        return Ok(());
    }
    Err(Error::unsupported(format!(
        "this backend needs Triton's backend API {API_MAJOR}.{API_MINOR} or a later {API_MAJOR}.x, the server has \
         {major}.{minor}"
    )))
}

/// # Safety
/// The server's contract of `TRITONBACKEND_Finalize`.
pub unsafe fn finalize<B: Backend>(raw: *mut sys::TRITONBACKEND_Backend) -> Failure {
    let result = catch("Finalize", || {
        // SAFETY: a live handle; its state is of this type or NULL.
        let state = unsafe { host::get_state::<BackendState<B>>(|out| sys::TRITONBACKEND_BackendState(raw, out)) }?;
        if !state.is_null() {
            // SAFETY: stored by `initialize`; the server finalizes once.
            drop(unsafe { Box::from_raw(state) });
        }
        Ok(())
    });
    guard::retire_hook();
    to_failure(result)
}

/// # Safety
/// The server's contract of `TRITONBACKEND_GetBackendAttribute`.
pub unsafe fn attributes<B: Backend>(
    raw: *mut sys::TRITONBACKEND_Backend,
    attributes: *mut sys::TRITONBACKEND_BackendAttribute,
) -> Failure {
    to_failure(catch("GetBackendAttribute", || {
        // SAFETY: called between initialize and finalize.
        let state = unsafe { backend_state::<B>(raw) }?;
        for group in state.backend.default_instances() {
            // SAFETY: live attributes; the device numbers are copied.
            unsafe {
                check(sys::TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
                    attributes,
                    group.kind.to_raw(),
                    group.count,
                    group.devices.as_ptr(),
                    group.devices.len() as u64,
                ))
            }?;
        }
        Ok(())
    }))
}

/// # Safety
/// A live backend between initialize and finalize; the reference is dropped before the latter.
unsafe fn backend_state<'a, B: Backend>(raw: *mut sys::TRITONBACKEND_Backend) -> Result<&'a BackendState<B>> {
    // SAFETY: by this function's contract, both calls.
    unsafe {
        let state = host::get_state(|out| sys::TRITONBACKEND_BackendState(raw, out))?;
        state_ref("backend", state)
    }
}

/// # Safety
/// The server's contract of `TRITONBACKEND_ModelInitialize`.
pub unsafe fn model_initialize<B: Backend>(raw: *mut sys::TRITONBACKEND_Model) -> Failure {
    to_failure(catch("ModelInitialize", || {
        // SAFETY: live through the call.
        let handle = unsafe { ModelHandle::new(raw) }?;
        // SAFETY: a live model, and its backend, which outlives it.
        let state = unsafe {
            let backend = host::get_handle("backend", |out| sys::TRITONBACKEND_ModelBackend(raw, out))?;
            backend_state::<B>(backend.as_ptr())
        }?;
        let backend = Arc::clone(&state.backend);
        let model = backend.load_model(&handle)?;
        let loaded = Arc::new(Loaded { model, backend });
        let budget = loaded.backend.token_budget(&loaded.model).map_or(std::ptr::null(), std::ptr::from_ref);
        let state = Box::into_raw(Box::new(ModelState { shared: Header::new(budget), loaded }));
        // SAFETY: a live handle; the pointer is ours to interpret.
        let stored = unsafe { check(sys::TRITONBACKEND_ModelSetState(raw, state.cast())) };
        if stored.is_err() {
            // SAFETY: made above, and stored nowhere.
            drop(unsafe { Box::from_raw(state) });
        }
        stored
    }))
}

/// # Safety
/// The server's contract of `TRITONBACKEND_ModelFinalize`.
pub unsafe fn model_finalize<B: Backend>(raw: *mut sys::TRITONBACKEND_Model) -> Failure {
    to_failure(catch("ModelFinalize", || {
        // SAFETY: a live handle; its state is of this type or NULL.
        let state = unsafe { host::get_state::<ModelState<B>>(|out| sys::TRITONBACKEND_ModelState(raw, out)) }?;
        if !state.is_null() {
            // SAFETY: stored by `model_initialize`; the server finalizes once.
            drop(unsafe { Box::from_raw(state) });
        }
        Ok(())
    }))
}

/// # Safety
/// The server's contract of `TRITONBACKEND_ModelInstanceInitialize`.
pub unsafe fn instance_initialize<B: Backend>(raw: *mut sys::TRITONBACKEND_ModelInstance) -> Failure {
    to_failure(catch("ModelInstanceInitialize", || {
        // SAFETY: live through the call.
        let handle = unsafe { InstanceHandle::new(raw) }?;
        // SAFETY: a live instance, its model, and the state that `model_initialize` stored there.
        let state = unsafe {
            let model = host::get_handle("model", |out| sys::TRITONBACKEND_ModelInstanceModel(raw, out))?;
            let state: *mut ModelState<B> = host::get_state(|out| sys::TRITONBACKEND_ModelState(model.as_ptr(), out))?;
            state_ref("model", state)
        }?;
        let loaded = Arc::clone(&state.loaded);
        let instance = loaded.backend.load_instance(&loaded.model, &handle)?;
        let uncacheable = loaded.backend.uncacheable_output(&loaded.model).map(c_string);
        let state = Box::into_raw(Box::new(InstanceState { instance: Mutex::new(instance), uncacheable, loaded }));
        // SAFETY: a live handle; the pointer is ours to interpret.
        let stored = unsafe { check(sys::TRITONBACKEND_ModelInstanceSetState(raw, state.cast())) };
        if stored.is_err() {
            // SAFETY: made above, and stored nowhere.
            drop(unsafe { Box::from_raw(state) });
        }
        stored
    }))
}

/// # Safety
/// The server's contract of `TRITONBACKEND_ModelInstanceFinalize`.
pub unsafe fn instance_finalize<B: Backend>(raw: *mut sys::TRITONBACKEND_ModelInstance) -> Failure {
    to_failure(catch("ModelInstanceFinalize", || {
        // SAFETY: a live handle; its state is of this type or NULL.
        let state =
            unsafe { host::get_state::<InstanceState<B>>(|out| sys::TRITONBACKEND_ModelInstanceState(raw, out)) }?;
        if !state.is_null() {
            // SAFETY: stored by `instance_initialize`; the server finalizes once, after the last Execute.
            drop(unsafe { Box::from_raw(state) });
        }
        Ok(())
    }))
}

/// # Safety
/// A live instance between its initialize and finalize; the reference is dropped before the latter.
unsafe fn instance_state<'a, B: Backend>(raw: *mut sys::TRITONBACKEND_ModelInstance) -> Result<&'a InstanceState<B>> {
    // SAFETY: by this function's contract, both calls.
    unsafe {
        let state = host::get_state(|out| sys::TRITONBACKEND_ModelInstanceState(raw, out))?;
        state_ref("instance", state)
    }
}

/// Who owns the requests is decided once. Until the state is found they are the server's, and an error leaves
/// them there; from then on they are ours, each is answered and released here, and NULL is returned whatever
/// happens.
///
/// # Safety
/// The server's contract of `TRITONBACKEND_ModelInstanceExecute`.
pub unsafe fn execute<B: Backend>(
    raw: *mut sys::TRITONBACKEND_ModelInstance,
    requests: *mut *mut sys::TRITONBACKEND_Request,
    request_count: u32,
) -> Failure {
    let found = catch("Execute", || {
        let handle = NonNull::new(raw).ok_or_else(|| Error::internal("no instance given"))?;
        // SAFETY: called between the instance's initialize and finalize.
        let state = unsafe { instance_state::<B>(raw) }?;
        Ok((handle, state))
    });
    let (handle, state) = match found {
        Ok(found) => found,
        Err(error) => return to_failure(Err(error)),
    };
    // The panic is in the log and in the answers of the requests that it left open.
    let _ = catch("Execute", || {
        // SAFETY: live requests that are ours now; the instance outlives this call.
        let batch = unsafe { Batch::own(handle, state.uncacheable.as_deref(), requests, request_count) };
        let mut instance = state.instance.lock().unwrap_or_else(PoisonError::into_inner);
        let Loaded { model, backend } = &*state.loaded;
        backend.execute(model, &mut instance, batch);
        Ok(())
    });
    memory::settle();
    std::ptr::null_mut()
}

/// # Safety
/// The server's contract of `TRITONBACKEND_ModelInstanceReady`; may run beside Execute.
pub unsafe fn instance_ready<B: Backend>(raw: *mut sys::TRITONBACKEND_ModelInstance) -> Failure {
    to_failure(catch("ModelInstanceReady", || {
        // SAFETY: called between the instance's initialize and finalize.
        let state = unsafe { instance_state::<B>(raw) }?;
        state.loaded.backend.ready(&state.loaded.model)
    }))
}
