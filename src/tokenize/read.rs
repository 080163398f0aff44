//! Reading a text only as far as its tokens are needed.

use std::borrow::Cow;

use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizer};

use super::{Span, Tokenizer, Truncation, WINDOW};
use crate::error::{Error, Result};

/// Tokens counted at most to tell which text of a pair is the longer one.
const COUNTED: usize = 1 << 16;

/// What English has; only the cost depends on it.
const BYTES_PER_TOKEN: usize = 5;

/// Bytes of a piece, so that few missing tokens are not looked for character by character.
const SMALLEST_PIECE: usize = 256;

/// A text that is tokenized piece by piece, from its end if that is the part that stays.
pub(super) struct Reader<'t> {
    tokenizer: &'t Tokenizer,
    rest: &'t str,
    finished: bool,
    from_end: bool,
    /// The first `keep` ids read, in reading order.
    ids: Vec<u32>,
    /// Where each of them stands, where that was asked for.
    spans: Option<Spans>,
    keep: usize,
    /// Tokens read, exact once `finished`.
    count: usize,
}

/// Where tokens stand in a text.
struct Spans {
    /// `start .. end` in characters, of each id that is kept, in reading order.
    kept: Vec<Span>,
    /// The character at which the part that was not read begins, or ends where that is read from its end.
    at: usize,
}

impl<'t> Reader<'t> {
    /// A reader that has read nothing and keeps at most `keep` ids, with their places if `spans` says so.
    pub(super) fn new(tokenizer: &'t Tokenizer, text: &'t str, keep: usize, spans: bool) -> Self {
        let from_end = tokenizer.options.truncation == Truncation::Left;
        let at = if spans && from_end { text.chars().count() } else { 0 };
        let spans = spans.then(|| Spans { kept: Vec::new(), at });
        Self { tokenizer, rest: text, finished: false, from_end, ids: Vec::new(), spans, keep, count: 0 }
    }

    /// How many tokens were read.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The `keep` tokens at the text's start, or at its end, in the text's order, and the places of as many.
    pub(super) fn into_parts(mut self, keep: usize) -> (Vec<u32>, Vec<Span>) {
        let mut spans = self.spans.map_or(Vec::new(), |spans| spans.kept);
        self.ids.truncate(keep);
        spans.truncate(keep);
        if self.from_end {
            self.ids.reverse();
            spans.reverse();
        }
        (self.ids, spans)
    }

    /// The first `most` tokens that were read and are kept, and their places.
    pub(super) fn first(&self, most: usize) -> (&[u32], &[Span]) {
        let spans = self.spans.as_ref().map_or(&[][..], |spans| &spans.kept);
        (&self.ids[..most.min(self.ids.len())], &spans[..most.min(spans.len())])
    }

    /// Forgets the first `tokens` of those, as if the text began behind them.
    pub(super) fn forget(&mut self, tokens: usize) {
        self.ids.drain(..tokens);
        if let Some(spans) = &mut self.spans {
            spans.kept.drain(..tokens);
        }
        self.count -= tokens;
    }

    /// What is not read yet.
    #[cfg(test)]
    pub(super) fn rest(&self) -> &'t str {
        self.rest
    }

    /// Reads until there are more than `tokens`, or the text ends.
    pub(super) fn read_past(&mut self, tokens: usize) -> Result<()> {
        while self.count <= tokens && !self.finished {
            let cuts = self.spans.is_none() || !self.tokenizer.strips;
            let Some(boundaries) = self.tokenizer.boundaries.as_ref().filter(|_| cuts) else {
                self.finished = true;
                return self.read_piece(self.rest, self.rest);
            };
            let missing = tokens + 1 - self.count;
            let window = self.tokenizer.window.min(missing.saturating_mul(BYTES_PER_TOKEN).max(SMALLEST_PIECE));
            if self.rest.len() <= window {
                self.finished = true;
                return self.read_piece(self.rest, self.rest);
            }
            let (piece, used) = if self.from_end {
                boundaries.last_piece(self.rest, window)
            } else {
                boundaries.first_piece(self.rest, window)
            };
            let whole;
            (self.rest, whole) = if self.from_end {
                self.rest.split_at(self.rest.len() - used)
            } else {
                let (whole, rest) = self.rest.split_at(used);
                (rest, whole)
            };
            self.finished = self.rest.is_empty();
            match &piece {
                Cow::Owned(word) if self.spans.is_some() && whole.len() > WINDOW => {
                    let silent = boundaries.silent_start(whole)..whole.len() - boundaries.silent_end(whole);
                    let character = |byte| whole[..byte].chars().count();
                    self.read_spans(word, whole, Some((character(silent.start), character(silent.end))))?;
                }
                _ => self.read_piece(&piece, whole)?,
            }
        }
        Ok(())
    }

    /// Reads a piece, which stands for the part `whole` of the text.
    fn read_piece(&mut self, piece: &str, whole: &str) -> Result<()> {
        if self.spans.is_some() {
            return self.read_spans(whole, whole, None);
        }
        let pipeline = &self.tokenizer.pipeline;
        if let Some(words) = self.tokenizer.ascii.as_ref().and_then(|ascii| ascii.words(piece)) {
            return self.read_words(words.iter());
        }
        let mut words = pipeline.get_added_vocabulary().extract_and_normalize(pipeline.get_normalizer(), piece);
        if let Some(pre_tokenizer) = pipeline.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut words).map_err(failed)?;
        }
        let mut words = words.get_splits(OffsetReferential::Original, OffsetType::None);
        if self.from_end {
            words.reverse();
        }
        for (word, _, added_token) in words {
            match added_token {
                Some(tokens) => self.push(tokens.iter().map(|token| token.id)),
                None => self.read_word(word)?,
            }
        }
        Ok(())
    }

    /// As [`Reader::read_piece`], with the places of the tokens; the crate's own way through its pipeline keeps them. A
    /// `word` of thousands of characters is read from a shorter piece, and each of its tokens stands for all of it.
    fn read_spans(&mut self, piece: &str, whole: &str, word: Option<Span>) -> Result<()> {
        let encoding = self.tokenizer.pipeline.encode_char_offsets(piece, false).map_err(failed)?;
        let free = self.keep - self.ids.len();
        if let Some(spans) = &mut self.spans {
            let characters = whole.chars().count();
            let start = if self.from_end { spans.at - characters } else { spans.at };
            let own = encoding.get_offsets().iter().map(|&own| word.unwrap_or(own));
            let places = own.map(|(from, to)| (start + from, start + to));
            if self.from_end {
                spans.at = start;
                spans.kept.extend(places.rev().take(free));
            } else {
                spans.at += characters;
                spans.kept.extend(places.take(free));
            }
        }
        self.push(encoding.get_ids().iter().copied());
        Ok(())
    }

    fn read_words<'w>(&mut self, mut words: impl DoubleEndedIterator<Item = &'w str>) -> Result<()> {
        if self.from_end {
            words.rev().try_for_each(|word| self.read_word(word))
        } else {
            words.try_for_each(|word| self.read_word(word))
        }
    }

    fn read_word(&mut self, word: &str) -> Result<()> {
        let tokens = self.tokenizer.pipeline.get_model().tokenize(word).map_err(failed)?;
        self.push(tokens.iter().map(|token| token.id));
        Ok(())
    }

    fn push(&mut self, word: impl DoubleEndedIterator<Item = u32> + ExactSizeIterator) {
        self.count += word.len();
        let free = self.keep - self.ids.len();
        if self.from_end {
            self.ids.extend(word.rev().take(free));
        } else {
            self.ids.extend(word.take(free));
        }
    }
}

/// How many tokens of a pair's texts stay, when both were read past `room` tokens or to their ends.
pub(super) fn longest_first(first: &mut Reader, second: &mut Reader, room: usize) -> Result<(usize, usize)> {
    let half = room / 2;
    if first.count + second.count <= room {
        Ok((first.count, second.count))
    } else if first.count <= half {
        Ok((first.count, room - first.count))
    } else if second.count <= half {
        Ok((room - second.count, second.count))
    } else if room % 2 == 1 && is_longer(first, second)? {
        Ok((half + 1, half))
    } else {
        Ok((half, room - half))
    }
}

/// Whether `first` has more tokens than `second`, as far as they are counted.
fn is_longer(first: &mut Reader, second: &mut Reader) -> Result<bool> {
    loop {
        if first.count > second.count {
            if second.finished {
                return Ok(true);
            }
            second.read_past(first.count)?;
        } else if first.finished || first.count > COUNTED {
            return Ok(false);
        } else {
            first.read_past(second.count)?;
        }
    }
}

/// The crate's own text may quote the user's, so it is not passed on.
fn failed(_: tokenizers::Error) -> Error {
    Error::internal("the tokenizer failed on the text")
}
