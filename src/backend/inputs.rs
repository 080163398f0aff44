//! What a request brings: copied out of Triton's memory and checked, row by row.

use triton_abi::{Error, Request, Result, Texts};

use super::model::Model;
use crate::tokenize::Tokens;

/// The texts of one request.
pub struct Inputs {
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

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.texts.len()
    }

    /// Bytes of all rows, without their lengths: what the batching library sees.
    pub fn total_bytes(&self) -> usize {
        self.texts.total_bytes() + self.pairs.as_ref().map_or(0, Texts::total_bytes)
    }

    /// Bytes of one row.
    pub fn bytes(&self, row: usize) -> usize {
        [Some(&self.texts), self.pairs.as_ref()]
            .into_iter()
            .flatten()
            .filter_map(|t| t.bytes(row))
            .map(<[u8]>::len)
            .sum()
    }

    /// The tokens of one row; the error names input and row.
    pub fn tokenize(&self, model: &Model, row: usize) -> Result<Tokens> {
        let pair = self.pairs.as_ref().map(|pairs| pairs.str(row)).transpose()?;
        let tokens = model.tokenizer.encode(self.texts.str(row)?, pair);
        Ok(tokens.map_err(|error| error.within(&format!("input '{}', row {row}", model.config.inputs[0].name)))?)
    }
}

/// Copies the inputs of each request; one that cannot be read is answered here.
pub fn read<'a>(model: &Model, requests: Vec<Request<'a>>) -> (Vec<Request<'a>>, Vec<Inputs>) {
    let read = requests.into_iter().filter_map(|request| match Inputs::read(model, &request) {
        Ok(inputs) => Some((request, inputs)),
        Err(error) => {
            request.fail(&model.explain(error));
            None
        }
    });
    read.unzip()
}
