//! One error type for everything below the C boundary: whose fault it is, and a sentence for the user.

use std::fmt;

/// Who has to act, which decides the code that the client sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Bad input of one request or a bad configuration: INVALID_ARG.
    Invalid,
    /// Asked for something that this version does not have: UNSUPPORTED.
    Unsupported,
    /// A resource ran out; a smaller or later request may work: UNAVAILABLE.
    Unavailable,
    /// Our fault, or a broken file or device: INTERNAL.
    Internal,
}

/// An error with its text. The text names the model's file, input or parameter, says what was wrong and what is
/// allowed; it holds no path outside the model's directory and no user text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// Who has to act.
    pub kind: ErrorKind,
    /// The sentence that the user reads.
    pub message: String,
}

/// Result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Bad input or configuration.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Invalid, message: message.into() }
    }

    /// A feature that is not there.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Unsupported, message: message.into() }
    }

    /// An exhausted resource.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Unavailable, message: message.into() }
    }

    /// Anything else.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Internal, message: message.into() }
    }

    /// The same error with `what: ` before its text.
    #[must_use]
    pub fn within(mut self, what: &str) -> Self {
        self.message = format!("{what}: {}", self.message);
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}
