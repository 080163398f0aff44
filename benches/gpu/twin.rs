//! The attention kernels of a card against their host twins: everything that is tested without a card rests on the two
//! agreeing. The same launch is made on both devices, by two processes, and what they wrote is compared.
#![allow(unsafe_code)]

use std::path::Path;

use triton_rust::engine::cuda::kernels::{
    Attention, AttentionShort, DeviceType, HEAD_DIMS, Kernels, SHORT_ROWS, attention_tile_rows,
};

use crate::device::{self, address};
use crate::{Result, noise};

/// Of sequences up to some tiles long, and of short ones alone.
const LENGTHS: [usize; 7] = [1, 17, 64, 65, 128, 129, 300];
const HEADS: usize = 2;
/// Between rounding in fp16 of sums that were taken in another order.
const MOST_APART: f32 = 2e-3;

/// Writes every context that the kernels give, fp16 bits.
pub fn write(file: &Path) -> Result<()> {
    let context = device::open()?;
    let stream = context.default_stream();
    let kernels = Kernels::load()?;
    let mut contexts: Vec<u16> = Vec::new();
    for head_dim in HEAD_DIMS {
        let rows = attention_tile_rows(DeviceType::F16, head_dim).ok_or("no attention of this width")?;
        let ends = LENGTHS.iter().scan(0, |end, len| {
            *end += *len as u32;
            Some(*end)
        });
        let cu_seqlens: Vec<u32> = std::iter::once(0).chain(ends).collect();
        let tiles: Vec<u32> = (0_u32..)
            .zip(LENGTHS)
            .flat_map(|(sequence, len)| (0..len).step_by(rows).flat_map(move |row| [sequence, row as u32]))
            .collect();
        let short: Vec<u32> = (0_u32..).zip(LENGTHS).filter(|(_, len)| *len <= SHORT_ROWS).map(|(i, _)| i).collect();
        let (tokens, hidden) = (LENGTHS.iter().sum::<usize>(), HEADS * head_dim);
        let qkv = stream.clone_htod(&numbers(tokens * 3 * hidden))?;
        let places = (stream.clone_htod(&cu_seqlens)?, stream.clone_htod(&tiles)?, stream.clone_htod(&short)?);
        for alone in [false, true] {
            let out = stream.alloc_zeros::<u16>(tokens * hidden)?;
            let scale = 1.0 / (head_dim as f32).sqrt();
            // SAFETY: a stream of the context in which the kernels were loaded; contexts and qkv are `[tokens, hidden]` and
            // `[tokens, 3 hidden]`, the lists name sequences and rows that are there, and all of them live until the stream
            // has been waited for, which the copy below does.
            unsafe {
                if alone {
                    let launch = AttentionShort {
                        context: address(&out, &stream),
                        qkv: address(&qkv, &stream),
                        cu_seqlens: address(&places.0, &stream),
                        sequences: address(&places.2, &stream),
                        sequence_count: short.len() as u32,
                        longest: SHORT_ROWS as u32,
                        heads: HEADS as u32,
                        head_dim: head_dim as u32,
                        scale,
                    };
                    kernels.attention_short(DeviceType::F16, &launch, stream.cu_stream())?;
                } else {
                    let launch = Attention {
                        context: address(&out, &stream),
                        qkv: address(&qkv, &stream),
                        cu_seqlens: address(&places.0, &stream),
                        tiles: address(&places.1, &stream),
                        tile_count: (tiles.len() / 2) as u32,
                        heads: HEADS as u32,
                        head_dim: head_dim as u32,
                        scale,
                    };
                    kernels.attention(DeviceType::F16, &launch, stream.cu_stream())?;
                }
            }
            contexts.extend(stream.clone_dtoh(&out)?);
        }
    }
    let bytes: Vec<u8> = contexts.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    std::fs::write(file, bytes).map_err(|why| format!("{}: {why}", file.display()))?;
    println!("{}: attention of {} values on {}", file.display(), contexts.len(), context.name()?);
    Ok(())
}

/// Fails where two files differ by more than rounding.
pub fn compare(one: &Path, other: &Path) -> Result<()> {
    let read = |file: &Path| -> Result<Vec<f32>> {
        let bytes = std::fs::read(file).map_err(|why| format!("{}: {why}", file.display()))?;
        let values = bytes.as_chunks::<2>().0.iter();
        Ok(values.map(|&bytes| half::f16::from_bits(u16::from_le_bytes(bytes)).to_f32()).collect())
    };
    let (one, other) = (read(one)?, read(other)?);
    if one.len() != other.len() || one.is_empty() {
        return Err(format!("{} values and {}", one.len(), other.len()).into());
    }
    let (mut most, mut at) = (0.0, 0);
    for (i, (x, y)) in one.iter().zip(&other).enumerate() {
        let apart = (x - y).abs();
        // NaN is the most of all: nothing is greater.
        if apart > most || apart.is_nan() {
            (most, at) = (apart, i);
        }
    }
    let zeros = one.iter().filter(|value| **value == 0.0).count();
    println!("{} values, {zeros} of them zero; at most {most:e} apart, at {at} (allowed {MOST_APART:e})", one.len());
    if most <= MOST_APART { Ok(()) } else { Err("the card and the host twin do not agree".into()) }
}

/// fp16 numbers about -2 .. 2.
fn numbers(count: usize) -> Vec<u16> {
    noise::noise(count).map(|value| half::f16::from_f32(2.0 * value).to_bits()).collect()
}
