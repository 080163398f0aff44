//! What a request brings: copied out of Triton's memory and checked, row by row.

use triton_abi::{Error, Request, Result, Texts};

use super::ids::Ids;
use super::model::Model;
use crate::config::triton::TensorDeclaration;
use crate::tokenize::{Tokens, Windows};

/// The rows of one request.
pub enum Inputs {
    /// Texts, or pairs of texts.
    Texts(TextRows),
    /// Ids that the client's own tokenizer made.
    Ids(Ids),
}

impl Inputs {
    /// Copies them out of the request.
    pub fn read(model: &Model, request: &Request<'_>) -> Result<Self> {
        match &model.config.ids {
            Some(inputs) => Ids::read(model, inputs, request).map(Self::Ids),
            None => TextRows::read(&model.config.inputs, request).map(Self::Texts),
        }
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.rows(),
            Self::Ids(ids) => ids.rows(),
        }
    }

    /// Bytes of all texts, without their lengths; ids cost nothing to tokenize.
    pub fn total_bytes(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.total_bytes(),
            Self::Ids(_) => 0,
        }
    }

    /// Bytes of one row's text, where it is a text.
    pub fn bytes(&self, row: usize) -> Option<usize> {
        match self {
            Self::Texts(texts) => Some(texts.bytes(row)),
            Self::Ids(_) => None,
        }
    }

    /// The tokens that the batching library expects: texts by their bytes, ids by their number.
    pub fn expected_tokens(&self, model: &Model) -> u64 {
        match self {
            Self::Texts(texts) => model.budget.estimate(texts.rows() as u64, texts.total_bytes() as u64),
            Self::Ids(ids) => ids.count() as u64,
        }
    }

    /// The windows of one row's text; the error names input and row.
    pub fn windows<'t>(&'t self, model: &'t Model, row: usize, stride: usize) -> Result<Windows<'t>> {
        match (self, &model.tokenizer) {
            (Self::Texts(texts), Some(tokenizer)) => Ok(tokenizer.windows(texts.get(row)?.0, stride)?),
            _ => Err(Error::internal("the model has no tokenizer for texts")),
        }
    }

    /// The tokens of one row; the error names input and row.
    pub fn tokens(&self, model: &Model, row: usize) -> Result<Tokens> {
        match (self, &model.config.ids, &model.tokenizer) {
            (Self::Texts(texts), _, Some(tokenizer)) => {
                let (text, pair) = texts.get(row)?;
                let tokens = tokenizer.encode(text, pair);
                Ok(tokens.map_err(|e| e.within(&format!("input '{}', row {row}", model.config.inputs[0].name)))?)
            }
            (Self::Ids(ids), Some(inputs), _) => ids.tokens(model, inputs, row),
            _ => Err(Error::internal("the model has no tokenizer for texts")),
        }
    }
}

/// The texts, or pairs of texts, of one request.
pub struct TextRows {
    texts: Texts,
    pairs: Option<Texts>,
}

impl TextRows {
    /// Copies the texts of a request. `inputs` declares TEXT, and TEXT_PAIR where the model takes pairs.
    pub fn read(inputs: &[TensorDeclaration], request: &Request<'_>) -> Result<Self> {
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

    /// The text of one row, and the second one of a pair; the error names input and row.
    pub fn get(&self, row: usize) -> Result<(&str, Option<&str>)> {
        Ok((self.texts.str(row)?, self.pairs.as_ref().map(|pairs| pairs.str(row)).transpose()?))
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
