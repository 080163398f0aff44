//! The engine against a plain f64 encoder, on random weights of every shape class and on every instruction set that
//! this machine can run.

use std::collections::BTreeMap;

use super::*;
use crate::batch::PackedBatch;
use crate::engine::{Output, Slot};
use crate::head::{self, Activation, Pooling, Value};
use crate::model::{Checkpoint, HiddenAct, bert};

/// A generator of numbers that look random (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// About normal, with standard deviation `scale`.
    fn normal(&mut self, scale: f32) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5).sum();
        sum * scale * 3f32.sqrt()
    }
}

/// A model with random weights: its tensors by name, and the same as a checkpoint on disk.
struct Fixture {
    spec: EncoderSpec,
    head: HeadSpec,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    checkpoint: Checkpoint,
}

impl Fixture {
    fn new(spec: EncoderSpec, head: HeadSpec, seed: u64) -> Self {
        let mut random = Random(seed);
        let mut tensors = BTreeMap::new();
        let (h, ff) = (spec.hidden_size, spec.intermediate_size);
        {
            let mut add = |name: String, shape: &[usize], mean: f32, scale: f32| {
                let data: Vec<f32> = (0..shape.iter().product()).map(|_| mean + random.normal(scale)).collect();
                tensors.insert(name, (shape.to_vec(), data));
            };
            for (name, rows) in [
                ("word", spec.vocab_size),
                ("position", spec.max_position_embeddings),
                ("token_type", spec.type_vocab_size),
            ] {
                add(format!("embeddings.{name}_embeddings.weight"), &[rows, h], 0.0, 0.5);
            }
            let mut norms = vec!["embeddings.LayerNorm".to_owned()];
            let mut linears = Vec::new();
            for i in 0..spec.num_hidden_layers {
                let at = |name: &str| format!("encoder.layer.{i}.{name}");
                norms.extend([at("attention.output.LayerNorm"), at("output.LayerNorm")]);
                for name in
                    ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
                {
                    linears.push((at(name), h, h));
                }
                linears.push((at("intermediate.dense"), ff, h));
                linears.push((at("output.dense"), h, ff));
            }
            if let HeadSpec::Classify { num_labels, .. } = head {
                linears.push(("pooler.dense".into(), h, h));
                linears.push(("classifier".into(), num_labels, h));
            }
            for name in norms {
                add(format!("{name}.weight"), &[h], 1.0, 0.1);
                add(format!("{name}.bias"), &[h], 0.0, 0.1);
            }
            for (name, out, input) in linears {
                add(format!("{name}.weight"), &[out, input], 0.0, 1.5 / (input as f32).sqrt());
                add(format!("{name}.bias"), &[out], 0.0, 0.2);
            }
        }
        let directory = std::env::temp_dir().join(format!("cpu-engine-{}-{seed}-{h}-{ff}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a temporary directory");
        let bytes: BTreeMap<_, Vec<u8>> = tensors
            .iter()
            .map(|(name, (_, data))| (name, data.iter().flat_map(|x| x.to_le_bytes()).collect()))
            .collect();
        let views = tensors.iter().map(|(name, (shape, _))| {
            let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), &bytes[name]);
            (name, view.expect("the shape fits"))
        });
        safetensors::serialize_to_file(views, None, &directory.join("model.safetensors")).expect("a file");
        let checkpoint = Checkpoint::open(&directory).expect("a checkpoint");
        std::fs::remove_dir_all(&directory).expect("the directory is ours");
        Self { spec, head, tensors, checkpoint }
    }

    fn load(&self, pool: &Arc<Pool>, kernels: &'static Kernels, options: CpuOptions) -> Arc<CpuModel> {
        let weights = bert::weights(&self.checkpoint, &self.spec, &self.head).expect("all tensors");
        let model = CpuModel::load(&self.spec, &self.head, &weights, options, Arc::clone(pool), kernels);
        Arc::new(model.expect("a model"))
    }

    fn tensor(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    fn sequence(&self, random: &mut Random, len: usize) -> (Vec<u32>, Vec<u32>) {
        let ids = (0..len).map(|_| random.below(self.spec.vocab_size) as u32).collect();
        let segments = (0..len).map(|i| u32::from(i > len / 2)).collect();
        (ids, segments)
    }

    fn linear(&self, name: &str, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let (weight, bias) = (self.tensor(&format!("{name}.weight")), self.tensor(&format!("{name}.bias")));
        let row = |x: &Vec<f64>| {
            let dot = |w: &[f32]| w.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
            weight.chunks_exact(x.len()).zip(bias).map(|(w, &b)| dot(w) + f64::from(b)).collect()
        };
        x.iter().map(row).collect()
    }

    fn norm(&self, name: &str, x: &mut [Vec<f64>]) {
        let (weight, bias) = (self.tensor(&format!("{name}.weight")), self.tensor(&format!("{name}.bias")));
        for row in x {
            let n = row.len() as f64;
            let mean = row.iter().sum::<f64>() / n;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            for ((x, &w), &b) in row.iter_mut().zip(weight).zip(bias) {
                *x =
                    (*x - mean) / (variance + f64::from(self.spec.layer_norm_eps)).sqrt() * f64::from(w) + f64::from(b);
            }
        }
    }

    /// The hidden states of one sequence, `[S][h]`, by the definition.
    fn reference(&self, ids: &[u32], segments: &[u32]) -> Vec<Vec<f64>> {
        let (h, d) = (self.spec.hidden_size, self.spec.head_dim());
        let embedding = |name: &str, i: usize| {
            self.tensor(&format!("embeddings.{name}_embeddings.weight"))[i * h..][..h].iter().map(|&x| f64::from(x))
        };
        let mut x: Vec<Vec<f64>> = (0..ids.len())
            .map(|t| {
                embedding("word", ids[t] as usize)
                    .zip(embedding("position", t))
                    .zip(embedding("token_type", segments[t] as usize))
                    .map(|((a, b), c)| a + b + c)
                    .collect()
            })
            .collect();
        self.norm("embeddings.LayerNorm", &mut x);
        for layer in 0..self.spec.num_hidden_layers {
            let at = |name: &str| format!("encoder.layer.{layer}.{name}");
            let [q, k, v] =
                ["query", "key", "value"].map(|name| self.linear(&at(&format!("attention.self.{name}")), &x));
            let mut context = vec![vec![0.0; h]; ids.len()];
            for head in (0..h).step_by(d) {
                for (t, context) in context.iter_mut().enumerate() {
                    let score = |k: &Vec<f64>| {
                        let dot: f64 = (head..head + d).map(|i| q[t][i] * k[i]).sum();
                        dot / (d as f64).sqrt()
                    };
                    let scores: Vec<f64> = k.iter().map(score).collect();
                    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                    for (s, v) in scores.iter().zip(&v) {
                        (head..head + d).for_each(|i| context[i] += (s - max).exp() / total * v[i]);
                    }
                }
            }
            add(&mut x, &self.linear(&at("attention.output.dense"), &context));
            self.norm(&at("attention.output.LayerNorm"), &mut x);
            let mut wide = self.linear(&at("intermediate.dense"), &x);
            wide.iter_mut().flatten().for_each(|x| *x = activation(self.spec.hidden_act, *x));
            add(&mut x, &self.linear(&at("output.dense"), &wide));
            self.norm(&at("output.LayerNorm"), &mut x);
        }
        x
    }
}

fn add(x: &mut [Vec<f64>], y: &[Vec<f64>]) {
    x.iter_mut().flatten().zip(y.iter().flatten()).for_each(|(x, y)| *x += y);
}

fn activation(act: HiddenAct, x: f64) -> f64 {
    match act {
        HiddenAct::Relu => x.max(0.0),
        HiddenAct::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        HiddenAct::Gelu => {
            // The series of erf, good to 1e-10 up to |x| = 5; beyond it erf is 1.
            let z = x / 2f64.sqrt();
            let (mut term, mut sum) = (z, z);
            for n in 1..120 {
                term *= -z * z / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            let erf = if z.abs() > 4.0 { z.signum() } else { sum * std::f64::consts::FRAC_2_SQRT_PI };
            0.5 * x * (1.0 + erf)
        }
    }
}

fn spec(hidden: usize, heads: usize, ff: usize, layers: usize) -> EncoderSpec {
    EncoderSpec {
        vocab_size: 97,
        hidden_size: hidden,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        intermediate_size: ff,
        max_position_embeddings: 8192,
        type_vocab_size: 2,
        layer_norm_eps: 1e-12,
        hidden_act: HiddenAct::Gelu,
    }
}

const FP32: CpuOptions = CpuOptions { dtype: Dtype::Fp32, threads: 0 };

const MEAN: HeadSpec = HeadSpec::Embed { pooling: Pooling::Mean, normalize: true };

/// Runs `sequences` as one pass and returns a row of `value` for each.
fn run(model: &Arc<CpuModel>, sequences: &[(Vec<u32>, Vec<u32>)], value: Value) -> Result<Vec<Vec<f32>>> {
    let mut batch = PackedBatch::new();
    sequences.iter().for_each(|(ids, segments)| batch.push(ids, segments));
    let width = match model.head {
        HeadSpec::Embed { .. } => model.spec.hidden_size,
        HeadSpec::Classify { num_labels, .. } => num_labels,
    };
    let mut rows = vec![vec![f32::NAN; width]; sequences.len()];
    let slots = rows.iter_mut().map(|row| Slot::Host(row));
    let mut outputs: Vec<_> = slots.enumerate().map(|(sequence, slot)| Output { sequence, value, slot }).collect();
    CpuEngine(Arc::clone(model)).runner()?.run(&batch, &mut outputs)?;
    drop(outputs);
    Ok(rows)
}

/// All hidden states of one sequence, `[S, h]`.
fn hidden_states(model: &CpuModel, exec: exec::Exec<'_, '_>, ids: &[u32], segments: &[u32]) -> Vec<f32> {
    let mut batch = PackedBatch::new();
    batch.push(ids, segments);
    let mut scratch = encoder::GroupScratch::new();
    let attention = scratch::Slots::new(model.threads, attention::AttentionScratch::new);
    model.encode(exec, &batch, 0..1, false, &mut scratch, &attention).expect("memory").to_vec()
}

fn distance(got: &[f32], right: &[f64]) -> f64 {
    assert_eq!(got.len(), right.len());
    got.iter().zip(right).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max)
}

#[test]
fn hidden_states_equal_the_definition_on_every_shape_class() {
    let pool = Arc::new(Pool::new(3));
    let team = pool.team(3);
    let mut random = Random(1);
    // Odd widths, every head_dim, with one and more layers.
    for (hidden, heads, ff, layers) in [
        (32, 2, 64, 2),
        (48, 3, 100, 1),
        (66, 6, 130, 1),
        (64, 1, 96, 2),
        (128, 1, 512, 1),
        (384, 12, 1536, 1),
        (1024, 16, 1100, 1),
    ] {
        let fixture = Fixture::new(spec(hidden, heads, ff, layers), MEAN, 40 + hidden as u64);
        for kernels in Kernels::all() {
            let model = fixture.load(&pool, kernels, FP32);
            for len in [1, 2, 5, 12, 13, 31, 33, 70] {
                let (ids, segments) = fixture.sequence(&mut random, if hidden > 400 { len.min(14) } else { len });
                let right: Vec<f64> = fixture.reference(&ids, &segments).into_iter().flatten().collect();
                for exec in [exec::Exec::Alone, exec::Exec::Team(&team)] {
                    let got = hidden_states(&model, exec, &ids, &segments);
                    let off = distance(&got, &right);
                    assert!(off < 2e-5, "{} h={hidden} heads={heads} S={}: off by {off}", kernels.name, ids.len());
                }
            }
        }
    }
}

/// The tables that have kernels for `dtype`.
fn tables(dtype: Dtype) -> impl Iterator<Item = &'static Kernels> {
    Kernels::all().into_iter().filter(move |kernels| format(dtype, kernels).is_ok())
}

#[test]
fn bf16_and_int8_stay_near_the_definition_on_every_shape_class() {
    let pool = Arc::new(Pool::new(3));
    let team = pool.team(3);
    let mut random = Random(11);
    for (hidden, heads, ff, layers) in [
        (32, 2, 64, 2),
        (48, 3, 100, 1),
        (66, 6, 130, 1),
        (45, 5, 67, 2),
        (64, 1, 96, 2),
        (128, 1, 512, 1),
        (384, 12, 1536, 1),
        (768, 12, 800, 1),
        (1024, 16, 1100, 1),
    ] {
        let fixture = Fixture::new(spec(hidden, heads, ff, layers), MEAN, 140 + hidden as u64);
        for (dtype, most) in [(Dtype::Bf16, 0.02), (Dtype::Int8, 0.06)] {
            for kernels in tables(dtype) {
                let model = fixture.load(&pool, kernels, CpuOptions { dtype, threads: 0 });
                for len in [1, 2, 5, 12, 13, 16, 31, 33, 70] {
                    let (ids, segments) = fixture.sequence(&mut random, if hidden > 400 { len.min(14) } else { len });
                    let right: Vec<f64> = fixture.reference(&ids, &segments).into_iter().flatten().collect();
                    let alone = hidden_states(&model, exec::Exec::Alone, &ids, &segments);
                    let off: f64 = alone.iter().zip(&right).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
                    let off = (off / right.iter().map(|x| x * x).sum::<f64>()).sqrt();
                    assert!(off < most, "{dtype:?} h={hidden} heads={heads} S={}: off by {off}", ids.len());
                    assert_eq!(alone, hidden_states(&model, exec::Exec::Team(&team), &ids, &segments));
                }
            }
        }
    }
}

#[test]
fn bf16_and_int8_of_long_sequences_and_every_activation() {
    let pool = Arc::new(Pool::new(2));
    for act in [HiddenAct::Gelu, HiddenAct::GeluTanh, HiddenAct::Relu] {
        let fixture = Fixture::new(EncoderSpec { hidden_act: act, ..spec(64, 2, 128, 1) }, MEAN, 78);
        for (dtype, most) in [(Dtype::Bf16, 0.01), (Dtype::Int8, 0.03)] {
            for kernels in tables(dtype) {
                let model = fixture.load(&pool, kernels, CpuOptions { dtype, threads: 0 });
                for len in [511, 512, 513, 1100] {
                    let (ids, segments) = fixture.sequence(&mut Random(len as u64), len);
                    let right: Vec<f64> = fixture.reference(&ids, &segments).into_iter().flatten().collect();
                    let got = hidden_states(&model, exec::Exec::Alone, &ids, &segments);
                    let off: f64 = got.iter().zip(&right).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum();
                    let off = (off / right.iter().map(|x| x * x).sum::<f64>()).sqrt();
                    assert!(off < most, "{dtype:?} {act:?} S={len}: off by {off}");
                }
            }
        }
    }
}

#[test]
fn a_dtype_without_kernels_is_refused_by_name() {
    let fixture = Fixture::new(spec(32, 2, 64, 1), MEAN, 79);
    for kernels in Kernels::all() {
        for (dtype, name) in [(Dtype::Bf16, "'bf16'"), (Dtype::Int8, "'int8'"), (Dtype::Auto, ""), (Dtype::Fp32, "")] {
            let weights = bert::weights(&fixture.checkpoint, &fixture.spec, &MEAN).expect("all tensors");
            let options = CpuOptions { dtype, threads: 0 };
            let pool = Arc::new(Pool::new(1));
            match CpuModel::load(&fixture.spec, &MEAN, &weights, options, pool, kernels) {
                Ok(model) => {
                    assert!(match dtype {
                        Dtype::Bf16 => kernels.low.is_some(),
                        Dtype::Int8 => kernels.int8.is_some(),
                        _ => true,
                    });
                    assert_eq!(model.low.is_some(), dtype != Dtype::Fp32 && kernels.low.is_some());
                }
                Err(error) => {
                    assert!(if dtype == Dtype::Bf16 { kernels.low.is_none() } else { kernels.int8.is_none() });
                    assert_eq!(error.kind, crate::error::ErrorKind::Unsupported);
                    assert!(error.message.contains(name) && error.message.contains("it needs avx"), "{error}");
                }
            }
        }
    }
}

#[test]
fn layer_by_layer() {
    let pool = Arc::new(Pool::new(2));
    let mut random = Random(2);
    for layers in 1..=6 {
        let fixture = Fixture::new(spec(96, 3, 160, layers), MEAN, layers as u64);
        let model = fixture.load(&pool, Kernels::best(Dtype::Auto), FP32);
        let (ids, segments) = fixture.sequence(&mut random, 29);
        let right: Vec<f64> = fixture.reference(&ids, &segments).into_iter().flatten().collect();
        let off = distance(&hidden_states(&model, exec::Exec::Alone, &ids, &segments), &right);
        assert!(off < 2e-5, "{layers} layers: off by {off}");
    }
}

#[test]
fn every_activation() {
    let pool = Arc::new(Pool::new(1));
    for act in [HiddenAct::Gelu, HiddenAct::GeluTanh, HiddenAct::Relu] {
        let fixture = Fixture::new(EncoderSpec { hidden_act: act, ..spec(64, 2, 128, 2) }, MEAN, 77);
        let (ids, segments) = fixture.sequence(&mut Random(3), 20);
        let right: Vec<f64> = fixture.reference(&ids, &segments).into_iter().flatten().collect();
        for kernels in Kernels::all() {
            let model = fixture.load(&pool, kernels, FP32);
            let off = distance(&hidden_states(&model, exec::Exec::Alone, &ids, &segments), &right);
            assert!(off < 2e-5, "{act:?} {}: off by {off}", kernels.name);
        }
    }
}

#[test]
fn long_sequences_are_right() {
    let pool = Arc::new(Pool::new(2));
    let fixture = Fixture::new(spec(32, 2, 64, 1), MEAN, 5);
    for kernels in Kernels::all() {
        let model = fixture.load(&pool, kernels, FP32);
        for len in [511, 512, 513, 1500] {
            let (ids, segments) = fixture.sequence(&mut Random(len as u64), len);
            let right: Vec<f64> = fixture.reference(&ids, &segments).into_iter().flatten().collect();
            let off = distance(&hidden_states(&model, exec::Exec::Alone, &ids, &segments), &right);
            assert!(off < 2e-5, "{} S={len}: off by {off}", kernels.name);
        }
    }
}

#[test]
fn a_sequence_of_8192_tokens() {
    let pool = Arc::new(Pool::new(2));
    let fixture = Fixture::new(spec(32, 1, 64, 1), MEAN, 6);
    let model = fixture.load(&pool, Kernels::best(Dtype::Auto), FP32);
    let (ids, segments) = fixture.sequence(&mut Random(8), 8192);
    let got = hidden_states(&model, exec::Exec::Team(&pool.team(2)), &ids, &segments);
    let right: Vec<f64> = fixture.reference(&ids, &segments).into_iter().flatten().collect();
    assert!(distance(&got, &right) < 2e-5);
    assert_eq!(got, hidden_states(&model, exec::Exec::Alone, &ids, &segments));
}

#[test]
fn an_answer_is_the_same_bit_by_bit_alone_and_among_others() {
    let mut random = Random(9);
    for pooling in [Pooling::Mean, Pooling::Cls] {
        let fixture = Fixture::new(spec(64, 2, 128, 2), HeadSpec::Embed { pooling, normalize: true }, 10);
        let sequences: Vec<_> = [7, 1, 300, 33, 64, 12, 13, 90, 5, 40, 511, 2]
            .iter()
            .map(|&len| fixture.sequence(&mut random, len))
            .collect();
        for dtype in [Dtype::Fp32, Dtype::Bf16, Dtype::Int8] {
            for kernels in tables(dtype) {
                let mut seen: Option<Vec<Vec<f32>>> = None;
                for threads in [1, 2, 5] {
                    let pool = Arc::new(Pool::new(threads));
                    let model = fixture.load(&pool, kernels, CpuOptions { dtype, threads: 0 });
                    let together = run(&model, &sequences, Value::Embedding).expect("a result");
                    for (i, sequence) in sequences.iter().enumerate() {
                        let alone = run(&model, std::slice::from_ref(sequence), Value::Embedding).expect("a result");
                        assert_eq!(alone[0], together[i], "{} {dtype:?} threads={threads} {i}", kernels.name);
                    }
                    let seen = seen.get_or_insert_with(|| together.clone());
                    assert_eq!(*seen, together);
                }
            }
        }
    }
}

#[test]
fn poolings_equal_the_definition() {
    let pool = Arc::new(Pool::new(2));
    for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Max, Pooling::Last] {
        for normalize in [false, true] {
            let fixture = Fixture::new(spec(64, 2, 128, 2), HeadSpec::Embed { pooling, normalize }, 21);
            let model = fixture.load(&pool, Kernels::best(Dtype::Auto), FP32);
            let mut random = Random(22);
            let sequences: Vec<_> = [9, 1, 30].iter().map(|&len| fixture.sequence(&mut random, len)).collect();
            let got = run(&model, &sequences, Value::Embedding).expect("a result");
            for (got, (ids, segments)) in got.iter().zip(&sequences) {
                let hidden: Vec<f32> =
                    fixture.reference(ids, segments).into_iter().flatten().map(|x| x as f32).collect();
                let mut right = vec![0.0; 64];
                head::pool(pooling, &hidden, &mut right);
                if normalize {
                    head::normalize(&mut right);
                }
                let right: Vec<f64> = right.into_iter().map(f64::from).collect();
                assert!(distance(got, &right) < 2e-5, "{pooling:?}");
            }
        }
    }
}

#[test]
fn logits_and_probabilities_equal_the_definition() {
    let pool = Arc::new(Pool::new(2));
    for (num_labels, activation) in [(2, Activation::Softmax), (37, Activation::Sigmoid), (1, Activation::Identity)] {
        let head = HeadSpec::Classify { num_labels, activation };
        let fixture = Fixture::new(spec(64, 4, 128, 2), head, 30);
        let model = fixture.load(&pool, Kernels::best(Dtype::Auto), FP32);
        let mut random = Random(31);
        let sequences: Vec<_> = [9, 1, 30, 250].iter().map(|&len| fixture.sequence(&mut random, len)).collect();
        let logits = run(&model, &sequences, Value::Logits).expect("a result");
        let probabilities = run(&model, &sequences, Value::Probabilities).expect("a result");
        for (i, (ids, segments)) in sequences.iter().enumerate() {
            let first = fixture.reference(ids, segments).swap_remove(0);
            let mut pooled = fixture.linear("pooler.dense", &[first]);
            pooled[0].iter_mut().for_each(|x| *x = x.tanh());
            let right = fixture.linear("classifier", &pooled);
            assert!(distance(&logits[i], &right[0]) < 2e-5);
            let mut activated = vec![0.0; num_labels];
            head::activate(activation, &logits[i], &mut activated);
            assert_eq!(probabilities[i], activated);
        }
    }
}

#[test]
fn what_is_out_of_range_is_refused_before_any_lookup() {
    let fixture = Fixture::new(EncoderSpec { max_position_embeddings: 16, ..spec(32, 2, 64, 1) }, MEAN, 50);
    let model = fixture.load(&Arc::new(Pool::new(1)), Kernels::best(Dtype::Auto), FP32);
    let message = |ids: Vec<u32>, segments: Vec<u32>| {
        let error = run(&model, &[(ids, segments)], Value::Embedding).expect_err("must be refused");
        (error.kind, error.message)
    };
    let (kind, text) = message(vec![1, 97], vec![0, 0]);
    assert_eq!(kind, crate::error::ErrorKind::Invalid);
    assert_eq!(text, "token id 97 is out of range: the model has 97");
    assert!(message(vec![1], vec![2]).1.contains("token type id 2"));
    assert!(message(vec![1; 17], vec![0; 17]).1.contains("17 tokens"));
    assert!(run(&model, &[(vec![1; 16], vec![1; 16])], Value::Logits).is_err(), "an embed head has no logits");
    assert!(run(&model, &[(vec![1; 16], vec![1; 16])], Value::Embedding).is_ok());
}

#[test]
fn nan_is_never_returned() {
    for pooling in [Pooling::Mean, Pooling::Max, Pooling::Cls] {
        let mut fixture =
            Fixture::new(spec(32, 2, 64, 2), HeadSpec::Embed { pooling, normalize: true }, 60 + pooling as u64);
        let dtype = [Dtype::Fp32, Dtype::Auto, Dtype::Auto][pooling as usize % 3];
        let model = fixture.load(&Arc::new(Pool::new(1)), Kernels::best(Dtype::Auto), CpuOptions { dtype, threads: 0 });
        let good = (vec![5, 6, 7], vec![0, 0, 0]);
        assert!(run(&model, std::slice::from_ref(&good), Value::Embedding).is_ok());
        // An infinite weight in the row of token 9 alone.
        let name = "embeddings.word_embeddings.weight".to_owned();
        let mut tensor = fixture.tensors[&name].clone();
        tensor.1[9 * 32 + 3] = f32::INFINITY;
        fixture.tensors.insert(name, tensor.clone());
        let mut model = Arc::into_inner(model).expect("one handle");
        model.weights.word.copy_from_slice(&tensor.1);
        let model = Arc::new(model);
        let error = run(&model, &[(vec![5, 9, 7], vec![0, 0, 0])], Value::Embedding).expect_err("not finite");
        assert_eq!(error.kind, crate::error::ErrorKind::Internal);
        assert!(run(&model, &[good], Value::Embedding).is_ok());
    }
}

#[test]
fn only_what_is_asked_for_is_written() {
    let fixture = Fixture::new(spec(32, 2, 64, 1), MEAN, 70);
    let model = fixture.load(&Arc::new(Pool::new(2)), Kernels::best(Dtype::Auto), FP32);
    let mut batch = PackedBatch::new();
    (0..40).for_each(|i| batch.push(&[i; 10], &[0; 10]));
    let mut runner = CpuEngine(Arc::clone(&model)).runner().expect("a runner");
    assert!(runner.run(&batch, &mut []).is_ok());
    let mut row = [0.0; 32];
    let mut twice = [0.0; 32];
    let mut outputs =
        [&mut row, &mut twice].map(|row| Output { sequence: 33, value: Value::Embedding, slot: Slot::Host(row) });
    runner.run(&batch, &mut outputs).expect("a result");
    assert_eq!(row, twice);
    assert_eq!(row.to_vec(), run(&model, &[(vec![33; 10], vec![0; 10])], Value::Embedding).expect("a result")[0]);
    assert!(runner.run(&PackedBatch::new(), &mut []).is_ok());
}
