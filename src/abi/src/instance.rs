//! The server's side of an instance, while it is being made.

use std::ptr::NonNull;

use crate::error::{Error, Result};
use crate::host;
use crate::memory::Memory;
use crate::model::ModelHandle;
use crate::sys;
use crate::usage;

/// What an instance runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The processor.
    Cpu,
    /// A CUDA device.
    Gpu,
    /// What the model decides.
    Model,
}

impl Kind {
    pub(crate) fn to_raw(self) -> sys::TRITONSERVER_InstanceGroupKind {
        match self {
            Kind::Cpu => sys::TRITONSERVER_INSTANCEGROUPKIND_CPU,
            Kind::Gpu => sys::TRITONSERVER_INSTANCEGROUPKIND_GPU,
            Kind::Model => sys::TRITONSERVER_INSTANCEGROUPKIND_MODEL,
        }
    }

    fn from_raw(raw: sys::TRITONSERVER_InstanceGroupKind) -> Result<Self> {
        match raw {
            sys::TRITONSERVER_INSTANCEGROUPKIND_CPU => Ok(Kind::Cpu),
            sys::TRITONSERVER_INSTANCEGROUPKIND_GPU => Ok(Kind::Gpu),
            sys::TRITONSERVER_INSTANCEGROUPKIND_MODEL => Ok(Kind::Model),
            other => Err(Error::internal(format!("the server names an unknown instance kind {other}"))),
        }
    }
}

/// The server's side of an instance, during [`Backend::load_instance`](crate::Backend::load_instance).
pub struct InstanceHandle {
    raw: NonNull<sys::TRITONBACKEND_ModelInstance>,
}

impl InstanceHandle {
    /// # Safety
    /// `raw` is NULL or lives as long as the handle.
    pub(crate) unsafe fn new(raw: *mut sys::TRITONBACKEND_ModelInstance) -> Result<Self> {
        let raw = NonNull::new(raw).ok_or_else(|| Error::internal("no instance given"))?;
        Ok(Self { raw })
    }

    /// The instance's name, unique in its model.
    pub fn name(&self) -> Result<String> {
        // SAFETY: a live instance; the name is the server's and lives as long.
        unsafe { host::get_string(|out| sys::TRITONBACKEND_ModelInstanceName(self.raw.as_ptr(), out)) }
    }

    /// What the instance runs on.
    pub fn kind(&self) -> Result<Kind> {
        // SAFETY: a live instance.
        let raw = unsafe {
            host::get(sys::TRITONSERVER_INSTANCEGROUPKIND_AUTO, |out| {
                sys::TRITONBACKEND_ModelInstanceKind(self.raw.as_ptr(), out)
            })
        }?;
        Kind::from_raw(raw)
    }

    /// Its model.
    pub fn model(&self) -> Result<ModelHandle> {
        // SAFETY: a live instance, and its model, which outlives it.
        unsafe {
            let model = host::get_handle("model", |out| sys::TRITONBACKEND_ModelInstanceModel(self.raw.as_ptr(), out))?;
            ModelHandle::new(model.as_ptr())
        }
    }

    /// Tells the server how many bytes of each memory the instance occupies; the last report counts.
    pub fn report_memory(&self, usage: &[(Memory, usize)]) -> Result<()> {
        // SAFETY: a live instance; the call copies the entries.
        unsafe {
            usage::report(usage, |entries, count| {
                sys::TRITONBACKEND_ModelInstanceReportMemoryUsage(self.raw.as_ptr(), entries, count)
            })
        }
    }

    /// The number of its device, for [`Kind::Gpu`].
    pub fn device(&self) -> Result<i32> {
        // SAFETY: a live instance.
        unsafe { host::get(0, |out| sys::TRITONBACKEND_ModelInstanceDeviceId(self.raw.as_ptr(), out)) }
    }
}
