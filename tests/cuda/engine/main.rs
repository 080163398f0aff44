//! The CUDA engine on the software device: the whole engine, unmodified, with its kernels compiled for the CPU. What
//! passes there has not been tested on a GPU. All but `software` run on a real card as they are.

mod model;
mod software;

use std::time::Instant;

use cudarc::driver::result;
use model::{Model, Numbers, cosine, minilm, minilm_rows, run, spec};
use triton_rust::batch::PackedBatch;
use triton_rust::engine::cuda::{ActivationPlace, CudaOptions};
use triton_rust::engine::{Dtype, Output, Slot};
use triton_rust::error::ErrorKind;
use triton_rust::head::{Activation, HeadSpec, Pooling, Value};
use triton_rust::model::HiddenAct;

const EMBED: HeadSpec = HeadSpec::Embed { pooling: Pooling::Mean, normalize: true };
const CLASSIFY: HeadSpec = HeadSpec::Classify { num_labels: 5, activation: Activation::Softmax };

/// Passes of few tokens: there is less to plan.
fn small(dtype: Dtype) -> CudaOptions {
    CudaOptions { dtype, pass_tokens: Some(64), ..CudaOptions::default() }
}

/// How far numbers may be off that are about 1.
fn tolerance(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Fp32 => 2e-5,
        Dtype::Bf16 => 8e-2,
        _ => 2e-2,
    }
}

#[track_caller]
fn assert_near(got: &[f32], right: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), right.len());
    for (i, (got, right)) in got.iter().zip(right).enumerate() {
        assert!((got - right).abs() <= tolerance, "{what}: element {i} is {got}, right is {right}");
    }
}

#[test]
fn minilm_equals_sentence_transformers() {
    let _device = cuda_device::shared();
    let rows = minilm_rows();
    for (dtype, least, most_tokens) in
        [(Dtype::Auto, 0.9999, usize::MAX), (Dtype::Bf16, 0.999, 900), (Dtype::Fp32, 0.999_999, 200)]
    {
        let started = Instant::now();
        let engine = minilm(CudaOptions { dtype, pass_tokens: Some(512), ..CudaOptions::default() });
        let mut runner = engine.runner().expect("a runner");
        let (mut tokens, mut worst) = (0, 1.0_f64);
        for chunk in rows.chunks(20) {
            let mut batch = PackedBatch::new();
            chunk.iter().for_each(|(ids, types, _)| batch.push(ids, types));
            if tokens + batch.tokens() > most_tokens {
                break;
            }
            tokens += batch.tokens();
            let got = run(&mut *runner, &batch, Value::Embedding, 384).expect("a result");
            for (got, (ids, _, right)) in got.chunks_exact(384).zip(chunk) {
                let cosine = cosine(got, right);
                assert!(cosine >= least, "{dtype:?}, a text of {} tokens: cosine {cosine}", ids.len());
                worst = worst.min(cosine);
            }
        }
        assert!(tokens > 150);
        println!("{dtype:?}: {tokens} tokens, cosine {worst:.6} at least, {:.1?}", started.elapsed());
    }
}

#[test]
fn every_head_and_activation_equals_the_cpu_engine() {
    let _device = cuda_device::shared();
    let heads = [
        EMBED,
        HeadSpec::Embed { pooling: Pooling::Cls, normalize: false },
        HeadSpec::Embed { pooling: Pooling::Max, normalize: false },
        HeadSpec::Embed { pooling: Pooling::Last, normalize: true },
        CLASSIFY,
        HeadSpec::Classify { num_labels: 3, activation: Activation::Sigmoid },
        HeadSpec::Classify { num_labels: 1, activation: Activation::Identity },
    ];
    let acts = [HiddenAct::Gelu, HiddenAct::GeluTanh, HiddenAct::Relu];
    for (i, head) in heads.into_iter().enumerate() {
        let model = Model::random(spec(32, 2, acts[i % 3]), head);
        let batch = model.batch(&[3, 70, 1, 129, 64, 17]);
        let mut right = model.right();
        for dtype in [Dtype::Fp16, Dtype::Bf16, Dtype::Fp32] {
            let mut runner = model.cuda(small(dtype)).expect("an engine").runner().expect("a runner");
            let values: &[Value] = match head {
                HeadSpec::Embed { .. } => &[Value::Embedding],
                HeadSpec::Classify { .. } => &[Value::Logits, Value::Probabilities],
            };
            for &value in values {
                let width = head.width(value, &model.spec);
                let got = run(&mut *runner, &batch, value, width).expect("a result");
                let right = run(&mut *right, &batch, value, width).expect("a result");
                // Vectors that are not normalized have elements of up to about 4.
                let scale = right.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
                assert_near(&got, &right, scale * tolerance(dtype), &format!("{head:?} {value:?} {dtype:?}"));
            }
        }
    }
}

/// `order` sets the order of threads before each model.
fn assert_shapes(order: impl Fn(usize)) {
    let mut numbers = Numbers(5);
    for (i, (head_dim, heads)) in [(32, 1), (32, 3), (64, 2), (128, 1)].into_iter().enumerate() {
        order(i);
        let model = Model::random(spec(head_dim, heads, HiddenAct::Gelu), EMBED);
        let mut right = model.right();
        for dtype in [Dtype::Fp16, Dtype::Bf16, Dtype::Fp32] {
            let mut runner = model.cuda(small(dtype)).expect("an engine").runner().expect("a runner");
            for most in [1, 8, 60, 512] {
                let lengths: Vec<usize> = (0..1 + numbers.below(4)).map(|_| 1 + numbers.below(most)).collect();
                let batch = model.batch(&lengths);
                let got = run(&mut *runner, &batch, Value::Embedding, model.spec.hidden_size).expect("a result");
                let right = run(&mut *right, &batch, Value::Embedding, model.spec.hidden_size).expect("a result");
                assert_near(&got, &right, tolerance(dtype), &format!("{head_dim} x {heads} {dtype:?} {lengths:?}"));
            }
        }
    }
}

#[test]
fn shapes_equal_the_cpu_engine() {
    let _device = cuda_device::shared();
    assert_shapes(|_| {});
}

#[test]
fn the_activation_is_as_near_wherever_it_is_computed() {
    let _device = cuda_device::shared();
    let places = [ActivationPlace::Exact, ActivationPlace::Apart, ActivationPlace::Fused, ActivationPlace::Fastest];
    for (hidden_act, head) in [(HiddenAct::Gelu, EMBED), (HiddenAct::Relu, EMBED), (HiddenAct::GeluTanh, CLASSIFY)] {
        let model = Model::random(spec(64, 2, hidden_act), head);
        let batch = model.batch(&[40, 90]);
        let (value, width) = (head.main_value(), head.width(head.main_value(), &model.spec));
        let right = run(&mut *model.right(), &batch, value, width).expect("a result");
        for (dtype, least, near) in [(Dtype::Fp16, 0.9999, 2e-3), (Dtype::Bf16, 0.999, 2e-2)] {
            let answers = places.map(|activation| {
                let options = CudaOptions { activation, ..small(dtype) };
                let mut runner = model.cuda(options).expect("an engine").runner().expect("a runner");
                run(&mut *runner, &batch, value, width).expect("a result")
            });
            for (place, got) in places.iter().zip(&answers) {
                for (got, right) in got.chunks_exact(width).zip(right.chunks_exact(width)) {
                    assert!(cosine(got, right) > least, "{hidden_act:?} {dtype:?} {place:?}");
                }
            }
            let scale = right.iter().fold(1.0_f32, |most, x| most.max(x.abs()));
            let [_, apart, fused, fastest] = &answers;
            let what = format!("{hidden_act:?} {dtype:?}");
            assert_near(apart, fused, scale * near, &format!("{what}: apart and fused"));
            assert_near(fastest, fused, scale * near, &format!("{what}: fastest and fused"));
        }
    }
}

#[test]
fn a_text_has_the_same_answer_alone_and_among_others() {
    let _device = cuda_device::shared();
    for head in [EMBED, CLASSIFY] {
        let model = Model::random(spec(32, 2, HiddenAct::Gelu), head);
        let lengths = [5, 64, 65, 1, 200, 33, 128, 2];
        let batch = model.batch(&lengths);
        let (value, width) = (head.main_value(), head.width(head.main_value(), &model.spec));
        let mut runner = model.cuda(small(Dtype::Fp16)).expect("an engine").runner().expect("a runner");
        let together = run(&mut *runner, &batch, value, width).expect("a result");
        for (i, together) in together.chunks_exact(width).enumerate() {
            let mut alone = PackedBatch::new();
            let range = batch.range(i);
            alone.push(&batch.input_ids[range.clone()], &batch.token_type_ids[range]);
            let alone = run(&mut *runner, &alone, value, width).expect("a result");
            assert_near(&alone, together, 2e-3, &format!("{head:?}, {} tokens", lengths[i]));
        }
    }
}

#[test]
fn rows_go_to_device_memory_and_only_what_is_asked_for_is_written() {
    let _device = cuda_device::shared();
    let model = Model::random(spec(32, 2, HiddenAct::Gelu), CLASSIFY);
    let batch = model.batch(&[9, 4, 70]);
    let mut runner = model.cuda(small(Dtype::Fp16)).expect("an engine").runner().expect("a runner");
    let logits = run(&mut *runner, &batch, Value::Logits, 5).expect("a result");
    let probabilities = run(&mut *runner, &batch, Value::Probabilities, 5).expect("a result");

    let place = DevicePlace::new(3 * 5);
    let mut host = [0.0; 5];
    let on_device = |sequence, value, row: u64| Output {
        sequence,
        value,
        slot: Slot::Device { address: place.address + row * 20, len: 5 },
    };
    // One value of a sequence for two places; nothing for sequence 1.
    let mut outputs = [
        on_device(0, Value::Logits, 0),
        Output { sequence: 0, value: Value::Logits, slot: Slot::Host(&mut host) },
        on_device(2, Value::Probabilities, 2),
    ];
    runner.run(&batch, &mut outputs).expect("a result");
    let written = place.read();
    assert_eq!(written[..5], logits[..5]);
    assert_eq!(host, logits[..5]);
    assert!(written[5..10].iter().all(|&x| x == DevicePlace::UNTOUCHED));
    assert_eq!(written[10..], probabilities[10..]);
}

/// Memory of device 0 that is not the engine's, as an output of the server's is.
struct DevicePlace {
    address: u64,
    len: usize,
}

impl DevicePlace {
    const UNTOUCHED: f32 = 7.5;

    fn new(len: usize) -> Self {
        Self::with_context(|| {
            // SAFETY: a context is current; as many elements are copied as are allocated.
            unsafe {
                let address = result::malloc_sync(4 * len).expect("memory");
                result::memcpy_htod_sync(address, &vec![Self::UNTOUCHED; len]).expect("a copy");
                Self { address, len }
            }
        })
    }

    fn read(&self) -> Vec<f32> {
        let mut all = vec![0.0; self.len];
        // SAFETY: as many elements as were allocated.
        Self::with_context(|| unsafe { result::memcpy_dtoh_sync(&mut all, self.address) }.expect("a copy"));
        all
    }

    fn with_context<T>(work: impl FnOnce() -> T) -> T {
        let device = result::device::get(0).expect("a device");
        // SAFETY: a device of the driver's; released below.
        unsafe { result::ctx::set_current(result::primary_ctx::retain(device).expect("a context")) }.expect("current");
        let done = work();
        // SAFETY: NULL is allowed; retained above.
        unsafe {
            result::ctx::set_current(std::ptr::null_mut()).expect("none current");
            result::primary_ctx::release(device).expect("released");
        }
        done
    }
}

impl Drop for DevicePlace {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`.
        Self::with_context(|| unsafe { result::free_sync(self.address) }.expect("freed"));
    }
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    let _device = cuda_device::shared();
    let refused = |spec, options, kind, words: &[&str]| {
        let error = Model::random(spec, EMBED).cuda(options).err().expect("refused");
        assert_eq!(error.kind, kind, "{error}");
        assert!(words.iter().all(|word| error.message.contains(word)), "{error}");
    };
    let plain = || spec(32, 2, HiddenAct::Gelu);
    refused(plain(), small(Dtype::Int8), ErrorKind::Unsupported, &["'int8'", "fp16"]);
    refused(spec(48, 1, HiddenAct::Gelu), small(Dtype::Fp16), ErrorKind::Unsupported, &["48 / 1", "[32, 64, 128]"]);
    let mut odd = plain();
    odd.intermediate_size = 132;
    refused(odd, small(Dtype::Fp16), ErrorKind::Unsupported, &["intermediate_size", "132"]);
    refused(
        plain(),
        CudaOptions { device: 77, ..small(Dtype::Fp16) },
        ErrorKind::Invalid,
        &["device 77", "usable: [0"],
    );
}

#[test]
fn weights_and_results_beyond_fp16_are_errors() {
    let _device = cuda_device::shared();
    let large = |name: &str, values: &mut [f32]| {
        if name == "encoder.layer.1.output.dense.weight" {
            values[3] = -70_000.0;
        }
    };
    let model = Model::with(spec(32, 2, HiddenAct::Gelu), EMBED, large);
    let error = model.cuda(small(Dtype::Fp16)).err().expect("refused");
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.contains("'encoder.layer.1.output.dense.weight' holds -70000"), "{error}");
    model.cuda(small(Dtype::Bf16)).expect("bf16 has room");

    for head in [EMBED, CLASSIFY] {
        let growing = |name: &str, values: &mut [f32]| {
            if name.contains("output.LayerNorm") {
                values.iter_mut().for_each(|x| *x *= 60_000.0);
            }
        };
        let model = Model::with(spec(32, 2, HiddenAct::Gelu), head, growing);
        let mut runner = model.cuda(small(Dtype::Fp16)).expect("an engine").runner().expect("a runner");
        let (value, width) = (head.main_value(), head.width(head.main_value(), &model.spec));
        let error = run(&mut *runner, &model.batch(&[7, 80]), value, width).expect_err("not finite");
        assert_eq!(error.kind, ErrorKind::Internal);
        assert!(error.message.contains("not finite") && error.message.contains("fp16"), "{error}");
    }
}

#[test]
fn bad_passes_are_refused_before_the_device_sees_them() {
    let _device = cuda_device::shared();
    let model = Model::random(spec(32, 2, HiddenAct::Gelu), EMBED);
    let mut runner = model.cuda(small(Dtype::Fp16)).expect("an engine").runner().expect("a runner");
    let mut batch = model.batch(&[3]);
    batch.input_ids[1] = 60;
    let error = run(&mut *runner, &batch, Value::Embedding, 64).expect_err("out of range");
    assert_eq!((error.kind, error.message.contains("token id 60")), (ErrorKind::Invalid, true));
    let error = run(&mut *runner, &model.batch(&[3]), Value::Embedding, 63).expect_err("too short");
    assert_eq!(error.kind, ErrorKind::Internal);
    run(&mut *runner, &model.batch(&[3]), Value::Embedding, 64).expect("still works");
}
