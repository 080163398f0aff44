//! Batches by token budget: the batching library that Triton loads beside the backend `rust`.
//!
//! Triton counts requests, cost is tokens. This library closes a batch where the tokens of one more request would go
//! beyond the model's `max_batch_tokens`. It does not tokenize: a request's tokens are estimated from the sizes of its
//! inputs, with the bytes per token that the backend has learned from the traffic. The backend, which knows the tokens,
//! holds the budget exactly; what this library adds is that short texts do not wait in one batch with more than a pass
//! of work.
//!
//! How Triton asks, and what must not be answered, is in [`triton_abi::batcher`].

#![deny(unsafe_code)]

use triton_abi::batcher::{BatchStrategy, QueuedRequest};
use triton_abi::{DataType, TokenBudget};

/// Bytes before each string of a BYTES tensor.
const LENGTH_BYTES: u64 = 4;

/// A request costs the tokens that it is expected to have.
pub struct Tokens;

impl BatchStrategy for Tokens {
    /// Texts of all rows, and both texts of a pair, by their bytes; token ids by their number.
    fn cost(budget: &TokenBudget, request: &QueuedRequest<'_>) -> u64 {
        let (mut rows, mut bytes, mut ids) = (0, 0u64, 0);
        for input in request.inputs() {
            match input.datatype {
                DataType::Bytes => {
                    let lengths = input.elements.saturating_mul(LENGTH_BYTES);
                    rows = input.elements.max(rows);
                    bytes = bytes.saturating_add(input.bytes.saturating_sub(lengths));
                }
                // Ids, mask and segments have the same shape.
                DataType::Int32 | DataType::Int64 => ids = input.elements.max(ids),
                _ => {}
            }
        }
        budget.estimate(rows, bytes).saturating_add(ids)
    }
}

// The macro allows the unsafe code of its entry points itself.
triton_abi::export_batcher!(Tokens);
