//! BYTES tensors: strings, each with its length in 4 little-endian bytes before it.

use std::ops::Range;

use crate::error::{Error, Result};

const LENGTH_BYTES: usize = 4;

/// The strings of a BYTES tensor, in one buffer that is ours.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Texts {
    input: String,
    data: Vec<u8>,
    spans: Vec<Range<usize>>,
}

impl Texts {
    /// Splits the raw bytes of a tensor of `count` elements. Every length is checked, and nothing may be left
    /// over. `input` names the tensor in errors.
    pub fn parse(input: &str, data: Vec<u8>, count: usize) -> Result<Self> {
        // No room is reserved for more elements than the data can hold.
        let most = data.len() / LENGTH_BYTES;
        let mut spans = Vec::new();
        spans.try_reserve_exact(count.min(most))?;
        let mut at = 0;
        for row in 0..count {
            let span = element(&data, at)
                .ok_or_else(|| Error::invalid_arg(format!("input '{input}': element {row} of {count} is cut off")))?;
            at = span.end;
            spans.push(span);
        }
        if at != data.len() {
            return Err(Error::invalid_arg(format!(
                "input '{input}': {} bytes after the last of {count} elements",
                data.len() - at
            )));
        }
        Ok(Self { input: input.to_string(), data, spans })
    }

    /// How many strings.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// The bytes of all strings together.
    pub fn total_bytes(&self) -> usize {
        self.data.len() - LENGTH_BYTES * self.len()
    }

    /// The bytes of string `row`, or `None` after the last.
    pub fn bytes(&self, row: usize) -> Option<&[u8]> {
        self.data.get(self.spans.get(row)?.clone())
    }

    /// String `row` as UTF-8; the error names the row and holds none of its bytes.
    pub fn str(&self, row: usize) -> Result<&str> {
        let bytes =
            self.bytes(row).ok_or_else(|| Error::internal(format!("input '{}' has no row {row}", self.input)))?;
        std::str::from_utf8(bytes).map_err(|e| {
            Error::invalid_arg(format!(
                "input '{}', row {row}: not valid UTF-8 from byte {} on",
                self.input,
                e.valid_up_to()
            ))
        })
    }
}

fn element(data: &[u8], at: usize) -> Option<Range<usize>> {
    let start = at.checked_add(LENGTH_BYTES)?;
    let length = u32::from_le_bytes(data.get(at..start)?.try_into().ok()?);
    let end = start.checked_add(usize::try_from(length).ok()?)?;
    (end <= data.len()).then_some(start..end)
}

/// The raw bytes of a BYTES tensor that holds `strings`.
pub(crate) fn encode<S: AsRef<[u8]>>(strings: &[S]) -> Result<Vec<u8>> {
    let too_large = || Error::internal("a BYTES output is too large");
    let mut size = 0usize;
    for string in strings {
        size = size
            .checked_add(LENGTH_BYTES)
            .and_then(|size| size.checked_add(string.as_ref().len()))
            .ok_or_else(too_large)?;
    }
    let mut data = Vec::new();
    data.try_reserve_exact(size)?;
    for string in strings {
        let bytes = string.as_ref();
        let length = u32::try_from(bytes.len()).map_err(|_| too_large())?;
        data.extend_from_slice(&length.to_le_bytes());
        data.extend_from_slice(bytes);
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_survive_the_way_there_and_back() {
        let strings = ["", "a", "naïve \u{0} 🦀"];
        let texts = Texts::parse("TEXT", encode(&strings).expect("fits"), 3).expect("valid");
        for (row, string) in strings.iter().enumerate() {
            assert_eq!(texts.str(row).expect("UTF-8"), *string);
        }
        assert_eq!(texts.bytes(1), Some(b"a".as_slice()));
        assert_eq!(texts.bytes(3), None);
    }

    #[test]
    fn refuses_every_cut_and_every_addition() {
        let data = encode(&["one", "", "three"]).expect("fits");
        for cut in 0..data.len() {
            assert!(Texts::parse("TEXT", data[..cut].to_vec(), 3).is_err(), "cut at {cut}");
        }
        let mut longer = data.clone();
        longer.push(0);
        assert!(Texts::parse("TEXT", longer, 3).is_err());
        assert!(Texts::parse("TEXT", data.clone(), 2).is_err());
        assert!(Texts::parse("TEXT", data, 4).is_err());
    }

    #[test]
    fn refuses_hostile_lengths_without_reserving_for_them() {
        assert!(Texts::parse("TEXT", vec![0xff; 4], 1).is_err());
        assert!(Texts::parse("TEXT", vec![0xff; 8], 1).is_err());
        assert!(Texts::parse("TEXT", Vec::new(), usize::MAX).is_err());
        assert!(Texts::parse("TEXT", vec![0; 4], usize::MAX).is_err());
    }

    #[test]
    fn names_the_row_that_is_not_utf8() {
        let data = encode(&[b"fine".as_slice(), b"bad \xff"]).expect("fits");
        let error = Texts::parse("TEXT", data, 2).expect("framed").str(1).expect_err("not UTF-8");
        assert_eq!(error.message(), "input 'TEXT', row 1: not valid UTF-8 from byte 4 on");
    }
}
