//! What every engine checks of a pass before it looks anything up.

use super::{Output, Slot};
use crate::batch::PackedBatch;
use crate::error::{Error, Result};
use crate::head::{HeadSpec, Value};
use crate::model::EncoderSpec;

/// Checks that the parts of `batch` fit, that every id is in range, and that `outputs` are ordered and of the head's
/// widths.
///
/// # Errors
/// `Invalid` for an id or a length that is out of range; `Internal` for parts that do not fit.
pub(super) fn check_pass(
    spec: &EncoderSpec,
    head: &HeadSpec,
    batch: &PackedBatch,
    outputs: &[Output<'_>],
) -> Result<()> {
    let broken = || Error::internal("the engine was given a batch whose parts do not fit");
    let tokens = batch.tokens();
    let ends = &batch.cu_seqlens;
    if ends.first() != Some(&0)
        || ends.last().map(|&end| end as usize) != Some(tokens)
        || batch.token_type_ids.len() != tokens
        || ends.windows(2).any(|pair| pair[0] >= pair[1])
    {
        return Err(broken());
    }
    for i in 0..batch.sequences() {
        let range = batch.range(i);
        spec.check_sequence(&batch.input_ids[range.clone()], &batch.token_type_ids[range])?;
    }
    let mut last = 0;
    for output in outputs {
        let width = width(spec, head, output.value).ok_or_else(broken)?;
        let len = match &output.slot {
            Slot::Host(slot) => slot.len(),
            Slot::Device { len, .. } => *len,
        };
        if output.sequence < last || output.sequence >= batch.sequences() || len != width {
            return Err(broken());
        }
        last = output.sequence;
    }
    Ok(())
}

/// The length of a value's row, where the head has that value.
fn width(spec: &EncoderSpec, head: &HeadSpec, value: Value) -> Option<usize> {
    match (value, *head) {
        (Value::Embedding, HeadSpec::Embed { .. }) => Some(spec.hidden_size),
        (Value::Logits | Value::Probabilities, HeadSpec::Classify { num_labels, .. }) => Some(num_labels),
        _ => None,
    }
}
