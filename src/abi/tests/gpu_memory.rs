//! Inputs and outputs in GPU memory, with a stand-in for the CUDA driver. One test, because the stand-in stays in the
//! process and counts.

#[path = "../examples/null_backend.rs"]
mod null_backend;

use fake_host::{FakeCuda, InputSpec, Placement, Plugin, RequestSpec, Scenario, run, sweep, sys};

const ALL: [&str; 3] = ["EMBEDDING", "BYTE_COUNT", "ECHO"];
const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_FAILED: i32 = 719;

#[test]
fn tensors_may_lie_in_gpu_memory() {
    let directory = std::env::temp_dir().join(format!("fake-cuda-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("writable temporary directory");
    let cuda = FakeCuda::load(&directory);
    std::fs::remove_dir_all(&directory).expect("still ours");

    let plugin = Plugin::in_this_executable();
    let input = || InputSpec::texts("TEXT", &["on", "", "the GPU"]);
    let request = |input| RequestSpec::new(input, &ALL).placed(Placement::Gpu);
    let scenario = Scenario::new("null", "embed", "/nowhere").batch([
        request(input().on_gpu()),
        request(input().in_pieces_of(5).on_gpu()),
        RequestSpec::new(input(), &ALL),
    ]);
    let report = run(&plugin, &scenario, None);
    report.assert_sound();
    for number in 0..3 {
        let answer = report.answer(number);
        assert_eq!(answer.error, None);
        assert_eq!(answer.i32s("BYTE_COUNT"), [2, 0, 7]);
        assert_eq!(answer.strings("ECHO"), ["on", "", "the GPU"]);
        assert_eq!(answer.f32s("EMBEDDING")[16..18], [7.0, 0.0]);
    }
    // 21 bytes: one piece and then five; three outputs each time.
    assert_eq!(cuda.copies(), 1 + 3 + 5 + 3);

    for (error, code) in
        [(OUT_OF_MEMORY, sys::TRITONSERVER_ERROR_UNAVAILABLE), (LAUNCH_FAILED, sys::TRITONSERVER_ERROR_INTERNAL)]
    {
        cuda.fail_next(error);
        let report = run(&plugin, &scenario, None);
        report.assert_sound();
        assert_eq!(report.answer(0).code(), Some(code));
        assert_eq!(report.answer(1).error, None);
    }

    sweep(&plugin, &scenario, sys::TRITONSERVER_ERROR_INTERNAL, |_| {});
}
