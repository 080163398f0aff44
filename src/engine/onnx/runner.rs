//! One pass: its sequences in groups of like length, each a run of the graph, and the head on what comes out.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use ort::session::SessionInputValue;
use ort::value::Tensor;

use super::signature::{Input, Meaning};
use super::{Graph, OnnxModel, groups, guarded};
use crate::batch::PackedBatch;
use crate::engine::{Output, Runner, Slot};
use crate::error::{Error, Result};
use crate::head::{self, HeadSpec, Value};

/// The inputs of one run, by name.
type Inputs<'m> = Vec<(Cow<'m, str>, SessionInputValue<'static>)>;

pub(super) struct OnnxRunner {
    model: Arc<OnnxModel>,
}

impl OnnxRunner {
    pub(super) fn new(model: Arc<OnnxModel>) -> Self {
        Self { model }
    }
}

impl Runner for OnnxRunner {
    fn run(&mut self, batch: &PackedBatch, outputs: &mut [Output<'_>]) -> Result<()> {
        for i in 0..batch.sequences() {
            let range = batch.range(i);
            self.model.spec.check_sequence(&batch.input_ids[range.clone()], &batch.token_type_ids[range])?;
        }
        // Each sequence of which something is wanted, with its places in `outputs`.
        let mut wanted: Vec<(usize, Range<usize>)> = Vec::new();
        for (place, output) in outputs.iter().enumerate() {
            match wanted.last_mut() {
                Some((sequence, places)) if *sequence == output.sequence => places.end = place + 1,
                _ => wanted.push((output.sequence, place..place + 1)),
            }
        }
        wanted.sort_by_key(|(sequence, _)| batch.range(*sequence).len());
        let lengths: Vec<usize> = wanted.iter().map(|(sequence, _)| batch.range(*sequence).len()).collect();
        for group in groups::plan(&lengths, self.model.signature.mask.is_some()) {
            let longest = lengths[group.end - 1];
            guarded("running model.onnx", || self.model.run_group(batch, &wanted[group], longest, outputs))?;
        }
        Ok(())
    }
}

impl OnnxModel {
    /// Runs the sequences of one group, padded to `length`.
    fn run_group(
        &self,
        batch: &PackedBatch,
        group: &[(usize, Range<usize>)],
        length: usize,
        outputs: &mut [Output<'_>],
    ) -> Result<()> {
        let inputs = self.inputs(batch, group, length)?;
        let mut graph = self.graph.lock().unwrap_or_else(PoisonError::into_inner);
        let Graph { session, options } = &mut *graph;
        let answer = session.run_with_options(inputs, options).map_err(failed)?;
        let (shape, numbers) = answer[self.signature.output.as_str()].try_extract_tensor::<f32>().map_err(failed)?;
        let (rows, width) = (group.len(), self.signature.width);
        let (expected, row): (&[usize], usize) = match self.signature.meaning {
            Meaning::Tokens => (&[rows, length, width], length * width),
            Meaning::Rows => (&[rows, width], width),
        };
        if !shape.iter().map(|&dim| usize::try_from(dim).ok()).eq(expected.iter().map(|&dim| Some(dim))) {
            return Err(Error::internal(format!(
                "model.onnx: output '{}' came with the shape {:?} instead of {expected:?}",
                self.signature.output,
                &shape[..]
            )));
        }
        for ((sequence, places), numbers) in group.iter().zip(numbers.chunks_exact(row)) {
            // Without the padding.
            let own = match self.signature.meaning {
                Meaning::Tokens => &numbers[..batch.range(*sequence).len() * width],
                Meaning::Rows => numbers,
            };
            for output in &mut outputs[places.clone()] {
                self.fill(own, output)?;
            }
        }
        Ok(())
    }

    fn inputs(&self, batch: &PackedBatch, group: &[(usize, Range<usize>)], length: usize) -> Result<Inputs<'_>> {
        let signature = &self.signature;
        let mut inputs = Vec::new();
        let mut add = |input: &'_ Input, padding: u32, of: &dyn Fn(usize) -> u32| -> Result<()> {
            let tokens = group.iter().flat_map(|(sequence, _)| {
                let range = batch.range(*sequence);
                let padded = length - range.len();
                range.map(of).chain(std::iter::repeat_n(padding, padded))
            });
            let shape = [group.len(), length];
            let tensor: SessionInputValue<'static> = if input.wide {
                let numbers: Vec<i64> = tokens.map(i64::from).collect();
                Tensor::from_array((shape, numbers)).map_err(failed)?.into()
            } else {
                // Ids are below a vocabulary's size.
                let numbers: Vec<i32> = tokens.map(|id| id as i32).collect();
                Tensor::from_array((shape, numbers)).map_err(failed)?.into()
            };
            inputs.push((Cow::Owned(input.name.clone()), tensor));
            Ok(())
        };
        add(&signature.ids, self.pad_id, &|at| batch.input_ids[at])?;
        if let Some(mask) = &signature.mask {
            add(mask, 0, &|_| 1)?;
        }
        if let Some(types) = &signature.types {
            add(types, 0, &|at| batch.token_type_ids[at])?;
        }
        Ok(inputs)
    }

    /// Computes one value of a sequence from `numbers`, its token vectors or its row.
    fn fill(&self, numbers: &[f32], output: &mut Output<'_>) -> Result<()> {
        let Slot::Host(slot) = &mut output.slot else {
            return Err(Error::internal("the engine onnx was given a device's memory"));
        };
        match (self.head, output.value) {
            (HeadSpec::Embed { pooling, normalize }, Value::Embedding) => {
                match self.signature.meaning {
                    Meaning::Tokens => head::pool(pooling, numbers, slot),
                    Meaning::Rows => slot.copy_from_slice(numbers),
                }
                if normalize {
                    head::normalize(slot);
                }
            }
            (HeadSpec::Classify { .. }, Value::Logits) => slot.copy_from_slice(numbers),
            (HeadSpec::Classify { activation, .. }, Value::Probabilities) => head::activate(activation, numbers, slot),
            _ => return Err(Error::internal("the engine onnx was asked for a value of another head")),
        }
        if slot.iter().all(|x| x.is_finite()) {
            return Ok(());
        }
        Err(Error::internal("model.onnx: the result is not finite"))
    }
}

/// What ONNX Runtime says of memory is the only word for a resource that ran out.
fn failed(error: ort::Error) -> Error {
    let text = error.message();
    if ["allocate memory", "bad_alloc", "out of memory"].iter().any(|words| text.contains(words)) {
        return Error::unavailable("model.onnx: there is not enough memory for the pass");
    }
    Error::internal(format!("model.onnx: {text}"))
}
