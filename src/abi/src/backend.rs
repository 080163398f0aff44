//! What a backend implements, and how it is exported.

use std::ptr::NonNull;

use crate::batch::Batch;
use crate::budget::TokenBudget;
use crate::error::{Error, Result};
use crate::host;
use crate::instance::{InstanceHandle, Kind};
use crate::message;
use crate::model::ModelHandle;
use crate::sys;

/// A Triton backend. One value of the implementing type lives from the server's start to its end.
///
/// Every method may be called from another thread than the last; a panic in any of them becomes an INTERNAL
/// error.
pub trait Backend: Sized + Send + Sync + 'static {
    /// State of a model, shared by its instances. Dropped after the last of them.
    type Model: Send + Sync + 'static;
    /// State of an instance: what one thread at a time needs for itself.
    type Instance: Send + 'static;

    /// The server loads the backend, before its first model.
    fn initialize(host: &BackendHandle) -> Result<Self>;

    /// The instances of a model whose configuration names none. An empty list leaves it to the server, which
    /// takes one on each GPU, or one on the CPU.
    fn default_instances(&self) -> Vec<InstanceGroup> {
        Vec::new()
    }

    /// A model is loaded. Where [`ModelHandle::is_auto_complete`] says so, its configuration may be completed.
    fn load_model(&self, model: &ModelHandle) -> Result<Self::Model>;

    /// An instance of a model is made, on a short-lived thread that is not the one that executes.
    fn load_instance(&self, model: &Self::Model, instance: &InstanceHandle) -> Result<Self::Instance>;

    /// Answers every request of the batch. It owns them, so there is nothing to return: what is wrong with one
    /// request is answered to that request.
    ///
    /// After a panic the same `instance` is used again for the next batch.
    fn execute(&self, model: &Self::Model, instance: &mut Self::Instance, batch: Batch<'_>);

    /// The name of a declared output that error responses of this model carry without a buffer, or `None`.
    ///
    /// For models with a response cache: Triton caches whatever is sent, and a cached error comes back as a
    /// success without outputs. An output without a buffer cannot be cached, and clients do not see it.
    fn uncacheable_output<'m>(&self, model: &'m Self::Model) -> Option<&'m str> {
        let _ = model;
        None
    }

    /// The token budget of this model, for a [batching library](crate::batcher) to read while it is loaded.
    fn token_budget<'m>(&self, model: &'m Self::Model) -> Option<&'m TokenBudget> {
        let _ = model;
        None
    }

    /// Whether the model can answer now; asked by servers of 2026 and later, while batches execute.
    fn ready(&self, model: &Self::Model) -> Result<()> {
        let _ = model;
        Ok(())
    }
}

/// A number of equal instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceGroup {
    /// What they run on.
    pub kind: Kind,
    /// How many, on each device.
    pub count: u64,
    /// Device numbers of [`Kind::Gpu`]; empty means every device.
    pub devices: Vec<u64>,
}

/// The server's side of the backend, during [`Backend::initialize`].
pub struct BackendHandle {
    raw: NonNull<sys::TRITONBACKEND_Backend>,
}

impl BackendHandle {
    /// # Safety
    /// `raw` is NULL or lives as long as the handle.
    pub(crate) unsafe fn new(raw: *mut sys::TRITONBACKEND_Backend) -> Result<Self> {
        let raw = NonNull::new(raw).ok_or_else(|| Error::internal("no backend given"))?;
        Ok(Self { raw })
    }

    /// The backend's name: the directory it was found in.
    pub fn name(&self) -> Result<String> {
        // SAFETY: a live backend; the name is the server's and lives as long.
        unsafe { host::get_string(|out| sys::TRITONBACKEND_BackendName(self.raw.as_ptr(), out)) }
    }

    /// The backend's configuration as JSON: `--backend-config=rust,key=value` is `{"cmdline":{"key":"value"}}`.
    pub fn config_json(&self) -> Result<String> {
        // SAFETY: a live backend; its message belongs to it and is not deleted here.
        unsafe {
            let config = host::get_handle("backend configuration", |out| {
                sys::TRITONBACKEND_BackendConfig(self.raw.as_ptr(), out)
            })?;
            message::json_of(config)
        }
    }
}

/// Defines the C entry points that Triton looks up in the plugin, for one type that implements
/// [`Backend`]. To be used once, in the crate that is built as the `cdylib`.
#[macro_export]
macro_rules! export_backend {
    ($backend:ty) => {
        #[allow(unsafe_code, non_snake_case)]
        const _: () = {
            use $crate::{entry, sys};

            type Failure = *mut sys::TRITONSERVER_Error;

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_Initialize(backend: *mut sys::TRITONBACKEND_Backend) -> Failure {
                // SAFETY: called by the server with its own handle, as documented there.
                unsafe { entry::initialize::<$backend>(backend) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_Finalize(backend: *mut sys::TRITONBACKEND_Backend) -> Failure {
                // SAFETY: as above, after everything else.
                unsafe { entry::finalize::<$backend>(backend) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_GetBackendAttribute(
                backend: *mut sys::TRITONBACKEND_Backend,
                attributes: *mut sys::TRITONBACKEND_BackendAttribute,
            ) -> Failure {
                // SAFETY: as above, after Initialize.
                unsafe { entry::attributes::<$backend>(backend, attributes) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInitialize(model: *mut sys::TRITONBACKEND_Model) -> Failure {
                // SAFETY: as above, after Initialize.
                unsafe { entry::model_initialize::<$backend>(model) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelFinalize(model: *mut sys::TRITONBACKEND_Model) -> Failure {
                // SAFETY: as above, after the model's instances are finalized.
                unsafe { entry::model_finalize::<$backend>(model) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInstanceInitialize(
                instance: *mut sys::TRITONBACKEND_ModelInstance,
            ) -> Failure {
                // SAFETY: as above, after ModelInitialize.
                unsafe { entry::instance_initialize::<$backend>(instance) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInstanceFinalize(
                instance: *mut sys::TRITONBACKEND_ModelInstance,
            ) -> Failure {
                // SAFETY: as above, after the last Execute has returned.
                unsafe { entry::instance_finalize::<$backend>(instance) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInstanceExecute(
                instance: *mut sys::TRITONBACKEND_ModelInstance,
                requests: *mut *mut sys::TRITONBACKEND_Request,
                request_count: u32,
            ) -> Failure {
                // SAFETY: as above, with `request_count` live requests.
                unsafe { entry::execute::<$backend>(instance, requests, request_count) }
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn TRITONBACKEND_ModelInstanceReady(
                instance: *mut sys::TRITONBACKEND_ModelInstance,
            ) -> Failure {
                // SAFETY: as above, between ModelInstanceInitialize and ModelInstanceFinalize.
                unsafe { entry::instance_ready::<$backend>(instance) }
            }
        };
    };
}
