use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::*;
use crate::error;

/// Answers a row of tokens `[id, ..]` with `[id, number of tokens]`; id 13 panics, id 14 is an error.
#[derive(Default)]
struct Fake {
    /// The lengths of the rows of each pass.
    passes: Mutex<Vec<Vec<usize>>>,
    now: AtomicUsize,
    most: AtomicUsize,
    /// While this holds, passes do not end.
    hold: AtomicBool,
    slow: bool,
}

struct FakeEngine(Arc<Fake>);

impl Engine for FakeEngine {
    fn runner(&self) -> error::Result<Box<dyn Runner>> {
        Ok(Box::new(FakeEngine(Arc::clone(&self.0))))
    }

    fn shares_passes(&self) -> bool {
        true
    }

    fn best_pass_tokens(&self) -> usize {
        1024
    }

    fn describe(&self) -> String {
        String::new()
    }
}

impl Runner for FakeEngine {
    fn run(&mut self, batch: &PackedBatch, outputs: &mut [Output<'_>]) -> error::Result<()> {
        let fake = &self.0;
        fake.most.fetch_max(fake.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let lengths: Vec<usize> = (0..batch.sequences()).map(|i| batch.range(i).len()).collect();
        if fake.slow {
            std::thread::sleep(Duration::from_micros(20));
        }
        fake.passes.lock().unwrap().push(lengths);
        while fake.hold.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        fake.now.fetch_sub(1, Ordering::SeqCst);
        assert!(!batch.input_ids.contains(&13), "thirteen");
        if batch.input_ids.contains(&14) {
            return Err(error::Error::unavailable("fourteen"));
        }
        for output in outputs {
            let range = batch.range(output.sequence);
            let Slot::Host(slot) = &mut output.slot else { panic!("host memory") };
            slot[0] = batch.input_ids[range.start] as f32;
            slot[1] = range.len() as f32;
        }
        Ok(())
    }
}

fn passes(fake: Fake, max_batch_tokens: usize) -> (Arc<Fake>, Passes) {
    let fake = Arc::new(fake);
    let engine = Arc::new(FakeEngine(Arc::clone(&fake)));
    (fake, Passes::new(engine, Arc::new(Pool::new(4)), max_batch_tokens))
}

fn row(id: u32, len: usize) -> Row {
    let tokens = Tokens { input_ids: vec![id; len], token_type_ids: vec![0; len], truncated: false };
    Row { tokens: Arc::new(tokens), values: Arc::new([(Value::Embedding, 2)]) }
}

/// Runs a call of these rows `(id, length)` to its end: the values of each.
fn run(passes: &Passes, rows: &[(u32, usize)]) -> Vec<Result<Vec<f32>>> {
    let mut call = passes.enter(rows.iter().map(|&(id, len)| row(id, len)).collect());
    let mut values: Vec<Option<Result<Vec<f32>>>> = rows.iter().map(|_| None).collect();
    while let Some(done) = call.next(&|_| {}) {
        for done in done {
            let first = values[done.row].replace(done.values.map(|values| values.to_vec()));
            assert!(first.is_none(), "a row is done once");
        }
    }
    values.into_iter().map(|values| values.expect("every row is done")).collect()
}

/// Waits until so many passes have begun.
fn until_passes(fake: &Fake, count: usize) {
    while fake.passes.lock().unwrap().len() < count {
        std::thread::yield_now();
    }
}

/// Waits until so many rows wait.
fn until_waiting(passes: &Passes, rows: usize) {
    while passes.lock().waiting.len() != rows {
        std::thread::yield_now();
    }
}

fn is_empty(passes: &Passes) -> bool {
    let state = passes.lock();
    state.waiting.is_empty() && state.calls.is_empty() && (state.leaders, state.long_passes) == (0, 0)
}

#[test]
fn one_call_runs_its_rows_in_passes_of_the_budget_shortest_first() {
    let (fake, passes) = passes(Fake::default(), 100);
    let values = run(&passes, &[(1, 60), (2, 10), (3, 150), (4, 30), (5, 50)]);
    let values: Vec<Vec<f32>> = values.into_iter().map(Result::unwrap).collect();
    assert_eq!(values, [[1., 60.], [2., 10.], [3., 150.], [4., 30.], [5., 50.]]);
    assert_eq!(*fake.passes.lock().unwrap(), [vec![10, 30, 50], vec![60], vec![150]]);
    assert!(run(&passes, &[]).is_empty());
    assert!(is_empty(&passes));
}

#[test]
fn rows_of_all_calls_meet_in_one_pass_while_others_compute() {
    let (fake, passes) = passes(Fake { hold: AtomicBool::new(true), ..Fake::default() }, 100);
    std::thread::scope(|scope| {
        for id in 1..=LEADERS {
            scope.spawn(|| run(&passes, &[(1, 5)]));
            until_passes(&fake, id);
        }
        for id in 0..4 {
            scope.spawn(|| assert_eq!(*run(&passes, &[(7, 9)])[0].as_ref().unwrap(), [7., 9.]));
            until_waiting(&passes, id + 1);
        }
        fake.hold.store(false, Ordering::SeqCst);
    });
    assert_eq!(fake.passes.lock().unwrap()[LEADERS..], [vec![9; 4]]);
    assert_eq!(fake.most.load(Ordering::SeqCst), LEADERS);
    assert!(is_empty(&passes));
}

#[test]
fn what_goes_wrong_in_a_pass_is_said_to_its_rows_alone() {
    let (_, passes) = passes(Fake::default(), 10);
    let values = run(&passes, &[(1, 4), (13, 10), (14, 9), (2, 5)]);
    assert_eq!(*values[0].as_ref().unwrap(), [1., 4.]);
    assert_eq!(*values[3].as_ref().unwrap(), [2., 5.]);
    let text = |i: usize| values[i].as_ref().unwrap_err().to_string();
    assert!(text(1).contains("panic in the encoder: thirteen"), "{}", text(1));
    assert!(text(2).contains("fourteen"), "{}", text(2));
    assert!(is_empty(&passes));
    assert_eq!(passes.lock().idle.len(), 0, "the runner that panicked is not used again");
    assert_eq!(*run(&passes, &[(3, 5)])[0].as_ref().unwrap(), [3., 5.]);
    assert_eq!(passes.lock().idle.len(), 1);
}

#[test]
fn a_panic_in_the_leaders_own_code_leaves_the_others_their_answers() {
    let (_, passes) = passes(Fake::default(), 100);
    let outcome = std::thread::scope(|scope| {
        let leader = || {
            let mut call = passes.enter(vec![row(1, 5)]);
            call.next(&|_| panic!("in the metrics"))
        };
        scope.spawn(leader).join()
    });
    assert!(outcome.is_err());
    assert!(is_empty(&passes), "the call and its pass were taken back");
    assert_eq!(*run(&passes, &[(2, 5)])[0].as_ref().unwrap(), [2., 5.]);
}

#[test]
fn rows_that_are_withdrawn_do_not_run_and_their_call_does_not_wait_for_them() {
    let (fake, passes) = passes(Fake::default(), 10);
    let mut call = passes.enter((0..4).map(|i| row(i, 10)).collect());
    let mut done: Vec<usize> = call.next(&|_| {}).unwrap().iter().map(|done| done.row).collect();
    call.withdraw(|i| i == 1 || i == 2);
    while let Some(more) = call.next(&|_| {}) {
        done.extend(more.iter().map(|done| done.row));
    }
    assert_eq!(done, [0, 3]);
    drop(call);
    drop(passes.enter(vec![row(1, 10)]));
    assert_eq!(fake.passes.lock().unwrap().len(), 2);
    assert!(is_empty(&passes));
}

/// A state with these waiting rows, each of a call of its own, all of which came at the same time.
fn waiting(lengths: &[usize]) -> State {
    let mut state = State::default();
    lengths.iter().for_each(|&len| arrive(&mut state, len));
    state
}

fn arrive(state: &mut State, len: usize) {
    let number = state.next_call;
    state.next_call += 1;
    state.calls.insert(number, Member { waiting: 1, ..Member::default() });
    state.waiting.insert((state.work + AGE * len as u64, number, 0), row(0, len));
}

/// The lengths of the next pass; its long rows run until `long_passes` is set back.
fn choose(state: &mut State, max_batch_tokens: usize) -> Vec<usize> {
    let (rows, _) = state.choose(max_batch_tokens, LONG_TOKENS);
    rows.iter().map(|(_, row)| row.tokens.input_ids.len()).collect()
}

#[test]
fn long_rows_run_alone_and_short_ones_beside_and_after_them() {
    let mut state = waiting(&[500, 300, 20, 30, 500]);
    assert_eq!(choose(&mut state, 1024), [20, 30]);
    assert_eq!(choose(&mut state, 1024), [300], "no more than half of a pass");
    arrive(&mut state, 40);
    assert_eq!(choose(&mut state, 1024), [40], "long ones run already");
    arrive(&mut state, 50);
    state.long_passes = 0;
    state.last_was_long = true;
    assert_eq!(choose(&mut state, 1024), [50], "long ones ran just now");
    assert_eq!(choose(&mut state, 1024), [500]);
    assert_eq!(choose(&mut state, 1024), [500], "nothing else waits");
    assert_eq!(choose(&mut state, 1024), [0; 0]);
}

#[test]
fn a_call_that_is_alone_fills_its_passes_with_long_rows() {
    let (fake, passes) = passes(Fake::default(), 1024);
    run(&passes, &[(1, 500), (2, 500), (3, 500), (4, 20)]);
    assert_eq!(*fake.passes.lock().unwrap(), [vec![20], vec![500, 500], vec![500]]);
}

#[test]
fn a_long_row_is_overtaken_only_by_what_comes_while_it_is_not_due() {
    // More short rows than a pass can hold come before each pass, for ever.
    let mut state = waiting(&[500]);
    let due = AGE * 500;
    let (mut before, mut overtaken) = (0, 0);
    loop {
        before += if state.work + AGE * 30 < due { 40 * 30 } else { 0 };
        (0..40).for_each(|_| arrive(&mut state, 30));
        let pass = choose(&mut state, 1024);
        if pass.contains(&500) {
            break;
        }
        overtaken += pass.iter().sum::<usize>();
        assert!(overtaken < 100_000, "starved");
    }
    // What was due before it, and what filled up the last of those passes.
    assert!(overtaken <= before + 1024, "{overtaken}, {before}");
}

#[test]
fn long_rows_that_never_end_do_not_starve_short_ones_nor_each_other() {
    let mut state = waiting(&[500; 50]);
    let mut turns = Vec::new();
    for _ in 0..600 {
        arrive(&mut state, 500);
        arrive(&mut state, 10);
        state.long_passes = 0;
        turns.push(choose(&mut state, 1024)[0]);
    }
    assert!(turns.windows(2).all(|pair| pair != [500, 500]), "short ones are served in between");
    let long = turns[500..].iter().filter(|&&len| len == 500).count();
    assert_eq!(long, 50, "once they are due, every second pass is of long rows");
}

#[test]
fn many_threads_lose_nothing_and_mix_nothing_up() {
    let (fake, passes) = passes(Fake { slow: true, ..Fake::default() }, 700);
    let start = Barrier::new(12);
    std::thread::scope(|scope| {
        for thread in 0..12_u32 {
            let (passes, start) = (&passes, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..150_u32 {
                    let id = 100 + thread * 1000 + round;
                    let rows: Vec<(u32, usize)> = (0..round % 7)
                        .map(|i| match (thread, (round + i) % 11) {
                            (3, 3) => (13, 7),
                            (4, 4) => (14, 8),
                            (_, 5) => (id, 400),
                            (_, n) => (id, 1 + n as usize),
                        })
                        .collect();
                    for (values, &(id, len)) in run(passes, &rows).iter().zip(&rows) {
                        match values {
                            // A neighbour's failure ends a pass, and says so.
                            Err(error) => assert!(error.to_string().contains("teen")),
                            Ok(values) => assert_eq!(*values, [id as f32, len as f32]),
                        }
                    }
                }
            });
        }
    });
    assert!(is_empty(&passes));
    assert!(fake.most.load(Ordering::SeqCst) <= LEADERS);
    assert!(fake.passes.lock().unwrap().iter().all(|pass| pass.len() == 1 || pass.iter().sum::<usize>() <= 700));
}
