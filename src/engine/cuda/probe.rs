//! Whether this machine can run the CUDA engine: the libraries and every symbol that the engine calls are looked for
//! before anything is called, since cudarc panics where one is missing. Nothing is opened before a model asks.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use cudarc::driver::result;
use cudarc::{cublaslt, driver};

use super::device::{capability, describe};
use crate::error::{Error, Result};

/// The oldest compute capability that the kernels are compiled for.
const OLDEST: (i32, i32) = (8, 0);

/// Of the driver.
const DRIVER: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
];

/// Of cublasLt.
const BLAS: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// Every symbol of the driver and of cublasLt that the engine calls, but for `cuEventElapsedTime`, which has two names.
pub fn required_symbols() -> Vec<&'static str> {
    DRIVER.iter().chain(BLAS).copied().collect()
}

/// The numbers of the devices that the engine can use, found once for the process.
///
/// # Errors
/// `Unsupported` with the reason where there is none.
pub fn devices() -> Result<Vec<u32>> {
    static DEVICES: OnceLock<Result<Vec<u32>>> = OnceLock::new();
    DEVICES.get_or_init(find).clone()
}

fn find() -> Result<Vec<u32>> {
    let none = |why: String| Err(Error::unsupported(why));
    // SAFETY: opening a library runs its initializers, which those of NVIDIA are made for.
    let (driver_there, blas_there) = unsafe { (driver::sys::is_culib_present(), cublaslt::sys::is_culib_present()) };
    if !driver_there {
        return none("this machine has no CUDA driver (libcuda.so.1 cannot be loaded)".to_owned());
    }
    if !blas_there {
        return none("cublasLt is missing (libcublasLt.so.12 or .13 cannot be loaded)".to_owned());
    }
    // SAFETY: both libraries can be opened, so neither call panics.
    let (driver, blas) = unsafe { (driver::sys::culib(), cublaslt::sys::culib()) };
    for (library, what, names) in [(driver, "CUDA driver", DRIVER), (blas, "cublasLt", BLAS)] {
        // SAFETY: a symbol is only looked for here, and not used.
        let missing = |name: &&&str| unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err();
        if let Some(name) = names.iter().find(missing) {
            return none(format!("the {what} on this machine is too old: it has no {name}"));
        }
    }
    if let Err(error) = result::init() {
        return none(format!("the CUDA driver does not start: {}", describe(error.0)));
    }
    let count = result::device::get_count()
        .map_err(|error| Error::unsupported(format!("CUDA devices cannot be counted: {}", describe(error.0))))?;
    let usable = |ordinal: &i32| {
        let Ok(device) = result::device::get(*ordinal) else { return false };
        // SAFETY: a device that the driver returned.
        unsafe { capability(device) }.is_ok_and(|capability| capability >= OLDEST)
    };
    let devices: Vec<u32> = (0..count).filter(usable).map(|ordinal| ordinal as u32).collect();
    if devices.is_empty() {
        let (major, minor) = OLDEST;
        return none(format!(
            "no usable CUDA device: of the {count} there, none has compute capability {major}.{minor} or later"
        ));
    }
    Ok(devices)
}
