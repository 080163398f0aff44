//! The turns of a conversation as one sequence: as the directory's post-processor puts special tokens around one text,
//! with what it puts between two texts of a pair between one turn and the next. With BERT that is
//! `[CLS] turn [SEP] turn [SEP] turn [SEP]`.
//!
//! Every turn is of the first segment: a model that was trained on single texts knows no other, and one that was trained
//! on pairs knows two texts, not a number of turns. These are the tokens that transformers gives for one text with the
//! separators written into it.

use super::Tokens;
use super::template::{Specials, Template};
use crate::error::{Error, Result};

/// Where the special tokens of a conversation stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnLayout {
    /// Before the first turn.
    head: Specials,
    /// Ids between two turns.
    separator: Vec<u32>,
    /// After the last turn.
    tail: Specials,
    /// The turns' segment.
    type_id: u32,
}

impl TurnLayout {
    /// # Errors
    /// `Unsupported` where nothing marks the end of a text of a pair: one turn could not be told from the next.
    pub(super) fn new(single: &Template, pair: &Template, token_types: bool) -> Result<Self> {
        let (mut head, mut type_id, mut tail) = single.around_first();
        if !token_types {
            head.iter_mut().chain(&mut tail).for_each(|(_, own)| *own = 0);
            type_id = 0;
        }
        let separator = pair.between();
        if separator.is_empty() {
            return Err(Error::unsupported(
                "tokenizer.json: its post_processor puts no token between the texts of a pair, so the turns of a \
                 conversation could not be told apart",
            ));
        }
        Ok(Self { head, separator, tail, type_id })
    }

    /// The tokens of the turn alone, out of the finished sequence of that one text.
    pub fn turn<'t>(&self, tokens: &'t Tokens) -> &'t [u32] {
        &tokens.input_ids[self.head.len()..tokens.input_ids.len() - self.tail.len()]
    }

    /// How many of the special tokens stand around all turns.
    pub fn special_tokens(&self) -> usize {
        self.head.len() + self.tail.len()
    }

    /// How many special tokens stand between two turns.
    pub fn separator_tokens(&self) -> usize {
        self.separator.len()
    }

    /// The finished sequence of the turns, oldest first.
    pub fn fill<'t>(&self, turns: impl IntoIterator<Item = &'t [u32]>, truncated: bool) -> Tokens {
        let mut tokens = Tokens { truncated, ..Tokens::default() };
        (tokens.input_ids, tokens.token_type_ids) = self.head.iter().copied().unzip();
        for (index, turn) in turns.into_iter().enumerate() {
            if index > 0 {
                tokens.input_ids.extend_from_slice(&self.separator);
            }
            tokens.input_ids.extend_from_slice(turn);
        }
        tokens.token_type_ids.resize(tokens.input_ids.len(), self.type_id);
        let (ids, types): (Vec<u32>, Vec<u32>) = self.tail.iter().copied().unzip();
        tokens.input_ids.extend(ids);
        tokens.token_type_ids.extend(types);
        tokens
    }
}
