//! A model that is a tokenizer and nothing more: texts to ids, for another model that takes ids.

use std::sync::Arc;
use std::time::Instant;

use triton_abi::{Batch, ComputeTimes, Error, ModelHandle, Request, Response, Result, TokenBudget, log_info, now_ns};

use super::inputs::TextRows;
use super::metrics::Metrics;
use super::pipeline::each_row;
use crate::config::parameters::Parameters;
use crate::config::tokenize::{IdOutput, TokenizeConfig};
use crate::config::triton::{TensorDeclaration, TritonConfig};
use crate::pool::Pool;
use crate::tokenize::{Span, Tokenizer, Tokens};

/// A loaded tokenizer.
pub struct TokenizerModel {
    name: String,
    config: TokenizeConfig,
    tokenizer: Tokenizer,
    pool: Arc<Pool>,
    threads: usize,
    batching: bool,
    /// The declared outputs, where a response cache keeps answers for whoever asks later, for whatever outputs.
    cached: Option<Vec<String>>,
    budget: TokenBudget,
    metrics: Metrics,
}

/// The outputs that a request wants, by name.
type Wanted = Vec<(IdOutput, String)>;

/// Tokens of a row, with their places in the text where those are asked for.
type Row = (Tokens, Vec<Span>);

impl TokenizerModel {
    /// Loads the tokenizer of the model's version directory and completes the server's configuration.
    pub fn load(
        handle: &ModelHandle,
        parameters: &Parameters,
        mut triton: TritonConfig,
        threads: usize,
    ) -> Result<Self> {
        let name = handle.name()?;
        let config = TokenizeConfig::resolve(parameters, &handle.version_directory()?)?;
        if triton.decoupled() {
            return Err(Error::unsupported("config.pbtxt: decoupled is not available for task 'tokenize'"));
        }
        let outputs: Vec<TensorDeclaration> = config.outputs.iter().map(|(_, tensor)| tensor.clone()).collect();
        if handle.is_auto_complete()? {
            triton.auto_complete(&config.inputs, &outputs);
            handle.set_config_json(&triton.to_text())?;
        }
        triton.validate(&config.inputs, &outputs)?;
        triton.refuse_sequences("a model of task 'tokenize'")?;
        let tokenizer = Tokenizer::from_json(&config.file.json, config.options)?;
        let pool = Pool::shared(threads);
        let metrics = Metrics::new(&name, handle.version()?)?;
        log_info!("model '{name}': tokenizes texts of up to {} tokens", config.options.max_length);
        let special_tokens = tokenizer.special_tokens(config.inputs.len() > 1);
        Ok(Self {
            threads: config.threads.unwrap_or(usize::MAX).min(pool.threads()),
            batching: triton.max_batch_size() > 0,
            cached: triton.response_cache().then(|| triton.output_names()),
            // Nothing is computed, so nothing need be kept apart.
            budget: TokenBudget::new(usize::MAX, config.options.max_length, special_tokens),
            name,
            config,
            tokenizer,
            pool,
            metrics,
        })
    }

    /// An output that an error response shows, so that no cache keeps it.
    pub fn uncacheable_output(&self) -> Option<&str> {
        self.cached.as_ref().map(|_| self.config.outputs[0].1.name.as_str())
    }

    /// What the batching library reads: no limit.
    pub fn token_budget(&self) -> &TokenBudget {
        &self.budget
    }

    /// Answers every request of the batch, one after the other.
    pub fn run(&self, batch: Batch<'_>) {
        let start = now_ns();
        let (requests, report) = batch.into_parts();
        let rows = requests.into_iter().map(|request| self.answer(request)).sum();
        if rows > 0 {
            report.send(rows, ComputeTimes::since(start));
        }
    }

    /// Returns how many rows were tokenized.
    fn answer(&self, request: Request<'_>) -> usize {
        let start = now_ns();
        let read = self.read(&request);
        let mut response = request.respond();
        let written = read.and_then(|(wanted, rows)| self.write(&mut response, &wanted, &rows).map(|()| rows.len()));
        match written {
            Ok(rows) => {
                response.send_final(ComputeTimes::since(start));
                rows
            }
            Err(error) => {
                response.fail(&error.context(format!("model '{}'", self.name)));
                0
            }
        }
    }

    /// The outputs that the request wants, and the tokens of its rows.
    fn read(&self, request: &Request<'_>) -> Result<(Wanted, Vec<Row>)> {
        let names = match &self.cached {
            Some(declared) => declared.clone(),
            None => request.requested_outputs()?,
        };
        let kind =
            |name: &str| self.config.outputs.iter().find(|(_, tensor)| tensor.name == name).map(|(kind, _)| *kind);
        let wanted: Wanted = names.into_iter().filter_map(|name| Some((kind(&name)?, name))).collect();
        let spans = wanted.iter().any(|(kind, _)| *kind == IdOutput::Offsets);
        let texts = TextRows::read(&self.config.inputs, request)?;
        let started = Instant::now();
        let rows = each_row(&self.pool, self.threads, texts.total_bytes(), texts.rows(), |row| {
            let (text, pair) = texts.get(row)?;
            let encoded = if spans {
                self.tokenizer.encode_with_spans(text, pair)
            } else {
                self.tokenizer.encode(text, pair).map(|tokens| (tokens, Vec::new()))
            };
            Ok(encoded.map_err(|e| e.within(&format!("input '{}', row {row}", self.config.inputs[0].name)))?)
        });
        self.metrics.tokenize_seconds.add(started.elapsed().as_secs_f64());
        let rows: Vec<Row> = rows.into_iter().collect::<Result<_>>()?;
        self.count(&rows);
        Ok((wanted, rows))
    }

    fn count(&self, rows: &[Row]) {
        self.metrics.texts.add(rows.len() as f64);
        self.metrics.tokens.add(rows.iter().map(|(tokens, _)| tokens.input_ids.len()).sum::<usize>() as f64);
        self.metrics.truncated_texts.add(rows.iter().filter(|(tokens, _)| tokens.truncated).count() as f64);
    }

    /// Adds the outputs, each row padded to the longest of this request.
    fn write(&self, response: &mut Response<'_>, wanted: &Wanted, rows: &[Row]) -> Result<()> {
        let length = rows.iter().map(|(tokens, _)| tokens.input_ids.len()).max().unwrap_or(0);
        for (kind, name) in wanted {
            let width = if *kind == IdOutput::Offsets { 2 } else { 1 };
            let padding = if *kind == IdOutput::InputIds { i64::from(self.config.pad_id) } else { 0 };
            let mut numbers = Vec::new();
            numbers.try_reserve_exact(rows.len() * length * width)?;
            for (index, row) in rows.iter().enumerate() {
                extend(&mut numbers, *kind, row);
                numbers.resize((index + 1) * length * width, padding);
            }
            let shape = [rows.len() as i64, length as i64, width as i64];
            let shape = &shape[usize::from(!self.batching)..=width];
            response.add_i64s(name, shape, &numbers)?;
        }
        Ok(())
    }
}

/// Appends what the output holds for one row.
fn extend(numbers: &mut Vec<i64>, kind: IdOutput, (tokens, spans): &Row) {
    let length = tokens.input_ids.len();
    match kind {
        IdOutput::InputIds => numbers.extend(tokens.input_ids.iter().map(|&id| i64::from(id))),
        IdOutput::AttentionMask => numbers.resize(numbers.len() + length, 1),
        IdOutput::TokenTypeIds => numbers.extend(tokens.token_type_ids.iter().map(|&id| i64::from(id))),
        IdOutput::Offsets => numbers.extend(spans.iter().flat_map(|&(start, end)| [start as i64, end as i64])),
    }
}
