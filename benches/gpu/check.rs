//! The engine against the oracle: what transformers computes in fp32 from the same directory (`oracle.py`).

use std::path::Path;

use safetensors::SafeTensors;
use triton_rust::batch::PackedBatch;
use triton_rust::engine::cuda::CudaOptions;
use triton_rust::engine::{Dtype, Output, Slot};
use triton_rust::head::{Pooling, Value};

use crate::{Model, Result};

/// What each number format must keep: the least cosine of a text's embedding to the oracle's, and the most of what tells
/// texts apart that may be wrong. Embeddings of random weights are much alike, and the cosine alone would hardly see it.
/// First tokens take another way through the last layer.
const LIMITS: [(Dtype, Pooling, &str, f64, f64); 4] = [
    (Dtype::Fp16, Pooling::Mean, "mean", 0.9999, 0.02),
    (Dtype::Fp16, Pooling::Cls, "cls", 0.9999, 0.02),
    (Dtype::Bf16, Pooling::Mean, "mean", 0.999, 0.1),
    (Dtype::Fp32, Pooling::Mean, "mean", 0.999_999, 0.002),
];

/// Fails where an embedding is not the oracle's.
pub fn check(directory: &Path) -> Result<()> {
    let file = std::fs::read(directory.join("oracle.safetensors"))
        .map_err(|why| format!("{}: oracle.safetensors: {why}", directory.display()))?;
    let oracle = SafeTensors::deserialize(&file)?;
    let (ids, types, ends) = (words(&oracle, "ids")?, words(&oracle, "types")?, words(&oracle, "cu_seqlens")?);
    let mut batch = PackedBatch::new();
    for range in ends.windows(2).map(|ends| ends[0] as usize..ends[1] as usize) {
        batch.push(&ids[range.clone()], &types[range]);
    }
    let mut failed = Vec::new();
    for (dtype, pooling, tensor, least, most_apart) in LIMITS {
        let right: Vec<f32> = words(&oracle, tensor)?.into_iter().map(f32::from_bits).collect();
        let ours = embeddings(directory, dtype, pooling, &batch)?;
        let (cosine, apart) = compare(&ours, &right, batch.sequences());
        let verdict = if cosine >= least && apart <= most_apart { "ok" } else { "WRONG" };
        println!(
            "{:<12} {dtype:?} {tensor:<5} least cosine of {} texts {cosine:.7} (at least {least}), {:.2}% of the \
             differences between them wrong (at most {:.1}%): {verdict}",
            directory.file_name().unwrap_or_default().to_string_lossy(),
            batch.sequences(),
            100.0 * apart,
            100.0 * most_apart
        );
        if verdict != "ok" {
            failed.push(format!("{dtype:?} {tensor}"));
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("not as transformers: {}", failed.join(", ")).into()) }
}

/// `[B, h]`, not normalized.
fn embeddings(directory: &Path, dtype: Dtype, pooling: Pooling, batch: &PackedBatch) -> Result<Vec<f32>> {
    // No plans for larger passes are needed.
    let options = CudaOptions { dtype, pass_tokens: Some(batch.tokens()), ..CudaOptions::default() };
    let model = Model::load(directory, options, pooling, false)?;
    let mut rows = vec![0.0; batch.sequences() * model.spec.hidden_size];
    let slots = rows.chunks_mut(model.spec.hidden_size).map(Slot::Host);
    let mut outputs: Vec<_> =
        slots.enumerate().map(|(sequence, slot)| Output { sequence, value: Value::Embedding, slot }).collect();
    model.engine.runner()?.run(batch, &mut outputs)?;
    drop(outputs);
    Ok(rows)
}

/// The least cosine of a row of `ours` to the same of `right`, and the error as a share of what remains of `right`
/// without the mean of its rows: the root of the sums of squares' ratio.
fn compare(ours: &[f32], right: &[f32], rows: usize) -> (f64, f64) {
    let width = right.len() / rows;
    let mean: Vec<f64> =
        (0..width).map(|i| right.chunks(width).map(|row| f64::from(row[i])).sum::<f64>() / rows as f64).collect();
    let (mut least, mut wrong, mut all) = (f64::INFINITY, 0.0, 0.0);
    for (ours, right) in ours.chunks(width).zip(right.chunks(width)) {
        let [mut dot, mut square, mut right_square] = [0.0; 3];
        for ((&x, &y), &mean) in ours.iter().zip(right).zip(&mean) {
            let (x, y) = (f64::from(x), f64::from(y));
            dot += x * y;
            square += x * x;
            right_square += y * y;
            wrong += (x - y) * (x - y);
            all += (y - mean) * (y - mean);
        }
        // NaN is the least of all.
        let cosine = dot / (square * right_square).sqrt();
        least = if cosine >= least { least } else { cosine };
    }
    (least, (wrong / all).sqrt())
}

/// The 32-bit words of a tensor, whatever they mean.
fn words(oracle: &SafeTensors<'_>, name: &str) -> Result<Vec<u32>> {
    let tensor = oracle.tensor(name).map_err(|why| format!("oracle.safetensors: {name}: {why}"))?;
    Ok(tensor.data().as_chunks::<4>().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect())
}
