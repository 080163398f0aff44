//! The raw declarations, generated from `include/triton_abi.h`. Use the safe modules instead.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]
#![allow(missing_docs, clippy::all)]

include!(concat!(env!("OUT_DIR"), "/sys.rs"));
