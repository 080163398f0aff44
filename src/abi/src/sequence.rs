//! Sequences: the requests that belong together, as the client says with an id and the marks START and END.
//!
//! The id is asked of the request and never read from the CORRID control's tensor: where the client's id is shorter than
//! the tensor, the server leaves the rest of it unset.

use std::ffi::c_char;
use std::fmt;

use crate::error::{Code, Error, Result, check};
use crate::host;
use crate::request::Request;
use crate::sys;

/// The longest id of a string that the server takes from its clients, in bytes.
const MOST_BYTES: usize = 128;

/// The id of a sequence. A number and a string never are the same sequence.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum SequenceId {
    /// An unsigned integer other than 0.
    Number(u64),
    /// The bytes of a string that is not empty; at most 128, not always UTF-8.
    Text(Box<[u8]>),
}

/// The kind only: what a client names its sequences with is its own.
impl fmt::Debug for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Number(_) => "Number",
            Self::Text(_) => "Text",
        })
    }
}

/// Where in its sequence a request stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceFlags {
    /// It is the first; what came before under the same id is another sequence.
    pub start: bool,
    /// It is the last.
    pub end: bool,
}

impl Request<'_> {
    /// Where in its sequence this request stands.
    pub fn sequence_flags(&self) -> Result<SequenceFlags> {
        // SAFETY: a live request.
        let flags = unsafe { host::get(0, |out| sys::TRITONBACKEND_RequestFlags(self.as_ptr(), out)) }?;
        Ok(SequenceFlags {
            start: flags & sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_START != 0,
            end: flags & sys::TRITONSERVER_REQUEST_FLAG_SEQUENCE_END != 0,
        })
    }

    /// The sequence that this request belongs to. `None` for one without: the server lets a client's request without an
    /// id not through to a sequence model, so that is a warm-up sample, or fills an empty slot.
    pub fn sequence_id(&self) -> Result<Option<SequenceId>> {
        // SAFETY: a live request.
        match unsafe { host::get(0, |out| sys::TRITONBACKEND_RequestCorrelationId(self.as_ptr(), out)) } {
            Ok(number) => return Ok((number != 0).then_some(SequenceId::Number(number))),
            Err(error) if error.code() == Code::InvalidArg => {}
            Err(error) => return Err(error),
        }
        let mut text = std::ptr::null();
        // SAFETY: a live request and a valid place for the answer.
        unsafe { check(sys::TRITONBACKEND_RequestCorrelationIdString(self.as_ptr(), &mut text)) }?;
        // SAFETY: NULL or the request's own string, which lives as long as the request.
        let text = unsafe { bounded(text) }?;
        Ok((!text.is_empty()).then_some(SequenceId::Text(text)))
    }
}

/// Copies a C string, and looks no further than the longest that there can be.
///
/// # Safety
/// `text` is NULL or points to a NUL-terminated string that lives through the call.
unsafe fn bounded(text: *const c_char) -> Result<Box<[u8]>> {
    if text.is_null() {
        return Ok(Box::default());
    }
    let text = text.cast::<u8>();
    // SAFETY: by this function's contract every byte up to the NUL is readable, and none after the NUL is read.
    let length = (0..=MOST_BYTES).find(|&at| unsafe { *text.add(at) } == 0);
    let length =
        length.ok_or_else(|| Error::invalid_arg(format!("the sequence id is longer than {MOST_BYTES} bytes")))?;
    // SAFETY: so many bytes are before the NUL.
    Ok(unsafe { std::slice::from_raw_parts(text, length) }.into())
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;

    fn copy(text: &[u8]) -> Result<Box<[u8]>> {
        let text = CString::new(text).expect("no NUL");
        // SAFETY: lives through the call.
        unsafe { bounded(text.as_ptr()) }
    }

    #[test]
    fn ids_keep_their_bytes_and_have_a_bound() {
        assert_eq!(*copy(b"").expect("short"), *b"");
        assert_eq!(*copy(b"a\xff\xfe").expect("short"), *b"a\xff\xfe", "ids that are not UTF-8 stay apart");
        assert_eq!(copy(&[b'x'; 128]).expect("as long as allowed").len(), 128);
        let error = copy(&[b'x'; 129]).expect_err("longer");
        assert!(error.message().contains("128"), "{error}");
        // SAFETY: NULL is allowed.
        assert_eq!(*unsafe { bounded(std::ptr::null()) }.expect("nothing"), *b"");
    }

    #[test]
    fn a_number_is_not_its_digits() {
        assert_ne!(SequenceId::Number(7), SequenceId::Text((*b"7").into()));
        assert_eq!(format!("{:?}", SequenceId::Text((*b"secret").into())), "Text");
    }
}
