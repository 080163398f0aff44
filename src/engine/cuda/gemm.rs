//! Matrix products through cublasLt: `y = x W^T + b`, with what comes after it in the same kernel.
//!
//! A [`Linear`] is a weight matrix on the device with its descriptor, made once at load. What depends on the number of
//! rows, the layouts and the algorithm, is a [`Plan`], made and timed once for each bucket of row counts and shared by
//! all instances. cublasLt counts columns first, so a row-major `[rows, width]` is its `width x rows`.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulAlgo_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreferenceAttributes_t, cudaDataType,
};

use super::device::Device;
use super::kernels::DeviceType;
use super::memory::{DeviceMemory, Event, Stream};
use crate::error::{Error, Result};
use crate::model::HiddenAct;

/// So many algorithms are timed for a plan.
const CANDIDATES: usize = 16;
/// Runs of each that are timed, after one that is not.
const TIMED_RUNS: usize = 3;

/// `CUBLAS_OP_T`
const TRANSPOSED: i32 = 1;

/// cublasLt on one device.
pub(super) struct Blas(sys::cublasLtHandle_t);

impl Blas {
    /// On the device whose context is current, which it is again when this is dropped.
    pub(super) fn new() -> std::result::Result<Self, CublasError> {
        result::create_handle().map(Self)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once. On error it is still ours.
        let destroy = || unsafe { result::destroy_handle(self.0) };
        let _ = destroy().or_else(|_| destroy());
    }
}

/// What a product ends with, in the same kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Epilogue {
    /// `y = x W^T + b`
    Bias,
    /// `y = y + x W^T + b`
    BiasAdd,
    /// `y = gelu(x W^T + b)`, GELU by tanh.
    BiasGelu,
    /// `y = relu(x W^T + b)`
    BiasRelu,
}

impl Epilogue {
    /// What the kernel of activations computes where a product ends with the bias instead.
    pub(super) fn activation(self) -> Option<HiddenAct> {
        match self {
            Self::Bias | Self::BiasAdd => None,
            Self::BiasGelu => Some(HiddenAct::GeluTanh),
            Self::BiasRelu => Some(HiddenAct::Relu),
        }
    }
}

/// A weight matrix `[out, input]` and a bias `[out]` on the device. It does not own them.
pub(super) struct Linear {
    device: Arc<Device>,
    dtype: DeviceType,
    weight: u64,
    out: usize,
    input: usize,
    /// How it may end, at least one way.
    ways: Vec<Way>,
}

/// How a product may end.
#[derive(Clone, Copy)]
struct Way {
    epilogue: Epilogue,
    descriptor: sys::cublasLtMatmulDesc_t,
    /// What has to follow in a kernel of its own for this way to equal the others.
    then: Option<HiddenAct>,
}

// SAFETY: the descriptors are not changed once they are made, and cublasLt may read them from any thread.
unsafe impl Send for Linear {}
// SAFETY: as above.
unsafe impl Sync for Linear {}

impl Linear {
    /// Of the device addresses of `weight` and `bias`, both in `dtype`. A second epilogue, `Bias`, leaves the first one's
    /// activation to a kernel after it: plans choose what is faster.
    ///
    /// # Errors
    /// `Unavailable` without memory; `Internal` for what cublasLt refuses.
    pub(super) fn new(
        device: &Arc<Device>,
        dtype: DeviceType,
        (weight, bias): (u64, u64),
        (out, input): (usize, usize),
        epilogues: &[Epilogue],
    ) -> Result<Self> {
        let mut linear = Self { device: Arc::clone(device), dtype, weight, out, input, ways: Vec::new() };
        for &epilogue in epilogues {
            linear.add(epilogue, bias).map_err(|error| device.blas_error("describing a matrix product", error))?;
        }
        Ok(linear)
    }

    fn add(&mut self, epilogue: Epilogue, bias: u64) -> std::result::Result<(), CublasError> {
        let descriptor = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F)?;
        let then = self.ways.first().and_then(|first| first.epilogue.activation());
        // From here on `drop` cleans up.
        self.ways.push(Way { epilogue, descriptor, then });
        let kind = match epilogue {
            Epilogue::Bias | Epilogue::BiasAdd => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::BiasGelu => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_GELU_BIAS,
            Epilogue::BiasRelu => cublasLtEpilogue_t::CUBLASLT_EPILOGUE_RELU_BIAS,
        };
        use cublasLtMatmulDescAttributes_t as Attribute;
        set(descriptor, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, TRANSPOSED)?;
        set(descriptor, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, kind)?;
        set(descriptor, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)
    }

    /// Enqueues the product of `input`, `[plan.rows, self.input]`, into `output`, `[plan.rows, self.out]`. An activation
    /// is part of it unless [`Self::then`] names one.
    ///
    /// # Errors
    /// `Internal` when it cannot be enqueued.
    pub(super) fn run(&self, tools: &Tools<'_>, plan: &Plan, input: u64, output: u64) -> Result<()> {
        self.launch(tools, plan, (plan.way, &plan.algorithm), input, output)
            .map_err(|error| self.device.blas_error("a matrix product", error))
    }

    /// The activation that is left to do after a run by `plan`, where the plan may choose.
    pub(super) fn then(&self, plan: &Plan) -> Option<HiddenAct> {
        self.ways[plan.way].then
    }

    fn launch(
        &self,
        tools: &Tools<'_>,
        plan: &Plan,
        (way, algorithm): (usize, &cublasLtMatmulAlgo_t),
        input: u64,
        output: u64,
    ) -> std::result::Result<(), CublasError> {
        let way = &self.ways[way];
        let alpha = 1.0_f32;
        let beta = if way.epilogue == Epilogue::BiasAdd { 1.0_f32 } else { 0.0 };
        let at = |address: u64| address as *const c_void;
        // SAFETY: live objects. The runner's arena has room for `plan.rows` rows of input and output, and keeps it until
        // the stream is synchronized; the weights live as long as the model; C and D may be the same memory.
        unsafe {
            result::matmul(
                self.device.blas().0,
                way.descriptor,
                ptr::from_ref(&alpha).cast(),
                ptr::from_ref(&beta).cast(),
                at(self.weight),
                plan.weight.0,
                at(input),
                plan.input.0,
                at(output),
                plan.output.0,
                output as *mut c_void,
                plan.output.0,
                algorithm,
                tools.workspace.address() as *mut c_void,
                tools.workspace.bytes(),
                tools.stream.raw().cast(),
            )
        }
    }
}

impl Drop for Linear {
    fn drop(&mut self) {
        for way in &self.ways {
            // SAFETY: ours, destroyed once. On error it is still ours.
            let destroy = || unsafe { result::destroy_matmul_desc(way.descriptor) };
            let _ = destroy().or_else(|_| destroy());
        }
    }
}

fn set<T>(
    descriptor: sys::cublasLtMatmulDesc_t,
    attribute: cublasLtMatmulDescAttributes_t,
    value: T,
) -> std::result::Result<(), CublasError> {
    // SAFETY: a live descriptor; the value has the type of the attribute, by the callers, and is copied.
    unsafe { result::set_matmul_desc_attribute(descriptor, attribute, ptr::from_ref(&value).cast(), size_of::<T>()) }
}

/// What an instance lends to its products.
pub(super) struct Tools<'a> {
    pub stream: &'a Stream,
    pub workspace: &'a DeviceMemory,
    /// Two, for timing.
    pub events: &'a [Event; 2],
}

/// How products of one shape run.
pub(super) struct Plan {
    weight: Layout,
    input: Layout,
    output: Layout,
    /// Which of the linear's ways to end.
    way: usize,
    algorithm: cublasLtMatmulAlgo_t,
    /// Of one product and what follows it; `None` where no algorithm ran.
    pub milliseconds: Option<f32>,
}

/// What plans of one model are told apart by.
type Shape = (usize, usize, usize, Epilogue);

/// The plans of one model, made when a shape is first met.
#[derive(Default)]
pub(super) struct Plans(Mutex<Made>);

#[derive(Default)]
struct Made {
    plans: HashMap<Shape, Arc<Plan>>,
    spent: Duration,
}

impl Plans {
    /// The plan for `rows` rows of `linear`. Where there is none yet, some algorithms are timed on `input` and `output`,
    /// whose content is lost.
    ///
    /// # Errors
    /// `Unsupported` where cublasLt has no algorithm; of the calls.
    pub(super) fn get(
        &self,
        tools: &Tools<'_>,
        linear: &Linear,
        rows: usize,
        input: u64,
        output: u64,
    ) -> Result<Arc<Plan>> {
        let shape = (rows, linear.out, linear.input, linear.ways[0].epilogue);
        // Held while timing: two instances would disturb each other's times.
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = made.plans.get(&shape) {
            return Ok(Arc::clone(plan));
        }
        let started = Instant::now();
        let plan = Plan::make(tools, linear, rows, input, output).map(Arc::new);
        made.spent += started.elapsed();
        let plan = plan?;
        made.plans.insert(shape, Arc::clone(&plan));
        Ok(plan)
    }

    /// How long plans were made until now.
    pub(super) fn spent(&self) -> Duration {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).spent
    }
}

impl Plan {
    fn make(tools: &Tools<'_>, linear: &Linear, rows: usize, input: u64, output: u64) -> Result<Self> {
        let fail = |error| linear.device.blas_error("planning a matrix product", error);
        let layout = |width, rows| Layout::new(linear.dtype, width, rows).map_err(fail);
        let mut plan = Self {
            weight: layout(linear.input, linear.out)?,
            input: layout(linear.input, rows)?,
            output: layout(linear.out, rows)?,
            way: 0,
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            milliseconds: None,
        };
        let mut candidates = Vec::new();
        for (way, Way { descriptor, .. }) in linear.ways.iter().enumerate() {
            let found = plan.candidates(linear, *descriptor, tools.workspace.bytes()).map_err(fail)?;
            candidates.extend(found.into_iter().map(|algorithm| (way, algorithm)));
        }
        let Some(&first) = candidates.first() else {
            return Err(Error::unsupported(format!(
                "cublasLt has no algorithm for {rows} rows of {} to {} in {:?} with {:?} on {}",
                linear.input, linear.out, linear.dtype, linear.ways[0].epilogue, linear.device.name
            )));
        };
        (plan.way, plan.algorithm) = first;
        for (way, algorithm) in candidates {
            // One that does not run here is left out; a lost device is noticed by the next call.
            if let Some(time) = plan.time(tools, linear, (way, &algorithm), rows, input, output)?
                && plan.milliseconds.is_none_or(|best| time < best)
            {
                (plan.way, plan.algorithm, plan.milliseconds) = (way, algorithm, Some(time));
            }
        }
        Ok(plan)
    }

    /// What cublasLt thinks is fast, best guess first.
    fn candidates(
        &self,
        linear: &Linear,
        descriptor: sys::cublasLtMatmulDesc_t,
        workspace: usize,
    ) -> std::result::Result<Vec<cublasLtMatmulAlgo_t>, CublasError> {
        let preference = Preference(result::create_matmul_pref()?);
        let mut found = [const { MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit() }; CANDIDATES];
        let mut count = 0;
        // SAFETY: live objects; the preference's value has the attribute's type and is copied; `found` has room for as
        // many results as are asked for, of which `count` are written.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                ptr::from_ref(&workspace).cast(),
                size_of::<usize>(),
            )?;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                linear.device.blas().0,
                descriptor,
                self.weight.0,
                self.input.0,
                self.output.0,
                self.output.0,
                preference.0,
                CANDIDATES as i32,
                found.as_mut_ptr().cast(),
                &mut count,
            );
            if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
                return Ok(Vec::new());
            }
            status.result()?;
            let found = found.iter().take(usize::try_from(count).unwrap_or(0)).map(|one| one.assume_init_ref());
            Ok(found.filter(|one| one.state.result().is_ok()).map(|one| one.algo).collect())
        }
    }

    /// Milliseconds of one run, or `None` for an algorithm that does not run.
    fn time(
        &self,
        tools: &Tools<'_>,
        linear: &Linear,
        (way, algorithm): (usize, &cublasLtMatmulAlgo_t),
        rows: usize,
        input: u64,
        output: u64,
    ) -> Result<Option<f32>> {
        let fail = |error| linear.device.error("timing a matrix product", error);
        let run = || {
            let product = linear.launch(tools, self, (way, algorithm), input, output);
            let Some(activation) = linear.ways[way].then.filter(|_| product.is_ok()) else { return product.is_ok() };
            let (kernels, elements) = (linear.device.kernels(), (rows * linear.out) as u64);
            // SAFETY: `output` has room for `[rows, out]`, as in `launch`.
            let done = unsafe { kernels.activation(linear.dtype, output, elements, activation, tools.stream.raw()) };
            done.is_ok()
        };
        let [start, end] = tools.events;
        if !run() {
            return Ok(None);
        }
        start.record(tools.stream).map_err(fail)?;
        for _ in 0..TIMED_RUNS {
            if !run() {
                return Ok(None);
            }
        }
        end.record(tools.stream).map_err(fail)?;
        let milliseconds = start.milliseconds_to(end).map_err(fail)?;
        Ok(Some(milliseconds / TIMED_RUNS as f32))
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

// SAFETY: not changed once it is made; cublasLt may read it from any thread.
unsafe impl Send for Layout {}
// SAFETY: as above.
unsafe impl Sync for Layout {}

impl Layout {
    /// Of a dense row-major `[rows, width]`.
    fn new(dtype: DeviceType, width: usize, rows: usize) -> std::result::Result<Self, CublasError> {
        let dtype = match dtype {
            DeviceType::F16 => cudaDataType::CUDA_R_16F,
            DeviceType::Bf16 => cudaDataType::CUDA_R_16BF,
            DeviceType::F32 => cudaDataType::CUDA_R_32F,
        };
        result::create_matrix_layout(dtype, width as u64, rows as u64, width as i64).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once. On error it is still ours.
        let destroy = || unsafe { result::destroy_matrix_layout(self.0) };
        let _ = destroy().or_else(|_| destroy());
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: as of `Layout`.
        let destroy = || unsafe { result::destroy_matmul_pref(self.0) };
        let _ = destroy().or_else(|_| destroy());
    }
}
