//! Texts of any length, window by window: each row's windows are made while others are encoded, so that memory does not
//! grow with a text. A row is answered by one value made of its windows, or a decoupled model answers each window.
//!
//! The rows of a batch take turns, so that short texts are answered before long ones that came with them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use triton_abi::{Batch, ComputeTimes, Error, Request, Result, now_ns};

use super::Instance;
use super::answer::Answer;
use super::inputs::{self, Inputs};
use super::jobs::observe;
use super::model::Model;
use super::passes::{self, Values};
use super::runs::Runs;
use super::stream::Stream;
use crate::config::windows::{Combine, WindowSpec};
use crate::head::{self, HeadSpec, Value};
use crate::tokenize::{Tokens, Windows};

/// Answers every request of the batch.
pub fn run(model: &Model, instance: &mut Instance, spec: WindowSpec, batch: Batch<'_>) {
    let (requests, report) = batch.into_parts();
    let (requests, inputs) = inputs::read(model, requests);
    let start = now_ns();
    let mut work = Work::open(model, spec, requests, &inputs);
    let rows = work.rows.len();
    while !work.turns.is_empty() {
        let pass = work.next_pass();
        work.run_pass(&mut instance.runs, &pass, start);
    }
    if rows > 0 {
        report.send(rows, ComputeTimes::since(start));
    }
}

/// The requests that are being computed.
struct Work<'a, 't> {
    model: &'t Model,
    spec: WindowSpec,
    /// `None` once it is answered.
    jobs: Vec<Option<Job<'a>>>,
    rows: Vec<Row<'t>>,
    /// The rows that have windows left, in the order of their turns.
    turns: VecDeque<usize>,
}

/// How a request is answered.
enum Job<'a> {
    /// When all of its rows are done.
    Once(Answer<'a>),
    /// A response for each window.
    Stream(Stream<'a>),
}

/// One row of one request.
struct Row<'t> {
    job: usize,
    /// In the request.
    row: usize,
    windows: Windows<'t>,
    /// Bytes of its text.
    bytes: usize,
    /// What is done of it: windows, and tokens with the special ones.
    done: usize,
    tokens: usize,
    /// What the windows make together so far, where they are combined.
    combined: Vec<f32>,
}

/// A window in a pass.
pub struct Piece {
    /// In `Work::rows`.
    row: usize,
    pub tokens: Arc<Tokens>,
    /// Where it stands in its text.
    pub characters: Range<usize>,
    /// Whether it is the last of its row.
    pub last: bool,
}

impl<'a, 't> Work<'a, 't> {
    fn open(model: &'t Model, spec: WindowSpec, requests: Vec<Request<'a>>, inputs: &'t [Inputs]) -> Self {
        let mut work = Self { model, spec, jobs: Vec::new(), rows: Vec::new(), turns: VecDeque::new() };
        for (request, inputs) in requests.into_iter().zip(inputs) {
            let job = work.jobs.len();
            let own = (0..inputs.rows()).map(|row| {
                let windows = inputs.windows(model, row, spec.stride)?;
                let bytes = inputs.bytes(row).unwrap_or(0);
                Ok(Row { job, row, windows, bytes, done: 0, tokens: 0, combined: Vec::new() })
            });
            let own: Vec<Row<'t>> = match own.collect::<Result<_>>() {
                Ok(own) => own,
                Err(error) => {
                    request.fail(&model.explain(error));
                    continue;
                }
            };
            let opened = match spec.combine {
                // Windows are put together on the host.
                Some(_) => Answer::open(model, None, request, own.len()).map(Job::Once),
                None => Stream::open(model, request, own.len()).map(Job::Stream),
            };
            let Some(opened) = opened else { continue };
            if own.is_empty() {
                opened.send(model, ComputeTimes::since(now_ns()));
                continue;
            }
            model.metrics.estimated_tokens.add(inputs.expected_tokens(model) as f64);
            work.turns.extend(work.rows.len()..work.rows.len() + own.len());
            work.rows.extend(own);
            work.jobs.push(Some(opened));
        }
        work
    }

    /// The next windows, as many as fit into a pass; none when all is done.
    fn next_pass(&mut self) -> Vec<Piece> {
        let started = Instant::now();
        for job in 0..self.jobs.len() {
            if self.jobs[job].as_ref().is_some_and(Job::is_cancelled) {
                self.fail(job, Error::cancelled("the request was cancelled"));
            }
        }
        let (budget, longest) = (self.model.max_batch_tokens, self.model.config.max_length);
        let (mut pass, mut tokens) = (Vec::new(), 0);
        while (pass.is_empty() || tokens + longest <= budget)
            && let Some(index) = self.turns.pop_front()
        {
            let row = &mut self.rows[index];
            if self.jobs[row.job].is_none() {
                continue;
            }
            match row.windows.next() {
                Some(Ok(window)) => {
                    let last = row.windows.is_finished();
                    if !last {
                        self.turns.push_back(index);
                    }
                    tokens += window.tokens.input_ids.len();
                    let (tokens, characters) = (Arc::new(window.tokens), window.characters);
                    pass.push(Piece { row: index, tokens, characters, last });
                }
                Some(Err(error)) => {
                    let (job, row) = (row.job, row.row);
                    let error = error.within(&format!("input '{}', row {row}", self.model.config.inputs[0].name));
                    self.fail(job, error.into());
                }
                None => {}
            }
        }
        // A request that failed here may have windows in the pass already.
        pass.retain(|piece| self.jobs[self.rows[piece.row].job].is_some());
        self.model.metrics.tokenize_seconds.add(started.elapsed().as_secs_f64());
        pass
    }

    /// Runs the windows of a pass and answers with them, with those of one row in the text's order.
    fn run_pass(&mut self, runs: &mut Runs, pass: &[Piece], start: u64) {
        let model = self.model;
        let (head, spec) = (&model.config.head, &model.config.spec);
        let values: &[Value] = match (head, self.spec.combine) {
            (HeadSpec::Embed { .. }, _) => &[Value::Embedding],
            (HeadSpec::Classify { .. }, Some(_)) => &[Value::Probabilities],
            (HeadSpec::Classify { .. }, None) => &[Value::Logits, Value::Probabilities],
        };
        let values: Arc<[_]> = values.iter().map(|&value| (value, head.width(value, spec))).collect();
        let row = |piece: &Piece| passes::Row { tokens: Arc::clone(&piece.tokens), values: Arc::clone(&values) };
        // `None` where it is not there yet, or was used.
        let mut results: Vec<Option<Result<Values>>> = pass.iter().map(|_| None).collect();
        let mut used = vec![false; pass.len()];
        runs.run(pass.iter().map(row).collect(), &|report| observe(model, report), |done| {
            results[done.row] = Some(done.values);
            let index = pass[done.row].row;
            let own = pass.iter().enumerate().filter(|(i, piece)| piece.row == index && !used[*i]);
            let own: Vec<(usize, &Piece)> = own.collect();
            for (i, piece) in own {
                match results[i].take() {
                    Some(Ok(values)) => self.done(piece, &values, start),
                    Some(Err(error)) => {
                        model.note_failure();
                        self.fail(self.rows[index].job, error);
                    }
                    None => break,
                }
                used[i] = true;
            }
        });
    }

    /// Takes the values of a window that was encoded, and answers with them as far as that is possible.
    fn done(&mut self, piece: &Piece, values: &[f32], start: u64) {
        self.model.metrics.tokens.add(piece.tokens.input_ids.len() as f64);
        let row = &mut self.rows[piece.row];
        let index = row.job;
        let Some(job) = self.jobs[index].as_mut() else { return };
        row.done += 1;
        row.tokens += piece.tokens.input_ids.len();
        if let Some(how) = self.spec.combine {
            row.add(how, values);
        }
        if piece.last {
            row.learn(self.model);
        }
        let answered = match job {
            Job::Once(answer) if piece.last => {
                row.finish(self.spec.combine, &self.model.config.head);
                answer.write(self.model, row.row, &row.combined);
                Ok(answer.row_done(row.row, row.tokens))
            }
            Job::Once(_) => Ok(false),
            Job::Stream(stream) => stream.answer(self.model, row.row, piece, values),
        };
        match answered {
            Ok(false) => {}
            Ok(true) => {
                if let Some(job) = self.jobs[index].take() {
                    job.send(self.model, ComputeTimes::since(start));
                }
            }
            Err(error) => self.fail(index, error),
        }
    }

    /// Answers a request with an error.
    fn fail(&mut self, job: usize, error: Error) {
        match self.jobs[job].take() {
            Some(Job::Once(answer)) => answer.fail(self.model, error),
            Some(Job::Stream(stream)) => stream.fail(self.model, error),
            None => {}
        }
    }
}

impl Job<'_> {
    fn is_cancelled(&self) -> bool {
        match self {
            Self::Once(answer) => answer.is_cancelled(),
            Self::Stream(stream) => stream.is_cancelled(),
        }
    }

    fn send(self, model: &Model, times: ComputeTimes) {
        match self {
            Self::Once(answer) => answer.send(model, times),
            Self::Stream(stream) => stream.send(times),
        }
    }
}

impl Row<'_> {
    /// Adds a window's `[width]` values.
    fn add(&mut self, how: Combine, values: &[f32]) {
        if self.combined.is_empty() {
            self.combined.extend_from_slice(values);
            return;
        }
        for (all, value) in self.combined.iter_mut().zip(values) {
            match how {
                Combine::Mean => *all += value,
                Combine::Max => *all = all.max(*value),
            }
        }
    }

    /// Makes the row's own values of what was added. One window's stay as they are.
    fn finish(&mut self, how: Option<Combine>, head: &HeadSpec) {
        if self.done < 2 || how != Some(Combine::Mean) {
            return;
        }
        self.combined.iter_mut().for_each(|value| *value /= self.done as f32);
        if let HeadSpec::Embed { normalize: true, .. } = head {
            head::normalize(&mut self.combined);
        }
    }

    /// Tells the batching library how many tokens its bytes became; those in two windows count twice, as they cost.
    fn learn(&self, model: &Model) {
        let special = self.done * model.special_tokens();
        model.budget.learn(self.bytes as u64, self.tokens.saturating_sub(special) as u64);
        model.metrics.texts.add(1.0);
    }
}
