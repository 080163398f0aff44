//! Both attention kernels.

use triton_rust::engine::cuda::kernels::{
    Attention, AttentionShort, DeviceType, HEAD_DIMS, SHORT_ROWS, attention_tile_rows,
};

use crate::gpu::{Buffer, Gpu, Random, assert_close, unit};

/// Both of them, for every type and width of a head, on up to `sequences` sequences of `tokens` tokens in all.
pub fn check_all(random: &mut Random, tokens: usize, sequences: usize) {
    let gpu = &Gpu::new();
    for head_dim in HEAD_DIMS {
        for dtype in DeviceType::ALL {
            let ends = random.sequences(tokens, sequences);
            let heads = random.integer(1, if head_dim == 128 { 1 } else { 3 });
            // Scores of some tens, so that a softmax without its maximum would overflow in fp16 and be one-sided.
            let case = Case::new(gpu, random, dtype, head_dim, heads, &ends, 2.0);
            case.long(gpu, random);
            if dtype == DeviceType::F32 {
                case.short_is_refused(gpu);
            } else {
                case.short(gpu, random);
            }
        }
    }
}

/// A batch, and what attention makes of it.
struct Case {
    dtype: DeviceType,
    head_dim: usize,
    heads: usize,
    ends: Vec<u32>,
    qkv: Buffer,
    cu_seqlens: Buffer,
    right: Vec<f64>,
    what: String,
}

impl Case {
    fn new(
        gpu: &Gpu,
        random: &mut Random,
        dtype: DeviceType,
        head_dim: usize,
        heads: usize,
        ends: &[u32],
        size: f32,
    ) -> Self {
        let tokens = ends[ends.len() - 1] as usize;
        let qkv = random.floats(dtype, tokens * 3 * heads * head_dim, size, 0.0);
        Self {
            dtype,
            head_dim,
            heads,
            ends: ends.to_vec(),
            right: attention(&qkv, ends, heads, head_dim),
            qkv: gpu.floats(dtype, &qkv),
            cu_seqlens: gpu.words(ends),
            what: format!("{dtype:?} heads {heads} x {head_dim}, sequences {ends:?}"),
        }
    }

    fn hidden(&self) -> usize {
        self.heads * self.head_dim
    }

    fn tokens(&self) -> usize {
        self.ends[self.ends.len() - 1] as usize
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// All rows of the context, one more after them that no kernel may write, and NaN in all of them.
    fn context(&self, gpu: &Gpu) -> Buffer {
        gpu.poisoned(self.dtype, (self.tokens() + 1) * self.hidden())
    }

    /// Checks the rows that `written` says, and that the others are as they were.
    fn check(&self, gpu: &Gpu, context: &Buffer, kernel: &str, written: impl Fn(usize) -> bool) {
        let got = gpu.read(self.dtype, context);
        for (row, got) in got.chunks_exact(self.hidden()).enumerate() {
            let what = format!("{kernel} {}, row {row}", self.what);
            if row < self.tokens() && written(row) {
                let right = &self.right[row * self.hidden()..][..self.hidden()];
                // A weighted mean of numbers of size 2. The weights have the type's precision, and in fp32 the error of
                // the scores' exponentials: sums of products as large as 100.
                let unit = if self.dtype == DeviceType::F32 { 2e-5 } else { unit(self.dtype) };
                assert_close(got, right, unit, 2.0, &what);
            } else {
                assert!(got.iter().all(|x| x.is_nan()), "{what} is not its own and was written");
            }
        }
    }

    fn long(&self, gpu: &Gpu, random: &mut Random) {
        let rows = attention_tile_rows(self.dtype, self.head_dim).expect("a kernel");
        let mut tiles: Vec<[u32; 2]> = Vec::new();
        for sequence in 0..self.ends.len() - 1 {
            let length = self.ends[sequence + 1] - self.ends[sequence];
            tiles.extend((0..length).step_by(rows).map(|first| [sequence as u32, first]));
        }
        // All tiles, in some order; and a single one, beside which nothing is written.
        for i in (1..tiles.len()).rev() {
            tiles.swap(i, random.integer(0, i));
        }
        for tiles in [&tiles[..], &tiles[..1]] {
            let context = self.context(gpu);
            let buffer = gpu.words(tiles.as_flattened());
            let arguments = Attention {
                context: context.address,
                qkv: self.qkv.address,
                cu_seqlens: self.cu_seqlens.address,
                tiles: buffer.address,
                tile_count: tiles.len() as u32,
                heads: self.heads as u32,
                head_dim: self.head_dim as u32,
                scale: self.scale(),
            };
            // SAFETY: buffers of these sizes, which live until the result is read.
            unsafe { gpu.kernels.attention(self.dtype, &arguments, gpu.stream.cu_stream()) }.expect("launches");
            let written = |row: usize| {
                tiles.iter().any(|&[sequence, first]| {
                    let start = self.ends[sequence as usize] + first;
                    (start..self.ends[sequence as usize + 1].min(start + rows as u32)).contains(&(row as u32))
                })
            };
            self.check(gpu, &context, "attention", written);
        }
    }

    /// Every sequence that is short enough.
    fn short(&self, gpu: &Gpu, random: &mut Random) {
        let length = |sequence: u32| (self.ends[sequence as usize + 1] - self.ends[sequence as usize]) as usize;
        let all: Vec<u32> = (0..self.ends.len() as u32 - 1).rev().collect();
        for limit in [16, 40, SHORT_ROWS] {
            let chosen: Vec<u32> = all.iter().copied().filter(|&sequence| length(sequence) <= limit).collect();
            let longest = chosen.iter().map(|&sequence| length(sequence)).max().unwrap_or(1);
            let longest = random.integer(longest, limit);
            let context = self.context(gpu);
            let sequences = gpu.words(&chosen);
            let arguments = AttentionShort {
                context: context.address,
                qkv: self.qkv.address,
                cu_seqlens: self.cu_seqlens.address,
                sequences: sequences.address,
                sequence_count: chosen.len() as u32,
                longest: longest as u32,
                heads: self.heads as u32,
                head_dim: self.head_dim as u32,
                scale: self.scale(),
            };
            // SAFETY: as above.
            unsafe { gpu.kernels.attention_short(self.dtype, &arguments, gpu.stream.cu_stream()) }.expect("launches");
            let sequence_of = |row: usize| self.ends.iter().filter(|&&end| end as usize <= row).count() as u32 - 1;
            self.check(gpu, &context, "attention_short", |row| chosen.contains(&sequence_of(row)));
        }
    }

    fn short_is_refused(&self, gpu: &Gpu) {
        let arguments = AttentionShort {
            context: 0,
            qkv: 0,
            cu_seqlens: 0,
            sequences: 0,
            sequence_count: 1,
            longest: 1,
            heads: 1,
            head_dim: self.head_dim as u32,
            scale: 1.0,
        };
        let refuses = |dtype, arguments: &AttentionShort| {
            // SAFETY: refused before anything is read.
            unsafe { gpu.kernels.attention_short(dtype, arguments, gpu.stream.cu_stream()) }.is_err()
        };
        assert!(refuses(DeviceType::F32, &arguments), "fp32");
        assert!(refuses(DeviceType::F16, &AttentionShort { longest: 65, ..arguments }), "65 tokens");
        assert!(refuses(DeviceType::F16, &AttentionShort { head_dim: 48, ..arguments }), "heads of 48");
    }
}

/// Attention in f64.
fn attention(qkv: &[f32], ends: &[u32], heads: usize, head_dim: usize) -> Vec<f64> {
    let hidden = heads * head_dim;
    let scale = 1.0 / (head_dim as f64).sqrt();
    let mut out = vec![0.0; qkv.len() / 3];
    let part = |token: u32, kind: usize, head: usize| {
        &qkv[token as usize * 3 * hidden + kind * hidden + head * head_dim..][..head_dim]
    };
    for sequence in ends.windows(2) {
        for head in 0..heads {
            for query in sequence[0]..sequence[1] {
                let dot = |key| -> f64 {
                    let pairs = part(query, 0, head).iter().zip(part(key, 1, head));
                    pairs.map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() * scale
                };
                let scores: Vec<f64> = (sequence[0]..sequence[1]).map(dot).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                let total: f64 = weights.iter().sum();
                let row = &mut out[query as usize * hidden + head * head_dim..][..head_dim];
                for (key, weight) in (sequence[0]..sequence[1]).zip(&weights) {
                    row.iter_mut().zip(part(key, 2, head)).for_each(|(o, &v)| *o += weight / total * f64::from(v));
                }
            }
        }
    }
    out
}

/// What is wrong with one sequence stays there; a sequence's answer has the same bits alone and among others.
#[test]
fn sequences_do_not_meet() {
    let _device = cuda_device::shared();
    let gpu = &Gpu::new();
    let random = &mut Random::new(9);
    for dtype in DeviceType::ALL {
        let (heads, head_dim) = (2, 64);
        let hidden = heads * head_dim;
        let lengths = [70usize, 130, 33];
        let ends: Vec<u32> = [0, 70, 200, 233].to_vec();
        let mut qkv = random.floats(dtype, 233 * 3 * hidden, 1.0, 0.0);
        qkv[..70 * 3 * hidden].fill(f32::NAN);
        qkv[200 * 3 * hidden..].fill(f32::INFINITY);
        let whole = run(gpu, dtype, &qkv, &ends, heads, head_dim);
        let alone = run(gpu, dtype, &qkv[70 * 3 * hidden..200 * 3 * hidden], &[0, lengths[1] as u32], heads, head_dim);
        assert_eq!(whole[70 * hidden..200 * hidden], alone[..], "{dtype:?}");
        assert!(alone.iter().all(|x| x.is_finite()), "{dtype:?}");
        let hostile = whole[..70 * hidden].iter().chain(&whole[200 * hidden..]);
        assert!(hostile.clone().all(|x| x.is_nan()), "{dtype:?}: what is not finite is hidden");
    }
}

fn run(gpu: &Gpu, dtype: DeviceType, qkv: &[f32], ends: &[u32], heads: usize, head_dim: usize) -> Vec<f32> {
    let rows = attention_tile_rows(dtype, head_dim).expect("a kernel");
    let mut tiles = Vec::new();
    for (sequence, pair) in ends.windows(2).enumerate() {
        tiles.extend((0..pair[1] - pair[0]).step_by(rows).flat_map(|first| [sequence as u32, first]));
    }
    let context = gpu.poisoned(dtype, qkv.len() / 3);
    let (buffer, tokens, cu_seqlens) = (gpu.words(&tiles), gpu.floats(dtype, qkv), gpu.words(ends));
    let arguments = Attention {
        context: context.address,
        qkv: tokens.address,
        cu_seqlens: cu_seqlens.address,
        tiles: buffer.address,
        tile_count: tiles.len() as u32 / 2,
        heads: heads as u32,
        head_dim: head_dim as u32,
        scale: 0.125,
    };
    // SAFETY: as above.
    unsafe { gpu.kernels.attention(dtype, &arguments, gpu.stream.cu_stream()) }.expect("launches");
    gpu.read(dtype, &context)
}
