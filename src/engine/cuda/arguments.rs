//! What the launchers in [`super::kernels`] take.
//!
//! Addresses are the device's; matrices are row-major and densely packed, their elements of the call's [`DeviceType`] unless
//! said otherwise, every address a multiple of 16 unless said otherwise.

use cudarc::driver::sys::CUdeviceptr;

use crate::head::{Activation, Pooling};

/// The widest row that [`Kernels::classify`](super::kernels::Kernels::classify) takes, whose shared memory holds one in fp32 and 32 bytes more: 48 KiB.
pub const MAX_HIDDEN: usize = 12_280;

/// The longest sequence that [`Kernels::attention_short`](super::kernels::Kernels::attention_short) takes.
pub const SHORT_ROWS: usize = 64;

/// What the elements of weights and activations are on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceType {
    /// IEEE half precision.
    F16,
    /// The upper half of an fp32.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl DeviceType {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F16, Self::Bf16, Self::F32];

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// As in the kernels' names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

/// The widths of a head that attention is compiled for.
pub const HEAD_DIMS: [usize; 3] = [32, 64, 128];

/// Query rows of one tile of [`Kernels::attention`](super::kernels::Kernels::attention); `None` for a width that there is no kernel for.
pub const fn attention_tile_rows(dtype: DeviceType, head_dim: usize) -> Option<usize> {
    match (dtype, head_dim) {
        (DeviceType::F16 | DeviceType::Bf16, 32 | 64) => Some(128),
        (DeviceType::F16 | DeviceType::Bf16, 128) => Some(64),
        (DeviceType::F32, 32 | 64 | 128) => Some(32),
        _ => None,
    }
}

/// The tokens' three embeddings, added and normalized.
#[derive(Clone, Copy, Debug)]
pub struct EmbedLayerNorm {
    /// `[tokens, hidden]`, written.
    pub out: CUdeviceptr,
    /// u32 `[tokens]`, each below the rows of its table, as the next two.
    pub input_ids: CUdeviceptr,
    /// u32 `[tokens]`.
    pub token_type_ids: CUdeviceptr,
    /// u32 `[tokens]`.
    pub position_ids: CUdeviceptr,
    /// `[vocabulary, hidden]`.
    pub word: CUdeviceptr,
    /// `[positions, hidden]`.
    pub position: CUdeviceptr,
    /// `[token types, hidden]`.
    pub token_type: CUdeviceptr,
    /// fp32 `[hidden]`.
    pub gamma: CUdeviceptr,
    /// fp32 `[hidden]`.
    pub beta: CUdeviceptr,
    /// Epsilon of the variance.
    pub eps: f32,
    /// Rows.
    pub tokens: u32,
    /// Columns, a multiple of 8.
    pub hidden: u32,
}

/// `out = norm(x + bias + residual)`.
#[derive(Clone, Copy, Debug)]
pub struct AddLayerNorm {
    /// `[rows, hidden]`, written; may be `x` or `residual`.
    pub out: CUdeviceptr,
    /// `[rows, hidden]`.
    pub x: CUdeviceptr,
    /// `[hidden]`, or 0 for none.
    pub bias: CUdeviceptr,
    /// `[rows, hidden]`, or 0 for none.
    pub residual: CUdeviceptr,
    /// fp32 `[hidden]`.
    pub gamma: CUdeviceptr,
    /// fp32 `[hidden]`.
    pub beta: CUdeviceptr,
    /// Epsilon of the variance.
    pub eps: f32,
    /// Rows.
    pub rows: u32,
    /// Columns, a multiple of 8.
    pub hidden: u32,
}

/// Self-attention of tiles of query rows.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// `[T, heads * head_dim]`: the tiles' rows are written.
    pub context: CUdeviceptr,
    /// `[T, 3 * heads * head_dim]`: query, key and value of each token.
    pub qkv: CUdeviceptr,
    /// u32 `[sequences + 1]`: sequence `b` has the tokens from element `b` to element `b + 1`, at least one.
    pub cu_seqlens: CUdeviceptr,
    /// u32 `[tiles, 2]`: a sequence, and the first of its query rows that the tile has. A tile has
    /// [`attention_tile_rows`] rows, or up to the end of the sequence.
    pub tiles: CUdeviceptr,
    /// Rows of `tiles`.
    pub tile_count: u32,
    /// Number of heads, up to 65,535.
    pub heads: u32,
    /// One of [`HEAD_DIMS`].
    pub head_dim: u32,
    /// Factor of the scores.
    pub scale: f32,
}

/// Self-attention of whole short sequences, fp16 and bf16.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShort {
    /// `[T, heads * head_dim]`: the sequences' rows are written.
    pub context: CUdeviceptr,
    /// `[T, 3 * heads * head_dim]`: query, key and value of each token.
    pub qkv: CUdeviceptr,
    /// As in [`Attention`].
    pub cu_seqlens: CUdeviceptr,
    /// u32 `[sequence_count]`: the sequences.
    pub sequences: CUdeviceptr,
    /// How many.
    pub sequence_count: u32,
    /// Tokens of the longest of them, up to [`SHORT_ROWS`]: the less, the more sequences are worked on at once.
    pub longest: u32,
    /// Number of heads.
    pub heads: u32,
    /// One of [`HEAD_DIMS`].
    pub head_dim: u32,
    /// Factor of the scores.
    pub scale: f32,
}

/// Rows by their index.
#[derive(Clone, Copy, Debug)]
pub struct GatherRows {
    /// `[rows, hidden]`, written.
    pub out: CUdeviceptr,
    /// `[*, hidden]`.
    pub x: CUdeviceptr,
    /// u32 `[rows]`, each a row of `x`.
    pub index: CUdeviceptr,
    /// Rows of `out`.
    pub rows: u32,
    /// Columns, a multiple of 8.
    pub hidden: u32,
}

/// One vector for each of some sequences.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    /// u64 `[rows]`: where each row goes, fp32 `[hidden]`, a multiple of 4.
    pub out_addresses: CUdeviceptr,
    /// u32 `[rows]`: of which sequence.
    pub sequences: CUdeviceptr,
    /// `[T, hidden]`.
    pub hidden_states: CUdeviceptr,
    /// As in [`Attention`].
    pub cu_seqlens: CUdeviceptr,
    /// How many rows.
    pub rows: u32,
    /// Columns, a multiple of 8.
    pub hidden: u32,
    /// How tokens are combined.
    pub pooling: Pooling,
    /// Whether rows are scaled to length 1.
    pub normalize: bool,
    /// u32: becomes 1 when something that is pooled, or a result, is not finite.
    pub not_finite: CUdeviceptr,
}

/// The classifier behind the pooler's dense layer.
#[derive(Clone, Copy, Debug)]
pub struct Classify {
    /// u64 `[rows]`: where a row's logits go, fp32 `[classes]`, a multiple of 4, or 0 where they are not wanted.
    pub logits_addresses: CUdeviceptr,
    /// u64 `[rows]`: the same for its probabilities. A row of which neither is wanted is skipped.
    pub probabilities_addresses: CUdeviceptr,
    /// `[rows, hidden]`: what the pooler's dense layer gave, before tanh.
    pub pooled: CUdeviceptr,
    /// `[classes, hidden]`.
    pub weight: CUdeviceptr,
    /// `[classes]`.
    pub bias: CUdeviceptr,
    /// How many rows.
    pub rows: u32,
    /// How many classes.
    pub classes: u32,
    /// Columns, a multiple of 8, up to [`MAX_HIDDEN`].
    pub hidden: u32,
    /// How logits become probabilities.
    pub activation: Activation,
    /// u32: becomes 1 when something of `pooled`, or a result, is not finite.
    pub not_finite: CUdeviceptr,
}
