//! The built library on the software device, driven by the fake host: outputs in the device's memory, and every call of
//! the host failed in turn.

use fake_host::{InputSpec, Placement, Plugin, RequestSpec, Scenario, run, sweep, sys};

use super::Before;

#[allow(dead_code, reason = "the fault injection test uses all of it")]
#[path = "../../fault_injection/model.rs"]
mod directory;

const ROWS: [&str; 2] = ["LOGITS", "PROBABILITIES"];

#[test]
fn the_library_writes_into_device_memory_and_survives_every_failing_call() {
    let device = cuda_device::exclusive();
    device.set_verbose(false);
    let before = Before::now(&device);
    let files = tempfile::tempdir().expect("writable temporary directory");
    directory::write_classifier(&files.path().join("1"));
    let config = r#"{"name":"tiny","backend":"rust","max_batch_size":0,"input":[],"output":[],"instance_group":[],
        "parameters":{"engine":{"string_value":"cuda"},"max_batch_tokens":{"string_value":"64"}}}"#;
    let texts = || InputSpec::texts("TEXT", &["a good film", "the book is bad"]);
    let scenario = Scenario::new("rust", "tiny", files.path()).config(config).batch([
        RequestSpec::new(texts(), &ROWS).placed(Placement::Device(0)),
        RequestSpec::new(texts(), &ROWS).placed(Placement::Misaligned),
        RequestSpec::new(texts(), &["LABEL", "SCORE", "TOKEN_COUNT"]),
    ]);
    let plugin = Plugin::built("deps/libtriton_rust.so");
    let clean = run(&plugin, &scenario, None);
    clean.assert_sound();
    for name in ROWS {
        assert_eq!(clean.answer(0).f32s(name), clean.answer(1).f32s(name), "{name}: wherever it is");
        assert!(clean.answer(0).f32s(name).iter().all(|x| x.is_finite() && *x != 0.0));
    }
    let best = |row: &[f32]| row.iter().copied().fold(0.0, f32::max);
    let scores: Vec<f32> = clean.answer(1).f32s("PROBABILITIES").chunks_exact(3).map(best).collect();
    assert_eq!(clean.answer(2).f32s("SCORE"), scores);
    let [(kind, number, bytes)] = clean.memory_usage[..] else { panic!("one device: {:?}", clean.memory_usage) };
    assert_eq!((kind, number), (sys::TRITONSERVER_MEMORY_GPU, 0));
    assert!(bytes > 100_000);
    let groups: Vec<_> = clean.instance_groups.iter().map(|group| (group.kind, group.devices.clone())).collect();
    let kinds = [sys::TRITONSERVER_INSTANCEGROUPKIND_GPU, sys::TRITONSERVER_INSTANCEGROUPKIND_CPU];
    assert_eq!(groups, [(kinds[0], vec![0, 1]), (kinds[1], vec![])]);
    before.assert_unchanged(&device, "after a clean run");

    sweep(&plugin, &scenario, sys::TRITONSERVER_ERROR_INTERNAL, |report| {
        let panics = report.errors_logged().into_iter().filter(|text| text.contains("panic")).count();
        assert_eq!(panics, 0, "{:?}", report.failed_call);
    });
    before.assert_unchanged(&device, "after the sweep");
}
