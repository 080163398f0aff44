//! What happens to a batch of requests: texts, tokens, passes, answers.
//!
//! The call returns when every request is answered, so Triton's order, priorities, queue policies and unload hold.
//! What is wrong with one request is answered to that request, and the others go on without it.

use std::sync::OnceLock;
use std::time::Instant;

use triton_abi::{Batch, ComputeTimes, Error, Request, Result, Texts, now_ns};

use super::Instance;
use super::answer::Answer;
use super::model::Model;
use crate::batch::plan_passes;
use crate::engine::Output;
use crate::tokenize::Tokens;

/// So much text is tokenized without a permit of the pool: some 100 us, for which an instance would otherwise wait
/// until a pass of another one is over.
const ALONE_BYTES: usize = 16 << 10;

/// Answers every request of the batch.
pub fn run(model: &Model, instance: &mut Instance, batch: Batch<'_>) {
    let (requests, report) = batch.into_parts();
    let (requests, inputs) = read(model, requests);
    let tokens = tokenize(model, &inputs);
    learn(model, &inputs, &tokens);
    let start = now_ns();
    let mut jobs = Jobs::open(model, requests, tokens);
    for pass in plan_passes(&jobs.lengths(), model.max_batch_tokens) {
        jobs.run_pass(model, instance, pass, start);
    }
    if !jobs.rows.is_empty() {
        report.send(jobs.rows.len(), ComputeTimes::since(start));
    }
}

/// The texts of one request.
struct Inputs {
    texts: Texts,
    pairs: Option<Texts>,
}

impl Inputs {
    fn read(model: &Model, request: &Request<'_>) -> Result<Self> {
        let inputs = &model.config.inputs;
        let texts = request.input(&inputs[0].name)?.texts()?;
        let Some(pair) = inputs.get(1) else { return Ok(Self { texts, pairs: None }) };
        let pairs = request.input(&pair.name)?.texts()?;
        if pairs.len() != texts.len() {
            return Err(Error::invalid_arg(format!(
                "input '{}' has {} rows and '{}' has {}; they must have as many",
                inputs[0].name,
                texts.len(),
                pair.name,
                pairs.len()
            )));
        }
        Ok(Self { texts, pairs: Some(pairs) })
    }

    /// Bytes of all rows, without their lengths: what the batching library sees.
    fn total_bytes(&self) -> usize {
        self.texts.total_bytes() + self.pairs.as_ref().map_or(0, Texts::total_bytes)
    }

    /// Bytes of one row.
    fn bytes(&self, row: usize) -> usize {
        [Some(&self.texts), self.pairs.as_ref()]
            .into_iter()
            .flatten()
            .filter_map(|t| t.bytes(row))
            .map(<[u8]>::len)
            .sum()
    }

    fn tokenize(&self, model: &Model, row: usize) -> Result<Tokens> {
        let pair = self.pairs.as_ref().map(|pairs| pairs.str(row)).transpose()?;
        let tokens = model.tokenizer.encode(self.texts.str(row)?, pair);
        Ok(tokens.map_err(|error| error.within(&format!("input '{}', row {row}", model.config.inputs[0].name)))?)
    }
}

/// Copies the inputs of each request; one that cannot be read is answered here.
fn read<'a>(model: &Model, requests: Vec<Request<'a>>) -> (Vec<Request<'a>>, Vec<Inputs>) {
    let read = requests.into_iter().filter_map(|request| match Inputs::read(model, &request) {
        Ok(inputs) => Some((request, inputs)),
        Err(error) => {
            request.fail(&model.explain(error));
            None
        }
    });
    read.unzip()
}

/// The tokens of every row of every request: here while others compute, or on the model's threads where it is much.
fn tokenize(model: &Model, inputs: &[Inputs]) -> Vec<Vec<Result<Tokens>>> {
    let started = Instant::now();
    let rows: Vec<(&Inputs, usize)> =
        inputs.iter().flat_map(|inputs| (0..inputs.texts.len()).map(move |row| (inputs, row))).collect();
    let slots: Vec<OnceLock<Result<Tokens>>> = rows.iter().map(|_| OnceLock::new()).collect();
    let task = |i: usize| {
        let (inputs, row) = rows[i];
        let _ = slots[i].set(inputs.tokenize(model, row));
    };
    if inputs.iter().map(Inputs::total_bytes).sum::<usize>() <= ALONE_BYTES {
        (0..rows.len()).for_each(task);
    } else {
        model.pool.for_each(model.threads, rows.len(), task);
    }
    model.metrics.tokenize_seconds.add(started.elapsed().as_secs_f64());
    let missing = || Err(Error::internal("a text was not tokenized"));
    let mut tokens = slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(missing));
    inputs.iter().map(|inputs| tokens.by_ref().take(inputs.texts.len()).collect()).collect()
}

/// Compares the tokens with what the batching library expected of the same bytes, and teaches it the difference. Requests
/// that fail are left out of both, rows that are cut only of the latter: how long a text was does not matter beyond that.
fn learn(model: &Model, inputs: &[Inputs], tokens: &[Vec<Result<Tokens>>]) {
    let special = model.tokenizer.special_tokens(model.config.inputs.len() > 1);
    let (mut estimated, mut bytes, mut content) = (0, 0, 0);
    for (inputs, rows) in inputs.iter().zip(tokens) {
        if rows.iter().any(Result::is_err) {
            continue;
        }
        estimated += model.budget.estimate(rows.len() as u64, inputs.total_bytes() as u64);
        let whole = rows.iter().flatten().enumerate().filter(|(_, tokens)| !tokens.truncated);
        for (row, tokens) in whole {
            bytes += inputs.bytes(row);
            content += tokens.input_ids.len().saturating_sub(special);
        }
    }
    model.metrics.estimated_tokens.add(estimated as f64);
    model.budget.learn(bytes as u64, content as u64);
}

/// The requests that are being computed, and all of their rows.
struct Jobs<'a> {
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
    fn open(model: &Model, requests: Vec<Request<'a>>, tokens: Vec<Vec<Result<Tokens>>>) -> Self {
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

    /// Tokens of each row.
    fn lengths(&self) -> Vec<usize> {
        self.rows.iter().map(|row| row.tokens.input_ids.len()).collect()
    }

    /// Runs one pass over the rows with these indices, and answers the requests of which it held the last row.
    fn run_pass(&mut self, model: &Model, instance: &mut Instance, mut pass: Vec<usize>, start: u64) {
        self.drop_cancelled(model, &pass);
        pass.retain(|&i| self.answers[self.rows[i].answer].is_some());
        pass.sort_unstable();
        if pass.is_empty() {
            return;
        }
        let Instance { runner, batch } = instance;
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
