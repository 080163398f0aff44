//! What the tests share.
#![allow(dead_code, reason = "not every test uses all of it")]

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaModule, LaunchConfig};
use cudarc::nvrtc::Ptx;

/// A module with all kernels: an image that starts as a fatbin does; the stand-in driver brings the kernels itself.
pub fn module(context: &Arc<CudaContext>) -> Arc<CudaModule> {
    let mut image = 0xba55_ed50u32.to_le_bytes().to_vec();
    image.resize(64, 0);
    context.load_module(Ptx::from_binary(image)).expect("loads")
}

/// A kernel of `selftest/*.cu`.
pub fn kernel(context: &Arc<CudaContext>, name: &str) -> CudaFunction {
    module(context).load_function(name).expect("a self-test kernel")
}

/// One dimension.
pub fn blocks(grid: u32, threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}
