//! Plain ASCII in BERT's pipeline: every character becomes one character or none whatever stands beside it, so a table
//! of 128 entries, read off the pipeline itself, splits a text into the words that the pipeline would give.

use super::boundaries::{Boundaries, Image};

/// What a character becomes.
#[derive(Clone, Copy)]
enum Action {
    /// Joins the word.
    Join(u8),
    /// Ends the word and is one itself.
    Alone(u8),
    /// Ends the word.
    Space,
    Drop,
    /// May start an added token: not for this table.
    Refuse,
}

/// The table of one tokenizer.
pub(super) struct Ascii {
    actions: [Action; 128],
}

/// The words of a text.
pub(super) struct Words {
    normalized: String,
    /// Where each word ends in `normalized`; the next one starts there.
    ends: Vec<usize>,
}

impl Ascii {
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer, boundaries: &Boundaries) -> Self {
        let mut starts = Vec::new();
        let mut normalized_starts = Vec::new();
        for token in tokenizer.get_added_vocabulary().get_added_tokens_decoder().values() {
            if token.normalized {
                normalized_starts.extend(boundaries.normalize(&token.content).chars().next());
            } else {
                starts.extend(token.content.chars().next());
            }
        }
        let actions = std::array::from_fn(|i| {
            let c = char::from(i as u8);
            let one = |image: &str| match image.as_bytes() {
                &[byte] if !starts.contains(&c) && !normalized_starts.contains(&char::from(byte)) => Some(byte),
                _ => None,
            };
            match boundaries.image(c) {
                Image::Word(image) => one(&image).map_or(Action::Refuse, Action::Join),
                Image::Alone(image) => one(&image).map_or(Action::Refuse, Action::Alone),
                // Added tokens hold no white space where there are boundaries.
                Image::Space => Action::Space,
                Image::Nothing if !starts.contains(&c) => Action::Drop,
                Image::Nothing | Image::Unknown => Action::Refuse,
            }
        });
        Self { actions }
    }

    /// The words of `text`, or `None` where the table does not tell.
    pub(super) fn words(&self, text: &str) -> Option<Words> {
        let mut normalized = String::with_capacity(text.len());
        let mut ends = Vec::with_capacity(text.len() / 4);
        let mut start = 0;
        let end_word = |normalized: &String, start: &mut usize, ends: &mut Vec<usize>| {
            if normalized.len() > *start {
                *start = normalized.len();
                ends.push(*start);
            }
        };
        for &byte in text.as_bytes() {
            match *self.actions.get(usize::from(byte))? {
                Action::Join(byte) => normalized.push(char::from(byte)),
                Action::Alone(byte) => {
                    end_word(&normalized, &mut start, &mut ends);
                    normalized.push(char::from(byte));
                    end_word(&normalized, &mut start, &mut ends);
                }
                Action::Space => end_word(&normalized, &mut start, &mut ends),
                Action::Drop => {}
                Action::Refuse => return None,
            }
        }
        end_word(&normalized, &mut start, &mut ends);
        Some(Words { normalized, ends })
    }
}

impl Words {
    /// The words in the text's order.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &str> + ExactSizeIterator {
        (0..self.ends.len()).map(|i| {
            let start = i.checked_sub(1).map_or(0, |before| self.ends[before]);
            &self.normalized[start..self.ends[i]]
        })
    }
}
