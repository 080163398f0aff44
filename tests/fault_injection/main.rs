//! The built `libtriton_rust.so`, driven by the fake host: every call of the host fails in turn, and still each
//! request is answered once and released once, nothing leaks, and no panic escapes.

mod conversation;
mod model;

use std::sync::OnceLock;

use fake_host::{FakeCuda, InputSpec, Placement, Plugin, Report, RequestSpec, Scenario, run, sweep, sys};
use tempfile::TempDir;

const CLASSES: [&str; 5] = ["LOGITS", "PROBABILITIES", "LABEL", "SCORE", "TOKEN_COUNT"];

fn plugin() -> Plugin {
    // Where cargo puts what it builds for a test; the copy one directory up may be old.
    Plugin::built("deps/libtriton_rust.so")
}

fn texts(texts: &[&str], outputs: &[&str]) -> RequestSpec {
    RequestSpec::new(InputSpec::texts("TEXT", texts), outputs)
}

/// What a server's configuration looks like when config.pbtxt only names the backend.
fn config(name: &str, more: &str) -> String {
    format!(
        r#"{{"name":"{name}","platform":"","backend":"rust","version_policy":{{"latest":{{"num_versions":1}}}},
            "max_batch_size":0,"input":[],"output":[],"instance_group":[]{more}}}"#
    )
}

fn scenario(write: impl FnOnce(&std::path::Path), more: &str) -> (TempDir, Scenario) {
    let directory = tempfile::tempdir().expect("writable temporary directory");
    write(&directory.path().join("1"));
    let scenario = Scenario::new("rust", "tiny", directory.path()).config(&config("tiny", more));
    (directory, scenario)
}

/// GPU tensors reach a stand-in for the driver. Loaded before any test could look for the real one.
fn fake_cuda() {
    static CUDA: OnceLock<FakeCuda> = OnceLock::new();
    CUDA.get_or_init(|| FakeCuda::load(tempfile::tempdir().expect("writable temporary directory").path()));
}

fn no_panic(report: &Report) {
    let panics: Vec<&str> = report.errors_logged().into_iter().filter(|text| text.contains("panic")).collect();
    assert!(panics.is_empty(), "{:?}: {panics:?}", report.failed_call);
}

#[test]
fn a_classifier_survives_every_failing_call() {
    fake_cuda();
    let (_directory, scenario) = scenario(model::write_classifier, "");
    let mut scenario = scenario
        .batch([
            texts(&["a good film"], &CLASSES),
            texts(&["the book is bad", "", "good"], &CLASSES).placed(Placement::Misaligned),
            RequestSpec::new(InputSpec::texts("TEXT", &[b"\xff"]), &CLASSES),
            texts(&["gone"], &CLASSES).cancelled(),
            texts(&["not a film"], &["LABEL"]),
        ])
        .batch([
            RequestSpec::new(InputSpec::texts("TEXT", &["a good film"]).in_pieces_of(3), &CLASSES),
            RequestSpec::new(InputSpec::texts("TEXT", &["bad"]).on_gpu(), &CLASSES).placed(Placement::Gpu),
        ]);
    scenario.instances = 2;
    scenario.reload = true;

    let clean = run(&plugin(), &scenario, None);
    clean.assert_sound();
    for number in [0, 1, 4, 5, 6] {
        assert_eq!(clean.answer(number).error, None);
    }
    assert_eq!(clean.answer(1).output("LOGITS").expect("asked for").shape, [3, 3]);
    assert_eq!(clean.answer(0).f32s("LOGITS"), clean.answer(5).f32s("LOGITS"), "buffers do not matter");
    assert!(model::LABELS.contains(&clean.answer(4).strings("LABEL")[0].as_str()));
    assert_eq!(clean.answer(0).i32s("TOKEN_COUNT"), [5]);
    assert_eq!(clean.answer(2).code(), Some(sys::TRITONSERVER_ERROR_INVALID_ARG));
    assert_eq!(clean.answer(3).code(), Some(sys::TRITONSERVER_ERROR_CANCELLED));

    for code in [sys::TRITONSERVER_ERROR_INTERNAL, sys::TRITONSERVER_ERROR_UNAVAILABLE] {
        sweep(&plugin(), &scenario, code, no_panic);
    }
}

#[test]
fn an_encoder_with_a_response_cache_survives_every_failing_call() {
    fake_cuda();
    let (_directory, scenario) = scenario(model::write_encoder, r#","response_cache":{"enable":true}"#);
    let scenario = scenario.batch([
        texts(&["a good film", "the book"], &["EMBEDDING"]),
        RequestSpec::new(InputSpec::texts("TEXT", &[b"\xff"]), &["EMBEDDING"]),
        texts(&["gone"], &["EMBEDDING"]).cancelled(),
    ]);
    sweep(&plugin(), &scenario, sys::TRITONSERVER_ERROR_INTERNAL, |report| {
        no_panic(report);
        for answer in report.outcomes.iter().map(|outcome| &outcome.answers[0]) {
            let cacheable = answer.outputs.iter().all(|output| output.bytes.is_some());
            assert_eq!(answer.error.is_none(), cacheable, "{:?}: {answer:?}", report.failed_call);
        }
    });
}

/// Windows of six tokens beside the special ones, of which two are shared with the next, and two windows to a pass.
const WINDOWS: &str = r#","parameters":{"max_length":{"string_value":"8"},"window_stride":{"string_value":"2"},
    "max_batch_tokens":{"string_value":"16"}}"#;
/// Fourteen tokens: windows from the tokens 0, 4 and 8 on.
const LONG: &str = "a good film is not a bad book the film is a good book";

#[test]
fn a_model_that_combines_windows_survives_every_failing_call() {
    fake_cuda();
    let (_directory, scenario) = scenario(model::write_classifier, WINDOWS);
    let scenario = scenario.batch([
        texts(&[LONG, "good"], &["PROBABILITIES", "LABEL", "TOKEN_COUNT"]).placed(Placement::Misaligned),
        RequestSpec::new(InputSpec::texts("TEXT", &[LONG.as_bytes(), b"\xff"]), &["LABEL"]),
        texts(&["gone"], &["LABEL"]).cancelled(),
        texts(&["good"], &["PROBABILITIES"]).placed(Placement::Gpu),
    ]);
    let clean = run(&plugin(), &scenario, None);
    assert_eq!(clean.answer(0).i32s("TOKEN_COUNT"), [8 + 8 + 8, 3]);
    assert_eq!(clean.answer(0).f32s("PROBABILITIES")[3..], clean.answer(3).f32s("PROBABILITIES"));
    assert_eq!(clean.answer(1).code(), Some(sys::TRITONSERVER_ERROR_INVALID_ARG));
    sweep(&plugin(), &scenario, sys::TRITONSERVER_ERROR_INTERNAL, no_panic);
}

#[test]
fn a_model_that_streams_windows_survives_every_failing_call() {
    fake_cuda();
    let stream = format!(r#"{WINDOWS},"model_transaction_policy":{{"decoupled":true}}"#);
    let (_directory, scenario) = scenario(model::write_classifier, &stream);
    let all = ["LOGITS", "PROBABILITIES", "LABEL", "SCORE", "TOKEN_COUNT", "ROW", "WINDOW_START", "WINDOW_END"];
    let scenario = scenario.batch([
        texts(&[LONG, "good"], &all).decoupled().placed(Placement::Misaligned),
        RequestSpec::new(InputSpec::texts("TEXT", &[LONG.as_bytes(), b"\xff"]), &all).decoupled(),
        texts(&[LONG, LONG], &["ROW"]).decoupled().cancelled_after(2),
        texts(&["bad"], &["LOGITS"]).decoupled().placed(Placement::Gpu),
    ]);
    let clean = run(&plugin(), &scenario, None);
    let numbers = |number: usize, name: &str| -> Vec<i32> {
        let outcome = &clean.outcomes[number];
        outcome.parts.iter().chain(&outcome.answers).flat_map(|answer| answer.i32s(name)).collect()
    };
    assert_eq!(numbers(0, "ROW"), [1, 0, 0, 0], "the short row is done first");
    assert_eq!(numbers(0, "WINDOW_START"), [0, 0, 15, 30]);
    assert_eq!(numbers(0, "WINDOW_END"), [4, 20, 38, 53]);
    assert_eq!(numbers(0, "TOKEN_COUNT"), [3, 8, 8, 8]);
    assert_eq!(clean.outcomes[1].parts.len(), 0);
    assert_eq!(clean.answer(1).code(), Some(sys::TRITONSERVER_ERROR_INVALID_ARG));
    assert!((2..6).contains(&clean.outcomes[2].parts.len()), "{}", clean.outcomes[2].parts.len());
    assert_eq!(clean.answer(2).code(), Some(sys::TRITONSERVER_ERROR_CANCELLED));
    for code in [sys::TRITONSERVER_ERROR_INTERNAL, sys::TRITONSERVER_ERROR_UNAVAILABLE] {
        sweep(&plugin(), &scenario, code, no_panic);
    }
}

#[test]
fn a_model_that_cannot_be_loaded_leaves_nothing_behind() {
    let (directory, scenario) = scenario(model::write_encoder, "");
    let weights = directory.path().join("1/model.safetensors");
    let bytes = std::fs::read(&weights).expect("just written");
    std::fs::write(&weights, &bytes[..bytes.len() / 2]).expect("ours");
    let report = run(&plugin(), &scenario, None);
    report.assert_sound();
    let (entry, _, message) = report.load_error.as_ref().expect("refused");
    assert_eq!(*entry, "ModelInitialize");
    assert!(message.contains("model.safetensors"), "{message}");
    no_panic(&report);
}
