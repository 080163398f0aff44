//! What only the software device can do: fail calls in turn, run out of memory, get lost, count, delay streams, and
//! run threads in other orders.

use cuda_device::{Exclusive, Order, PINNED};
use triton_rust::engine::cuda::{ActivationPlace, CudaOptions, required_symbols};
use triton_rust::engine::{Dtype, Runner};
use triton_rust::error::{ErrorKind, Result};
use triton_rust::head::Value;
use triton_rust::model::HiddenAct;

use crate::model::{Model, run, spec};
use crate::{CLASSIFY, EMBED, assert_near, assert_shapes, small};

#[path = "plugin.rs"]
mod plugin;

const OUT_OF_MEMORY: i32 = 2;
const INVALID_VALUE: i32 = 1;
const ILLEGAL_ADDRESS: i32 = 700;
/// The best pass by the device's eight multiprocessors, of a model 128 wide.
const RULE: usize = 2048;

fn tiny() -> Model {
    Model::random(spec(32, 1, HiddenAct::Gelu), CLASSIFY)
}

/// With few positions, so that few plans are made and few calls.
fn tiniest() -> Model {
    let mut spec = spec(32, 1, HiddenAct::Gelu);
    (spec.max_position_embeddings, spec.num_hidden_layers) = (80, 1);
    Model::random(spec, CLASSIFY)
}

fn pass(model: &Model, runner: &mut dyn Runner, lengths: &[usize]) -> Result<Vec<f32>> {
    run(runner, &model.batch(lengths), Value::Logits, 5)
}

/// What was on the devices before: a device that gets lost keeps what it had.
#[derive(Clone, Debug, PartialEq)]
struct Before([u64; 3], [i64; 5]);

impl Before {
    fn now(device: &Exclusive) -> Self {
        let kinds = ["contexts", "streams", "events", "modules", "cublasLt"];
        Self([0, 1, PINNED].map(|number| device.allocated(number)), kinds.map(|kind| device.live(kind)))
    }

    #[track_caller]
    fn assert_unchanged(&self, device: &Exclusive, after: &str) {
        assert_eq!(*self, Self::now(device), "something is left {after}");
    }
}

/// A model from load to drop, with two passes.
fn life(model: &Model) -> [Result<Vec<f32>>; 2] {
    match model.cuda(small(Dtype::Fp16)).and_then(|engine| engine.runner()) {
        Err(error) => [Err(error.clone()), Err(error)],
        Ok(mut runner) => [(); 2].map(|()| pass(model, &mut *runner, &[3, 70])),
    }
}

/// Calls of one life, kernels not counted.
fn calls(device: &Exclusive, model: &Model) -> u64 {
    device.forget_calls();
    for result in life(model) {
        result.expect("a result");
    }
    device.all_calls().iter().filter(|(name, _)| !name.starts_with("kernel ")).map(|(_, count)| count).sum()
}

#[test]
fn every_failing_call_is_survived() {
    let device = cuda_device::exclusive();
    device.set_verbose(false);
    let (model, before) = (tiniest(), Before::now(&device));
    let [Ok(right), Ok(again)] = life(&model) else { panic!("two results") };
    assert_eq!(right, again, "one load, one plan");
    before.assert_unchanged(&device, "after a clean run");
    let calls = calls(&device, &model);
    assert!(calls > 100);
    println!("{calls} calls");

    // Each call once, and some with the other meaning, to keep it short.
    for (code, step) in [(OUT_OF_MEMORY, 1), (INVALID_VALUE, 5)] {
        for nth in (1..=calls).step_by(step) {
            device.fail("*", nth, code);
            let [first, second] = life(&model);
            let after = format!("when call {nth} of {calls} fails with {code}");
            device.clear_faults();
            // Planning is cut short by time, so that the last calls may not come again.
            for result in [&first, &second] {
                match result {
                    // What is faster may differ between loads, and with it the rounding.
                    Ok(values) => assert_near(values, &right, 2e-3, &after),
                    Err(error) if code == OUT_OF_MEMORY => {
                        assert_eq!(error.kind, ErrorKind::Unavailable, "{after}: {error}");
                    }
                    Err(error) => assert_eq!(error.kind, ErrorKind::Internal, "{after}: {error}"),
                }
            }
            // Where the load went well one pass at most has failed.
            assert!(first.is_ok() || second.is_ok() || first == second, "{after}: {first:?} {second:?}");
            before.assert_unchanged(&device, &after);
        }
    }
}

#[test]
fn a_pass_that_finds_no_memory_makes_room_for_the_next() {
    let device = cuda_device::exclusive();
    device.set_verbose(false);
    let (model, before) = (tiny(), Before::now(&device));
    let engine = model.cuda(small(Dtype::Fp16)).expect("an engine");
    let mut runner = engine.runner().expect("a runner");
    let right = pass(&model, &mut *runner, &[3, 70]).expect("a result");
    // What there is now, and half a MiB.
    device.set_memory(device.allocated(0) + (512 << 10));
    let error = pass(&model, &mut *runner, &[512; 40]).expect_err("too large");
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.message.contains("device 0") && error.message.contains("out of memory"), "{error}");
    assert_eq!(pass(&model, &mut *runner, &[3, 70]), Ok(right), "a smaller one works");
    drop((runner, engine));
    before.assert_unchanged(&device, "after the pass");

    device.set_memory(64 << 10);
    let error = model.cuda(small(Dtype::Fp16)).err().expect("no room for weights");
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
    device.set_memory(0);
    before.assert_unchanged(&device, "after a load that failed");
}

#[test]
fn a_lost_device_is_an_error_of_every_pass_and_of_no_other_device() {
    let device = cuda_device::exclusive();
    device.set_verbose(false);
    let model = tiny();
    let engine = model.cuda(small(Dtype::Fp16)).expect("an engine");
    let other = model.cuda(CudaOptions { device: 1, ..small(Dtype::Fp16) }).expect("an engine");
    let (mut runner, mut neighbour) = (engine.runner().expect("a runner"), engine.runner().expect("a runner"));
    let mut elsewhere = other.runner().expect("a runner");
    assert_eq!((engine.device(), other.device()), (Some(0), Some(1)));
    engine.health().expect("sound");

    device.lose(0, ILLEGAL_ADDRESS);
    for runner in [&mut runner, &mut neighbour] {
        let error = pass(&model, &mut **runner, &[3]).expect_err("lost");
        assert_eq!(error.kind, ErrorKind::Internal);
        assert!(error.message.contains("device 0 is lost") && error.message.contains("700"), "{error}");
    }
    assert_eq!(engine.health().expect_err("lost").kind, ErrorKind::Internal);
    other.health().expect("sound");
    pass(&model, &mut *elsewhere, &[3, 70]).expect("the other device works");
    let calls = |device: &Exclusive| device.all_calls().values().sum::<u64>();
    let before = calls(&device);
    pass(&model, &mut *runner, &[3]).expect_err("lost for good");
    assert_eq!(calls(&device), before, "a lost device is not asked again");
    drop((runner, neighbour, elsewhere, engine, other));
}

#[test]
fn passes_allocate_nothing_and_call_nothing_that_was_not_looked_for() {
    let device = cuda_device::exclusive();
    let model = tiny();
    device.forget_calls();
    let mut runner = model.cuda(small(Dtype::Fp16)).expect("an engine").runner().expect("a runner");
    let allocations = |device: &Exclusive| device.calls("cuMemAlloc_v2") + device.calls("cuMemHostAlloc");
    let before = allocations(&device);
    for lengths in [&[3][..], &[60, 4], &[512], &[100, 200, 12]] {
        pass(&model, &mut *runner, lengths).expect("a result");
    }
    assert_eq!(allocations(&device), before);
    drop(runner);
    let known = required_symbols();
    for name in device.all_calls().keys().filter(|name| !name.starts_with("kernel ")) {
        // cudarc knows the one, drivers before CUDA 12.8 the other: either will do.
        assert!(known.contains(&name.as_str()) || name.starts_with("cuEventElapsedTime"), "{name}");
    }
}

#[test]
fn the_plan_chooses_where_the_activation_is_computed() {
    let device = cuda_device::exclusive();
    let model = Model::random(spec(32, 2, HiddenAct::Gelu), EMBED);
    let batch = model.batch(&[3, 70]);
    for place in [ActivationPlace::Fused, ActivationPlace::Apart, ActivationPlace::Exact, ActivationPlace::Fastest] {
        device.forget_calls();
        let options = CudaOptions { activation: place, ..small(Dtype::Fp16) };
        let mut runner = model.cuda(options).expect("an engine").runner().expect("a runner");
        let timed = device.calls("kernel activation_f16");
        assert_eq!(timed > 0, place == ActivationPlace::Fastest, "{place:?}: {timed} launches for timing");
        let passes = [(); 3].map(|()| {
            device.forget_calls();
            run(&mut *runner, &batch, Value::Embedding, 64).expect("a result");
            device.calls("kernel activation_f16")
        });
        match place {
            ActivationPlace::Fused => assert_eq!(passes, [0; 3]),
            ActivationPlace::Apart | ActivationPlace::Exact => assert_eq!(passes, [2; 3], "one a layer"),
            // The first pass may plan; what was chosen then stays.
            ActivationPlace::Fastest => assert!(passes[1..] == [0; 2] || passes[1..] == [2; 2], "{passes:?}"),
        }
    }
}

#[test]
fn the_best_pass_is_measured_at_load_or_follows_the_multiprocessors() {
    let device = cuda_device::exclusive();
    let model = Model::random(spec(128, 1, HiddenAct::Gelu), EMBED);
    device.forget_calls();
    let fixed = model.cuda(small(Dtype::Fp16)).expect("an engine");
    assert_eq!((fixed.best_pass_tokens(), device.calls("cublasLtMatmul")), (64, 0), "the user's, nothing is measured");
    let before = Before::now(&device);
    let engine = model.cuda(CudaOptions { pass_tokens: None, ..small(Dtype::Fp16) }).expect("an engine");
    assert!(device.calls("cublasLtMatmul") > 0, "measured before there is an instance");
    let (tokens, measured) = (engine.best_pass_tokens(), engine.describe().contains("best pass measured"));
    println!("{tokens} tokens: {}", engine.describe());
    assert!(if measured { (1024..=16_384).contains(&tokens) && tokens % 512 == 0 } else { tokens == RULE }, "{tokens}");
    drop(engine);
    before.assert_unchanged(&device, "after measuring");

    // Room for the weights, not for the largest pass: no measurement, and the model loads all the same.
    device.set_memory(device.allocated(0) + fixed.device_bytes() as u64 + (1 << 20));
    let engine = model.cuda(CudaOptions { pass_tokens: None, ..small(Dtype::Fp16) }).expect("an engine");
    assert!(!engine.describe().contains("measured"));
    assert_eq!(engine.best_pass_tokens(), RULE);
}

#[test]
fn lazy_streams_and_other_orders_of_threads_change_nothing() {
    let device = cuda_device::exclusive();
    let model = tiny();
    // What is faster may differ between loads, and with it the rounding.
    let fused = CudaOptions { activation: ActivationPlace::Fused, ..small(Dtype::Fp16) };
    let mut runner = model.cuda(fused).expect("an engine").runner().expect("a runner");
    let right = pass(&model, &mut *runner, &[3, 70, 64]).expect("a result");
    drop(runner);
    device.set_lazy(true);
    for order in [Order::Forward, Order::Reverse, Order::Random(7)] {
        device.set_order(order);
        let mut runner = model.cuda(fused).expect("an engine").runner().expect("a runner");
        assert_eq!(pass(&model, &mut *runner, &[3, 70, 64]), Ok(right.clone()), "{order:?}");
    }
    assert_shapes(|i| device.set_order([Order::Reverse, Order::Random(3)][i % 2]));
}

#[test]
fn instances_share_weights_and_devices_do_not() {
    let device = cuda_device::exclusive();
    let model = Model::random(spec(32, 2, HiddenAct::Relu), EMBED);
    let before = Before::now(&device);
    let more = |number| device.allocated(number) - before.0[usize::from(number == 1)];
    let shared = || (device.live("contexts") - before.1[0], device.live("modules") - before.1[3]);
    let engine = model.cuda(small(Dtype::Fp16)).expect("an engine");
    let weights = more(0);
    assert!(weights >= engine.device_bytes() as u64 && engine.device_bytes() > 0);
    let first = engine.runner().expect("a runner");
    let one = more(0) - weights;
    let second = engine.runner().expect("a runner");
    assert_eq!(more(0), weights + 2 * one);
    assert_eq!((shared(), more(1)), ((1, 1), 0));
    let other = model.cuda(CudaOptions { device: 1, ..small(Dtype::Fp16) }).expect("an engine");
    assert_eq!((shared(), more(1)), ((2, 2), weights));
    drop((first, second, engine, other));
    before.assert_unchanged(&device, "at the end");
}
