//! The engine for NVIDIA GPUs.

pub mod kernels;
