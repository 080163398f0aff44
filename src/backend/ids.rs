//! Raw ids of a request, checked against the model's tables before anything looks them up.

use triton_abi::{Error, Input, Request, Result};

use super::model::Model;
use crate::config::ids::IdInputs;
use crate::tokenize::Tokens;

/// The ids of one request, `[rows, length]`, as the client padded them.
pub struct Ids {
    rows: usize,
    length: usize,
    input_ids: Vec<i64>,
    attention_mask: Option<Vec<i64>>,
    token_type_ids: Option<Vec<i64>>,
}

impl Ids {
    /// Copies the ids of a request.
    pub fn read(model: &Model, inputs: &IdInputs, request: &Request<'_>) -> Result<Self> {
        let input_ids = request.input(&inputs.input_ids)?;
        let shape = input_ids.shape();
        let (rows, length) = if model.batching { (shape[0], shape[1]) } else { (1, shape[0]) };
        let beside = |name: &Option<String>| {
            let Some(name) = name else { return Ok(None) };
            same_shape(&request.input(name)?, &input_ids)?.integers().map(Some)
        };
        Ok(Self {
            rows: usize::try_from(rows).unwrap_or(0),
            length: usize::try_from(length).unwrap_or(0),
            attention_mask: beside(&inputs.attention_mask)?,
            token_type_ids: beside(&inputs.token_type_ids)?,
            input_ids: input_ids.integers()?,
        })
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many ids, the padding among them.
    pub fn count(&self) -> usize {
        self.input_ids.len()
    }

    /// The tokens of one row, without its padding; the error names input and row.
    pub fn tokens(&self, model: &Model, inputs: &IdInputs, row: usize) -> Result<Tokens> {
        let places = row * self.length..(row + 1) * self.length;
        let fail = |input: &str, why: String| Error::invalid_arg(format!("input '{input}', row {row}: {why}"));
        let length = match (&self.attention_mask, &inputs.attention_mask) {
            (Some(mask), Some(name)) => prefix(&mask[places.clone()]).map_err(|why| fail(name, why))?,
            _ => self.length,
        };
        let most = model.config.max_length;
        if !(1..=most).contains(&length) {
            return Err(fail(&inputs.input_ids, format!("has {length} tokens, allowed are 1 to {most}")));
        }
        let spec = &model.config.spec;
        let below = |ids: &[i64], name: &str, table: usize| {
            ids[places.start..][..length]
                .iter()
                .map(|&id| u32::try_from(id).ok().filter(|&id| (id as usize) < table).ok_or(id))
                .collect::<std::result::Result<Vec<u32>, i64>>()
                .map_err(|id| fail(name, format!("id {id} is out of range, allowed are 0 to {}", table - 1)))
        };
        Ok(Tokens {
            input_ids: below(&self.input_ids, &inputs.input_ids, spec.vocab_size)?,
            token_type_ids: match (&self.token_type_ids, &inputs.token_type_ids) {
                (Some(types), Some(name)) => below(types, name, spec.type_vocab_size)?,
                _ => vec![0; length],
            },
            truncated: false,
        })
    }
}

fn same_shape<'i, 'r>(input: &'i Input<'r>, ids: &Input<'_>) -> Result<&'i Input<'r>> {
    if input.shape() == ids.shape() {
        return Ok(input);
    }
    Err(Error::invalid_arg(format!(
        "input '{}' has shape {:?} and '{}' has {:?}; they must be the same",
        input.name(),
        input.shape(),
        ids.name(),
        ids.shape()
    )))
}

/// How many ones a mask of ones and then zeros has. The tokens' positions are their places, so there is no other mask that
/// leaves padding out and has the answer of the reference, where padding in front moves the tokens' positions.
fn prefix(mask: &[i64]) -> std::result::Result<usize, String> {
    if let Some(other) = mask.iter().find(|value| !(0..=1).contains(*value)) {
        return Err(format!("value {other}; allowed are 1 for a token and 0 for padding"));
    }
    let length = mask.iter().take_while(|&&value| value == 1).count();
    match mask[length..].iter().position(|&value| value == 1) {
        Some(at) => Err(format!("a token follows padding, at {}; padding must come last", length + at)),
        None => Ok(length),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_is_ones_and_then_zeros() {
        assert_eq!(prefix(&[1, 1, 0, 0]), Ok(2));
        assert_eq!(prefix(&[1]), Ok(1));
        assert_eq!(prefix(&[0, 0]), Ok(0));
        assert!(prefix(&[1, 0, 1]).unwrap_err().contains("at 2"));
        assert!(prefix(&[0, 1]).unwrap_err().contains("at 1"));
        assert!(prefix(&[1, 2]).unwrap_err().contains("value 2"));
        assert!(prefix(&[-1]).unwrap_err().contains("value -1"));
    }
}
