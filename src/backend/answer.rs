//! The answer to one request: the outputs that its client asked for, filled row by row.

use triton_abi::{ComputeTimes, Error, Request, Response, Result, Slot};

use super::model::Model;
use crate::config::OutputKind;
use crate::engine::{self, Output};
use crate::head::Value;

/// A response that is being filled.
pub struct Answer<'a> {
    response: Response<'a>,
    /// The name of each requested output that is written when all rows are there.
    late: Vec<(OutputKind, String)>,
    /// The FP32 outputs that the engine fills, in the order in which the response holds them.
    filled: Vec<(Slot, Value)>,
    /// `[rows, num_labels]`: the probabilities behind LABEL and SCORE where PROBABILITIES has none on the host.
    probabilities: Vec<f32>,
    /// Tokens of each row that is done.
    token_counts: Vec<i32>,
    rows: usize,
    missing: usize,
}

impl<'a> Answer<'a> {
    /// Makes the outputs of a request of `rows` rows, which an engine on CUDA device `device` fills if there is one; on
    /// an error the request is answered with it.
    pub fn open(model: &Model, device: Option<u32>, request: Request<'a>, rows: usize) -> Option<Self> {
        let wanted = wanted(model, &request);
        let mut answer = Self {
            response: request.respond(),
            late: Vec::new(),
            filled: Vec::new(),
            probabilities: Vec::new(),
            token_counts: vec![0; rows],
            rows,
            missing: rows,
        };
        match wanted.and_then(|wanted| answer.add_outputs(model, device, wanted)) {
            Ok(()) => Some(answer),
            Err(error) => {
                answer.fail(model, error);
                None
            }
        }
    }

    fn add_outputs(&mut self, model: &Model, device: Option<u32>, wanted: Vec<(OutputKind, String)>) -> Result<()> {
        for (kind, name) in wanted {
            let value = match kind {
                OutputKind::Embedding => Value::Embedding,
                OutputKind::Logits => Value::Logits,
                OutputKind::Probabilities => Value::Probabilities,
                // The places of windows are no outputs of a model that answers once.
                _ => {
                    self.late.push((kind, name));
                    continue;
                }
            };
            let width = model.config.head.width(value, &model.config.spec);
            let shape = shape(model, self.rows, width);
            let slot = match device {
                Some(device) => self.response.add_f32_on(device, &name, &shape)?,
                None => self.response.add_f32(&name, &shape)?,
            };
            self.filled.push((slot, value));
        }
        let classes = self.late.iter().any(|(kind, _)| *kind != OutputKind::TokenCount);
        if classes && self.probabilities_slot().is_none() {
            let len = self.rows * model.config.labels.len();
            self.probabilities.try_reserve_exact(len)?;
            self.probabilities.resize(len, 0.0);
        }
        Ok(())
    }

    /// The output whose elements on the host are the probabilities.
    fn probabilities_slot(&self) -> Option<Slot> {
        let slots = self.filled.iter().filter(|(_, value)| *value == Value::Probabilities).map(|(slot, _)| *slot);
        slots.into_iter().find(|slot| self.response.device_address(*slot).is_none())
    }

    /// Whether the client has gone away.
    pub fn is_cancelled(&self) -> bool {
        self.response.request().is_cancelled()
    }

    /// Adds a place for each of `rows`, pairs of a row of this request (ascending) and its sequence in the pass.
    pub fn places<'s>(&'s mut self, model: &Model, rows: &[(usize, usize)], outputs: &mut Vec<Output<'s>>) {
        for &(slot, value) in &self.filled {
            let Some(address) = self.response.device_address(slot) else { continue };
            let width = model.config.head.width(value, &model.config.spec);
            outputs.extend(rows.iter().map(|&(row, sequence)| {
                let address = address + (row * width * size_of::<f32>()) as u64;
                Output { sequence, value, slot: engine::Slot::Device { address, len: width } }
            }));
        }
        let slots = self.response.all_f32_mut().zip(&self.filled).map(|((_, elements), (_, value))| (*value, elements));
        let own = (!self.probabilities.is_empty()).then_some((Value::Probabilities, &mut self.probabilities[..]));
        for (value, elements) in slots.chain(own) {
            let width = model.config.head.width(value, &model.config.spec);
            let mut rows = rows.iter().peekable();
            for (row, place) in elements.chunks_exact_mut(width).enumerate() {
                if let Some(&(_, sequence)) = rows.next_if(|(wanted, _)| *wanted == row) {
                    outputs.push(Output { sequence, value, slot: engine::Slot::Host(place) });
                }
            }
        }
    }

    /// What an engine has to yield for each row: the values of [`Self::places`], each with its width.
    pub fn values(&self, model: &Model) -> Vec<(Value, usize)> {
        let own = (!self.probabilities.is_empty()).then_some(Value::Probabilities);
        let values = self.filled.iter().map(|(_, value)| *value).chain(own);
        values.map(|value| (value, model.config.head.width(value, &model.config.spec))).collect()
    }

    /// Writes one row: its [`Self::values`] one after another.
    pub fn write(&mut self, model: &Model, row: usize, mut values: &[f32]) {
        let mut places = Vec::new();
        self.places(model, &[(row, 0)], &mut places);
        for place in places {
            if let engine::Slot::Host(to) = place.slot {
                let (from, rest) = values.split_at(to.len());
                to.copy_from_slice(from);
                values = rest;
            }
        }
    }

    /// Notes that a row is done. Returns whether it was the last.
    pub fn row_done(&mut self, row: usize, tokens: usize) -> bool {
        self.token_counts[row] = i32::try_from(tokens).unwrap_or(i32::MAX);
        self.missing -= 1;
        self.missing == 0
    }

    /// Writes what is derived from the rows and sends the response. All rows are done.
    pub fn send(mut self, model: &Model, times: ComputeTimes) {
        match self.finish(model) {
            Ok(()) => self.response.send_final(times),
            Err(error) => self.fail(model, error),
        }
    }

    fn finish(&mut self, model: &Model) -> Result<()> {
        let shape = shape(model, self.rows, 1);
        let late = std::mem::take(&mut self.late);
        if late.iter().any(|(kind, _)| *kind != OutputKind::TokenCount) {
            // The response's own outputs are borrowed while others are added: a copy of a few numbers a row.
            let probabilities = match self.probabilities_slot() {
                Some(slot) => self.response.f32_mut(slot).to_vec(),
                None => std::mem::take(&mut self.probabilities),
            };
            let best: Vec<(usize, f32)> = probabilities.chunks_exact(model.config.labels.len()).map(best).collect();
            for (kind, name) in &late {
                match kind {
                    OutputKind::Label => {
                        let names: Vec<&str> = best.iter().map(|(i, _)| model.config.labels[*i].as_str()).collect();
                        self.response.add_strings(name, &shape, &names)?;
                    }
                    OutputKind::Score => {
                        let slot = self.response.add_f32(name, &shape)?;
                        self.response.f32_mut(slot).iter_mut().zip(&best).for_each(|(to, (_, score))| *to = *score);
                    }
                    _ => {}
                }
            }
        }
        for (_, name) in late.iter().filter(|(kind, _)| *kind == OutputKind::TokenCount) {
            let slot = self.response.add_i32(name, &shape)?;
            self.response.i32_mut(slot).copy_from_slice(&self.token_counts);
        }
        Ok(())
    }

    /// Answers with an error instead.
    pub fn fail(self, model: &Model, error: Error) {
        self.response.fail(&model.explain(error));
    }
}

/// The outputs to write: those that the client asked for. With a response cache all that are declared, since a cached
/// answer is given to whoever asks later, for whatever outputs.
pub(super) fn wanted(model: &Model, request: &Request<'_>) -> Result<Vec<(OutputKind, String)>> {
    let names = if model.response_cache { model.declared.clone() } else { request.requested_outputs()? };
    let kind = |name: &str| model.config.outputs.iter().find(|(_, tensor)| tensor.name == name).map(|(kind, _)| *kind);
    Ok(names.into_iter().filter_map(|name| Some((kind(&name)?, name))).collect())
}

/// `[rows, width]`, or `[width]` where the model has no batch dimension.
pub(super) fn shape(model: &Model, rows: usize, width: usize) -> Vec<i64> {
    if model.batching { vec![rows as i64, width as i64] } else { vec![width as i64] }
}

/// Index and value of the greatest probability, the first of equals.
pub(super) fn best(row: &[f32]) -> (usize, f32) {
    let first = (0, row[0]);
    row.iter().copied().enumerate().skip(1).fold(first, |best, next| if next.1 > best.1 { next } else { best })
}
