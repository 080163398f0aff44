//! Device 0 and what runs on it.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::cublaslt;
use cudarc::driver::sys::{CUdeviceptr, CUresult, cuDriverGetVersion};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use triton_rust::engine::cuda;

use crate::Result;

/// The context of device 0.
pub fn open() -> Result<Arc<CudaContext>> {
    let usable = cuda::devices()?;
    if !usable.contains(&0) {
        return Err(format!("CUDA device 0 cannot be used; usable: {usable:?}").into());
    }
    Ok(CudaContext::new(0)?)
}

/// Name and value of what a figure depends on.
pub fn facts() -> Result<Vec<(&'static str, String)>> {
    let context = open()?;
    let (major, minor) = context.compute_capability()?;
    let mut driver = 0;
    // SAFETY: a place for the answer; the driver is open. cublasLt is, too, and its version needs no handle.
    let (status, cublaslt) = unsafe { (cuDriverGetVersion(&mut driver), cublaslt::sys::cublasLtGetVersion()) };
    if status != CUresult::CUDA_SUCCESS {
        return Err(format!("cuDriverGetVersion: {status:?}").into());
    }
    Ok(vec![
        ("device", context.name()?),
        ("compute capability", format!("{major}.{minor}")),
        ("memory", format!("{} MiB", context.total_mem()? >> 20)),
        ("CUDA of the driver", format!("{}.{}", driver / 1000, driver % 1000 / 10)),
        ("cublasLt", version(cublaslt)),
    ])
}

/// 120,905 is 12.9.5.
fn version(number: usize) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

/// The address of a slice whose stream is `stream`, and in which it alone is used.
pub fn address<T>(slice: &CudaSlice<T>, stream: &Arc<CudaStream>) -> CUdeviceptr {
    slice.device_ptr(stream).0
}
