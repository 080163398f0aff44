//! Texts of the benchmarks: how long they are, what they cost, and batches of them.

use triton_rust::batch::PackedBatch;
use triton_rust::model::EncoderSpec;

/// Lengths of a log-normal distribution with that median, 5 to 400 tokens, the same at every call.
pub fn natural(count: usize, median: f64, sigma: f64) -> Vec<usize> {
    // Quantiles in a scrambled order (a Weyl sequence): any few of them are a fair sample.
    let length = |i: usize| {
        let u = ((i as f64 + 0.5) * 0.618_033_988_749_895).fract();
        // Normal quantile, by the logistic's.
        let z = (u / (1.0 - u)).ln() / 1.702;
        ((median * (sigma * z).exp()).round() as usize).clamp(5, 400)
    };
    (0..count).map(length).collect()
}

/// Floating-point operations that a text of `len` tokens takes, in linear layers and attention.
pub fn flops(spec: &EncoderSpec, len: usize) -> f64 {
    let (h, ff, len) = (spec.hidden_size as f64, spec.intermediate_size as f64, len as f64);
    let linear = 2.0 * len * (4.0 * h * h + 2.0 * h * ff);
    let attention = 2.0 * 2.0 * len * len * h;
    spec.num_hidden_layers as f64 * (linear + attention)
}

/// A pass of texts of these lengths, whose ids are spread over the vocabulary.
pub fn batch(spec: &EncoderSpec, lengths: &[usize]) -> PackedBatch {
    let mut batch = PackedBatch::new();
    for (i, &len) in lengths.iter().enumerate() {
        let ids: Vec<u32> = (0..len).map(|t| ((i * 7919 + t * 104_729 + 1000) % spec.vocab_size) as u32).collect();
        batch.push(&ids, &vec![0; len]);
    }
    batch
}
