//! Serves BERT-class text models inside NVIDIA Triton, from raw strings to answers in the server's own process.

pub mod batch;
pub mod engine;
pub mod error;
pub mod head;
pub mod model;
pub mod pool;
pub mod tokenize;
