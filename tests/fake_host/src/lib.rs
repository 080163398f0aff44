//! A stand-in for tritonserver in tests.
