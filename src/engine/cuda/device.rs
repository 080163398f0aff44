//! A CUDA device: its primary context, which all models on it share, and what a failed call means.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys::cublasStatus_t;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute, CUresult};

use super::gemm::Blas;
use super::kernels::Kernels;
use super::probe;
use crate::error::{Error, Result};

/// One device, as long as a model is on it.
pub(super) struct Device {
    /// Its number, as CUDA and Triton count.
    pub ordinal: u32,
    /// As the driver names it.
    pub name: String,
    /// Of the device.
    pub multiprocessors: usize,
    /// Major and minor of the compute capability.
    pub capability: (i32, i32),
    /// Present until it is dropped. Gone before the context is.
    kernels: Option<Kernels>,
    blas: Option<Blas>,
    raw: sys::CUdevice,
    context: sys::CUcontext,
    /// Why no call can succeed any more.
    lost: OnceLock<String>,
}

// SAFETY: the handles may be used from any thread that has made the context current, which `Current` does.
unsafe impl Send for Device {}
// SAFETY: as above; the driver and cublasLt synchronize calls on shared handles themselves.
unsafe impl Sync for Device {}

impl Device {
    /// The device `ordinal`, opened by the first model on it and shared by the others.
    ///
    /// # Errors
    /// Of [`probe::devices`]; `Invalid` for a device that is not there; `Unavailable` without memory for a context.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Self>> {
        static OPEN: Mutex<Vec<(u32, Weak<Device>)>> = Mutex::new(Vec::new());
        let usable = probe::devices()?;
        if !usable.contains(&ordinal) {
            return Err(Error::invalid(format!("CUDA device {ordinal} cannot be used; usable: {usable:?}")));
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, device)| device.strong_count() > 0);
        if let Some(device) = open.iter().find(|(other, _)| *other == ordinal).and_then(|(_, device)| device.upgrade())
        {
            return Ok(device);
        }
        let device = Arc::new(Self::new(ordinal)?);
        open.push((ordinal, Arc::downgrade(&device)));
        Ok(device)
    }

    fn new(ordinal: u32) -> Result<Self> {
        let number =
            i32::try_from(ordinal).map_err(|_| Error::invalid(format!("there is no CUDA device {ordinal}")))?;
        let fail = |error| call_error(ordinal, "opening the device", error);
        let raw = result::device::get(number).map_err(fail)?;
        // SAFETY: a device that the driver returned, in both calls.
        let (capability, multiprocessors) = unsafe { (capability(raw), attribute(raw, MULTIPROCESSORS)) };
        // SAFETY: as above. Released in `drop`.
        let context = unsafe { result::primary_ctx::retain(raw) }.map_err(fail)?;
        let mut device = Self {
            ordinal,
            name: String::new(),
            multiprocessors: 1,
            capability: (0, 0),
            kernels: None,
            blas: None,
            raw,
            context,
            lost: OnceLock::new(),
        };
        // From here on `drop` cleans up.
        device.name = result::device::get_name(raw).map_err(fail)?;
        device.capability = capability.map_err(fail)?;
        device.multiprocessors = multiprocessors.map_err(fail)?.max(1) as usize;
        let current = device.make_current()?;
        let kernels = Kernels::load().map_err(|error| device.error("loading the kernels", error))?;
        drop(current);
        device.kernels = Some(kernels);
        let current = device.make_current()?;
        let blas = Blas::new().map_err(|error| device.blas_error("opening cublasLt", error))?;
        drop(current);
        device.blas = Some(blas);
        Ok(device)
    }

    /// The loaded kernels.
    pub(super) fn kernels(&self) -> &Kernels {
        self.kernels.as_ref().expect("present until drop")
    }

    /// cublasLt on this device.
    pub(super) fn blas(&self) -> &Blas {
        self.blas.as_ref().expect("present until drop")
    }

    /// Makes the device's context current on this thread until the guard is dropped.
    ///
    /// # Errors
    /// `Internal` when the device is lost.
    pub(super) fn make_current(&self) -> Result<Current<'_>> {
        self.check_lost()?;
        self.current().map_err(|error| self.error("making the context current", error))
    }

    fn current(&self) -> std::result::Result<Current<'_>, DriverError> {
        let previous = result::ctx::get_current()?.unwrap_or(ptr::null_mut());
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }?;
        Ok(Current { previous, _device: PhantomData, _one_thread: PhantomData })
    }

    /// Gives something back to the driver: with the context current, and once more where that fails. What the driver
    /// does not take back then is lost with the context.
    pub(super) fn give_back(&self, call: impl Fn() -> std::result::Result<(), DriverError>) {
        let attempt = || self.current().and_then(|_current| call());
        let _ = attempt().or_else(|_| attempt());
    }

    /// Why no call can succeed any more, once it is so.
    ///
    /// # Errors
    /// `Internal` when the device is lost.
    pub(super) fn check_lost(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |why| Err(self.lost_error(why)))
    }

    fn lost_error(&self, why: &str) -> Error {
        Error::internal(format!("CUDA device {} is lost ({why}): the server must be restarted", self.ordinal))
    }

    /// What a failed call means. An error after which the context is of no use marks the device as lost.
    pub(super) fn error(&self, what: &str, error: DriverError) -> Error {
        if is_sticky(error.0) || self.is_broken(error.0) {
            let why = self.lost.get_or_init(|| format!("{what}: {}", describe(error.0)));
            return self.lost_error(why);
        }
        call_error(self.ordinal, what, error)
    }

    /// As [`Self::error`], of a call of cublasLt.
    pub(super) fn blas_error(&self, what: &str, error: CublasError) -> Error {
        match error.0 {
            cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => {
                Error::unavailable(format!("CUDA device {}: {what}: out of memory", self.ordinal))
            }
            status => match self.current().and_then(|_current| result::ctx::synchronize()) {
                Err(error) => self.error(what, error),
                Ok(()) => Error::internal(format!("CUDA device {}: {what}: {status:?}", self.ordinal)),
            },
        }
    }

    /// Whether the context answers with an error to everything. Asked only after errors that a sound context has too.
    fn is_broken(&self, error: CUresult) -> bool {
        error != CUresult::CUDA_ERROR_OUT_OF_MEMORY
            && self.current().and_then(|_current| result::ctx::synchronize()).is_err()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let (kernels, blas) = (self.kernels.take(), self.blas.take());
        {
            let _current = self.current().or_else(|_| self.current());
            drop(kernels);
            drop(blas);
        }
        // SAFETY: retained in `new`, released once. On error it is still ours.
        let release = || unsafe { result::primary_ctx::release(self.raw) };
        let _ = release().or_else(|_| release());
    }
}

/// A device's context is current on this thread; the one before is restored when this is dropped.
pub(super) struct Current<'a> {
    previous: sys::CUcontext,
    _device: PhantomData<&'a Device>,
    _one_thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        // SAFETY: the context that was current on this thread, or NULL for none.
        let restore = || unsafe { result::ctx::set_current(self.previous) };
        let _ = restore().or_else(|_| restore());
    }
}

const MULTIPROCESSORS: CUdevice_attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;

/// # Safety
/// `device` came from the driver.
unsafe fn attribute(device: sys::CUdevice, attribute: CUdevice_attribute) -> std::result::Result<i32, DriverError> {
    // SAFETY: by this function's contract.
    unsafe { result::device::get_attribute(device, attribute) }
}

/// Major and minor of a device's compute capability.
///
/// # Safety
/// `device` came from the driver.
pub(super) unsafe fn capability(device: sys::CUdevice) -> std::result::Result<(i32, i32), DriverError> {
    // SAFETY: by this function's contract.
    unsafe {
        Ok((
            attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ))
    }
}

/// What a failed call means where the context is sound: `Unavailable` for missing memory, else `Internal`.
pub(super) fn call_error(ordinal: u32, what: &str, error: DriverError) -> Error {
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            Error::unavailable(format!("CUDA device {ordinal}: {what}: out of memory"))
        }
        other => Error::internal(format!("CUDA device {ordinal}: {what}: {}", describe(other))),
    }
}

/// The driver's name of an error and its number.
pub(super) fn describe(error: CUresult) -> String {
    let number = error as u32;
    match DriverError(error).error_name() {
        Ok(name) => format!("{} ({number})", name.to_string_lossy()),
        Err(_) => format!("error {number}"),
    }
}

/// The errors of which the driver's documentation says that the process must be restarted to use the device again, and
/// those of a device that is not there any more.
fn is_sticky(error: CUresult) -> bool {
    use CUresult as E;
    matches!(
        error,
        E::CUDA_ERROR_ECC_UNCORRECTABLE
            | E::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | E::CUDA_ERROR_DEVICE_UNAVAILABLE
            | E::CUDA_ERROR_DEINITIALIZED
            | E::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | E::CUDA_ERROR_ILLEGAL_ADDRESS
            | E::CUDA_ERROR_LAUNCH_TIMEOUT
            | E::CUDA_ERROR_ASSERT
            | E::CUDA_ERROR_HARDWARE_STACK_ERROR
            | E::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | E::CUDA_ERROR_MISALIGNED_ADDRESS
            | E::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | E::CUDA_ERROR_INVALID_PC
            | E::CUDA_ERROR_LAUNCH_FAILED
    )
}
