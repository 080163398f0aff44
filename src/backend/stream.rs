//! The answers to one request of a decoupled model: a response for each window of each row, in the order in which they are
//! done. The windows of one row come in the text's order.

use triton_abi::{ComputeTimes, Error, Request, Response, Result};

use super::answer::{best, shape, wanted};
use super::model::Model;
use super::windows::Piece;
use crate::config::OutputKind;

/// A request that gets its responses.
pub struct Stream<'a> {
    response: Response<'a>,
    wanted: Vec<(OutputKind, String)>,
    /// Rows that have windows left.
    missing: usize,
}

impl<'a> Stream<'a> {
    /// For a request of `rows` rows; on an error the request is answered with it.
    pub fn open(model: &Model, request: Request<'a>, rows: usize) -> Option<Self> {
        match wanted(model, &request) {
            Ok(wanted) => Some(Self { response: request.respond(), wanted, missing: rows }),
            Err(error) => {
                request.fail(&model.explain(error));
                None
            }
        }
    }

    /// Whether the client has gone away.
    pub fn is_cancelled(&self) -> bool {
        self.response.request().is_cancelled()
    }

    /// Answers one window of a row with its values: EMBEDDING, or LOGITS and then PROBABILITIES. Returns whether that was all:
    /// then the response is filled and [`Self::send`] ends the request with it.
    pub fn answer(&mut self, model: &Model, row: usize, window: &Piece, values: &[f32]) -> Result<bool> {
        self.fill(model, row, window, values)?;
        self.missing -= usize::from(window.last);
        if self.missing > 0 {
            self.response.send_part()?;
        }
        Ok(self.missing == 0)
    }

    fn fill(&mut self, model: &Model, row: usize, window: &Piece, values: &[f32]) -> Result<()> {
        let (logits, probabilities) = values.split_at(model.config.labels.len().min(values.len()));
        let class = || best(probabilities);
        let response = &mut self.response;
        for (kind, name) in &self.wanted {
            match kind {
                OutputKind::Embedding => floats(response, model, name, values)?,
                OutputKind::Logits => floats(response, model, name, logits)?,
                OutputKind::Probabilities => floats(response, model, name, probabilities)?,
                OutputKind::Score => floats(response, model, name, &[class().1])?,
                OutputKind::Label => {
                    response.add_strings(name, &shape(model, 1, 1), &[&model.config.labels[class().0]])?;
                }
                OutputKind::TokenCount => number(response, model, name, window.tokens.input_ids.len())?,
                OutputKind::Row => number(response, model, name, row)?,
                OutputKind::WindowStart => number(response, model, name, window.characters.start)?,
                OutputKind::WindowEnd => number(response, model, name, window.characters.end)?,
            }
        }
        Ok(())
    }

    /// Ends the request with the response that was filled last.
    pub fn send(self, times: ComputeTimes) {
        self.response.send_final(times);
    }

    /// Ends it with an error.
    pub fn fail(self, model: &Model, error: Error) {
        self.response.fail(&model.explain(error));
    }
}

/// Adds an output of one row of FP32 values.
fn floats(response: &mut Response<'_>, model: &Model, name: &str, values: &[f32]) -> Result<()> {
    let slot = response.add_f32(name, &shape(model, 1, values.len()))?;
    response.f32_mut(slot).copy_from_slice(values);
    Ok(())
}

/// Adds an output of one INT32.
fn number(response: &mut Response<'_>, model: &Model, name: &str, value: usize) -> Result<()> {
    let slot = response.add_i32(name, &shape(model, 1, 1))?;
    response.i32_mut(slot).fill(i32::try_from(value).unwrap_or(i32::MAX));
    Ok(())
}
