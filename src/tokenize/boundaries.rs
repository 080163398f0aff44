//! Where a text may be cut so that the tokens of the pieces are the tokens of the whole.
//!
//! The rule is known for the pipeline of BERT: `BertNormalizer`, `Lowercase`, both or none, then `BertPreTokenizer`, any
//! model, any added tokens without white space. Why a cut between the characters `a` and `b` is exact where [`Boundaries::can_cut`]
//! says so:
//!
//! 1. *Added tokens matched in the raw text.* No such token holds `a` directly before `b`, so no occurrence spans the
//!    cut, and the leftmost-longest matches of the whole are those of the left piece, then those of the right one.
//!    What `lstrip` and `rstrip` swallow is white space, which gives no token anyway. `single_word` looks at one
//!    neighbour: where a tokenizer has such a token, only white space is cut at, which counts as no neighbour.
//! 2. *Normalizer.* Every step maps one character at a time, except that NFD sorts each run of combining marks. One of
//!    `a`, `b` is a *splitter*: its image starts with a character that is no mark, and of its end nothing that could be
//!    sorted survives (seen by probing, see 3). So sorting never carries anything across the cut that stays visible.
//! 3. *Added tokens matched in the normalized text, pre-tokenizer.* A splitter's image parts its neighbours: of
//!    "a" + c + "a" the pipeline makes "a", the splitter's own words (for white space: none), "a". No normalized added
//!    token holds the last character of `a`'s image followed by another (or, at `b`, its first one preceded by another).
//! 4. *Model.* It sees one word at a time.
//!
//! What one character does is read off the crate itself, by probing, never off tables of our own.
//!
//! A stretch without any such cut, longer than the window, holds only characters that join words and characters that
//! vanish: it is one word. WordPiece answers a word of more than `max_input_chars_per_word` with one unknown token, so
//! the word's first characters stand for all of it; and of characters that vanish, one of each kind between two others
//! stands for all of them (one, because a mark that vanishes may part two that NFD would have sorted).

use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper,
};

/// What a character does, as a set of bits; 0 for one that the probe cannot place, which is never cut at.
type Class = u8;
/// Becomes part of the word around it, as one character or more.
const WORD: Class = 1;
/// Leaves nothing behind.
const VANISHES: Class = 2;
/// The text may be cut before it, as far as the character itself tells.
const CUT_BEFORE: Class = 4;
/// The text may be cut after it, as far as the character itself tells.
const CUT_AFTER: Class = 8;
/// Parts its neighbours and gives no token: white space.
const SILENT: Class = 16;
/// Was probed.
const KNOWN: Class = 128;

const PAGE: usize = 256;

/// What the pipeline makes of a character.
pub(super) enum Image {
    /// Part of a word.
    Word(String),
    /// A word of its own.
    Alone(String),
    Space,
    Nothing,
    Unknown,
}

/// The safe places to cut, for one tokenizer.
pub(super) struct Boundaries {
    normalizer: Option<NormalizerWrapper>,
    /// Neighbours inside added tokens that are matched in the raw text.
    inside_raw: HashSet<(char, char)>,
    /// Characters of added tokens matched in the normalized text: all but each one's first, and all but its last.
    after_first: HashSet<char>,
    before_last: HashSet<char>,
    /// There are `single_word` tokens.
    only_white_space: bool,
    /// Words of more characters than this are one unknown token, wherever they stand.
    longest_word: Option<usize>,
    /// Classes by code point, found when first asked for.
    pages: Vec<OnceLock<Box<[AtomicU8; PAGE]>>>,
}

impl Boundaries {
    /// The rule for this tokenizer, or `None` where none is known.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let normalizer = tokenizer.get_normalizer().cloned();
        if !normalizer.as_ref().is_none_or(maps_characters) {
            return None;
        }
        let Some(PreTokenizerWrapper::BertPreTokenizer(_)) = tokenizer.get_pre_tokenizer() else { return None };
        let mut boundaries = Self {
            normalizer,
            inside_raw: HashSet::new(),
            after_first: HashSet::new(),
            before_last: HashSet::new(),
            only_white_space: false,
            longest_word: None,
            pages: std::iter::repeat_with(OnceLock::new).take(char::MAX as usize / PAGE + 1).collect(),
        };
        let mut word_like = false;
        for token in tokenizer.get_added_vocabulary().get_added_tokens_decoder().values() {
            boundaries.only_white_space |= token.single_word;
            let pattern = if token.normalized { boundaries.normalize(&token.content) } else { token.content.clone() };
            if pattern.contains(char::is_whitespace) {
                return None;
            }
            word_like |= boundaries.split(&format!("a{pattern}a"), !token.normalized).len() == 1;
            let neighbours = pattern.chars().zip(pattern.chars().skip(1));
            if token.normalized {
                for (before, after) in neighbours {
                    boundaries.before_last.insert(before);
                    boundaries.after_first.insert(after);
                }
            } else {
                boundaries.inside_raw.extend(neighbours);
            }
        }
        // An added token that could stand inside a word would break that word up.
        if let (false, ModelWrapper::WordPiece(model)) = (word_like, tokenizer.get_model()) {
            boundaries.longest_word = Some(model.max_input_chars_per_word);
        }
        Some(boundaries)
    }

    /// The first piece of `text` that can be tokenized alone, of about `window` bytes, and the bytes of `text` that it
    /// stands for.
    pub(super) fn first_piece<'t>(&self, text: &'t str, window: usize) -> (Cow<'t, str>, usize) {
        let skipped = self.silent_start(text);
        let rest = &text[skipped..];
        if rest.len() <= window {
            return (Cow::Borrowed(rest), text.len());
        }
        let end = rest.floor_char_boundary(window);
        match self.last_cut(rest, 1..end + 1) {
            Some(cut) => (Cow::Borrowed(&rest[..cut]), skipped + cut),
            None => {
                let cut = self.first_cut(rest, end + 1..rest.len()).unwrap_or(rest.len());
                (self.shorten(&rest[..cut]), skipped + cut)
            }
        }
    }

    /// The last piece of `text`, as [`Boundaries::first_piece`].
    pub(super) fn last_piece<'t>(&self, text: &'t str, window: usize) -> (Cow<'t, str>, usize) {
        let skipped = self.silent_end(text);
        let rest = &text[..text.len() - skipped];
        if rest.len() <= window {
            return (Cow::Borrowed(rest), text.len());
        }
        let start = rest.ceil_char_boundary(rest.len() - window);
        match self.first_cut(rest, start..rest.len()) {
            Some(cut) => (Cow::Borrowed(&rest[cut..]), skipped + rest.len() - cut),
            None => {
                let cut = self.last_cut(rest, 1..start).unwrap_or(0);
                (self.shorten(&rest[cut..]), skipped + rest.len() - cut)
            }
        }
    }

    /// How many bytes of white space `text` starts with.
    pub(super) fn silent_start(&self, text: &str) -> usize {
        let mut chars = text.char_indices().peekable();
        while let Some((at, c)) = chars.next() {
            let goes = self.class(c) & SILENT != 0 && chars.peek().is_none_or(|&(_, next)| self.can_cut(c, next));
            if !goes {
                return at;
            }
        }
        text.len()
    }

    /// How many bytes of white space `text` ends with.
    pub(super) fn silent_end(&self, text: &str) -> usize {
        let mut chars = text.char_indices().rev().peekable();
        while let Some((at, c)) = chars.next() {
            let goes = self.class(c) & SILENT != 0 && chars.peek().is_none_or(|&(_, before)| self.can_cut(before, c));
            if !goes {
                return text.len() - at - c.len_utf8();
            }
        }
        text.len()
    }

    /// The first place in `within` (byte offsets above 0) where `text` may be cut.
    fn first_cut(&self, text: &str, within: Range<usize>) -> Option<usize> {
        let start = text.ceil_char_boundary(within.start);
        let mut before = text[..start].chars().next_back()?;
        for (at, c) in text[start..].char_indices() {
            if start + at >= within.end {
                break;
            }
            if self.can_cut(before, c) {
                return Some(start + at);
            }
            before = c;
        }
        None
    }

    /// The last place in `within` (byte offsets above 0) where `text` may be cut.
    fn last_cut(&self, text: &str, within: Range<usize>) -> Option<usize> {
        let end = text.floor_char_boundary(within.end.checked_sub(1)?);
        let mut after = text[end..].chars().next()?;
        let mut at = end;
        for before in text[..end].chars().rev() {
            if at < within.start {
                break;
            }
            if self.can_cut(before, after) {
                return Some(at);
            }
            at -= before.len_utf8();
            after = before;
        }
        None
    }

    /// Whether the text may be cut between two neighbouring characters.
    fn can_cut(&self, before: char, after: char) -> bool {
        (self.class(before) & CUT_AFTER != 0 || self.class(after) & CUT_BEFORE != 0)
            && !self.inside_raw.contains(&(before, after))
    }

    /// A shorter text with the tokens of `run`, which has no place to cut; `run` itself where there is no shorter one.
    fn shorten<'t>(&self, run: &'t str) -> Cow<'t, str> {
        let Some(longest) = self.longest_word else { return Cow::Borrowed(run) };
        let mut short = String::new();
        let mut characters = 0;
        let mut vanishing = HashSet::new();
        for c in run.chars() {
            match self.class(c) {
                WORD => {
                    characters += 1;
                    if characters <= longest.saturating_add(1) {
                        short.push(c);
                    }
                    vanishing.clear();
                }
                VANISHES if characters <= longest => {
                    if vanishing.insert(c) {
                        short.push(c);
                    }
                }
                VANISHES => {}
                _ => return Cow::Borrowed(run),
            }
        }
        Cow::Owned(short)
    }

    fn class(&self, c: char) -> Class {
        let page = self.pages[c as usize / PAGE].get_or_init(|| Box::new([const { AtomicU8::new(0) }; PAGE]));
        let class = &page[c as usize % PAGE];
        let mut known = class.load(Ordering::Relaxed);
        if known & KNOWN == 0 {
            // Threads that meet here find the same.
            known = self.probe(c) | KNOWN;
            class.store(known, Ordering::Relaxed);
        }
        known & !KNOWN
    }

    /// Sees what the pipeline makes of a character between two letters.
    fn probe(&self, c: char) -> Class {
        let words = self.split(&format!("a{c}a"), true);
        match &words[..] {
            [word] if word == "aa" => VANISHES,
            [_] => WORD,
            [first, own @ .., last] if first == "a" && last == "a" => {
                if self.only_white_space && !c.is_whitespace() {
                    return 0;
                }
                let image = self.normalize(&c.to_string());
                let starts = image.chars().next().is_some_and(|first| !self.after_first.contains(&first));
                let ends = image.chars().next_back().is_some_and(|last| !self.before_last.contains(&last));
                let silent = own.is_empty();
                [(CUT_BEFORE, starts), (CUT_AFTER, ends), (SILENT, silent)]
                    .iter()
                    .filter(|(_, set)| *set)
                    .fold(0, |class, (bit, _)| class | bit)
            }
            _ => 0,
        }
    }

    /// What stands for `c` in a normalized text, and how it meets its neighbours there.
    pub(super) fn image(&self, c: char) -> Image {
        match self.class(c) {
            WORD => Image::Word(self.normalize(&c.to_string())),
            VANISHES => Image::Nothing,
            class if class & SILENT != 0 => Image::Space,
            class if class & (CUT_BEFORE | CUT_AFTER) != 0 => Image::Alone(self.normalize(&c.to_string())),
            _ => Image::Unknown,
        }
    }

    /// The normalized form of a text without added tokens.
    pub(super) fn normalize(&self, text: &str) -> String {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = &self.normalizer {
            // None of those that map characters has an error to give.
            let _ = normalizer.normalize(&mut normalized);
        }
        normalized.get().to_owned()
    }

    /// The words of a text without added tokens, which is normalized before if `normalize` says so.
    fn split(&self, text: &str, normalize: bool) -> Vec<String> {
        let text = if normalize { self.normalize(text) } else { text.to_owned() };
        let mut split = PreTokenizedString::from(text);
        // Nor has BertPreTokenizer.
        let _ = BertPreTokenizer.pre_tokenize(&mut split);
        let words = split.get_splits(OffsetReferential::Original, OffsetType::None);
        words.into_iter().map(|(word, _, _)| word.to_owned()).collect()
    }
}

/// Whether a normalizer is one of those that step 2 of the proof is about.
fn maps_characters(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::BertNormalizer(_) | NormalizerWrapper::Lowercase(_) => true,
        NormalizerWrapper::Sequence(steps) => steps.as_ref().iter().all(maps_characters),
        _ => false,
    }
}
