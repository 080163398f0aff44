//! stub
use crate::error::Result;
/// stub
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Truncation {
    Right,
    Left,
    Error,
}
/// stub
#[allow(missing_docs)]
pub struct Tokens {
    pub input_ids: Vec<u32>,
    pub token_type_ids: Vec<u32>,
    pub truncated: bool,
}
/// stub
pub struct Tokenizer;
#[allow(missing_docs)]
impl Tokenizer {
    pub fn new(_json: &serde_json::Value, _max_length: usize, _t: Truncation) -> Result<Self> {
        Ok(Self)
    }
    pub fn vocab_size(&self) -> usize {
        5
    }
    pub fn encode(&self, text: &str, _pair: Option<&str>) -> Result<Tokens> {
        let n = text.len().max(1);
        Ok(Tokens { input_ids: vec![1; n], token_type_ids: vec![0; n], truncated: false })
    }
}
