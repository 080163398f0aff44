//! The server's side of a model, while it is being loaded.

use std::path::PathBuf;
use std::ptr::NonNull;

use crate::error::{Error, Result};
use crate::host;
use crate::memory::Memory;
use crate::message::Message;
use crate::sys;
use crate::usage;

/// The version of the configuration's JSON form; there is only one.
const CONFIG_VERSION: u32 = 1;

/// The server's side of a model, during [`Backend::load_model`](crate::Backend::load_model).
pub struct ModelHandle {
    raw: NonNull<sys::TRITONBACKEND_Model>,
}

impl ModelHandle {
    /// # Safety
    /// `raw` is NULL or lives as long as the handle.
    pub(crate) unsafe fn new(raw: *mut sys::TRITONBACKEND_Model) -> Result<Self> {
        let raw = NonNull::new(raw).ok_or_else(|| Error::internal("no model given"))?;
        Ok(Self { raw })
    }

    /// The model's name.
    pub fn name(&self) -> Result<String> {
        // SAFETY: a live model; the name is the server's and lives as long.
        unsafe { host::get_string(|out| sys::TRITONBACKEND_ModelName(self.raw.as_ptr(), out)) }
    }

    /// The model's version: the name of the directory in [`Self::repository`] that holds its files.
    pub fn version(&self) -> Result<u64> {
        // SAFETY: a live model.
        unsafe { host::get(0, |out| sys::TRITONBACKEND_ModelVersion(self.raw.as_ptr(), out)) }
    }

    /// The model's directory, which holds `config.pbtxt` and the directories of its versions.
    pub fn repository(&self) -> Result<PathBuf> {
        let mut kind = sys::TRITONBACKEND_ARTIFACT_FILESYSTEM;
        // SAFETY: a live model and a valid place for the kind; the path is the server's and lives as long.
        let path =
            unsafe { host::get_string(|out| sys::TRITONBACKEND_ModelRepository(self.raw.as_ptr(), &mut kind, out)) }?;
        if kind != sys::TRITONBACKEND_ARTIFACT_FILESYSTEM {
            return Err(Error::unsupported("the model does not lie in a file system"));
        }
        Ok(PathBuf::from(path))
    }

    /// The directory of this version's files.
    pub fn version_directory(&self) -> Result<PathBuf> {
        Ok(self.repository()?.join(self.version()?.to_string()))
    }

    /// The model's configuration as JSON, with the server's defaults filled in.
    pub fn config_json(&self) -> Result<String> {
        // SAFETY: a live model; the message is ours.
        let message = unsafe {
            Message::from_call(|out| sys::TRITONBACKEND_ModelConfig(self.raw.as_ptr(), CONFIG_VERSION, out))
        }?;
        message.json()
    }

    /// Tells the server how many bytes of each memory the model occupies, its instances apart; the last report counts.
    pub fn report_memory(&self, usage: &[(Memory, usize)]) -> Result<()> {
        // SAFETY: a live model; the call copies the entries.
        unsafe {
            usage::report(usage, |entries, count| {
                sys::TRITONBACKEND_ModelReportMemoryUsage(self.raw.as_ptr(), entries, count)
            })
        }
    }

    /// Whether the server lets the backend complete the configuration.
    pub fn is_auto_complete(&self) -> Result<bool> {
        // SAFETY: a live model.
        unsafe { host::get(false, |out| sys::TRITONBACKEND_ModelAutoCompleteConfig(self.raw.as_ptr(), out)) }
    }

    /// Replaces the configuration. The server takes over max_batch_size, inputs, outputs, the scheduler where
    /// none was chosen, and the transaction policy; it drops everything else silently.
    pub fn set_config_json(&self, json: &str) -> Result<()> {
        let message = Message::new(json)?;
        // SAFETY: a live model and a live message, which stays ours.
        unsafe {
            crate::error::check(sys::TRITONBACKEND_ModelSetConfig(self.raw.as_ptr(), CONFIG_VERSION, message.as_ptr()))
        }
    }
}
