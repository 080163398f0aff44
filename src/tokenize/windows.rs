//! A text of any length as overlapping windows of at most `max_length` tokens, as transformers describes them for
//! `truncation=True, stride=N, return_overflowing_tokens=True`: every window but the last is full, each begins with the last
//! `stride` tokens of the one before, and each has the special tokens.
//!
//! The windows are made one after another while the text is read, so that 10 MB of text need the memory of one window and
//! one piece. A text of a pipeline that cannot be cut into pieces (see the parent module) is read whole.

use std::ops::Range;

use super::read::Reader;
use super::{Tokenizer, Tokens, guarded};
use crate::error::{Error, Result};

/// One window of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Its tokens, special ones included; nothing counts as truncated.
    pub tokens: Tokens,
    /// From its first token's first character to behind its last token's last one, counted in the text's characters
    /// (Unicode code points, as Python indexes a `str`); empty for a text without tokens.
    pub characters: Range<usize>,
}

/// The windows of one text, made as they are asked for. After an error there are no more.
pub struct Windows<'t> {
    tokenizer: &'t Tokenizer,
    /// Holds the tokens of the next window and those read beyond it.
    reader: Reader<'t>,
    room: usize,
    stride: usize,
    finished: bool,
}

impl Tokenizer {
    /// The windows of `text`, at least one, with `stride` tokens in two neighbouring ones. They begin at the text's start:
    /// the tokenizer's truncation must not be [`Truncation::Left`](super::Truncation::Left).
    ///
    /// # Errors
    /// `Invalid` when `stride` is not less than the tokens that a window has beside the special ones.
    pub fn windows<'t>(&'t self, text: &'t str, stride: usize) -> Result<Windows<'t>> {
        let (max_length, special) = (self.options.max_length, self.single.special_tokens());
        let room = max_length.saturating_sub(special);
        if stride >= room {
            return Err(Error::invalid(format!(
                "a stride of {stride} tokens needs windows of more; max_length {max_length} leaves {room} beside {special} \
                 special tokens"
            )));
        }
        let reader = Reader::new(self, text, usize::MAX, true);
        Ok(Windows { tokenizer: self, reader, room, stride, finished: false })
    }
}

impl Iterator for Windows<'_> {
    type Item = Result<Window>;

    fn next(&mut self) -> Option<Result<Window>> {
        if self.finished {
            return None;
        }
        // One token more than fits tells that another window follows.
        let window = guarded(|| self.reader.read_past(self.room)).map(|()| self.window());
        self.finished = window.is_err() || self.reader.count() <= self.room;
        if !self.finished {
            self.reader.forget(self.room - self.stride);
        }
        Some(window)
    }
}

impl Windows<'_> {
    /// Whether there are no more: the last one was given.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// The window at the start of what was read.
    fn window(&self) -> Window {
        let (ids, places) = self.reader.first(self.room);
        let mut tokens = self.tokenizer.single.fill(ids, &[], false);
        if !self.tokenizer.options.token_types {
            tokens.token_type_ids.fill(0);
        }
        let start = places.first().map_or(0, |place| place.0);
        Window { tokens, characters: start..places.last().map_or(0, |place| place.1) }
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::utils::truncation::TruncationDirection;

    use super::super::Truncation;
    use super::super::tests::{MINILM, Random, load};
    use super::*;

    /// The whole text, cut by the crate. Its own truncation while it tokenizes (0.23) loses what overflows.
    fn whole(whole: &tokenizers::Tokenizer, text: &str, max_length: usize, stride: usize) -> Vec<Window> {
        let mut encoding = whole.encode_char_offsets(text, false).unwrap();
        encoding.truncate(max_length - 2, stride, TruncationDirection::Right);
        let all = std::iter::once(&encoding).chain(encoding.get_overflowing());
        all.map(|encoding| {
            let input_ids = [&[101], encoding.get_ids(), &[102]].concat();
            let offsets = encoding.get_offsets();
            Window {
                tokens: Tokens { token_type_ids: vec![0; input_ids.len()], input_ids, truncated: false },
                characters: offsets.first().map_or(0, |offsets| offsets.0)
                    ..offsets.last().map_or(0, |offsets| offsets.1),
            }
        })
        .collect()
    }

    fn windows(tokenizer: &Tokenizer, text: &str, stride: usize) -> Vec<Window> {
        tokenizer.windows(text, stride).unwrap().collect::<Result<_>>().unwrap()
    }

    #[test]
    fn windows_are_those_of_the_whole_text() {
        let mut random = Random(7);
        let mut tokenizer = load(512, Truncation::Right);
        let mut crates = tokenizers::Tokenizer::from_bytes(&*MINILM).unwrap();
        crates.with_padding(None).with_truncation(None).unwrap();
        for case in 0..400 {
            let parts = [3, 12, 60][case % 3];
            let text = random.text(parts, &[]);
            let (max_length, stride) = (8 + random.below(20), 1 + random.below(5));
            tokenizer.options.max_length = max_length;
            tokenizer.window = 1 + random.below(40);
            let expected = whole(&crates, &text, max_length, stride);
            assert_eq!(windows(&tokenizer, &text, stride), expected, "case {case}: {text:?}");
        }
    }

    #[test]
    fn every_text_has_a_window_and_only_long_ones_have_more() {
        let tokenizer = load(6, Truncation::Right);
        let empty = windows(&tokenizer, "", 2);
        assert_eq!((empty.len(), empty[0].tokens.input_ids.len(), empty[0].characters.clone()), (1, 2, 0..0));
        let full = windows(&tokenizer, " one two three four ", 2);
        assert_eq!((full.len(), full[0].characters.clone()), (1, 1..19));
        let one_more = windows(&tokenizer, "one two three four five", 2);
        let places: Vec<_> = one_more.iter().map(|window| window.characters.clone()).collect();
        assert_eq!(places, [0..18, 8..23]);
        assert!(tokenizer.windows("x", 4).is_err_and(|error| error.message.contains("leaves 4")));
    }

    #[test]
    fn a_text_is_read_no_further_than_its_windows_are_asked_for() {
        let tokenizer = load(32, Truncation::Right);
        let text = "The quick brown fox jumps over the lazy dog. ".repeat(1 << 16);
        let mut windows = tokenizer.windows(&text, 8).unwrap();
        windows.nth(10).unwrap().unwrap();
        assert!(windows.reader.count() < 1 << 12 && windows.reader.rest().len() > text.len() - (1 << 14));
    }

    #[test]
    fn one_endless_word_is_one_token_of_all_its_characters() {
        let tokenizer = load(16, Truncation::Right);
        let text = format!("so {} it is", "é".repeat(1 << 15));
        let all = windows(&tokenizer, &text, 4);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].tokens.input_ids.len(), all[0].characters.clone()), (6, 0..(1 << 15) + 9));
    }
}
