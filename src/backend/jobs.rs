//! The requests of a batch while they are computed: their rows run in passes, and each request is answered when its last
//! row is done.

use std::sync::Arc;
use std::time::Instant;

use triton_abi::{ComputeTimes, Error, Request, Result, now_ns};

use super::answer::Answer;
use super::model::Model;
use super::passes::{self, Done, Passes, Report};
use super::runs::Runs;
use crate::batch::{PackedBatch, plan_passes};
use crate::engine::{Output, Runner};
use crate::tokenize::Tokens;

/// The requests that are being computed, and all of their rows.
pub struct Jobs<'a> {
    /// `None` once it is answered.
    answers: Vec<Option<Answer<'a>>>,
    /// Ordered by request, then by row.
    rows: Vec<Row>,
}

/// One row of one request.
struct Row {
    answer: usize,
    row: usize,
    tokens: Arc<Tokens>,
}

impl<'a> Jobs<'a> {
    /// Opens an answer for each request whose rows all have tokens; the others are answered with their first error.
    /// An engine on CUDA device `device`, if there is one, will fill them.
    pub fn open(
        model: &Model,
        device: Option<u32>,
        requests: Vec<Request<'a>>,
        tokens: Vec<Vec<Result<Tokens>>>,
    ) -> Self {
        let mut jobs = Self { answers: Vec::with_capacity(requests.len()), rows: Vec::new() };
        for (request, own) in requests.into_iter().zip(tokens) {
            let own: Vec<Tokens> = match own.into_iter().collect() {
                Ok(own) => own,
                Err(error) => {
                    request.fail(&model.explain(error));
                    continue;
                }
            };
            let Some(answer) = Answer::open(model, device, request, own.len()) else { continue };
            if own.is_empty() {
                answer.send(model, ComputeTimes::since(now_ns()));
                continue;
            }
            let index = jobs.answers.len();
            jobs.answers.push(Some(answer));
            let rows = own.into_iter().map(Arc::new).enumerate();
            jobs.rows.extend(rows.map(|(row, tokens)| Row { answer: index, row, tokens }));
        }
        jobs
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Runs all rows and answers every request.
    pub fn run(&mut self, model: &Model, runs: &mut Runs, start: u64) {
        match runs {
            Runs::Together(passes) => self.run_among_others(model, passes, start),
            Runs::Alone { runner, batch, .. } => {
                let lengths: Vec<usize> = self.rows.iter().map(|row| row.tokens.input_ids.len()).collect();
                for pass in plan_passes(&lengths, model.max_batch_tokens) {
                    self.run_pass(model, &mut **runner, batch, pass, start);
                }
            }
        }
    }

    /// Runs the rows in passes with those of other instances.
    fn run_among_others(&mut self, model: &Model, passes: &Passes, start: u64) {
        let values: Vec<Arc<[_]>> = self.answers.iter().flatten().map(|answer| answer.values(model).into()).collect();
        let row = |row: &Row| {
            let (tokens, values) = (Arc::clone(&row.tokens), Arc::clone(&values[row.answer]));
            passes::Row { tokens, values }
        };
        let mut call = passes.enter(self.rows.iter().map(row).collect());
        loop {
            if self.drop_cancelled(model, 0..self.answers.len()) {
                call.withdraw(|i| self.answers[self.rows[i].answer].is_none());
            }
            let Some(done) = call.next(&|report| observe(model, report)) else { return };
            if self.take(model, done, start) {
                call.withdraw(|i| self.answers[self.rows[i].answer].is_none());
            }
        }
    }

    /// Takes over what passes have yielded, and answers the requests of which it is the last. Whether any failed.
    fn take(&mut self, model: &Model, done: Vec<Done>, start: u64) -> bool {
        count(model, done.iter().map(|done| &*self.rows[done.row].tokens));
        let mut failed = false;
        for Done { row: i, values } in done {
            let (index, row) = (self.rows[i].answer, self.rows[i].row);
            match values {
                Ok(values) => {
                    if let Some(answer) = &mut self.answers[index] {
                        answer.write(model, row, &values);
                    }
                    self.row_done(model, i, start);
                }
                Err(error) => failed |= self.fail(model, index, error),
            }
        }
        failed
    }

    /// Runs one pass over the rows with these indices, and answers the requests of which it held the last row.
    fn run_pass(
        &mut self,
        model: &Model,
        runner: &mut dyn Runner,
        batch: &mut PackedBatch,
        mut pass: Vec<usize>,
        start: u64,
    ) {
        let answers: Vec<usize> = pass.iter().map(|&i| self.rows[i].answer).collect();
        self.drop_cancelled(model, answers);
        pass.retain(|&i| self.answers[self.rows[i].answer].is_some());
        pass.sort_unstable();
        if pass.is_empty() {
            return;
        }
        batch.clear();
        for &i in &pass {
            batch.push(&self.rows[i].tokens.input_ids, &self.rows[i].tokens.token_type_ids);
        }
        let started = Instant::now();
        let result = runner.run(batch, &mut self.places(model, &pass));
        observe(model, &Report { tokens: batch.tokens(), time: started.elapsed() });
        count(model, pass.iter().map(|&i| &*self.rows[i].tokens));
        match result {
            Ok(()) => pass.iter().for_each(|&i| self.row_done(model, i, start)),
            Err(error) => {
                model.note_failure();
                let error = Error::from(error);
                for &i in &pass {
                    self.fail(model, self.rows[i].answer, error.clone());
                }
            }
        }
    }

    /// A place for every requested value of every row of the pass, ordered by sequence.
    fn places(&mut self, model: &Model, pass: &[usize]) -> Vec<Output<'_>> {
        let mut outputs = Vec::with_capacity(pass.len());
        let mut sequence = 0;
        let mut own = Vec::new();
        for (index, answer) in self.answers.iter_mut().enumerate() {
            own.clear();
            while let Some(row) = pass.get(sequence).map(|&i| &self.rows[i]).filter(|row| row.answer == index) {
                own.push((row.row, sequence));
                sequence += 1;
            }
            if let (Some(answer), false) = (answer, own.is_empty()) {
                answer.places(model, &own, &mut outputs);
            }
        }
        outputs.sort_by_key(|output| output.sequence);
        outputs
    }

    /// Notes that a row is done, and answers its request if it was the last.
    fn row_done(&mut self, model: &Model, i: usize, start: u64) {
        let row = &self.rows[i];
        let slot = &mut self.answers[row.answer];
        let last = slot.as_mut().is_some_and(|answer| answer.row_done(row.row, row.tokens.input_ids.len()));
        if last && let Some(answer) = slot.take() {
            answer.send(model, ComputeTimes::since(start));
        }
    }

    /// Answers those of these requests that were cancelled. Whether there are any.
    fn drop_cancelled(&mut self, model: &Model, answers: impl IntoIterator<Item = usize>) -> bool {
        let mut any = false;
        for answer in answers {
            if self.answers[answer].as_ref().is_some_and(Answer::is_cancelled) {
                any |= self.fail(model, answer, Error::cancelled("the request was cancelled"));
            }
        }
        any
    }

    /// Answers a request with an error, unless it is answered. Whether it was not.
    fn fail(&mut self, model: &Model, answer: usize, error: Error) -> bool {
        let answer = self.answers[answer].take();
        let open = answer.is_some();
        if let Some(answer) = answer {
            answer.fail(model, error);
        }
        open
    }
}

/// Counts rows that were run.
fn count<'t>(model: &Model, rows: impl Iterator<Item = &'t Tokens>) {
    let (mut texts, mut tokens, mut truncated) = (0, 0, 0);
    for row in rows {
        texts += 1;
        tokens += row.input_ids.len();
        truncated += usize::from(row.truncated);
    }
    model.metrics.texts.add(texts as f64);
    model.metrics.tokens.add(tokens as f64);
    model.metrics.truncated_texts.add(truncated as f64);
}

/// Counts a pass.
pub fn observe(model: &Model, pass: &Report) {
    model.metrics.encode_seconds.add(pass.time.as_secs_f64());
    model.metrics.batch_tokens.observe(pass.tokens as f64);
}
