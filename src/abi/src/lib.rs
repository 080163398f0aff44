//! The Triton backend C ABI behind a safe interface.
