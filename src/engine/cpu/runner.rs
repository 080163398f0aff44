//! A runner: the working memory of one instance, the checks of a pass before it and of its results after it.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use super::CpuModel;
use super::attention::AttentionScratch;
use super::encoder::GroupScratch;
use super::exec::Exec;
use super::linear::{Out, Rows};
use super::plan::{Group, plan};
use super::rows::Epilogue;
use super::scratch::Slots;
use crate::batch::PackedBatch;
use crate::engine::check::check_pass;
use crate::engine::{Output, Runner, Slot};
use crate::error::{Error, Result};
use crate::head::{self, HeadSpec, Pooling, Value};

/// Working memory that a runner keeps between passes, in tokens a thread.
const KEPT_TOKENS: usize = 1024;

pub(super) struct CpuRunner {
    model: Arc<CpuModel>,
    groups: Slots<GroupScratch>,
    attention: Slots<AttentionScratch>,
}

impl CpuRunner {
    pub(super) fn new(model: Arc<CpuModel>) -> Self {
        let threads = model.threads;
        Self {
            model,
            groups: Slots::new(threads, GroupScratch::new),
            attention: Slots::new(threads, AttentionScratch::new),
        }
    }

    /// What a giant pass has left behind does not stay.
    fn shrink(&mut self) {
        let spec = &self.model.spec;
        for scratch in self.groups.iter_mut() {
            if scratch.x.len() > KEPT_TOKENS * spec.hidden_size {
                *scratch = GroupScratch::new();
            }
        }
        for scratch in self.attention.iter_mut() {
            if scratch.tokens() > KEPT_TOKENS {
                *scratch = AttentionScratch::new();
            }
        }
    }
}

impl Runner for CpuRunner {
    fn run(&mut self, batch: &PackedBatch, outputs: &mut [Output<'_>]) -> Result<()> {
        let model = Arc::clone(&self.model);
        check_pass(&model.spec, &model.head, batch, outputs)?;
        if outputs.iter().any(|output| matches!(output.slot, Slot::Device { .. })) {
            return Err(Error::internal("the CPU engine was given device memory to write"));
        }
        let team = model.pool.team(model.threads);

        // Each group with the outputs of its sequences; a group of which nothing is wanted is left out.
        let mut rest = outputs;
        let mut by_sequence = plan(batch, model.threads);
        by_sequence.sort_by_key(|group| group.sequences.start);
        let mut work = Vec::new();
        for group in by_sequence {
            let count = rest.partition_point(|output| output.sequence < group.sequences.end);
            let (own, others) = rest.split_at_mut(count);
            rest = others;
            if count > 0 {
                work.push((group, Mutex::new(own)));
            }
        }

        let failure = Mutex::new(None);
        let run = |exec: Exec<'_, '_>, (group, outputs): &(Group, Mutex<&mut [Output<'_>]>)| {
            let mut outputs = outputs.lock().unwrap_or_else(PoisonError::into_inner);
            let result =
                self.groups.with(|scratch| model.run_group(exec, batch, group, &mut outputs, scratch, &self.attention));
            if let Err(error) = result {
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        };
        let (split, mut alone): (Vec<_>, Vec<_>) = work.into_iter().partition(|(group, _)| group.split);
        // The greatest first: the last ones, for which a thread may have to wait, are then small.
        alone.sort_by_key(|(group, _)| {
            let Range { start, end } = group.sequences;
            std::cmp::Reverse(batch.cu_seqlens[end] - batch.cu_seqlens[start])
        });
        for group in &split {
            run(Exec::Team(&team), group);
        }
        team.for_each(alone.len(), |i| run(Exec::Alone, &alone[i]));
        drop(team);
        let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.shrink();
        failure.map_or(Ok(()), Err)
    }
}

impl CpuModel {
    /// Encoder and head on one group; fills `outputs`, which are of the group's sequences.
    fn run_group(
        &self,
        exec: Exec<'_, '_>,
        batch: &PackedBatch,
        group: &Group,
        outputs: &mut [Output<'_>],
        scratch: &mut GroupScratch,
        attention: &Slots<AttentionScratch>,
    ) -> Result<()> {
        let h = self.spec.hidden_size;
        let first_only = matches!(self.head, HeadSpec::Classify { .. } | HeadSpec::Embed { pooling: Pooling::Cls, .. });
        let hidden = self.encode(exec, batch, group.sequences.clone(), first_only, scratch, attention)?;
        // Before pooling: the maximum of NaN and a number is the number.
        finite(hidden)?;
        let rows = hidden.len();
        let base = group.sequences.start;
        match self.head {
            HeadSpec::Embed { pooling, normalize } => {
                for output in outputs {
                    let Slot::Host(slot) = &mut output.slot else { continue };
                    let i = output.sequence - base;
                    let tokens = if first_only { i..i + 1 } else { scratch.sequences[i].clone() };
                    head::pool(pooling, &scratch.x[tokens.start * h..tokens.end * h], slot);
                    if normalize {
                        head::normalize(slot);
                    }
                    finite(slot)?;
                }
            }
            HeadSpec::Classify { num_labels, activation } => {
                let Some((pooler, classifier)) = &self.weights.classifier else {
                    return Err(Error::internal("the CPU engine has no weights for its classifier"));
                };
                let first = &scratch.x[..rows];
                scratch.context.grow(rows)?;
                let pooled = &mut scratch.context[..rows];
                scratch.logits.grow(rows / h * num_labels)?;
                let logits = &mut scratch.logits[..rows / h * num_labels];
                pooler.run(self.kernels, exec, Rows::F32(first), Out::F32(Epilogue::Store, pooled));
                pooled.iter_mut().for_each(|x| *x = x.tanh());
                classifier.run(self.kernels, exec, Rows::F32(pooled), Out::F32(Epilogue::Store, logits));
                for output in outputs {
                    let Slot::Host(slot) = &mut output.slot else { continue };
                    let logits = &logits[(output.sequence - base) * num_labels..][..num_labels];
                    match output.value {
                        Value::Probabilities => head::activate(activation, logits, slot),
                        _ => slot.copy_from_slice(logits),
                    }
                    finite(slot)?;
                }
            }
        }
        Ok(())
    }
}

/// NaN is never returned.
fn finite(values: &[f32]) -> Result<()> {
    // Zero times infinity or NaN is NaN, and so is any sum with it.
    let mut lanes = [0.0; 16];
    let (blocks, rest) = values.as_chunks::<16>();
    for block in blocks {
        lanes.iter_mut().zip(block).for_each(|(lane, x)| *lane += x * 0.0);
    }
    if lanes.iter().chain(rest).all(|x| x.is_finite()) {
        return Ok(());
    }
    Err(Error::internal("the model's result is not finite: its weights overflow fp32 on this input"))
}
