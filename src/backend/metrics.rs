//! A model's series on the server's metrics port. The README's table is the same.

use triton_abi::Result;
use triton_abi::metrics::{Counter, Gauge, Histogram};

/// Upper bounds of the buckets of `rust_batch_tokens`.
const BATCH_TOKENS: [f64; 11] = [16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// All series of one model; they go with it.
pub struct Metrics {
    /// Texts (or pairs) that were answered with success or failed in the encoder.
    pub texts: Counter,
    /// Tokens that were encoded, the special ones counted.
    pub tokens: Counter,
    /// Tokens that the batching library expected of these texts, with what had been learned until then.
    pub estimated_tokens: Counter,
    /// Texts that were cut at `max_length`.
    pub truncated_texts: Counter,
    /// Time in which a batch was tokenized.
    pub tokenize_seconds: Counter,
    /// Time in which passes ran.
    pub encode_seconds: Counter,
    /// The model's `max_batch_tokens`.
    pub max_batch_tokens: Gauge,
    /// Tokens of each pass.
    pub batch_tokens: Histogram,
    /// 1 when a CUDA device of the model is lost.
    pub device_lost: Gauge,
}

impl Metrics {
    /// The series of the model `name`, version `version`.
    pub fn new(name: &str, version: u64) -> Result<Self> {
        let version = version.to_string();
        let labels = [("model", name), ("version", version.as_str())];
        let counter = |family: &str, help: &str| Counter::new(family, help, &labels);
        Ok(Self {
            texts: counter("rust_texts_total", "Texts or pairs of texts that were encoded")?,
            tokens: counter("rust_tokens_total", "Tokens that were encoded, special tokens included")?,
            estimated_tokens: counter(
                "rust_estimated_tokens_total",
                "Tokens of the same texts as estimated from their bytes, to form batches",
            )?,
            truncated_texts: counter("rust_truncated_texts_total", "Texts that were cut at max_length")?,
            tokenize_seconds: counter("rust_tokenize_seconds_total", "Wall time of tokenizing batches")?,
            encode_seconds: counter("rust_encode_seconds_total", "Wall time of encoder passes")?,
            max_batch_tokens: Gauge::new("rust_max_batch_tokens", "Tokens that an encoder pass may have", &labels)?,
            batch_tokens: Histogram::new("rust_batch_tokens", "Tokens of an encoder pass", &labels, &BATCH_TOKENS)?,
            device_lost: Gauge::new("rust_device_lost", "1 when a CUDA device of the model is lost", &labels)?,
        })
    }
}

/// The series of a conversation: a gauge of the sessions that its instances keep.
pub fn sessions(name: &str, version: u64) -> Result<Gauge> {
    let labels = [("model", name), ("version", &version.to_string())];
    Gauge::new("rust_sessions", "Sessions of a conversation whose turns are kept", &labels)
}
