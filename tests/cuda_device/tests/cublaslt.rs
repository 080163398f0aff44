//! cublasLt's stand-in against a plain loop, and what it refuses.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result::{
    create_handle, create_matmul_desc, create_matmul_pref, create_matrix_layout, destroy_handle, destroy_matmul_desc,
    destroy_matmul_pref, destroy_matrix_layout, get_matmul_algo_heuristic, matmul, set_matmul_desc_attribute,
    set_matmul_pref_attribute,
};
use cudarc::cublaslt::sys::cublasLtMatmulDescAttributes_t::{
    CUBLASLT_MATMUL_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_TRANSA,
    CUBLASLT_MATMUL_DESC_TRANSB,
};
use cudarc::cublaslt::sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
use cudarc::cublaslt::sys::cublasStatus_t::{
    CUBLAS_STATUS_ALLOC_FAILED, CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED,
};
use cudarc::cublaslt::sys::{cublasComputeType_t, cublasStatus_t, cudaDataType_t};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use half::{bf16, f16};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Dtype {
    F32,
    F16,
    Bf16,
}
use Dtype::{Bf16, F16, F32};

impl Dtype {
    fn cuda(self) -> cudaDataType_t {
        match self {
            F32 => cudaDataType_t::CUDA_R_32F,
            F16 => cudaDataType_t::CUDA_R_16F,
            Bf16 => cudaDataType_t::CUDA_R_16BF,
        }
    }

    fn round(self, value: f32) -> f32 {
        match self {
            F32 => value,
            F16 => f16::from_f32(value).to_f32(),
            Bf16 => bf16::from_f32(value).to_f32(),
        }
    }

    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        }
    }

    fn values(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            F32 => bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            F16 => bytes.chunks(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            Bf16 => bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        }
    }
}

/// One product, and what may be wrong about it.
#[derive(Clone, Debug)]
struct Case {
    m: usize,
    n: usize,
    k: usize,
    input: Dtype,
    output: Dtype,
    transpose: (bool, bool),
    /// 1 default, 2 ReLU, 4 bias, 32 tanh GELU, or sums of these.
    epilogue: u32,
    beta: f32,
    /// Elements from one column of D to the next, beyond m.
    gap: usize,
    workspace_preferred: u64,
    workspace_given: usize,
    /// Bytes that A's address is off.
    shift_a: usize,
}

fn case(m: usize, n: usize, k: usize, input: Dtype) -> Case {
    let output = input;
    let transpose = (true, false);
    let (workspace_preferred, workspace_given) = (1 << 20, 1 << 20);
    Case {
        m,
        n,
        k,
        input,
        output,
        transpose,
        epilogue: 1,
        beta: 0.0,
        gap: 0,
        workspace_preferred,
        workspace_given,
        shift_a: 0,
    }
}

fn numbers(count: usize, seed: u64, dtype: Dtype) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        dtype.round((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

fn upload(stream: &Arc<CudaStream>, bytes: &[u8]) -> CudaSlice<u8> {
    stream.clone_htod(bytes).expect("copies")
}

/// D and C's expected D, both `[n, m + gap]`.
fn run(stream: &Arc<CudaStream>, case: &Case) -> Result<(Vec<f32>, Vec<f32>), cublasStatus_t> {
    let Case { m, n, k, input, output, .. } = *case;
    let ld_d = m + case.gap;
    let (a, b) = (numbers(m * k, 1, input), numbers(k * n, 2, input));
    let (c, bias) = (numbers(n * ld_d, 3, output), numbers(m, 4, output));
    let mut expected = c.clone();
    for j in 0..n {
        for i in 0..m {
            let at_a = |x: usize| if case.transpose.0 { a[i * k + x] } else { a[x * m + i] };
            let at_b = |x: usize| if case.transpose.1 { b[x * n + j] } else { b[j * k + x] };
            let mut value = (0..k).map(|x| at_a(x) * at_b(x)).sum::<f32>() * 0.5 + case.beta * c[j * ld_d + i];
            if case.epilogue & 4 != 0 {
                value += bias[i];
            }
            if case.epilogue & 2 != 0 {
                value = value.max(0.0);
            }
            if case.epilogue & 32 != 0 {
                value = 0.5 * value * (1.0 + (0.797_884_6 * (value + 0.044_715 * value.powi(3))).tanh());
            }
            expected[j * ld_d + i] = value;
        }
    }

    let mut a_bytes = vec![0; case.shift_a];
    a_bytes.extend(input.bytes(&a));
    let (a, b) = (upload(stream, &a_bytes), upload(stream, &input.bytes(&b)));
    let (mut d, bias) = (upload(stream, &output.bytes(&c)), upload(stream, &output.bytes(&bias)));
    let mut workspace = stream.alloc_zeros::<u8>(case.workspace_given.max(1)).expect("allocates");
    let (rows_a, columns_a) = if case.transpose.0 { (k, m) } else { (m, k) };
    let (rows_b, columns_b) = if case.transpose.1 { (n, k) } else { (k, n) };
    let handle = create_handle().map_err(|e| e.0)?;
    let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F;
    let desc = create_matmul_desc(compute, cudaDataType_t::CUDA_R_32F).map_err(|e| e.0)?;
    let layout = |dtype: Dtype, rows: usize, columns: usize, ld: usize| {
        create_matrix_layout(dtype.cuda(), rows as u64, columns as u64, ld as i64).map_err(|e| e.0)
    };
    let a_layout = layout(input, rows_a, columns_a, rows_a)?;
    let b_layout = layout(input, rows_b, columns_b, rows_b)?;
    let d_layout = layout(output, m, n, ld_d)?;
    let preference = create_matmul_pref().map_err(|e| e.0)?;
    let bias_address = bias.device_ptr(stream).0;
    // SAFETY: objects that were made above; attributes of their documented types; buffers as large as the layouts say.
    let result = unsafe {
        for (name, value) in [
            (CUBLASLT_MATMUL_DESC_TRANSA, case.transpose.0 as u32),
            (CUBLASLT_MATMUL_DESC_TRANSB, case.transpose.1 as u32),
            (CUBLASLT_MATMUL_DESC_EPILOGUE, case.epilogue),
        ] {
            set_matmul_desc_attribute(desc, name, (&raw const value).cast(), 4).map_err(|e| e.0)?;
        }
        set_matmul_desc_attribute(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (&raw const bias_address).cast(), 8)
            .map_err(|e| e.0)?;
        let preferred = &raw const case.workspace_preferred;
        set_matmul_pref_attribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, preferred.cast(), 8)
            .map_err(|e| e.0)?;
        get_matmul_algo_heuristic(handle, desc, a_layout, b_layout, d_layout, d_layout, preference).and_then(|found| {
            let d_address = d.device_ptr_mut(stream).0;
            matmul(
                handle,
                desc,
                (&raw const HALF).cast(),
                (&raw const case.beta).cast(),
                (a.device_ptr(stream).0 + case.shift_a as u64) as *const c_void,
                a_layout,
                b.device_ptr(stream).0 as *const c_void,
                b_layout,
                d_address as *const c_void,
                d_layout,
                d_address as *mut c_void,
                d_layout,
                &found.algo,
                workspace.device_ptr_mut(stream).0 as *mut c_void,
                case.workspace_given,
                stream.cu_stream().cast(),
            )
        })
    };
    // SAFETY: each is destroyed once.
    unsafe {
        for layout in [a_layout, b_layout, d_layout] {
            destroy_matrix_layout(layout).map_err(|e| e.0)?;
        }
        destroy_matmul_pref(preference).map_err(|e| e.0)?;
        destroy_matmul_desc(desc).map_err(|e| e.0)?;
        destroy_handle(handle).map_err(|e| e.0)?;
    }
    result.map_err(|e| e.0)?;
    Ok((output.values(&stream.clone_dtoh(&d).expect("copies back")), expected))
}

static HALF: f32 = 0.5;

fn check(stream: &Arc<CudaStream>, case: &Case) {
    let (found, expected) = run(stream, case).unwrap_or_else(|status| panic!("{case:?}: {status:?}"));
    let scale = (case.k as f32).sqrt();
    let tolerance = match case.output {
        F32 => 1e-6,
        F16 => 5e-4,
        Bf16 => 4e-3,
    };
    for (at, (&x, &y)) in found.iter().zip(&expected).enumerate() {
        assert!((x - y).abs() <= tolerance * (scale + y.abs()), "{case:?} at {at}: {x}, expected {y}");
    }
}

#[test]
fn products_are_those_of_a_plain_loop() {
    let _device = cuda_device::shared();
    let stream = CudaContext::new(0).expect("a device").default_stream();
    for dtype in [F32, F16, Bf16] {
        for transpose in [(false, false), (true, false), (false, true), (true, true)] {
            check(&stream, &Case { transpose, ..case(40, 13, 72, dtype) });
        }
        for epilogue in [1, 2, 4, 6, 32, 36] {
            check(&stream, &Case { epilogue, beta: 1.0, gap: 8, ..case(24, 7, 600, dtype) });
        }
        check(&stream, &case(1, 1, 1, dtype));
        check(&stream, &case(17, 400, 8, dtype));
        check(&stream, &Case { output: F32, epilogue: 4, ..case(33, 65, 129, dtype) });
    }
}

#[test]
fn what_the_documentation_forbids_is_refused() {
    let device = cuda_device::exclusive();
    device.set_verbose(false);
    let stream = CudaContext::new(0).expect("a device").default_stream();
    let good = case(16, 16, 16, F16);
    check(&stream, &good);
    let refused = |case: Case, status: cublasStatus_t, why: &str| {
        assert_eq!(run(&stream, &case).map(|_| ()), Err(status), "{case:?}");
        assert!(device.message().contains(why), "'{}' does not say '{why}'", device.message());
    };
    refused(Case { shift_a: 8, ..good.clone() }, CUBLAS_STATUS_NOT_SUPPORTED, "A is not aligned");
    refused(Case { output: Bf16, ..good.clone() }, CUBLAS_STATUS_NOT_SUPPORTED, "do not go together");
    refused(Case { epilogue: 160, ..good.clone() }, CUBLAS_STATUS_NOT_SUPPORTED, "epilogue 160");
    refused(Case { workspace_given: 0, ..good.clone() }, CUBLAS_STATUS_INVALID_VALUE, "a workspace of 0 bytes");
    check(&stream, &Case { workspace_given: 0, workspace_preferred: 0, ..good.clone() });
    device.fail("cublasLtMatmul", 1, CUBLAS_STATUS_ALLOC_FAILED as i32);
    assert_eq!(run(&stream, &good).map(|_| ()), Err(CUBLAS_STATUS_ALLOC_FAILED));
    check(&stream, &good);
    assert_eq!(device.live("cublasLt"), 0);
}
