//! Serves BERT-class text models inside NVIDIA Triton, from raw strings to answers in the server's own process.
//!
//! Data flows one way. [`backend`] takes a batch of requests from Triton and copies their texts out; [`tokenize`] makes
//! tokens of them, cut at the model's length and never padded; [`batch`] plans passes of a token budget and packs each;
//! an [`engine`] runs the encoder on a packed pass and applies the [`head`], straight into the response's memory; and
//! each request is answered when its last row is done. Beside the flow, [`config`] turns config.pbtxt and the model's
//! files into one description, and [`model`] says what an encoder is, apart from any engine.

#![deny(unsafe_code)]

pub mod backend;
pub mod batch;
pub mod config;
pub mod engine;
pub mod error;
pub mod head;
pub mod model;
pub mod pool;
pub mod tokenize;

#[cfg(test)]
extern crate fake_host as _;

// The macro allows the unsafe code of its entry points itself.
triton_abi::export_backend!(backend::TextBackend);
