//! Raw text to token ids, as `tokenizer.json` of the model's directory says and as transformers' fast tokenizers do it
//! with `truncation=True` (pairs: longest first) and no padding.
//!
//! Truncation comes before the expensive part: a text is read piece by piece (`boundaries`) until it has given more
//! tokens than there is room for, so that 10 MB cost what their first few hundred tokens cost. The pieces' tokens are
//! exactly the whole text's. That holds for BERT's pipeline (`BertNormalizer`, `Lowercase`, both or none, and
//! `BertPreTokenizer`); a text of any other pipeline (byte-level, Metaspace, Unicode normal forms) is one piece: the
//! same answer, in time and memory that grow with the text.
//!
//! The crate keeps track of where every byte came from; nine tenths of its time go there. Plain ASCII needs none of it,
//! so `ascii` splits it into the same words.
//!
//! Nothing here starts a thread or holds a lock while it works: any number of threads may call [`Tokenizer::encode`].

mod ascii;
mod boundaries;
#[cfg(test)]
mod cases;
mod read;
mod template;
#[cfg(test)]
mod tests;
mod turns;
mod windows;

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokenizers::{Model, ModelWrapper};

use crate::error::{Error, Result};
use ascii::Ascii;
use boundaries::Boundaries;
use read::{Reader, longest_first};
use template::Template;
pub use turns::TurnLayout;
pub use windows::{Window, Windows};

/// The file that holds a tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";

/// Most bytes of text to a piece.
const WINDOW: usize = 4096;

/// What happens to a text with more tokens than `max_length`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truncation {
    /// Its first tokens stay.
    Right,
    /// Its last tokens stay.
    Left,
    /// It is refused.
    Error,
}

/// What the user may choose about tokenization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenizeOptions {
    /// Most tokens of one sequence, special tokens included.
    pub max_length: usize,
    /// What happens to longer texts.
    pub truncation: Truncation,
    /// Whether the post-processor's segments are given; otherwise all are 0.
    pub token_types: bool,
}

/// One tokenized text, or pair of texts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// `[S]` token ids, special tokens included, at most `max_length`.
    pub input_ids: Vec<u32>,
    /// `[S]` segment of each token.
    pub token_type_ids: Vec<u32>,
    /// Whether tokens of the text, or of either text of a pair, were left out.
    pub truncated: bool,
}

/// Where a token stands in its text: the characters `start .. end`. Special tokens are at `(0, 0)`.
pub type Span = (usize, usize);

/// A directory's tokenizer, with the truncation to apply.
pub struct Tokenizer {
    /// Its own truncation and padding are off, its post-processor is not used after loading.
    pipeline: tokenizers::Tokenizer,
    single: Template,
    pair: Template,
    boundaries: Option<Boundaries>,
    /// There are added tokens that swallow the white space beside them: their places tell, their ids do not.
    strips: bool,
    ascii: Option<Ascii>,
    options: TokenizeOptions,
    max_token_id: u32,
    window: usize,
}

impl Tokenizer {
    /// Makes a tokenizer of a `tokenizer.json` that is read already.
    ///
    /// # Errors
    /// As [`Tokenizer::from_bytes`], naming the file.
    pub fn from_json(json: &serde_json::Value, options: TokenizeOptions) -> Result<Self> {
        let bytes = serde_json::to_vec(json).map_err(|e| Error::internal(e.to_string()));
        bytes.and_then(|bytes| Self::from_bytes(&bytes, options)).map_err(|e| e.within(TOKENIZER_FILE))
    }

    /// Makes a tokenizer of the content of a `tokenizer.json`.
    ///
    /// # Errors
    /// `Invalid` when it is not a tokenizer that can work, or `max_length` leaves no room for text.
    pub fn from_bytes(json: &[u8], options: TokenizeOptions) -> Result<Self> {
        // The crate answers some malformed files with a panic.
        catch_unwind(AssertUnwindSafe(|| Self::build(json, options)))
            .unwrap_or_else(|_| Err(Error::invalid("it is not a tokenizer that the tokenizers library can read")))
    }

    fn build(json: &[u8], options: TokenizeOptions) -> Result<Self> {
        let mut pipeline = tokenizers::Tokenizer::from_bytes(json).map_err(|e| Error::invalid(e.to_string()))?;
        pipeline.with_padding(None);
        pipeline.with_truncation(None).map_err(|e| Error::invalid(e.to_string()))?;
        let (single, pair) = (Template::probe(&pipeline, false)?, Template::probe(&pipeline, true)?);
        let special = single.special_tokens();
        if options.max_length <= special {
            return Err(Error::invalid(format!(
                "max_length {} leaves no room for text beside {special} special tokens; it must be at least {}",
                options.max_length,
                special + 1
            )));
        }
        if let ModelWrapper::WordPiece(model) = pipeline.get_model()
            && model.token_to_id(&model.unk_token).is_none()
        {
            return Err(Error::invalid("model.vocab lacks the token that model.unk_token names"));
        }
        let ids = pipeline.get_vocab(true).into_values();
        let max_token_id = ids.chain(single.special_ids()).chain(pair.special_ids()).max().unwrap_or(0);
        let boundaries = Boundaries::new(&pipeline);
        let mut added = pipeline.get_added_vocabulary().get_added_tokens_decoder().values();
        let strips = added.any(|token| token.lstrip || token.rstrip);
        let ascii = boundaries.as_ref().map(|boundaries| Ascii::new(&pipeline, boundaries));
        Ok(Self { pipeline, single, pair, boundaries, strips, ascii, options, max_token_id, window: WINDOW })
    }

    /// Tokenizes a text, or a pair of texts, with the special tokens.
    ///
    /// A pair is cut longest first: a text that fits half the room stays whole, otherwise both are cut to half, and
    /// an odd token goes to the text that has more (to the second if neither has). Which one that is can need all
    /// tokens of the shorter text; the counting ends at 65,536 tokens, and texts that both have more count as equal.
    ///
    /// # Errors
    /// `Invalid` when the text is too long and truncation is [`Truncation::Error`], or when `max_length` has no room for
    /// a pair; `Internal` when the tokenizer itself fails on a text.
    pub fn encode(&self, text: &str, pair: Option<&str>) -> Result<Tokens> {
        Ok(self.encode_guarded(text, pair, false)?.0)
    }

    /// As [`Tokenizer::encode`], with the place of each token in its text, `[S]`. It costs several times as much.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_with_spans(&self, text: &str, pair: Option<&str>) -> Result<(Tokens, Vec<Span>)> {
        self.encode_guarded(text, pair, true)
    }

    fn encode_guarded(&self, text: &str, pair: Option<&str>, spans: bool) -> Result<(Tokens, Vec<Span>)> {
        // All state is the call's own.
        guarded(|| self.encode_unguarded(text, pair, spans))
    }

    fn encode_unguarded(&self, text: &str, pair: Option<&str>, spans: bool) -> Result<(Tokens, Vec<Span>)> {
        let template = if pair.is_some() { &self.pair } else { &self.single };
        let special = template.special_tokens();
        let max_length = self.options.max_length;
        let Some(room @ 1..) = max_length.checked_sub(special) else {
            return Err(Error::invalid(format!(
                "max_length {max_length} leaves no room for a pair of texts beside {special} special tokens"
            )));
        };
        let mut first = Reader::new(self, text, room, spans);
        first.read_past(room)?;
        let mut second = pair.map(|pair| Reader::new(self, pair, room, spans));
        if let Some(second) = &mut second {
            second.read_past(room)?;
        }
        let truncated = first.count() + second.as_ref().map_or(0, Reader::count) > room;
        if truncated && self.options.truncation == Truncation::Error {
            let what = if pair.is_some() { "the pair of texts has" } else { "the text has" };
            return Err(Error::invalid(format!(
                "{what} more tokens than max_length {max_length} allows ({room} beside {special} special tokens), and \
                 truncation is 'error'"
            )));
        }
        let (keep_first, keep_second) = match &mut second {
            Some(second) => longest_first(&mut first, second, room)?,
            None => (room, 0),
        };
        let (first, first_spans) = first.into_parts(keep_first);
        let (second, second_spans) = second.map_or_else(Default::default, |second| second.into_parts(keep_second));
        let mut tokens = template.fill(&first, &second, truncated);
        if !self.options.token_types {
            tokens.token_type_ids.fill(0);
        }
        let spans = if spans { template.fill_spans(&first_spans, &second_spans) } else { Vec::new() };
        Ok((tokens, spans))
    }

    /// The greatest token id that a text can give: it must be below the model's `vocab_size`.
    pub fn max_token_id(&self) -> u32 {
        self.max_token_id
    }

    /// The greatest token type that a text, or a pair, can give: it must be below the model's `type_vocab_size`.
    pub fn max_token_type_id(&self, pair: bool) -> u32 {
        if pair { self.pair.max_type_id() } else { self.single.max_type_id() }
    }

    /// How the turns of a conversation are put together.
    ///
    /// # Errors
    /// `Unsupported` for a post-processor that puts nothing between two texts.
    pub fn turn_layout(&self) -> Result<TurnLayout> {
        TurnLayout::new(&self.single, &self.pair, self.options.token_types)
    }

    /// How many special tokens a text, or a pair, is given; `max_length` must be greater.
    pub fn special_tokens(&self, pair: bool) -> usize {
        if pair { self.pair.special_tokens() } else { self.single.special_tokens() }
    }
}

/// A panic of the crate becomes an error. What `work` may leave half done is not to be used after one.
fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err(Error::internal("the tokenizer failed on the text")))
}
