//! Where the special tokens stand: what the directory's post-processor adds around one text and around a pair.

use tokenizers::{Encoding, Token};

use super::{Span, Tokens};
use crate::error::{Error, Result};

/// Stands for every token of the first text while the template is read off the post-processor.
const FIRST: u32 = u32::MAX;
/// The same for the second text.
const SECOND: u32 = u32::MAX - 1;

/// Ids and segments of special tokens.
pub(super) type Specials = Vec<(u32, u32)>;

/// The layout of a finished sequence. Every post-processor of the crate puts constant tokens around the texts and
/// gives all tokens of a text the same type, so one probe with a one-token text shows all that it does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    parts: Vec<Part>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Special { id: u32, type_id: u32 },
    First { type_id: u32 },
    Second { type_id: u32 },
}

impl Template {
    /// Reads the layout of a single text, or of a pair, off the post-processor.
    ///
    /// # Errors
    /// `Invalid` when the post-processor fails.
    pub(super) fn probe(tokenizer: &tokenizers::Tokenizer, pair: bool) -> Result<Self> {
        let text = |id, type_id| Encoding::from_tokens(vec![Token::new(id, String::new(), (0, 0))], type_id);
        let encoding = tokenizer
            .post_process(text(FIRST, 0), pair.then(|| text(SECOND, 1)), true)
            .map_err(|e| Error::invalid(format!("post_processor: {e}")))?;
        let parts = encoding.get_ids().iter().zip(encoding.get_type_ids()).map(|(&id, &type_id)| match id {
            FIRST => Part::First { type_id },
            SECOND => Part::Second { type_id },
            _ => Part::Special { id, type_id },
        });
        Ok(Self { parts: parts.collect() })
    }

    /// How many special tokens it adds.
    pub(super) fn special_tokens(&self) -> usize {
        self.parts.iter().filter(|part| matches!(part, Part::Special { .. })).count()
    }

    /// The special tokens' ids.
    pub(super) fn special_ids(&self) -> impl Iterator<Item = u32> {
        self.parts.iter().filter_map(|part| match part {
            Part::Special { id, .. } => Some(*id),
            _ => None,
        })
    }

    /// The greatest token type.
    pub(super) fn max_type_id(&self) -> u32 {
        let type_id = |part: &Part| match *part {
            Part::Special { type_id, .. } | Part::First { type_id } | Part::Second { type_id } => type_id,
        };
        self.parts.iter().map(type_id).max().unwrap_or(0)
    }

    /// The places of the finished sequence's tokens, of those of the texts' tokens; special tokens stand nowhere.
    pub(super) fn fill_spans(&self, first: &[Span], second: &[Span]) -> Vec<Span> {
        let mut spans = Vec::with_capacity(self.special_tokens() + first.len() + second.len());
        for part in &self.parts {
            match part {
                Part::Special { .. } => spans.push((0, 0)),
                Part::First { .. } => spans.extend_from_slice(first),
                Part::Second { .. } => spans.extend_from_slice(second),
            }
        }
        spans
    }

    /// The special tokens before the first text, its segment, and the special tokens after it; of the layout of a single
    /// text.
    pub(super) fn around_first(&self) -> (Specials, u32, Specials) {
        let (mut head, mut type_of_text, mut tail) = (Vec::new(), None, Vec::new());
        for part in &self.parts {
            match *part {
                Part::First { type_id } => type_of_text = Some(type_id),
                Part::Special { id, type_id } if type_of_text.is_none() => head.push((id, type_id)),
                Part::Special { id, type_id } => tail.push((id, type_id)),
                Part::Second { .. } => {}
            }
        }
        (head, type_of_text.unwrap_or(0), tail)
    }

    /// The ids of the special tokens between the texts of a pair; of the layout of a pair.
    pub(super) fn between(&self) -> Vec<u32> {
        let parts = self.parts.iter().skip_while(|part| !matches!(part, Part::First { .. })).skip(1);
        parts
            .map_while(|part| match part {
                Part::Special { id, .. } => Some(*id),
                _ => None,
            })
            .collect()
    }

    /// The finished sequence of the texts' tokens.
    pub(super) fn fill(&self, first: &[u32], second: &[u32], truncated: bool) -> Tokens {
        let capacity = self.special_tokens() + first.len() + second.len();
        let mut input_ids = Vec::with_capacity(capacity);
        let mut token_type_ids = Vec::with_capacity(capacity);
        for part in &self.parts {
            let type_id = match *part {
                Part::Special { id, type_id } => {
                    input_ids.push(id);
                    type_id
                }
                Part::First { type_id } => {
                    input_ids.extend_from_slice(first);
                    type_id
                }
                Part::Second { type_id } => {
                    input_ids.extend_from_slice(second);
                    type_id
                }
            };
            token_type_ids.resize(input_ids.len(), type_id);
        }
        Tokens { input_ids, token_type_ids, truncated }
    }
}
