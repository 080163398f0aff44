//! The rate that figures are compared with: what cublasLt reaches on a large fp16 product, in the same run.
#![allow(unsafe_code)]

use std::ptr;
use std::time::Instant;

use cudarc::cublaslt::result;
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t, cudaDataType,
};
use cudarc::driver::CudaStream;

use crate::device::{self, address};
use crate::{Result, noise};

const WORKSPACE: usize = 32 << 20;
const CANDIDATES: usize = 16;
/// `CUBLAS_OP_T`: both operands are read along the depth, as a linear layer reads them.
const TRANSPOSED: i32 = 1;

/// FLOP/s of an `n x n x n` product of fp16 matrices with fp32 sums, by the best of cublasLt's algorithms, over about
/// `seconds`. The matrices hold random numbers: on zeros a GPU draws less power and is faster.
pub fn rate(n: usize, seconds: f64) -> Result<f64> {
    let context = device::open()?;
    let stream = context.default_stream();
    let numbers: Vec<u16> = noise::noise(n * n).map(|value| half::f16::from_f32(value).to_bits()).collect();
    let (a, b) = (stream.clone_htod(&numbers)?, stream.clone_htod(&numbers)?);
    let (c, workspace) = (stream.alloc_zeros::<u16>(n * n)?, stream.alloc_zeros::<u8>(WORKSPACE)?);
    let (a, b, c) = (address(&a, &stream), address(&b, &stream), address(&c, &stream));
    let workspace = address(&workspace, &stream);
    let (alpha, beta) = (1.0_f32, 0.0_f32);
    // SAFETY: live objects; each attribute's value has the attribute's type and is copied; `found` has room for as many
    // results as are asked for; the matrices are dense `n x n`, and the slices above live to the end of this function,
    // which waits for the stream. The objects of cublasLt are left to the process's end.
    unsafe {
        let handle = result::create_handle()?;
        let layout = result::create_matrix_layout(cudaDataType::CUDA_R_16F, n as u64, n as u64, n as i64)?;
        let product = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F)?;
        let transposed = cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        result::set_matmul_desc_attribute(product, transposed, ptr::from_ref(&TRANSPOSED).cast(), size_of::<i32>())?;
        let preference = result::create_matmul_pref()?;
        let most = cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        result::set_matmul_pref_attribute(preference, most, ptr::from_ref(&WORKSPACE).cast(), size_of::<usize>())?;
        let mut found = vec![std::mem::zeroed::<cublasLtMatmulHeuristicResult_t>(); CANDIDATES];
        let mut count = 0;
        sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            product,
            layout,
            layout,
            layout,
            layout,
            preference,
            CANDIDATES as i32,
            found.as_mut_ptr(),
            &mut count,
        )
        .result()?;
        let run = |algorithm: &cublasLtMatmulAlgo_t, times: usize| -> Result<f64> {
            let start = Instant::now();
            for _ in 0..times {
                result::matmul(
                    handle,
                    product,
                    ptr::from_ref(&alpha).cast(),
                    ptr::from_ref(&beta).cast(),
                    a as *const _,
                    layout,
                    b as *const _,
                    layout,
                    c as *const _,
                    layout,
                    c as *mut _,
                    layout,
                    algorithm,
                    workspace as *mut _,
                    WORKSPACE,
                    stream.cu_stream().cast(),
                )?;
            }
            wait(&stream)?;
            Ok(start.elapsed().as_secs_f64() / times as f64)
        };
        let mut best: Option<(f64, cublasLtMatmulAlgo_t)> = None;
        for candidate in &found[..usize::try_from(count)?] {
            if candidate.state.result().is_err() || run(&candidate.algo, 1).is_err() {
                continue;
            }
            let time = run(&candidate.algo, 3)?;
            if best.is_none_or(|(fastest, _)| time < fastest) {
                best = Some((time, candidate.algo));
            }
        }
        let (time, algorithm) = best.ok_or("cublasLt has no algorithm for an fp16 matrix product")?;
        let times = ((seconds / time) as usize).max(3);
        Ok(2.0 * (n as f64).powi(3) / run(&algorithm, times)?)
    }
}

fn wait(stream: &CudaStream) -> Result<()> {
    Ok(stream.synchronize()?)
}
