use std::sync::Barrier;

use super::*;

fn sum_of_squares(pool: &Pool, limit: usize, tasks: usize) -> usize {
    let sum = AtomicUsize::new(0);
    pool.for_each(limit, tasks, |i| {
        sum.fetch_add(i * i, Ordering::Relaxed);
    });
    sum.into_inner()
}

fn expected(tasks: usize) -> usize {
    (0..tasks).map(|i| i * i).sum()
}

#[test]
fn every_task_runs_once() {
    for threads in [1, 2, 3, 8] {
        let pool = Pool::new(threads);
        for tasks in [0, 1, 2, 7, 100, 1000] {
            for limit in [1, 2, 100] {
                assert_eq!(sum_of_squares(&pool, limit, tasks), expected(tasks));
            }
        }
    }
}

#[test]
fn helpers_take_part_and_have_names() {
    let pool = Pool::new(3);
    let all_here = Barrier::new(3);
    let names = Mutex::new(Vec::new());
    pool.for_each(3, 3, |_| {
        all_here.wait();
        lock(&names).push(std::thread::current().name().unwrap_or("").to_owned());
    });
    let names = names.into_inner().expect("no panic");
    assert_eq!(names.iter().filter(|name| name.starts_with("rust-pool-")).count(), 2, "{names:?}");
}

#[test]
fn no_more_threads_compute_than_there_are_permits() {
    let pool = Pool::new(3);
    let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    pool.for_each(8, 5, |_| {
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_micros(20));
                        now.fetch_sub(1, Ordering::SeqCst);
                    });
                }
            });
        }
    });
    assert!(most.into_inner() <= 3);
    assert_eq!(pool.inner.waiting.load(Ordering::SeqCst), 0);
}

#[test]
fn limit_bounds_a_team() {
    let pool = Pool::new(4);
    let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    pool.for_each(2, 40, |_| {
        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(200));
        now.fetch_sub(1, Ordering::SeqCst);
    });
    assert!(most.into_inner() <= 2);
}

#[test]
fn many_callers_many_small_jobs() {
    let pool = Pool::new(4);
    std::thread::scope(|scope| {
        for caller in 0..6 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..300 {
                    let team = pool.team(1 + caller % 4);
                    for job in 0..10 {
                        let tasks = (round * 7 + job * 3) % 23;
                        let sum = AtomicUsize::new(0);
                        team.for_each(tasks, |i| {
                            sum.fetch_add(i * i, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), expected(tasks));
                    }
                }
            });
        }
    });
    // A helper gives its permit back a moment after its team's end.
    let idle = Instant::now();
    while pool.inner.running.load(Ordering::SeqCst) != 0 {
        assert!(idle.elapsed() < Duration::from_secs(5), "a permit was lost");
        std::thread::yield_now();
    }
    assert!(lock(&pool.inner.state).teams.is_empty());
}

#[test]
fn nested_calls_run_inline() {
    let pool = Pool::new(2);
    let count = AtomicUsize::new(0);
    pool.for_each(2, 8, |_| {
        pool.for_each(2, 8, |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(count.into_inner(), 64);
    // A team within a team, outside of a task, with the only permit.
    let alone = Pool::new(1);
    let team = alone.team(1);
    assert_eq!(sum_of_squares(&alone, 1, 10), expected(10));
    team.for_each(1, |_| {});
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_lives() {
    let pool = Pool::new(3);
    for round in 0..50 {
        let ended = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(3, 20, |i| {
                if i == round % 20 {
                    panic!("task {i}");
                }
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }));
        let payload = result.expect_err("the panic goes on");
        assert_eq!(payload.downcast_ref::<String>(), Some(&format!("task {}", round % 20)));
        assert_eq!(ended.into_inner(), 19);
        assert_eq!(sum_of_squares(&pool, 3, 30), expected(30));
    }
}

#[test]
fn a_waiting_caller_gets_a_helpers_permit() {
    let pool = Pool::new(2);
    let (started, served) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Long work with a helper: without its leave the other caller would wait for the end of all tasks.
            let first = AtomicBool::new(true);
            pool.for_each(2, 400, |_| {
                if first.swap(false, Ordering::SeqCst) {
                    started.wait();
                }
                std::thread::sleep(Duration::from_millis(1));
            });
            assert!(served.load(Ordering::SeqCst));
        });
        started.wait();
        pool.for_each(2, 1, |_| served.store(true, Ordering::SeqCst));
    });
}

#[test]
fn dropping_the_pool_ends_its_threads() {
    for _ in 0..20 {
        let pool = Pool::new(4);
        let weak = Arc::downgrade(&pool.inner);
        assert_eq!(sum_of_squares(&pool, 4, 50), expected(50));
        drop(pool);
        assert_eq!(weak.strong_count(), 0, "a helper outlived its pool");
    }
}

#[test]
fn the_shared_pool_is_one() {
    let (a, b) = (Pool::shared(2), Pool::shared(5));
    assert!(Arc::ptr_eq(&a, &b));
    assert_eq!(a.threads(), b.threads());
}
