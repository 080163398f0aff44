//! A backend without an engine, driven by the fake host.

#[path = "../examples/null_backend.rs"]
mod null_backend;

use fake_host::{Fault, InputSpec, Placement, Plugin, Report, RequestSpec, Scenario, run, sweep, sys};

const ALL: [&str; 3] = ["EMBEDDING", "BYTE_COUNT", "ECHO"];

fn scenario() -> Scenario {
    Scenario::new("null", "embed", "/nowhere")
}

fn texts(texts: &[&str]) -> RequestSpec {
    RequestSpec::new(InputSpec::texts("TEXT", texts), &ALL)
}

fn run_sound(scenario: &Scenario) -> Report {
    let report = run(&Plugin::in_this_executable(), scenario, None);
    report.assert_sound();
    assert_eq!(report.load_error, None);
    report
}

fn assert_answers(report: &Report, number: usize, texts: &[&str]) {
    let answer = report.answer(number);
    assert_eq!(answer.error, None);
    let lengths: Vec<i32> = texts.iter().map(|text| text.len() as i32).collect();
    assert_eq!(answer.i32s("BYTE_COUNT"), lengths);
    assert_eq!(answer.strings("ECHO"), texts);
    let embedding = answer.f32s("EMBEDDING");
    assert_eq!(embedding.len(), 8 * texts.len());
    for (row, length) in embedding.chunks(8).zip(lengths) {
        assert_eq!(row[0], length as f32);
        assert!(row[1..].iter().all(|value| *value == 0.0), "{row:?}");
    }
}

#[test]
fn answers_and_reports_what_it_should() {
    let mut scenario = scenario().batch([texts(&["hello"]), texts(&["", "naïve", "🦀"])]).batch([texts(&["again"])]);
    scenario.instances = 2;
    let report = run_sound(&scenario);
    assert_answers(&report, 0, &["hello"]);
    assert_answers(&report, 1, &["", "naïve", "🦀"]);
    assert_answers(&report, 2, &["again"]);
    assert_eq!(report.answer(1).output("EMBEDDING").expect("asked for").shape, [3, 8]);
    assert_eq!(report.answer(0).parameters["instance"], "embed_0");
    assert_eq!(report.answer(2).parameters["instance"], "embed_1");
    assert_eq!(report.batch_rows, [4, 1]);
    assert!(report.outcomes.iter().all(|outcome| outcome.statistics == [true]));
    assert_eq!(report.instance_groups[0].count, 2);
    assert!(report.config.contains("TYPE_STRING"), "completed: {}", report.config);
    assert_eq!(report.metrics["null_texts{model=\"embed\"}"], [1.0, 3.0, 1.0]);
    assert_eq!(report.metrics["null_rows{model=\"embed\"}"], [4.0, 1.0]);
    assert!(report.errors_logged().is_empty(), "{:?}", report.logs);
}

#[test]
fn sends_only_what_was_asked_for() {
    let mut request = texts(&["x"]);
    request.outputs = vec!["BYTE_COUNT".to_string()];
    let report = run_sound(&scenario().batch([request]));
    assert_eq!(report.answer(0).outputs.len(), 1);
    assert_eq!(report.answer(0).i32s("BYTE_COUNT"), [1]);
}

#[test]
fn gathers_an_input_from_many_buffers() {
    let request = |size| {
        let input = InputSpec::texts("TEXT", &["hello", "", "world"]).in_pieces_of(size);
        RequestSpec::new(input, &ALL)
    };
    let report = run_sound(&scenario().batch([request(1), request(3), request(1000)]));
    for number in 0..3 {
        assert_answers(&report, number, &["hello", "", "world"]);
    }
}

#[test]
fn writes_outputs_at_odd_addresses() {
    let report = run_sound(&scenario().batch([texts(&["a", "bb"]).placed(Placement::Misaligned)]));
    assert_answers(&report, 0, &["a", "bb"]);
}

#[test]
fn one_bad_request_of_a_batch_fails_alone() {
    let bad_utf8 = RequestSpec::new(InputSpec::texts("TEXT", &[b"fine".as_slice(), b"\xff"]), &ALL);
    let mut cut = InputSpec::texts("TEXT", &["cut off"]);
    cut.buffers[0].bytes.pop();
    let mut too_many = InputSpec::texts("TEXT", &["one"]);
    too_many.shape = vec![2, 1];
    let wrong_type = InputSpec::int64("TEXT", &[1, 1], &[7]);
    let other_input = InputSpec::texts("OTHER", &["x"]);
    let mut negative = InputSpec::texts("TEXT", &["x"]);
    negative.shape = vec![-1, 1];
    let report = run_sound(&scenario().batch([
        texts(&["before"]),
        bad_utf8,
        RequestSpec::new(cut, &ALL),
        RequestSpec::new(too_many, &ALL),
        RequestSpec::new(wrong_type, &ALL),
        RequestSpec::new(other_input, &ALL),
        RequestSpec::new(negative, &ALL),
        texts(&["!fail"]),
        texts(&["!forget"]),
        texts(&["gone"]).cancelled(),
        texts(&["after"]),
    ]));
    assert_answers(&report, 0, &["before"]);
    assert_answers(&report, 10, &["after"]);
    for number in 1..8 {
        assert_eq!(report.answer(number).code(), Some(sys::TRITONSERVER_ERROR_INVALID_ARG));
    }
    assert_eq!(report.answer(8).code(), Some(sys::TRITONSERVER_ERROR_INTERNAL));
    assert_eq!(report.answer(9).code(), Some(sys::TRITONSERVER_ERROR_CANCELLED));
    assert_eq!(report.batch_rows, [4], "two good ones, one that fails late, one forgotten");
    assert_eq!(
        report.answer(1).error.as_ref().expect("an error").1,
        "input 'TEXT', row 1: not valid UTF-8 from byte 0 on"
    );
}

#[test]
fn reads_numbers_of_both_widths() {
    let with = |input| texts(&["x"]).input(input);
    let mut odd = InputSpec::int64("SCALE", &[2], &[1, 2]);
    odd.buffers[0].bytes.pop();
    let report = run_sound(&scenario().batch([
        with(InputSpec::int64("SCALE", &[2], &[i64::MIN, 2])),
        with(InputSpec::int32("SCALE", &[2], &[i32::MIN, 2]).in_pieces_of(3)),
        with(odd),
    ]));
    assert_answers(&report, 0, &["x"]);
    assert_answers(&report, 1, &["x"]);
    assert_eq!(report.answer(2).code(), Some(sys::TRITONSERVER_ERROR_INVALID_ARG));
}

#[test]
fn a_panic_fails_what_is_unanswered_and_nothing_else() {
    let scenario =
        scenario().batch([texts(&["done"]), texts(&["!panic"]), texts(&["behind it"])]).batch([texts(&["next"])]);
    let report = run_sound(&scenario);
    assert_answers(&report, 0, &["done"]);
    for number in 1..3 {
        let (code, message) = report.answer(number).error.clone().expect("an error");
        assert_eq!(code, sys::TRITONSERVER_ERROR_INTERNAL);
        assert_eq!(message, "panic: asked to by a text");
    }
    assert_answers(&report, 3, &["next"]);
    assert_eq!(report.errors_logged().len(), 1, "{:?}", report.logs);
}

#[test]
fn a_panic_at_load_is_a_load_error() {
    let config = r#"{"name":"embed","input":[],"parameters":{"panic_at_load":{"string_value":"1"}}}"#;
    let report = run(&Plugin::in_this_executable(), &scenario().config(config), None);
    report.assert_sound();
    let (entry, code, message) = report.load_error.expect("an error");
    assert_eq!((entry, code), ("ModelInitialize", sys::TRITONSERVER_ERROR_INTERNAL));
    assert_eq!(message, "panic in ModelInitialize: asked to at load");
}

#[test]
fn error_responses_of_a_cached_model_cannot_be_cached() {
    let config = r#"{"name":"embed","input":[],"response_cache":{"enable":true}}"#;
    let scenario = scenario().config(config).batch([
        texts(&["!fail"]),
        texts(&["fine"]),
        texts(&["gone"]).cancelled(),
        texts(&["!forget"]),
        texts(&["!panic"]),
        texts(&["behind it"]),
    ]);
    let check = |report: &Report| {
        for outcome in &report.outcomes {
            let answer = &outcome.answers[0];
            let cacheable = answer.outputs.iter().all(|output| output.bytes.is_some());
            assert_eq!(answer.error.is_none(), cacheable, "{answer:?}");
        }
    };
    let report = run_sound(&scenario);
    check(&report);
    assert_answers(&report, 1, &["fine"]);
    // Also when one call of the host fails on the way; the server answers what Execute refuses.
    sweep(&Plugin::in_this_executable(), &scenario, sys::TRITONSERVER_ERROR_INTERNAL, check);
}

#[test]
fn every_call_of_the_host_may_fail() {
    let mut scenario = scenario()
        .batch([
            texts(&["one"]),
            texts(&["two", "three"]).placed(Placement::Misaligned),
            texts(&["gone"]).cancelled(),
            texts(&["!fail"]),
            texts(&["!forget"]),
            texts(&["last"]).input(InputSpec::int32("SCALE", &[1], &[3])),
        ])
        .batch([texts(&["!panic"])])
        .batch([RequestSpec::new(InputSpec::texts("TEXT", &["in", "pieces"]).in_pieces_of(4), &ALL)]);
    scenario.instances = 2;
    for code in
        [sys::TRITONSERVER_ERROR_INTERNAL, sys::TRITONSERVER_ERROR_UNAVAILABLE, sys::TRITONSERVER_ERROR_INVALID_ARG]
    {
        let mut runs = 0;
        sweep(&Plugin::in_this_executable(), &scenario, code, |report| {
            runs += 1;
            // Panics that nobody asked for.
            let unasked = |text: &&str| text.contains("panic") && !text.contains("asked to");
            let panics: Vec<&str> = report.errors_logged().into_iter().filter(unasked).collect();
            assert!(panics.is_empty(), "{:?}: {panics:?}", report.failed_call);
        });
        assert!(runs > 100, "only {runs} runs");
    }
}

fn decoupled_scenario() -> Scenario {
    scenario().config(r#"{"name":"embed","input":[],"model_transaction_policy":{"decoupled":true}}"#).batch([
        texts(&["one", "", "three"]).decoupled(),
        texts(&["alone"]).decoupled().placed(Placement::Misaligned),
        texts(&["is", "sent", "this", "is", "not"]).decoupled().cancelled_after(2),
        texts(&["x", "!panic"]).decoupled(),
    ])
}

#[test]
fn a_decoupled_model_answers_in_parts_and_ends_each_request_once() {
    let report = run_sound(&decoupled_scenario());
    let echoes = |number: usize| -> Vec<String> {
        let outcome = &report.outcomes[number];
        outcome.parts.iter().chain(&outcome.answers).flat_map(|answer| answer.strings("ECHO")).collect()
    };
    assert_eq!(echoes(0), ["one", "", "three"]);
    assert_eq!((report.outcomes[0].parts.len(), report.outcomes[0].statistics.as_slice()), (2, [true].as_slice()));
    assert_eq!(echoes(1), ["alone"]);
    assert!(report.outcomes[1].parts.is_empty());
    assert_eq!(report.outcomes[2].parts.len(), 2, "what was sent before the client went away");
    assert_eq!(report.answer(2).code(), Some(sys::TRITONSERVER_ERROR_CANCELLED));
    assert_eq!(report.answer(3).code(), Some(sys::TRITONSERVER_ERROR_INTERNAL));
}

#[test]
fn every_call_may_fail_between_the_parts_of_an_answer() {
    for code in [sys::TRITONSERVER_ERROR_INTERNAL, sys::TRITONSERVER_ERROR_UNAVAILABLE] {
        sweep(&Plugin::in_this_executable(), &decoupled_scenario(), code, |report| {
            for outcome in &report.outcomes {
                assert!(outcome.parts.iter().all(|part| part.error.is_none()), "{:?}", report.failed_call);
            }
        });
    }
}

#[test]
fn states_are_dropped_when_they_cannot_be_stored() {
    let plugin = Plugin::in_this_executable();
    let clean = run(&plugin, &scenario(), None);
    for name in ["TRITONBACKEND_BackendSetState", "TRITONBACKEND_ModelSetState", "TRITONBACKEND_ModelInstanceSetState"]
    {
        let call = clean.calls.iter().position(|call| *call == name).expect("called");
        let code = sys::TRITONSERVER_ERROR_UNSUPPORTED;
        let report = run(&plugin, &scenario(), Some(Fault { call, code }));
        // The model's metrics are gone, or they would be among the leaks.
        report.assert_sound();
        assert_eq!(report.load_error.expect("an error").1, code);
    }
}

#[test]
fn gpu_memory_without_a_usable_driver_fails_only_its_request() {
    let gpu_input = RequestSpec::new(InputSpec::texts("TEXT", &["x"]).on_gpu(), &ALL);
    let report = run_sound(&scenario().batch([
        texts(&["before"]),
        gpu_input,
        texts(&["x"]).placed(Placement::Gpu),
        texts(&["after"]),
    ]));
    assert_answers(&report, 0, &["before"]);
    assert_answers(&report, 3, &["after"]);
    for number in 1..3 {
        let (_, message) = report.answer(number).error.clone().expect("an error");
        // A machine with a GPU has a driver, which does not know these pointers.
        assert!(message.contains("libcuda.so.1") || message.contains("cuMemcpy"), "{message}");
    }
}

/// The server counts the users of a series for each family object: were there one for each model, the old model of a
/// reload would free the series that the new one writes to.
#[test]
fn a_reload_shares_metric_families_and_series() {
    let mut scenario = scenario().batch([texts(&["x"])]);
    scenario.reload = true;
    let report = run_sound(&scenario);
    assert_answers(&report, 0, &["x"]);
    assert_answers(&report, 1, &["x"]);
    assert_eq!(report.metrics["null_texts{model=\"embed\"}"], [1.0, 1.0]);
    let families = report.calls.iter().filter(|call| **call == "TRITONSERVER_MetricFamilyNew");
    assert_eq!(families.count(), 3);
    sweep(&Plugin::in_this_executable(), &scenario, sys::TRITONSERVER_ERROR_INTERNAL, |_| {});
}
