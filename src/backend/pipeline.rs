//! What happens to a batch of requests: texts, tokens, passes, answers.
//!
//! The call returns when every request is answered, so Triton's order, priorities, queue policies and unload hold.
//! What is wrong with one request is answered to that request, and the others go on without it.

use std::sync::OnceLock;
use std::time::Instant;

use triton_abi::{Batch, ComputeTimes, Error, Result, now_ns};

use super::Instance;
use super::inputs::{self, Inputs};
use super::jobs::Jobs;
use super::model::Model;
use crate::pool::Pool;
use crate::tokenize::Tokens;

/// So much text is tokenized without a permit of the pool: some 100 us, for which an instance would otherwise wait
/// until a pass of another one is over.
const ALONE_BYTES: usize = 16 << 10;

/// Answers every request of the batch.
pub fn run(model: &Model, instance: &mut Instance, batch: Batch<'_>) {
    let (requests, report) = batch.into_parts();
    let (requests, inputs, turns) = match &mut instance.conversations {
        Some(conversations) => conversations.read(model, requests),
        None => {
            let (requests, inputs) = inputs::read(model, requests);
            (requests, inputs, Vec::new())
        }
    };
    let mut tokens = tokenize(model, &inputs);
    match &mut instance.conversations {
        Some(conversations) => conversations.extend(turns, &mut tokens),
        None => learn(model, &inputs, &tokens),
    }
    let start = now_ns();
    let mut jobs = Jobs::open(model, instance.runs.device(), requests, tokens);
    jobs.run(model, &mut instance.runs, start);
    if jobs.rows() > 0 {
        report.send(jobs.rows(), ComputeTimes::since(start));
    }
}

/// The tokens of every row of every request.
fn tokenize(model: &Model, inputs: &[Inputs]) -> Vec<Vec<Result<Tokens>>> {
    let started = Instant::now();
    let rows: Vec<(&Inputs, usize)> =
        inputs.iter().flat_map(|inputs| (0..inputs.rows()).map(move |row| (inputs, row))).collect();
    let bytes = inputs.iter().map(Inputs::total_bytes).sum();
    let tokens = each_row(&model.pool, model.threads, bytes, rows.len(), |i| rows[i].0.tokens(model, rows[i].1));
    model.metrics.tokenize_seconds.add(started.elapsed().as_secs_f64());
    let mut tokens = tokens.into_iter();
    inputs.iter().map(|inputs| tokens.by_ref().take(inputs.rows()).collect()).collect()
}

/// What `task` makes of each of `rows` rows, which have so many bytes of text in all: here while others compute, or on at
/// most `threads` threads of the pool where it is much.
pub fn each_row<T: Send + Sync>(
    pool: &Pool,
    threads: usize,
    bytes: usize,
    rows: usize,
    task: impl Fn(usize) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    if bytes <= ALONE_BYTES {
        return (0..rows).map(task).collect();
    }
    let slots: Vec<OnceLock<Result<T>>> = (0..rows).map(|_| OnceLock::new()).collect();
    pool.for_each(threads, rows, |row| {
        let _ = slots[row].set(task(row));
    });
    let missing = || Err(Error::internal("a text was not tokenized"));
    slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(missing)).collect()
}

/// Compares the tokens with what the batching library expected of the same bytes, and teaches it the difference. Requests
/// that fail are left out of both, rows that are cut only of the latter: how long a text was does not matter beyond that.
fn learn(model: &Model, inputs: &[Inputs], tokens: &[Vec<Result<Tokens>>]) {
    let special = model.special_tokens();
    let (mut estimated, mut bytes, mut content) = (0, 0, 0);
    for (inputs, rows) in inputs.iter().zip(tokens) {
        if rows.iter().any(Result::is_err) {
            continue;
        }
        estimated += inputs.expected_tokens(model);
        let whole = rows.iter().flatten().enumerate().filter(|(_, tokens)| !tokens.truncated);
        for (row, tokens) in whole {
            let Some(own) = inputs.bytes(row) else { continue };
            bytes += own;
            content += tokens.input_ids.len().saturating_sub(special);
        }
    }
    model.metrics.estimated_tokens.add(estimated as f64);
    model.budget.learn(bytes as u64, content as u64);
}
