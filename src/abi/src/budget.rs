//! The token budget of a model: what a backend tells the batching library about it, in memory that both see.
//!
//! Two plugins meet here, built from the same source or not. The server hands the batching library the pointer that the
//! backend keeps at its model ([`Header`]); a library that finds its magic and its version there reads the atomics behind
//! it as long as the model is loaded. Nothing else is shared: no lock, no allocation, no type with a layout of Rust's.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Tells a model's state of ours from that of any other backend of the same name.
const MAGIC: u64 = u64::from_le_bytes(*b"RustTok\x01");

/// Changes with the layout or the meaning of [`TokenBudget`].
const VERSION: u64 = 1;

/// Fixed point of [`TokenBudget::bytes_per_token`].
const ONE: u64 = 1 << 16;

/// What a token has before there was any traffic: a little below English text, so that the first batches err on the
/// small side.
const FIRST_BYTES_PER_TOKEN: u64 = 4 * ONE;

/// Learned values stay in this range: byte-level tokens, and long words that the vocabulary does not have.
const BYTES_PER_TOKEN: (f64, f64) = (0.5, 32.0);

/// Tokens after which half of what was learned before is forgotten.
const MEMORY_TOKENS: f64 = 8192.0;

/// The first field of a model's state.
#[repr(C)]
pub(crate) struct Header {
    magic: u64,
    version: u64,
    budget: *const TokenBudget,
}

impl Header {
    /// With NULL there is no budget, and nothing to find.
    pub(crate) fn new(budget: *const TokenBudget) -> Self {
        Self { magic: if budget.is_null() { 0 } else { MAGIC }, version: VERSION, budget }
    }

    /// The budget behind a model's state, or NULL.
    ///
    /// # Safety
    /// `state` is NULL, or points to at least 24 readable bytes where its first 8 are the magic.
    pub(crate) unsafe fn find(state: *const Header) -> *const TokenBudget {
        if state.is_null() || !state.is_aligned() {
            return std::ptr::null();
        }
        // SAFETY: readable by this function's contract; the rest is read only behind the magic.
        unsafe {
            if (&raw const (*state).magic).read() != MAGIC || (&raw const (*state).version).read() != VERSION {
                return std::ptr::null();
            }
            (&raw const (*state).budget).read()
        }
    }
}

/// The token budget of one model. A backend keeps one in its model and gives it to this crate in
/// [`Backend::token_budget`](crate::Backend::token_budget).
///
/// All values may change while others read them; each is valid by itself.
#[derive(Debug)]
#[repr(C)]
pub struct TokenBudget {
    max_batch_tokens: AtomicU64,
    /// Tokens of one row, special ones included, at which it is cut.
    max_length: AtomicU64,
    /// Special tokens of one row.
    special_tokens: AtomicU64,
    /// In 1/65536 bytes.
    bytes_per_token: AtomicU64,
}

impl TokenBudget {
    /// Batches of at most `max_batch_tokens` tokens, from rows that are cut at `max_length` tokens, of which
    /// `special_tokens` are not made of text.
    pub fn new(max_batch_tokens: usize, max_length: usize, special_tokens: usize) -> Self {
        Self {
            max_batch_tokens: AtomicU64::new(max_batch_tokens as u64),
            max_length: AtomicU64::new(max_length as u64),
            special_tokens: AtomicU64::new(special_tokens as u64),
            bytes_per_token: AtomicU64::new(FIRST_BYTES_PER_TOKEN),
        }
    }

    /// Tokens of one pass.
    pub fn max_batch_tokens(&self) -> u64 {
        self.max_batch_tokens.load(Relaxed)
    }

    /// Bytes of text that one token has had lately.
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes_per_token.load(Relaxed) as f64 / ONE as f64
    }

    /// The tokens that `rows` rows with `bytes` bytes of text in all will have, as well as bytes can tell.
    pub fn estimate(&self, rows: u64, bytes: u64) -> u64 {
        let content = bytes.saturating_mul(ONE) / self.bytes_per_token.load(Relaxed).max(1);
        let special = rows.saturating_mul(self.special_tokens.load(Relaxed));
        content.saturating_add(special).min(rows.saturating_mul(self.max_length.load(Relaxed)))
    }

    /// Learns from `bytes` bytes of text that have become `tokens` tokens, special ones not counted. Rows that were cut
    /// are to be left out on both sides.
    pub fn learn(&self, bytes: u64, tokens: u64) {
        if tokens == 0 {
            return;
        }
        let (least, most) = BYTES_PER_TOKEN;
        let seen = (bytes as f64 / tokens as f64).clamp(least, most);
        let weight = 1.0 - (-(tokens as f64) / MEMORY_TOKENS).exp2();
        // Of two instances that learn at once one may be lost; the next batch teaches the same again.
        let before = self.bytes_per_token();
        let after = before + (seen - before) * weight;
        self.bytes_per_token.store((after * ONE as f64).round() as u64, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_rows_special_tokens_and_the_cut() {
        let budget = TokenBudget::new(512, 100, 2);
        assert_eq!(budget.estimate(1, 0), 2);
        assert_eq!(budget.estimate(1, 40), 12);
        assert_eq!(budget.estimate(3, 40), 16);
        assert_eq!(budget.estimate(1, 4000), 100, "one row is cut at max_length");
        assert_eq!(budget.estimate(8, 4000), 800);
        assert_eq!(budget.estimate(0, 0), 0);
        assert_eq!(budget.estimate(1, u64::MAX), 100);
        assert_eq!(budget.estimate(u64::MAX, u64::MAX), u64::MAX, "no overflow");
    }

    #[test]
    fn learns_the_traffic_and_follows_it() {
        let budget = TokenBudget::new(512, 1 << 20, 0);
        for _ in 0..100 {
            budget.learn(6000, 1000);
        }
        assert!((budget.bytes_per_token() - 6.0).abs() < 0.01, "{}", budget.bytes_per_token());
        assert_eq!(budget.estimate(1, 6000).abs_diff(1000), 0);
        for _ in 0..100 {
            budget.learn(3000, 1000);
        }
        assert!((budget.bytes_per_token() - 3.0).abs() < 0.01, "{}", budget.bytes_per_token());
    }

    #[test]
    fn one_odd_text_changes_little_and_nothing_leaves_the_range() {
        let budget = TokenBudget::new(512, 512, 2);
        budget.learn(100, 0);
        budget.learn(5000, 1);
        assert!((budget.bytes_per_token() - 4.0).abs() < 0.01);
        for _ in 0..1000 {
            budget.learn(1 << 30, 10_000);
        }
        assert!(budget.bytes_per_token() <= 32.0);
        for _ in 0..1000 {
            budget.learn(0, 10_000);
        }
        assert!(budget.bytes_per_token() >= 0.5);
    }

    #[test]
    fn only_a_state_of_ours_has_a_budget() {
        let budget = TokenBudget::new(512, 512, 2);
        let found = |header: &Header| {
            // SAFETY: a whole header.
            unsafe { Header::find(header) }
        };
        assert_eq!(found(&Header::new(&budget)), &raw const budget);
        assert!(found(&Header::new(std::ptr::null())).is_null());
        assert!(found(&Header { version: VERSION + 1, ..Header::new(&budget) }).is_null());
        assert!(found(&Header { magic: MAGIC ^ 1, ..Header::new(&budget) }).is_null());
        // SAFETY: NULL is allowed.
        assert!(unsafe { Header::find(std::ptr::null()) }.is_null());
    }
}
