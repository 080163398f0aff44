//! The five functions, called as Triton's scheduler calls them.

mod host;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::CString;
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use host::*;
use triton_abi::TokenBudget;
use triton_abi::batcher::{BatchStrategy, QueuedRequest, entry};

/// `FAIL`, `LOG` and the panic hook are the process's.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts the allocations of each thread.
struct Counting;

// SAFETY: as the system's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A model of the backend `rust` with this budget; `state` outlives it.
fn model(state: &State) -> Model {
    Model { backend: CString::from(c"rust"), state: std::ptr::from_ref(state).cast_mut().cast() }
}

/// Runs `test` with a scheduler of a model with a budget of `tokens`.
fn with_budget(tokens: u64, test: impl FnOnce(&mut Scheduler)) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let budget = budget(tokens);
    let state = State::new(&budget);
    let mut scheduler = Scheduler::new(&model(&state));
    assert!(!scheduler.batcher.is_null());
    test(&mut scheduler);
}

fn requests(count: usize, length: u64) -> Vec<Request> {
    (0..count).map(|_| Request::texts(&[length])).collect()
}

#[test]
fn a_queue_is_cut_where_the_budget_ends() {
    // 12 tokens each: 10 of text and 2 special ones.
    with_budget(36, |scheduler| {
        let queue = requests(12, 40);
        let mut batches = Vec::new();
        let mut rest = &queue[..];
        while !rest.is_empty() {
            scheduler.next_payload();
            let count = scheduler.scan(rest);
            batches.push(count);
            rest = &rest[count..];
        }
        assert_eq!(batches, [3, 3, 3, 3]);
    });
    with_budget(12, |scheduler| {
        let queue = requests(3, 40);
        for start in 0..3 {
            scheduler.next_payload();
            assert_eq!(scheduler.scan(&queue[start..]), 1);
        }
    });
}

#[test]
fn rows_pairs_and_ids_are_all_counted() {
    with_budget(100, |scheduler| {
        let cost = |scheduler: &mut Scheduler, request: Request| {
            // How much room is left in a batch after it: ids of [1, n] cost n.
            let first = Request::ids(&[1, 0]);
            let room = (0..=100).rev().find(|&n| {
                scheduler.next_payload();
                scheduler.begin();
                scheduler.include(&first) && scheduler.include(&request) && scheduler.include(&Request::ids(&[1, n]))
            });
            100 - room.expect("it fits alone")
        };
        assert_eq!(cost(scheduler, Request::texts(&[40])), 12);
        assert_eq!(cost(scheduler, Request::texts(&[40, 40, 0])), 26, "all rows");
        assert_eq!(cost(scheduler, Request::pairs(&[40], &[80])), 32, "both texts");
        assert_eq!(cost(scheduler, Request::ids(&[2, 8])), 16, "ids exactly, and once beside their mask");
        assert_eq!(cost(scheduler, Request::texts(&[])), 0);
    });
}

#[test]
fn one_long_text_counts_as_much_as_it_will_have() {
    // It is cut at 512.
    with_budget(600, |scheduler| {
        scheduler.next_payload();
        let queue = [Request::texts(&[10 << 20]), Request::texts(&[340]), Request::texts(&[0])];
        assert_eq!(scheduler.scan(&queue), 2, "512 + 87, and no room for 2");
    });
}

/// T2: a refused first request, or an error, spins the scheduler for ever.
#[test]
fn the_first_request_is_always_included() {
    with_budget(1, |scheduler| {
        let queue = requests(3, 4000);
        for start in 0..3 {
            scheduler.next_payload();
            assert_eq!(scheduler.scan(&queue[start..]), 1);
        }
        // A payload that keeps growing, and is beyond its budget.
        let more = requests(3, 4000);
        for start in 0..3 {
            assert_eq!(scheduler.scan(&more[start..]), 1);
        }
    });
}

/// T1: a payload that waits for an instance grows by scans that look like new batches.
#[test]
fn a_growing_payload_has_one_budget() {
    with_budget(48, |scheduler| {
        let queue = requests(12, 40);
        scheduler.next_payload();
        assert_eq!(scheduler.scan(&queue[..2]), 2);
        assert_eq!(scheduler.scan(&queue[2..8]), 2, "24 of 48 are left");
        assert_eq!(scheduler.scan(&queue[4..8]), 1, "the first only");
        scheduler.next_payload();
        assert_eq!(scheduler.scan(&queue[5..]), 4);
    });
}

#[test]
fn what_the_server_does_not_tell_costs_nothing() {
    with_budget(12, |scheduler| {
        let queue = requests(3, 40);
        scheduler.next_payload();
        FAIL.store(true, Ordering::Relaxed);
        let included = scheduler.scan(&queue);
        FAIL.store(false, Ordering::Relaxed);
        assert_eq!(included, 3);
    });
}

#[test]
fn only_models_of_ours_are_batched_by_tokens() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let budget = budget(1);
    let mine = State::new(&budget);
    let other_version = State { version: 2, ..State::new(&budget) };
    let other_state = State { magic: [7; 8], ..State::new(&budget) };
    let nobody = Model { backend: CString::from(c"python"), state: std::ptr::from_ref(&mine).cast_mut().cast() };
    let no_state = Model { backend: CString::from(c"rust"), state: null_mut() };
    for model in [nobody, no_state, model(&other_version), model(&other_state)] {
        LOG.lock().expect("no panic under it").clear();
        let mut scheduler = Scheduler::new(&model);
        assert!(scheduler.batcher.is_null());
        assert!(LOG.lock().expect("no panic under it").iter().any(|line| line.contains("no token budget")));
        scheduler.next_payload();
        assert_eq!(scheduler.scan(&requests(5, 4000)), 5, "as without the library");
    }
}

/// The model loads all the same.
#[test]
fn a_server_that_fails_at_load_is_without_the_library() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    LOG.lock().expect("no panic under it").clear();
    let budget = budget(1);
    let state = State::new(&budget);
    FAIL.store(true, Ordering::Relaxed);
    let scheduler = Scheduler::new(&model(&state));
    FAIL.store(false, Ordering::Relaxed);
    assert!(scheduler.batcher.is_null());
    assert!(LOG.lock().expect("no panic under it").iter().any(|line| line.contains("injected")));
}

#[test]
fn null_is_tolerated_everywhere() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut included = false;
    let mut userp = std::ptr::dangling_mut();
    let mut batcher = std::ptr::dangling_mut();
    let request = Request::texts(&[1]);
    let request = std::ptr::from_ref(&request).cast_mut().cast();
    // SAFETY: NULL where the library allows it, valid pointers elsewhere.
    unsafe {
        assert!(TRITONBACKEND_ModelBatcherInitialize(&mut batcher, null_mut()).is_null());
        assert!(batcher.is_null());
        assert!(TRITONBACKEND_ModelBatcherInitialize(null_mut(), null_mut()).is_null());
        assert!(TRITONBACKEND_ModelBatchInitialize(null(), &mut userp).is_null());
        assert!(userp.is_null());
        assert!(TRITONBACKEND_ModelBatchInitialize(null(), null_mut()).is_null());
        assert!(TRITONBACKEND_ModelBatchIncludeRequest(request, null_mut(), &mut included).is_null());
        assert!(included);
        assert!(TRITONBACKEND_ModelBatchIncludeRequest(null_mut(), null_mut(), null_mut()).is_null());
        assert!(TRITONBACKEND_ModelBatchFinalize(null_mut()).is_null());
        assert!(TRITONBACKEND_ModelBatcherFinalize(null_mut()).is_null());
    }
}

/// T5: the scheduler's thread may look at the batcher once more after it is finalized, and never gives the last userp
/// back.
#[test]
fn a_finalized_batcher_can_still_be_used() {
    with_budget(24, |scheduler| {
        scheduler.next_payload();
        // SAFETY: what the library gave.
        assert!(unsafe { TRITONBACKEND_ModelBatcherFinalize(scheduler.batcher) }.is_null());
        assert_eq!(scheduler.scan(&requests(4, 40)), 2);
        scheduler.next_payload();
        assert_eq!(scheduler.scan(&requests(4, 40)), 2);
    });
}

#[test]
fn a_panic_includes_the_request() {
    struct Panics;
    impl BatchStrategy for Panics {
        fn cost(_: &TokenBudget, _: &QueuedRequest<'_>) -> u64 {
            panic!("no cost");
        }
    }
    with_budget(24, |scheduler| {
        LOG.lock().expect("no panic under it").clear();
        let request = Request::texts(&[1]);
        let request = std::ptr::from_ref(&request).cast_mut().cast();
        let mut included = false;
        // SAFETY: a batcher serves as its own userp.
        let error = unsafe { entry::include_request::<Panics>(request, scheduler.batcher.cast(), &mut included) };
        assert!(error.is_null() && included);
        assert!(LOG.lock().expect("no panic under it").iter().any(|line| line == "panic: no cost"));
    });
}

#[test]
fn nothing_is_allocated_while_batches_are_formed() {
    with_budget(100, |scheduler| {
        let queue = requests(64, 40);
        let pair = Request::pairs(&[40; 8], &[40; 8]);
        scheduler.next_payload();
        scheduler.scan(&queue);
        let before = ALLOCATIONS.with(Cell::get);
        for _ in 0..100 {
            scheduler.next_payload();
            scheduler.scan(&queue);
            scheduler.scan(std::slice::from_ref(&pair));
        }
        assert_eq!(ALLOCATIONS.with(Cell::get), before);
    });
}
