//! What one request in the queue costs the scheduler, which holds its lock meanwhile: to stay under 200 ns at 1 KiB of
//! text. Against a stand-in for the server whose own calls are next to free: `cargo bench -p batchstrategy`.

#[path = "../tests/host/mod.rs"]
mod host;

use std::ffi::CString;
use std::hint::black_box;

use criterion::Criterion;

use host::{Model, Request, Scheduler, State, budget};

fn include_request(criterion: &mut Criterion) {
    let budget = budget(u64::MAX);
    let state = State::new(&budget);
    let model = Model { backend: CString::from(c"rust"), state: std::ptr::from_ref(&state).cast_mut().cast() };
    let mut scheduler = Scheduler::new(&model);
    let requests = [
        ("one text of 1 KiB", Request::texts(&[1024])),
        ("a pair of 1 KiB", Request::pairs(&[512], &[512])),
        ("64 rows of 1 KiB", Request::texts(&[1024; 64])),
        ("one text of 1 MiB", Request::texts(&[1 << 20])),
    ];
    scheduler.next_payload();
    for (name, request) in &requests {
        criterion.bench_function(name, |bencher| bencher.iter(|| scheduler.include(black_box(request))));
    }
    // What the server does for each wake-up with one request in its queue.
    let queue = [Request::texts(&[1024])];
    criterion.bench_function("a scan of one request", |bencher| bencher.iter(|| scheduler.scan(black_box(&queue))));
}

fn main() {
    let mut criterion = Criterion::default().without_plots().configure_from_args();
    include_request(&mut criterion);
    criterion.final_summary();
}
