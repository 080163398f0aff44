//! Passes that are formed from the rows of all calls of Execute at once.
//!
//! The rows of every batch that is inside Execute wait in one set. There is no thread of its own: a call whose rows wait
//! and that finds the engine free leads a pass. It takes the rows whose turn it is, of whatever calls, runs them, gives
//! each call its results and wakes it. So a call still returns when its own requests are answered, and a pass holds what
//! is best for all: with a pass for each instance a short text would wait for the long ones that came in one batch
//! with it or before it.
//!
//! **Whose turn it is.** A row is due after so many tokens of work as there were when it came and [`AGE`] times its own.
//! Rows run in the order in which they are due: a short one overtakes a long one, but only within that bound.
//! Short and long rows ([`Passes::long_tokens`]) do not share a pass, since all wait for its end. While short rows wait,
//! one pass of long rows runs at a time, and not two in a row, so that long texts which came together do not keep all
//! threads from short ones. So a row is passed over by passes that begin with a row that was due before it, while a pass
//! of long rows runs, and by one pass of short rows after that: it is not starved.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use triton_abi::{Error, Result, catch};

use crate::batch::PackedBatch;
use crate::engine::{Engine, Output, Runner, Slot};
use crate::head::Value;
use crate::pool::Pool;
use crate::tokenize::Tokens;

/// Passes at once: while one call hands its results over, another computes; with more, each would find fewer rows.
const LEADERS: usize = 2;
/// How much work may come before a row, in tokens for each of its own. Less does not tell short from long, more makes long
/// texts wait longer and hardly helps the short ones any more.
const AGE: u64 = 8;
/// No row of up to so many tokens is long: what a thread of the CPU engine runs at once.
const LONG_TOKENS: usize = 256;
/// Nor is one that is a smaller part of a full pass.
const LONG_PART: usize = 32;
/// How long a call sleeps before it looks whether its requests were cancelled.
const LOOK: Duration = Duration::from_millis(20);

/// The rows that wait for one engine, and who runs them.
pub struct Passes {
    engine: Arc<dyn Engine>,
    pool: Arc<Pool>,
    max_batch_tokens: usize,
    state: Mutex<State>,
}

/// A row to be run.
pub struct Row {
    /// At least one.
    pub tokens: Arc<Tokens>,
    /// What is wanted of it, each with its width.
    pub values: Arc<[(Value, usize)]>,
}

/// A row that has been run.
pub struct Done {
    /// Its index among the rows of the call.
    pub row: usize,
    /// Its values one after another, or why there are none.
    pub values: Result<Values>,
}

/// The part of a pass's results that belongs to one row.
pub struct Values {
    pass: Arc<Vec<f32>>,
    start: usize,
    len: usize,
}

impl Values {
    /// The values of each of a pass's rows.
    pub fn of_rows<'r>(
        pass: Result<Arc<Vec<f32>>>,
        rows: impl Iterator<Item = &'r Row>,
    ) -> impl Iterator<Item = Result<Self>> {
        rows.scan(0, move |end, row| {
            let (start, len) = (*end, row.width());
            *end += len;
            Some(pass.clone().map(|pass| Self { pass, start, len }))
        })
    }
}

impl std::ops::Deref for Values {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.pass[self.start..self.start + self.len]
    }
}

/// What a pass was, for the metrics.
pub struct Report {
    /// Tokens of its rows.
    pub tokens: usize,
    /// How long the encoder ran.
    pub time: Duration,
}

/// When a row is due, then the number of its call and its index there.
type Turn = (u64, u64, usize);

#[derive(Default)]
struct State {
    waiting: BTreeMap<Turn, Row>,
    calls: BTreeMap<u64, Member>,
    next_call: u64,
    /// Tokens of all passes that have begun: the clock by which rows age.
    work: u64,
    /// Calls that lead a pass.
    leaders: usize,
    /// Those whose pass is of long rows.
    long_passes: usize,
    /// Whether the pass that began last was of long rows.
    last_was_long: bool,
    /// What no pass is using.
    idle: Vec<Worker>,
}

/// A call that is inside.
#[derive(Default)]
struct Member {
    /// How many of its rows wait.
    waiting: usize,
    done: Vec<Done>,
    asleep: bool,
    wake: Arc<Condvar>,
}

/// What runs one pass at a time.
struct Worker {
    runner: Box<dyn Runner>,
    /// Kept for its memory.
    batch: PackedBatch,
}

impl Passes {
    /// For rows of this engine, any of whose runners can run any of them into host memory.
    pub fn new(engine: Arc<dyn Engine>, pool: Arc<Pool>, max_batch_tokens: usize) -> Self {
        Self { engine, pool, max_batch_tokens, state: Mutex::default() }
    }

    /// Lets the rows of a call wait for their turn.
    pub fn enter(&self, rows: Vec<Row>) -> Call<'_> {
        let mut state = self.lock();
        let number = state.next_call;
        state.next_call += 1;
        let missing = rows.len();
        state.calls.insert(number, Member { waiting: missing, ..Member::default() });
        let now = state.work;
        state.waiting.extend(rows.into_iter().enumerate().map(|(index, row)| {
            let due = now + AGE * row.tokens.input_ids.len() as u64;
            ((due, number, index), row)
        }));
        Call { passes: self, number, missing }
    }

    /// Rows of more tokens are long.
    fn long_tokens(&self) -> usize {
        LONG_TOKENS.max(self.max_batch_tokens / LONG_PART)
    }

    /// Locks do not poison: a panic while it is held leaves rows that wait, and calls that know of them.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one pass; the caller has counted itself as a leader.
    fn lead(&self, observe: &dyn Fn(&Report)) {
        let mut pass = Pass { passes: self, rows: Vec::new(), long: false, result: Err(Error::internal("no result")) };
        // Before the choice: what comes while other passes hold all permits has its turn too.
        let _permit = self.pool.team(1);
        (pass.rows, pass.long) = self.lock().choose(self.max_batch_tokens, self.long_tokens());
        if !pass.rows.is_empty() {
            pass.result = self.run(&pass.rows, observe).map(Arc::new);
        }
    }

    /// The values of all rows, one after another.
    fn run(&self, rows: &[(Turn, Row)], observe: &dyn Fn(&Report)) -> Result<Vec<f32>> {
        let idle = self.lock().idle.pop();
        let mut worker = match idle {
            Some(worker) => worker,
            None => Worker { runner: self.engine.runner()?, batch: PackedBatch::new() },
        };
        let rows: Vec<&Row> = rows.iter().map(|(_, row)| row).collect();
        let started = Instant::now();
        // A worker that panicked is not used again.
        let values = catch("the encoder", || Ok(run_rows(&mut *worker.runner, &mut worker.batch, &rows)));
        observe(&Report { tokens: worker.batch.tokens(), time: started.elapsed() });
        let values = values?;
        self.lock().idle.push(worker);
        values
    }
}

/// Runs one pass over `rows` into host memory; gives the values of all rows, one after another.
pub fn run_rows(runner: &mut dyn Runner, batch: &mut PackedBatch, rows: &[&Row]) -> Result<Vec<f32>> {
    batch.clear();
    for row in rows {
        batch.push(&row.tokens.input_ids, &row.tokens.token_type_ids);
    }
    let mut values = Vec::new();
    let len = rows.iter().map(|row| row.width()).sum();
    values.try_reserve_exact(len)?;
    values.resize(len, 0.0);
    let mut outputs = Vec::new();
    let mut rest = values.as_mut_slice();
    for (sequence, row) in rows.iter().enumerate() {
        for &(value, width) in row.values.iter() {
            let (place, others) = rest.split_at_mut(width);
            rest = others;
            outputs.push(Output { sequence, value, slot: Slot::Host(place) });
        }
    }
    runner.run(batch, &mut outputs)?;
    Ok(values)
}

impl Row {
    /// Number of its values.
    fn width(&self) -> usize {
        self.values.iter().map(|(_, width)| width).sum()
    }
}

impl State {
    /// Takes the rows of the next pass out of those that wait; and whether they are long.
    fn choose(&mut self, max_batch_tokens: usize, long_tokens: usize) -> (Vec<(Turn, Row)>, bool) {
        let is_long = |row: &Row| row.tokens.input_ids.len() > long_tokens;
        let short_wait = self.waiting.values().any(|row| !is_long(row));
        let only_short = short_wait && (self.long_passes > 0 || self.last_was_long);
        let Some(long) = self.waiting.values().map(is_long).find(|long| !(*long && only_short)) else {
            return (Vec::new(), false);
        };
        // Half of the threads stay free for others, if there are any.
        let most = if long && self.calls.len() > 1 { max_batch_tokens / 2 } else { max_batch_tokens };
        let mut tokens = 0;
        let mut turns = Vec::new();
        for (turn, row) in &self.waiting {
            let len = row.tokens.input_ids.len();
            if is_long(row) == long && (turns.is_empty() || tokens + len <= most) {
                tokens += len;
                turns.push(*turn);
            }
        }
        self.work += tokens as u64;
        self.last_was_long = long;
        self.long_passes += usize::from(long);
        let rows: Vec<(Turn, Row)> = turns.iter().filter_map(|turn| self.waiting.remove_entry(turn)).collect();
        for ((_, call, _), _) in &rows {
            if let Some(member) = self.calls.get_mut(call) {
                member.waiting -= 1;
            }
        }
        (rows, long)
    }

    /// Wakes a call that can lead the next pass, where one is needed.
    fn call_leader(&mut self) {
        if self.leaders == LEADERS {
            return;
        }
        // One that is awake looks by itself before it sleeps.
        let asleep = |call: &&u64| self.calls.get(call).is_some_and(|member| member.asleep);
        let Some(call) = self.waiting.keys().map(|(_, call, _)| call).find(asleep) else { return };
        if let Some(member) = self.calls.get_mut(call) {
            member.wake();
        }
    }
}

impl Member {
    /// Two leaders that are called one after the other are two calls.
    fn wake(&mut self) {
        self.asleep = false;
        self.wake.notify_one();
    }
}

/// A pass that is being led. When it is dropped, also by a panic, its rows are given back to their calls.
struct Pass<'p> {
    passes: &'p Passes,
    rows: Vec<(Turn, Row)>,
    long: bool,
    /// The values of all rows, one after another.
    result: Result<Arc<Vec<f32>>>,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let mut state = self.passes.lock();
        let values = Values::of_rows(self.result.clone(), self.rows.iter().map(|(_, row)| row));
        for (((_, call, index), _), values) in self.rows.iter().zip(values) {
            // A call that has ended meanwhile does not want them.
            if let Some(member) = state.calls.get_mut(call) {
                member.done.push(Done { row: *index, values });
                member.wake();
            }
        }
        state.leaders -= 1;
        state.long_passes -= usize::from(self.long);
        state.call_leader();
    }
}

/// The rows of one call, while it is inside. Dropping it takes back those that wait.
pub struct Call<'p> {
    passes: &'p Passes,
    number: u64,
    /// Rows that wait or run, or whose results nobody has taken.
    missing: usize,
}

impl Call<'_> {
    /// What has been run since, which may be nothing; `None` when nothing is missing. Waits, or leads a pass, which it
    /// reports to `observe`.
    pub fn next(&mut self, observe: &dyn Fn(&Report)) -> Option<Vec<Done>> {
        if self.missing == 0 {
            return None;
        }
        let mut state = self.passes.lock();
        let can_lead = state.leaders < LEADERS;
        let member = state.calls.get_mut(&self.number)?;
        if member.done.is_empty() {
            if member.waiting > 0 && can_lead {
                state.leaders += 1;
                drop(state);
                self.passes.lead(observe);
                state = self.passes.lock();
            } else {
                member.asleep = true;
                let wake = Arc::clone(&member.wake);
                (state, _) = wake.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            }
        }
        let member = state.calls.get_mut(&self.number)?;
        member.asleep = false;
        let done = std::mem::take(&mut member.done);
        self.missing -= done.len();
        Some(done)
    }

    /// Takes back the rows that wait and are not wanted any more. Those that run already still come.
    pub fn withdraw(&mut self, unwanted: impl Fn(usize) -> bool) {
        let mut state = self.passes.lock();
        let before = state.waiting.len();
        state.waiting.retain(|&(_, call, index), _| call != self.number || !unwanted(index));
        let withdrawn = before - state.waiting.len();
        self.missing -= withdrawn;
        if let Some(member) = state.calls.get_mut(&self.number) {
            member.waiting -= withdrawn;
        }
        state.call_leader();
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if self.missing > 0 {
            self.withdraw(|_| true);
        }
        self.passes.lock().calls.remove(&self.number);
    }
}

#[cfg(test)]
#[path = "passes_tests.rs"]
mod tests;
