//! The native CPU engine.
