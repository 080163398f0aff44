//! The same backend, built as a cdylib and opened as the server opens it.

use fake_host::{InputSpec, Plugin, RequestSpec, Scenario, sweep, sys};

#[test]
fn an_opened_plugin_survives_every_failing_call() {
    let plugin = Plugin::built("examples/libnull_backend.so");
    let request = RequestSpec::new(InputSpec::texts("TEXT", &["a", "bb"]), &["EMBEDDING"]);
    let scenario = Scenario::new("null", "embed", "/nowhere").batch([request]);
    let mut answered = 0;
    sweep(&plugin, &scenario, sys::TRITONSERVER_ERROR_INTERNAL, |report| {
        answered += report.outcomes.iter().filter(|o| o.answers[0].error.is_none()).count();
    });
    assert!(answered > 10, "{answered}");
}
