//! The requests of a batch while they are computed: their rows run in passes, and each request is answered when its last
//! row is done.

use std::time::Instant;

use triton_abi::{ComputeTimes, Error, Request, Result, now_ns};

use super::Instance;
use super::answer::Answer;
use super::model::Model;
use crate::engine::Output;
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
    tokens: Tokens,
}

impl<'a> Jobs<'a> {
    /// Opens an answer for each request whose rows all have tokens; the others are answered with their first error.
    pub fn open(model: &Model, requests: Vec<Request<'a>>, tokens: Vec<Vec<Result<Tokens>>>) -> Self {
        let mut jobs = Self { answers: Vec::with_capacity(requests.len()), rows: Vec::new() };
        for (request, own) in requests.into_iter().zip(tokens) {
            let own: Vec<Tokens> = match own.into_iter().collect() {
                Ok(own) => own,
                Err(error) => {
                    request.fail(&model.explain(error));
                    continue;
                }
            };
            let Some(answer) = Answer::open(model, request, own.len()) else { continue };
            if own.is_empty() {
                answer.send(model, ComputeTimes::since(now_ns()));
                continue;
            }
            let index = jobs.answers.len();
            jobs.answers.push(Some(answer));
            jobs.rows.extend(own.into_iter().enumerate().map(|(row, tokens)| Row { answer: index, row, tokens }));
        }
        jobs
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Tokens of each row.
    pub fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(|row| row.tokens.input_ids.len()).collect()
    }

    /// Runs one pass over the rows with these indices, and answers the requests of which it held the last row.
    pub fn run_pass(&mut self, model: &Model, instance: &mut Instance, mut pass: Vec<usize>, start: u64) {
        self.drop_cancelled(model, &pass);
        pass.retain(|&i| self.answers[self.rows[i].answer].is_some());
        pass.sort_unstable();
        if pass.is_empty() {
            return;
        }
        let Instance { runner, batch, .. } = instance;
        batch.clear();
        for &i in &pass {
            batch.push(&self.rows[i].tokens.input_ids, &self.rows[i].tokens.token_type_ids);
        }
        let started = Instant::now();
        let result = runner.run(batch, &mut self.places(model, &pass));
        model.metrics.encode_seconds.add(started.elapsed().as_secs_f64());
        self.count(model, &pass, batch.tokens());
        match result {
            Ok(()) => self.rows_done(model, &pass, start),
            Err(error) => {
                let error = Error::from(error);
                self.fail(model, &pass, |_| Some(error.clone()));
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

    fn rows_done(&mut self, model: &Model, pass: &[usize], start: u64) {
        for &i in pass {
            let row = &self.rows[i];
            let slot = &mut self.answers[row.answer];
            let last = slot.as_mut().is_some_and(|answer| answer.row_done(row.row, row.tokens.input_ids.len()));
            if last && let Some(answer) = slot.take() {
                answer.send(model, ComputeTimes::since(start));
            }
        }
    }

    fn drop_cancelled(&mut self, model: &Model, pass: &[usize]) {
        self.fail(model, pass, |answer| answer.is_cancelled().then(|| Error::cancelled("the request was cancelled")));
    }

    /// Answers the requests of the pass for which `why` has an error.
    fn fail(&mut self, model: &Model, pass: &[usize], why: impl Fn(&Answer<'a>) -> Option<Error>) {
        for &i in pass {
            let slot = &mut self.answers[self.rows[i].answer];
            if let Some(error) = slot.as_ref().and_then(&why)
                && let Some(answer) = slot.take()
            {
                answer.fail(model, error);
            }
        }
    }

    fn count(&self, model: &Model, pass: &[usize], tokens: usize) {
        let truncated = pass.iter().filter(|&&i| self.rows[i].tokens.truncated).count();
        model.metrics.texts.add(pass.len() as f64);
        model.metrics.tokens.add(tokens as f64);
        model.metrics.truncated_texts.add(truncated as f64);
        model.metrics.batch_tokens.observe(tokens as f64);
    }
}
