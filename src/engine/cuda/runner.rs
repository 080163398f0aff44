//! A runner: the stream and the memory of one instance, the checks of a pass before it and of its results after it.

use std::sync::Arc;
use std::time::Duration;

use super::encoder::{Pass, bucket, buckets};
use super::exchange::Exchange;
use super::gemm::Tools;
use super::lists::{FLAG_WORDS, Lists};
use super::memory::{DeviceMemory, Event};
use super::{CudaModel, dtype_name};
use crate::batch::PackedBatch;
use crate::engine::check::check_pass;
use crate::engine::{Output, Runner, Slot};
use crate::error::{Error, ErrorKind, Result};
use crate::head::{HeadSpec, Pooling};

/// How long plans of a model are made at load. What is left then is made when a pass first needs it.
const PLANNING: Duration = Duration::from_secs(2);
/// How much of that may go into finding the best pass.
const MEASURING: Duration = Duration::from_secs(1);
/// Tokens of the passes that are compared for it: from the first, in steps.
const MEASURED: (usize, usize) = (1024, 512);
/// A smaller pass is better than a faster one within this share of the best tokens/s: it waits less, and takes less memory.
const NEAR_BEST: f32 = 0.98;
/// Passes of more tokens get their memory when they come: a `max_batch_tokens` that only means "no limit" is no reason
/// to allocate for it.
const MOST_TOKENS_AT_LOAD: usize = 16_384;

pub(super) struct CudaRunner {
    model: Arc<CudaModel>,
    /// Copies, and the stream of all work. Dropped first: it waits for what is under way.
    exchange: Exchange,
    /// The hidden states of a pass.
    arena: DeviceMemory,
    /// The lists of a pass, and the rows for host memory.
    block: DeviceMemory,
    /// Of cublasLt.
    workspace: DeviceMemory,
    events: [Event; 2],
    lists: Lists,
}

impl CudaRunner {
    /// With memory for passes of the model's size, and its plans.
    ///
    /// # Errors
    /// `Unavailable` when the device has no room; `Unsupported` for a product that cublasLt does not have.
    pub(super) fn new(model: Arc<CudaModel>) -> Result<Self> {
        let mut runner = Self::empty(model)?;
        runner.prepare()?;
        Ok(runner)
    }

    /// With no memory for a pass yet.
    fn empty(model: Arc<CudaModel>) -> Result<Self> {
        let device = &model.device;
        // What NVIDIA recommends: 32 MiB from Hopper on, 4 MiB before.
        let workspace = if device.capability >= (9, 0) { 32 << 20 } else { 4 << 20 };
        Ok(Self {
            exchange: Exchange::new(device)?,
            arena: DeviceMemory::empty(device),
            block: DeviceMemory::empty(device),
            workspace: DeviceMemory::new(device, "cublasLt's workspace", workspace)?,
            events: [Event::timed(device)?, Event::timed(device)?],
            lists: Lists::default(),
            model,
        })
    }

    /// Allocates for passes of the usual size, and makes the plans of all that are not larger.
    fn prepare(&mut self) -> Result<()> {
        let model = Arc::clone(&self.model);
        let tokens = model.pass_tokens.min(MOST_TOKENS_AT_LOAD).max(model.spec.max_position_embeddings);
        let width = match model.head {
            HeadSpec::Embed { .. } => model.spec.hidden_size,
            HeadSpec::Classify { num_labels, .. } => 2 * num_labels,
        };
        let words = Lists::usual_words(tokens, width);
        self.arena.grow("hidden states", model.arena_bytes(bucket(tokens)))?;
        self.block.grow("the lists of a pass", 4 * words)?;
        let _current = model.device.make_current()?;
        self.exchange.reserve(words, words)?;
        for rows in buckets(tokens).take_while(|_| model.plans.spent() < PLANNING) {
            let pass = self.pass(&model, rows, rows);
            pass.plans()?;
            pass.pooler_plan()?;
        }
        self.exchange.drain()
    }

    fn pass<'a>(&'a self, model: &'a CudaModel, tokens: usize, sequences: usize) -> Pass<'a> {
        Pass {
            model,
            tools: Tools { stream: self.exchange.stream(), workspace: &self.workspace, events: &self.events },
            arena: model.arena(self.arena.address(), bucket(tokens)),
            lists: &self.lists,
            lists_at: self.block.address(),
            tokens,
            sequences,
            first_only: model.first_only(),
        }
    }

    /// The pass up to the copy of its results.
    fn enqueue(&mut self, batch: &PackedBatch, outputs: &[Output<'_>]) -> Result<()> {
        let model = Arc::clone(&self.model);
        let tokens = batch.tokens();
        self.arena.grow("hidden states", model.arena_bytes(bucket(tokens)))?;
        self.lists.fill(batch, outputs, model.dtype, model.tile_rows);
        let rows: usize = outputs.iter().filter_map(|output| host_len(&output.slot)).sum();
        self.block.grow("the lists of a pass", 4 * self.lists.total_words(rows))?;
        self.lists.fill_addresses(batch, outputs, self.block.address());

        let _current = model.device.make_current()?;
        let pass = self.pass(&model, tokens, batch.sequences());
        let (plans, pooler) = (pass.plans()?, pass.pooler_plan()?);
        let words = self.lists.words();
        self.exchange.write(&self.block, 0, words.len(), |to| {
            to.copy_from_slice(words);
            Ok(())
        })?;
        let pass = self.pass(&model, tokens, batch.sequences());
        let hidden = pass.encode(&plans)?;
        pass.head(hidden, pooler.as_deref())?;
        self.exchange.read(&self.block, 4 * self.lists.not_finite, FLAG_WORDS + rows)
    }

    /// Waits for the results and copies the rows for host memory to their slots.
    fn finish(&mut self, outputs: &mut [Output<'_>]) -> Result<()> {
        let _current = self.model.device.make_current()?;
        let (flag, mut rows) = self.exchange.received()?.split_at(FLAG_WORDS);
        if flag[0] != 0 {
            let name = dtype_name(self.model.dtype);
            return Err(Error::internal(format!(
                "the model's result is not finite: its weights overflow {name} on this input"
            )));
        }
        for output in outputs {
            if let Slot::Host(slot) = &mut output.slot {
                let (own, rest) = rows.split_at(slot.len());
                slot.iter_mut().zip(own).for_each(|(to, word)| *to = f32::from_bits(*word));
                rows = rest;
            }
        }
        Ok(())
    }

    /// After an error nothing of the pass is under way any more. Where memory ran out, what is allocated for passes goes
    /// back, so that the next smaller one has all there is.
    fn recover(&mut self, error: &Error) {
        self.exchange.settle();
        if error.kind == ErrorKind::Unavailable {
            self.arena.free();
            self.block.free();
        }
    }
}

/// The best tokens of a pass, by the times of a layer's matrix products, which the plans then keep. `None` where there is no
/// room to run the largest, or no time to come to `least`, which others were guessed to be as good as.
///
/// # Errors
/// `Unsupported` for a product that cublasLt does not have; `Internal` for a device that fails.
pub(super) fn measure_pass(model: &Arc<CudaModel>, least: usize) -> Result<Option<usize>> {
    let measure = || -> Result<Vec<(usize, f32)>> {
        let mut runner = CudaRunner::empty(Arc::clone(model))?;
        runner.arena.grow("hidden states", model.arena_bytes(MOST_TOKENS_AT_LOAD))?;
        let _current = model.device.make_current()?;
        let mut times = Vec::new();
        // From below: a slow device comes to its best sooner.
        for tokens in (MEASURED.0..=MOST_TOKENS_AT_LOAD).step_by(MEASURED.1) {
            if model.plans.spent() >= MEASURING {
                break;
            }
            let plans = runner.pass(model, tokens, 1).plans()?;
            times.extend(plans.milliseconds().map(|time| (tokens, time)));
        }
        runner.exchange.drain()?;
        Ok(times)
    };
    match measure() {
        Err(error) if error.kind == ErrorKind::Unavailable => Ok(None),
        times => Ok(best_pass(&times?, least)),
    }
}

/// Of passes with their times, the smallest whose tokens/s are near the best.
fn best_pass(times: &[(usize, f32)], least: usize) -> Option<usize> {
    let rate = |&(tokens, time): &(usize, f32)| tokens as f32 / time;
    let best = times.iter().map(rate).fold(0.0, f32::max);
    let reached = times.last().is_some_and(|&(tokens, _)| tokens >= least);
    times.iter().find(|one| reached && rate(one) >= NEAR_BEST * best).map(|&(tokens, _)| tokens)
}

impl Runner for CudaRunner {
    fn run(&mut self, batch: &PackedBatch, outputs: &mut [Output<'_>]) -> Result<()> {
        self.model.device.check_lost()?;
        check_pass(&self.model.spec, &self.model.head, batch, outputs)?;
        if outputs.is_empty() {
            return Ok(());
        }
        let result = self.enqueue(batch, outputs).and_then(|()| self.finish(outputs));
        if let Err(error) = &result {
            self.recover(error);
        }
        result
    }

    fn device_bytes(&self) -> usize {
        self.arena.bytes() + self.block.bytes() + self.workspace.bytes()
    }
}

impl CudaModel {
    /// Whether the head needs nothing but first tokens.
    fn first_only(&self) -> bool {
        matches!(self.head, HeadSpec::Classify { .. } | HeadSpec::Embed { pooling: Pooling::Cls, .. })
    }
}

fn host_len(slot: &Slot<'_>) -> Option<usize> {
    match slot {
        Slot::Host(slot) => Some(slot.len()),
        Slot::Device { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_pass_is_the_smallest_near_the_best_rate() {
        // 100, 125, 150, 148 and 152 tokens/ms.
        let times = [(1000, 10.0), (2000, 16.0), (3000, 20.0), (3700, 25.0), (4560, 30.0)];
        assert_eq!(best_pass(&times, 4000), Some(3000), "98.7% of the best");
        assert_eq!(best_pass(&times[..2], 2000), Some(2000));
        assert_eq!(best_pass(&times, 4561), None, "not measured far enough");
        assert_eq!(best_pass(&[], 0), None);
    }
}
