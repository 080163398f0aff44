//! Conversations: sessions live from batch to batch, and no failing call of the host spoils more than its request.

use fake_host::{InputSpec, Plugin, RequestSpec, run, sweep, sys};

use super::{fake_cuda, model, no_panic, plugin, scenario, texts};

const START: u32 = sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START;
const END: u32 = sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_END;
const OLDEST: &str = r#","sequence_batching":{"oldest":{"max_candidate_sequences":4}}"#;
const DIRECT: &str = r#","sequence_batching":{"direct":{},"control_input":[
    {"name":"READY","control":[{"kind":"CONTROL_SEQUENCE_READY","int32_false_true":[0,1]}]},
    {"name":"ID","control":[{"kind":"CONTROL_SEQUENCE_CORRID","data_type":"TYPE_UINT64"}]}]}"#;

fn turn(text: &str) -> RequestSpec {
    texts(&[text], &["EMBEDDING", "TOKEN_COUNT"])
}

/// A request as the direct strategy hands it over.
fn with_ready(request: RequestSpec, ready: bool) -> RequestSpec {
    request.input(InputSpec::int32("READY", &[1, 1], &[i32::from(ready)]))
}

#[test]
fn sessions_live_from_batch_to_batch_and_end() {
    fake_cuda();
    let (_directory, scenario) = scenario(model::write_encoder, OLDEST);
    let scenario = scenario
        .batch([turn("a good film").in_sequence(7, START), turn("bad").in_named_sequence("7", START)])
        .batch([turn("the book").in_named_sequence("7", 0), turn("").in_sequence(7, 0)])
        .batch([turn("not").in_sequence(7, END), turn("is").in_sequence(7, START)])
        .batch([turn("good").in_sequence(7, 0), turn("good").in_sequence(8, 0)])
        .batch([turn("a film [SEP] book").in_sequence(9, START | END), turn("a film").in_sequence(10, START)])
        .batch([turn("book").in_sequence(10, END)]);
    let report = run(&plugin(), &scenario, None);
    report.assert_sound();
    let counts: Vec<_> = (0..11)
        .map(|number| report.answer(number))
        .map(|answer| answer.code().map_or_else(|| answer.i32s("TOKEN_COUNT")[0], |code| -(code as i32)))
        .collect();
    let lost = -(sys::TRITONSERVER_ERROR_UNAVAILABLE as i32);
    assert_eq!(counts, [5, 3, 6, 6, 8, 3, 5, lost, 6, 4, 6]);
    assert_eq!(report.answer(8).f32s("EMBEDDING"), report.answer(10).f32s("EMBEDDING"), "the turns in one text");
    // Also those that never end go with their instance.
    let held: f64 = report.metrics.iter().filter(|(name, _)| name.contains("rust_sessions")).flat_map(|(_, v)| v).sum();
    assert_eq!(held, 0.0, "{:?}", report.metrics);
}

#[test]
fn a_conversation_survives_every_failing_call() {
    fake_cuda();
    // Sessions of one turn: what a failing call does to a session is not counted against its later turns.
    let (_directory, scenario) = scenario(model::write_encoder, DIRECT);
    let scenario = scenario
        .batch([
            with_ready(turn("a good film").in_sequence(1, START), true),
            with_ready(RequestSpec::new(InputSpec::texts("TEXT", &[""]), &[]), false),
            with_ready(turn("bad").in_sequence(u64::MAX, START | END), true),
            with_ready(turn("bad").in_named_sequence("x", START), true),
        ])
        .batch([
            with_ready(RequestSpec::new(InputSpec::texts("TEXT", &[b"\xff"]), &[]).in_sequence(2, START), true),
            turn("a warm-up sample has neither"),
            with_ready(turn("gone").in_sequence(3, START).cancelled(), true),
        ]);
    let clean = run(&plugin(), &scenario, None);
    assert_eq!(clean.answer(0).i32s("TOKEN_COUNT"), [5]);
    assert!(clean.answer(1).error.is_none() && clean.answer(1).outputs.is_empty(), "an empty slot gets nothing");
    assert_eq!(clean.answer(2).i32s("TOKEN_COUNT"), [3]);
    let (code, message) = clean.answer(3).error.as_ref().expect("a string");
    assert_eq!(*code, sys::TRITONSERVER_ERROR_INVALID_ARG);
    assert!(message.contains("CORRID") && message.contains("a string"), "{message}");
    assert_eq!(clean.answer(4).code(), Some(sys::TRITONSERVER_ERROR_INVALID_ARG));
    assert!(clean.answer(5).error.is_none());
    assert_eq!(clean.answer(6).code(), Some(sys::TRITONSERVER_ERROR_CANCELLED));
    assert_eq!(clean.batch_rows, [2, 1], "what fills a slot is not computed");

    for code in [sys::TRITONSERVER_ERROR_INTERNAL, sys::TRITONSERVER_ERROR_UNAVAILABLE] {
        sweep(&plugin(), &scenario, code, no_panic);
    }
}

#[test]
fn direct_without_ready_is_refused_at_load() {
    let refused = |plugin: Plugin, section: &str| {
        let (_directory, scenario) = scenario(model::write_encoder, section);
        let report = run(&plugin, &scenario, None);
        report.assert_sound();
        report.load_error.expect("refused").2
    };
    assert!(refused(plugin(), r#","sequence_batching":{"direct":{}}"#).contains("CONTROL_SEQUENCE_READY"));
}
