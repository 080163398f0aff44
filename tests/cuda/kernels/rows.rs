//! Kernels that work row by row: LayerNorm, activations, gathering.

use triton_rust::engine::cuda::kernels::{AddLayerNorm, DeviceType, EmbedLayerNorm, GatherRows};
use triton_rust::model::HiddenAct;

use crate::gpu::{Gpu, Random, assert_close, rounded, unit};

/// All of them for every type, with up to `most_rows` rows of each width.
pub fn check_all(random: &mut Random, most_rows: usize, widths: &[usize]) {
    let gpu = &Gpu::new();
    for dtype in DeviceType::ALL {
        for &hidden in widths {
            let rows = random.integer(1, most_rows);
            embed_layer_norm(gpu, random, dtype, rows, hidden);
            for (bias, residual) in [(true, true), (false, true), (true, false), (false, false)] {
                add_layer_norm(gpu, random, dtype, rows, hidden, bias, residual);
            }
            gather(gpu, random, dtype, rows, hidden);
        }
        activations(gpu, random, dtype);
    }
}

/// LayerNorm of each row in f64.
fn normalized(x: &[f64], gamma: &[f32], beta: &[f32], eps: f32) -> Vec<f64> {
    let h = gamma.len();
    let row = |row: &[f64]| {
        let mean = row.iter().sum::<f64>() / h as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / h as f64;
        let scale = 1.0 / (variance + f64::from(eps)).sqrt();
        let out = row.iter().zip(gamma).zip(beta).map(|((x, &g), &b)| (x - mean) * scale * f64::from(g) + f64::from(b));
        out.collect::<Vec<_>>()
    };
    x.chunks_exact(h).flat_map(row).collect()
}

fn embed_layer_norm(gpu: &Gpu, random: &mut Random, dtype: DeviceType, tokens: usize, hidden: usize) {
    let tables = [50, 512, 2].map(|rows| (rows, random.floats(dtype, rows * hidden, 1.0, 0.0)));
    let ids = tables.each_ref().map(|(rows, _)| random.integers(tokens, *rows));
    let (gamma, beta) =
        (random.floats(DeviceType::F32, hidden, 0.2, 1.0), random.floats(DeviceType::F32, hidden, 0.5, 0.0));
    let out = gpu.poisoned(dtype, tokens * hidden);
    let [word, position, token_type] = tables.each_ref().map(|(_, table)| gpu.floats(dtype, table));
    let [input_ids, position_ids, token_type_ids] = ids.each_ref().map(|ids| gpu.words(ids));
    let (g, b) = (gpu.floats(DeviceType::F32, &gamma), gpu.floats(DeviceType::F32, &beta));
    let arguments = EmbedLayerNorm {
        out: out.address,
        input_ids: input_ids.address,
        token_type_ids: token_type_ids.address,
        position_ids: position_ids.address,
        word: word.address,
        position: position.address,
        token_type: token_type.address,
        gamma: g.address,
        beta: b.address,
        eps: 1e-12,
        tokens: tokens as u32,
        hidden: hidden as u32,
    };
    // SAFETY: buffers of these sizes, which live until the result is read.
    unsafe { gpu.kernels.embed_layer_norm(dtype, &arguments, gpu.stream.cu_stream()) }.expect("launches");
    let element = |token: usize, i: usize| {
        ids.iter().zip(&tables).map(|(ids, (_, table))| f64::from(table[ids[token] as usize * hidden + i])).sum()
    };
    let sums: Vec<f64> = (0..tokens * hidden).map(|i| element(i / hidden, i % hidden)).collect();
    let what = format!("embed_layer_norm {dtype:?} [{tokens}, {hidden}]");
    assert_close(&gpu.read(dtype, &out), &normalized(&sums, &gamma, &beta, 1e-12), unit(dtype), 0.1, &what);
}

fn add_layer_norm(
    gpu: &Gpu,
    random: &mut Random,
    dtype: DeviceType,
    rows: usize,
    hidden: usize,
    bias: bool,
    residual: bool,
) {
    // A mean far from zero, which a variance computed as the difference of two sums would not survive.
    let x = random.floats(dtype, rows * hidden, 1.0, 16.0);
    let added_bias = random.floats(dtype, hidden, 1.0, 0.0);
    let added = random.floats(dtype, rows * hidden, 1.0, 4.0);
    let (gamma, beta) =
        (random.floats(DeviceType::F32, hidden, 0.2, 1.0), random.floats(DeviceType::F32, hidden, 0.5, 0.0));
    let sums: Vec<f64> = (0..rows * hidden)
        .map(|i| {
            let bias = if bias { f64::from(added_bias[i % hidden]) } else { 0.0 };
            f64::from(x[i]) + bias + if residual { f64::from(added[i]) } else { 0.0 }
        })
        .collect();
    let right = normalized(&sums, &gamma, &beta, 1e-5);

    let (b, r) = (gpu.floats(dtype, &added_bias), gpu.floats(dtype, &added));
    let (g, shift) = (gpu.floats(DeviceType::F32, &gamma), gpu.floats(DeviceType::F32, &beta));
    let input = gpu.floats(dtype, &x);
    let other = gpu.poisoned(dtype, rows * hidden);
    // In place last, as it changes the input.
    for (out, place) in [(&other, "elsewhere"), (&input, "in place")] {
        let arguments = AddLayerNorm {
            out: out.address,
            x: input.address,
            bias: if bias { b.address } else { 0 },
            residual: if residual { r.address } else { 0 },
            gamma: g.address,
            beta: shift.address,
            eps: 1e-5,
            rows: rows as u32,
            hidden: hidden as u32,
        };
        // SAFETY: as above.
        unsafe { gpu.kernels.add_layer_norm(dtype, &arguments, gpu.stream.cu_stream()) }.expect("launches");
        let what = format!("add_layer_norm {dtype:?} [{rows}, {hidden}] bias {bias} residual {residual} {place}");
        // fp32 numbers near 20 lose 1e-6 of a deviation of 1.
        let (unit, size) = if dtype == DeviceType::F32 { (1e-5, 1.0) } else { (unit(dtype), 0.1) };
        assert_close(&gpu.read(dtype, out), &right, unit, size, &what);
    }
}

fn gather(gpu: &Gpu, random: &mut Random, dtype: DeviceType, rows: usize, hidden: usize) {
    let x = random.floats(dtype, 2 * rows * hidden, 1.0, 0.0);
    let index = random.integers(rows, 2 * rows);
    let (out, input, indices) = (gpu.poisoned(dtype, rows * hidden), gpu.floats(dtype, &x), gpu.words(&index));
    let arguments = GatherRows {
        out: out.address,
        x: input.address,
        index: indices.address,
        rows: rows as u32,
        hidden: hidden as u32,
    };
    // SAFETY: as above.
    unsafe { gpu.kernels.gather_rows(dtype, &arguments, gpu.stream.cu_stream()) }.expect("launches");
    let right: Vec<f32> = index.iter().flat_map(|&i| &x[i as usize * hidden..][..hidden]).copied().collect();
    assert_eq!(gpu.read(dtype, &out), right, "gather_rows {dtype:?} [{rows}, {hidden}]");
}

/// erf: the Taylor series, or the continued fraction of erfc further out.
fn erf(x: f64) -> f64 {
    if x.abs() < 3.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return sum * std::f64::consts::FRAC_2_SQRT_PI;
    }
    let mut fraction = 0.0;
    for n in (1..200).rev() {
        fraction = f64::from(n) / 2.0 / (x.abs() + fraction);
    }
    x.signum() * (1.0 - (-x * x).exp() / std::f64::consts::PI.sqrt() / (x.abs() + fraction))
}

fn activations(gpu: &Gpu, random: &mut Random, dtype: DeviceType) {
    // More than a block's, so that grids of several blocks are met; from -8 to 8, and far out.
    let n = 8 * random.integer(300, 900);
    let mut values: Vec<f32> = (0..n).map(|i| 16.0 * i as f32 / n as f32 - 8.0).collect();
    values[n - 4..].copy_from_slice(&[1e4, -1e4, 0.0, -0.0]);
    let x = rounded(dtype, values);
    for kind in [HiddenAct::Gelu, HiddenAct::GeluTanh, HiddenAct::Relu] {
        let right: Vec<f64> = x
            .iter()
            .map(|&x| {
                let x = f64::from(x);
                match kind {
                    HiddenAct::Gelu => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
                    HiddenAct::GeluTanh => {
                        0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
                    }
                    HiddenAct::Relu => x.max(0.0),
                }
            })
            .collect();
        let buffer = gpu.floats(dtype, &x);
        // SAFETY: as above.
        unsafe { gpu.kernels.activation(dtype, buffer.address, n as u64, kind, gpu.stream.cu_stream()) }
            .expect("launches");
        // In fp32, 1 + erf has lost what is below 1e-7 of it.
        let size = if dtype == DeviceType::F32 { 0.5 } else { 0.01 };
        assert_close(&gpu.read(dtype, &buffer), &right, unit(dtype), size, &format!("activation {dtype:?} {kind:?}"));

        let hostile = gpu.floats(dtype, &[f32::NAN, f32::INFINITY, f32::NAN, 1.0, 1.0, 1.0, 1.0, 1.0]);
        // SAFETY: as above.
        unsafe { gpu.kernels.activation(dtype, hostile.address, 8, kind, gpu.stream.cu_stream()) }.expect("launches");
        let out = gpu.read(dtype, &hostile);
        assert!(out[0].is_nan() && out[1] == f32::INFINITY && out[2].is_nan(), "{kind:?} hides {out:?}");
    }
    // SAFETY: refused before anything is read.
    let refused = unsafe { gpu.kernels.activation(dtype, 0, 4, HiddenAct::Relu, gpu.stream.cu_stream()) };
    assert!(refused.is_err(), "four elements are no multiple of eight");
}
