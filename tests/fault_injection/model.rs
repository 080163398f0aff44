//! Model directories with a tiny random BERT, written by the test itself.

use std::collections::HashMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

// Two heads of 32, which every engine has.
const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 64;
const LAYERS: usize = 2;
const POSITIONS: usize = 64;
const WORDS: [&str; 14] =
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "book", "the", "is", "##s", "not"];

/// Class names of [`write_classifier`].
pub const LABELS: [&str; 3] = ["negative", "neutral", "positive"];

/// A `BertForSequenceClassification`.
pub fn write_classifier(version: &Path) {
    write(version, "BertForSequenceClassification", "bert.", true);
}

/// A bare `BertModel`, which is served with mean pooling.
pub fn write_encoder(version: &Path) {
    write(version, "BertModel", "", false);
}

fn write(version: &Path, architecture: &str, prefix: &str, classifier: bool) {
    std::fs::create_dir_all(version).expect("writable directory");
    let labels: serde_json::Map<_, _> =
        LABELS.iter().enumerate().map(|(id, label)| (id.to_string(), json!(label))).collect();
    let config = json!({
        "architectures": [architecture], "model_type": "bert", "vocab_size": WORDS.len(), "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
        "id2label": labels, "problem_type": "single_label_classification",
    });
    let text = |value: &serde_json::Value| value.to_string();
    std::fs::write(version.join("config.json"), text(&config)).expect("writable directory");
    std::fs::write(version.join("tokenizer.json"), text(&tokenizer())).expect("writable directory");

    let mut weights = Weights { seed: 1, tensors: Vec::new() };
    let word = format!("{prefix}embeddings.word_embeddings.weight");
    weights.add(&word, &[WORDS.len(), HIDDEN]);
    weights.add(&format!("{prefix}embeddings.position_embeddings.weight"), &[POSITIONS, HIDDEN]);
    weights.add(&format!("{prefix}embeddings.token_type_embeddings.weight"), &[2, HIDDEN]);
    weights.norm(&format!("{prefix}embeddings.LayerNorm"));
    for layer in 0..LAYERS {
        let name = |part: &str| format!("{prefix}encoder.layer.{layer}.{part}");
        for part in ["query", "key", "value"] {
            weights.linear(&name(&format!("attention.self.{part}")), HIDDEN, HIDDEN);
        }
        weights.linear(&name("attention.output.dense"), HIDDEN, HIDDEN);
        weights.norm(&name("attention.output.LayerNorm"));
        weights.linear(&name("intermediate.dense"), INTERMEDIATE, HIDDEN);
        weights.linear(&name("output.dense"), HIDDEN, INTERMEDIATE);
        weights.norm(&name("output.LayerNorm"));
    }
    if classifier {
        weights.linear(&format!("{prefix}pooler.dense"), HIDDEN, HIDDEN);
        weights.linear("classifier", LABELS.len(), HIDDEN);
    }
    weights.save(&version.join("model.safetensors"));
}

fn tokenizer() -> serde_json::Value {
    let vocabulary: HashMap<&str, usize> = WORDS.iter().enumerate().map(|(id, word)| (*word, id)).collect();
    let special = |token: &str| {
        json!({ "id": vocabulary[token], "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": WORDS[..5].iter().map(|token| special(token)).collect::<Vec<_>>(),
        "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
                        "strip_accents": null, "lowercase": true },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": { "type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2] },
        "decoder": null,
        "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 100, "vocab": vocabulary },
    })
}

struct Weights {
    seed: u32,
    tensors: Vec<(String, Vec<usize>, Vec<u8>)>,
}

impl Weights {
    /// A tensor of small pseudo-random numbers.
    fn add(&mut self, name: &str, shape: &[usize]) {
        let count: usize = shape.iter().product();
        let mut bytes = Vec::with_capacity(4 * count);
        for _ in 0..count {
            self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = (self.seed >> 8) as f32 / (1 << 24) as f32 - 0.5;
            bytes.extend((value * 0.2).to_le_bytes());
        }
        self.tensors.push((name.to_string(), shape.to_vec(), bytes));
    }

    fn linear(&mut self, name: &str, out: usize, input: usize) {
        self.add(&format!("{name}.weight"), &[out, input]);
        self.add(&format!("{name}.bias"), &[out]);
    }

    fn norm(&mut self, name: &str) {
        self.add(&format!("{name}.weight"), &[HIDDEN]);
        self.add(&format!("{name}.bias"), &[HIDDEN]);
    }

    fn save(&self, path: &Path) {
        let views = self.tensors.iter().map(|(name, shape, bytes)| {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes).expect("bytes of the shape");
            (name.as_str(), view)
        });
        safetensors::serialize_to_file(views, None, path).expect("writable directory");
    }
}
