//! Attention of one sequence and head in bf16: products of pairs, summed in fp32; the softmax in fp32.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::attention::{KEYS, LowHead, LowScratch, SCORES};
use super::exec::part;
use super::kernels::{MOST_ROWS, PANEL, TILE_ROWS, Tile};
use super::low::steps;
use super::simd::{exp, first, load, store, store_bf16};
use super::{tile_amx, tile_bf16};

/// The queries of `head`, in blocks of a tile's rows, against all keys of their sequence. `AMX` says with which tile.
///
/// # Safety
/// The CPU has what it is told to use. No other task uses these rows and columns of `head.context`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn head<const AMX: bool>(head: &LowHead<'_>, scratch: &mut LowScratch) {
    let (len, d, stride) = (head.len, head.head_dim, head.stride);
    let (pairs, token_pairs, width) = (steps::<u16>(d), steps::<u16>(len), d.next_multiple_of(PANEL));
    let most = if AMX { MOST_ROWS } else { TILE_ROWS };
    let product = |t: Tile<'_, u16>| if AMX { tile_amx::tile_bf16(t) } else { tile_bf16::tile(t) };
    pack_keys(head.keys, stride, len, d, &mut scratch.keys);
    pack_values(head.values, stride, len, d, &mut scratch.values);
    let LowScratch { keys: packed_keys, values: packed_values, scores, weights, sums } = scratch;

    let tiles = head.queries.len().div_ceil(most);
    for tile in 0..tiles {
        let block = part(head.queries.len(), tiles, tile);
        let (start, rows) = (head.queries.start + block.start, block.len());
        let (mut max, mut total) = ([f32::NEG_INFINITY; MOST_ROWS], [0.0; MOST_ROWS]);
        for from in (0..len).step_by(KEYS) {
            let keys = from..len.min(from + KEYS);
            for (i, panel) in (from / PANEL..keys.end.div_ceil(PANEL)).enumerate() {
                let b = &packed_keys[panel * pairs * 2 * PANEL..][..pairs * 2 * PANEL];
                let (a, out) = (&head.query[start * stride..], &mut scores[i * PANEL..]);
                product(Tile::whole(rows, pairs, (a, stride), b, (out, SCORES)));
            }
            let (mut now, mut added) = (max, [0.0; MOST_ROWS]);
            for i in 0..rows {
                let row = i * SCORES..i * SCORES + SCORES;
                (now[i], added[i]) = softmax(&mut scores[row.clone()], &mut weights[row], keys.len(), max[i]);
            }
            let mut scale = [0.0; MOST_ROWS];
            for i in (0..rows).step_by(16) {
                let rescale = exp(_mm512_sub_ps(load(&max[i..]), load(&now[i..])));
                let sum = _mm512_fmadd_ps(load(&total[i..]), rescale, load(&added[i..]));
                store(&mut total[i..], sum);
                store(&mut scale[i..], rescale);
            }
            max = now;
            let k = steps::<u16>(keys.len());
            for panel in 0..width / PANEL {
                let b = &packed_values[(panel * token_pairs + from / 2) * 2 * PANEL..][..k * 2 * PANEL];
                let sums = &mut sums[panel * PANEL..];
                if from == 0 {
                    product(Tile::whole(rows, k, (weights, SCORES), b, (sums, width)));
                    continue;
                }
                let mut out = [[0.0; PANEL]; MOST_ROWS];
                let added = out.as_flattened_mut();
                product(Tile::whole(rows, k, (weights, SCORES), b, (added, PANEL)));
                for (i, out) in out[..rows].iter().enumerate() {
                    for j in [0, 16] {
                        let sums = &mut sums[i * width + j..];
                        let sum = _mm512_fmadd_ps(load(sums), _mm512_set1_ps(scale[i]), load(&out[j..]));
                        store(sums, sum);
                    }
                }
            }
        }
        for (i, total) in total[..rows].iter().enumerate() {
            let scale = 1.0 / total;
            // SAFETY: as the caller promises.
            let out = unsafe { head.context.columns(head.first + start + i, head.columns.clone()) };
            for (out, sums) in out.chunks_mut(16).zip(sums[i * width..].chunks(16)) {
                store_bf16(out, _mm512_mul_ps(load(sums), _mm512_set1_ps(scale)));
            }
        }
    }
}

/// One block of an online softmax: `weights` become `exp(score - m)`, where `m` is the maximum of `before` and of the
/// first `len` scores, and 0 up to the next multiple of 32. Returns `m` and their sum.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn softmax(scores: &mut [f32], weights: &mut [u16], len: usize, before: f32) -> (f32, f32) {
    weights[len..len.next_multiple_of(32)].fill(0);
    let (scores, weights) = (&mut scores[..len.next_multiple_of(16)], &mut weights[..len.next_multiple_of(16)]);
    let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
    let last = len.next_multiple_of(16) - 16;
    let tail = _mm512_mask_blend_ps(first(len - last), nothing, load(&scores[last..]));
    store(&mut scores[last..], tail);
    let mut max = tail;
    for block in scores[..last].chunks_exact(16) {
        max = _mm512_max_ps(max, load(block));
    }
    let max = before.max(_mm512_reduce_max_ps(max));
    let (shift, mut sum) = (_mm512_set1_ps(max), _mm512_setzero_ps());
    for (block, weights) in scores.chunks_exact(16).zip(weights.chunks_exact_mut(16)) {
        let weight = exp(_mm512_sub_ps(load(block), shift));
        sum = _mm512_add_ps(sum, weight);
        store_bf16(weights, weight);
    }
    (max, _mm512_reduce_add_ps(sum))
}

/// `keys`: rows of `d` that are `stride` apart, to `[ceil(len / 32), steps(d), 32, 2]`, zero past `len` and `d`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack_keys(keys: &[u16], stride: usize, len: usize, d: usize, packed: &mut [u16]) {
    let pairs = steps::<u16>(d);
    for start in (0..len.next_multiple_of(PANEL)).step_by(16) {
        let panel = &mut packed[start / PANEL * pairs * 2 * PANEL..][..pairs * 2 * PANEL];
        for column in (0..d).step_by(32) {
            // 16 keys by 16 pairs, turned into 16 pairs by 16 keys.
            let inside = low_half_mask(d - column);
            let block: [__m512i; 16] = std::array::from_fn(|i| {
                if start + i >= len {
                    return _mm512_setzero_si512();
                }
                let key = &keys[(start + i) * stride + column..][..(d - column).min(32)];
                // SAFETY: the mask leaves out what is past the slice.
                unsafe { _mm512_maskz_loadu_epi16(inside, key.as_ptr().cast()) }
            });
            let block = transpose(block);
            for (i, row) in block.iter().enumerate().take(pairs - column / 2) {
                let out = &mut panel[(column / 2 + i) * 2 * PANEL + start % PANEL * 2..][..32];
                // SAFETY: there is room for 32 numbers of 16 bits.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), *row) };
            }
        }
    }
}

/// A mask of the first `n` of 32 lanes.
#[inline]
fn low_half_mask(n: usize) -> u32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// Transposes 16 x 16 numbers of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(x: [__m512i; 16]) -> [__m512i; 16] {
    // Pairs of rows, then of pairs, within each quarter of a vector; then the quarters.
    let mut y = x;
    for i in (0..16).step_by(2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    let mut z = y;
    for i in (0..16).step_by(4) {
        z[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        z[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        z[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        z[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    // z[4 g + c] holds, in quarter q, column 4 q + c of the rows 4 g .. 4 g + 4.
    let mut out = x;
    for c in 0..4 {
        let (a, b, e, f) = (z[c], z[4 + c], z[8 + c], z[12 + c]);
        let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (ef_even, ef_odd) = (_mm512_shuffle_i32x4::<0x88>(e, f), _mm512_shuffle_i32x4::<0xdd>(e, f));
        out[c] = _mm512_shuffle_i32x4::<0x88>(ab_even, ef_even);
        out[8 + c] = _mm512_shuffle_i32x4::<0xdd>(ab_even, ef_even);
        out[4 + c] = _mm512_shuffle_i32x4::<0x88>(ab_odd, ef_odd);
        out[12 + c] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, ef_odd);
    }
    out
}

/// `values`: rows of `d` that are `stride` apart, to `[ceil(d / 32), steps(len), 32, 2]`, zero past `d` and `len`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack_values(values: &[u16], stride: usize, len: usize, d: usize, packed: &mut [u16]) {
    let steps = steps::<u16>(len);
    let low: [u16; 32] = std::array::from_fn(|i| (i / 2 + i % 2 * 32) as u16);
    let high = low.map(|i| i + 16);
    // SAFETY: both arrays are a vector long.
    let (low, high) = unsafe { (_mm512_loadu_si512(low.as_ptr().cast()), _mm512_loadu_si512(high.as_ptr().cast())) };
    for column in (0..d).step_by(PANEL) {
        let inside = low_half_mask(d - column);
        let panel = &mut packed[column * steps * 2..][..steps * 2 * PANEL];
        for (i, out) in panel.chunks_exact_mut(2 * PANEL).enumerate() {
            let row = |row: usize| {
                if row >= len {
                    return _mm512_setzero_si512();
                }
                let value = &values[row * stride + column..][..(d - column).min(PANEL)];
                // SAFETY: the mask leaves out what is past the slice.
                unsafe { _mm512_maskz_loadu_epi16(inside, value.as_ptr().cast()) }
            };
            let (even, odd) = (row(2 * i), row(2 * i + 1));
            // SAFETY: `out` is two vectors long.
            unsafe {
                let out = out.as_mut_ptr();
                _mm512_storeu_si512(out.cast(), _mm512_permutex2var_epi16(even, low, odd));
                _mm512_storeu_si512(out.add(PANEL).cast(), _mm512_permutex2var_epi16(even, high, odd));
            }
        }
    }
}
