//! Element types and sizes of tensors.

use crate::error::{Error, Result};
use crate::sys;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DataType {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
    /// Strings: each element is its length in 4 little-endian bytes and then its bytes.
    Bytes,
    Bf16,
}

impl DataType {
    pub(crate) fn from_raw(raw: sys::TRITONSERVER_DataType) -> Result<Self> {
        Ok(match raw {
            sys::TRITONSERVER_TYPE_BOOL => DataType::Bool,
            sys::TRITONSERVER_TYPE_UINT8 => DataType::Uint8,
            sys::TRITONSERVER_TYPE_UINT16 => DataType::Uint16,
            sys::TRITONSERVER_TYPE_UINT32 => DataType::Uint32,
            sys::TRITONSERVER_TYPE_UINT64 => DataType::Uint64,
            sys::TRITONSERVER_TYPE_INT8 => DataType::Int8,
            sys::TRITONSERVER_TYPE_INT16 => DataType::Int16,
            sys::TRITONSERVER_TYPE_INT32 => DataType::Int32,
            sys::TRITONSERVER_TYPE_INT64 => DataType::Int64,
            sys::TRITONSERVER_TYPE_FP16 => DataType::Fp16,
            sys::TRITONSERVER_TYPE_FP32 => DataType::Fp32,
            sys::TRITONSERVER_TYPE_FP64 => DataType::Fp64,
            sys::TRITONSERVER_TYPE_BYTES => DataType::Bytes,
            sys::TRITONSERVER_TYPE_BF16 => DataType::Bf16,
            other => {
                return Err(Error::internal(format!("the server names an unknown data type {other}")));
            }
        })
    }

    pub(crate) fn to_raw(self) -> sys::TRITONSERVER_DataType {
        match self {
            DataType::Bool => sys::TRITONSERVER_TYPE_BOOL,
            DataType::Uint8 => sys::TRITONSERVER_TYPE_UINT8,
            DataType::Uint16 => sys::TRITONSERVER_TYPE_UINT16,
            DataType::Uint32 => sys::TRITONSERVER_TYPE_UINT32,
            DataType::Uint64 => sys::TRITONSERVER_TYPE_UINT64,
            DataType::Int8 => sys::TRITONSERVER_TYPE_INT8,
            DataType::Int16 => sys::TRITONSERVER_TYPE_INT16,
            DataType::Int32 => sys::TRITONSERVER_TYPE_INT32,
            DataType::Int64 => sys::TRITONSERVER_TYPE_INT64,
            DataType::Fp16 => sys::TRITONSERVER_TYPE_FP16,
            DataType::Fp32 => sys::TRITONSERVER_TYPE_FP32,
            DataType::Fp64 => sys::TRITONSERVER_TYPE_FP64,
            DataType::Bytes => sys::TRITONSERVER_TYPE_BYTES,
            DataType::Bf16 => sys::TRITONSERVER_TYPE_BF16,
        }
    }

    /// The name as of `config.pbtxt`, without `TYPE_`, for messages.
    pub fn name(self) -> &'static str {
        match self {
            DataType::Bool => "BOOL",
            DataType::Uint8 => "UINT8",
            DataType::Uint16 => "UINT16",
            DataType::Uint32 => "UINT32",
            DataType::Uint64 => "UINT64",
            DataType::Int8 => "INT8",
            DataType::Int16 => "INT16",
            DataType::Int32 => "INT32",
            DataType::Int64 => "INT64",
            DataType::Fp16 => "FP16",
            DataType::Fp32 => "FP32",
            DataType::Fp64 => "FP64",
            DataType::Bytes => "BYTES",
            DataType::Bf16 => "BF16",
        }
    }
}

/// The number of elements of a shape, checked.
pub(crate) fn element_count(shape: &[i64]) -> Result<usize> {
    shape
        .iter()
        .try_fold(1usize, |count, &dim| count.checked_mul(usize::try_from(dim).ok()?))
        .ok_or_else(|| Error::invalid_arg(format!("shape {shape:?} is not valid")))
}
