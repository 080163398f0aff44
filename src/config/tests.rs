//! The rules of the reference, each on a directory of a few small files. The expectations were read off
//! sentence-transformers 6.2 and transformers 5.23.

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::head::Activation;

/// A directory with a small BERT's config.json, a tokenizer.json, and `files` over them.
fn directory(files: &[(&str, Json)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 8, "hidden_size": 4,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 512
    });
    let tokenizer = json!({
        "added_tokens": [],
        "normalizer": null,
        "truncation": { "direction": "Right", "max_length": 128 },
        "model": { "type": "WordPiece", "vocab": { "[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3 } }
    });
    for (name, content) in [("config.json", config), ("tokenizer.json", tokenizer)].iter().chain(files) {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content.to_string()).unwrap();
    }
    dir
}

fn resolve(files: &[(&str, Json)], parameters: &[(&str, &str)]) -> Result<ModelConfig> {
    let dir = directory(files);
    let parameters = Parameters::parse(parameters.iter().copied())?;
    ModelConfig::resolve(&parameters, &Directory::read(dir.path())?, &no_config())
}

fn no_config() -> TritonConfig {
    TritonConfig::parse("{}").unwrap()
}

fn message(result: Result<ModelConfig>) -> String {
    result.unwrap_err().message
}

fn sentence_files(pooling: Json, normalize: bool) -> Vec<(&'static str, Json)> {
    let module =
        |kind: &str, path: &str| json!({ "type": format!("sentence_transformers.models.{kind}"), "path": path });
    let mut modules = vec![module("Transformer", ""), module("Pooling", "1_Pooling")];
    if normalize {
        modules.push(module("Normalize", "2_Normalize"));
    }
    vec![("modules.json", Json::Array(modules)), ("1_Pooling/config.json", pooling)]
}

fn classifier(extra: Json) -> Vec<(&'static str, Json)> {
    let mut config = json!({
        "model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 8, "hidden_size": 4,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 512
    });
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    vec![("config.json", config)]
}

#[test]
fn a_bare_encoder_is_pooled_by_the_mean_and_not_normalized() {
    let config = resolve(&[], &[]).unwrap();
    assert_eq!(config.head, HeadSpec::Embed { pooling: Pooling::Mean, normalize: false });
    assert_eq!(config.max_length, 512);
    let names: Vec<&str> = config.outputs.iter().map(|(_, t)| t.name.as_str()).collect();
    assert_eq!(names, ["EMBEDDING", "TOKEN_COUNT"]);
}

#[test]
fn pooling_and_normalization_come_from_modules_json() {
    for (pooling, expected) in [
        (json!({ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false }), Pooling::Cls),
        (json!({ "pooling_mode_max_tokens": true }), Pooling::Max),
        (json!({ "pooling_mode": "lasttoken" }), Pooling::Last),
        (json!({ "pooling_mode": ["mean"] }), Pooling::Mean),
        (json!({}), Pooling::Mean),
    ] {
        let config = resolve(&sentence_files(pooling, true), &[]).unwrap();
        assert_eq!(config.head, HeadSpec::Embed { pooling: expected, normalize: true });
    }
    let config = resolve(&sentence_files(json!({}), true), &[("pooling", "max"), ("normalize", "false")]).unwrap();
    assert_eq!(config.head, HeadSpec::Embed { pooling: Pooling::Max, normalize: false });
}

#[test]
fn what_modules_json_asks_for_and_is_not_here_is_refused_by_name() {
    let two = json!({ "pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true });
    assert!(message(resolve(&sentence_files(two, false), &[])).contains("cls+mean"));
    let mut files = sentence_files(json!({}), true);
    files[0].1.as_array_mut().unwrap().push(json!({ "type": "sentence_transformers.models.Dense", "path": "3" }));
    assert!(message(resolve(&files, &[])).contains("'Dense'"));
    files[0].1 = json!([{ "type": "sentence_transformers.models.Transformer", "path": "../other" }]);
    assert!(message(resolve(&files, &[])).contains("out of the version directory"));
    for (extra, word) in [
        (json!({ "truncate_dim": 2 }), "truncate_dim"),
        (json!({ "prompts": { "q": "query: " }, "default_prompt_name": "q" }), "default_prompt_name"),
        (json!({ "model_type": "SparseEncoder" }), "SparseEncoder"),
    ] {
        let mut files = sentence_files(json!({}), true);
        files.push(("config_sentence_transformers.json", extra));
        assert!(message(resolve(&files, &[])).contains(word));
    }
}

#[test]
fn max_length_follows_the_reference() {
    let sentence = || sentence_files(json!({}), true);
    let length = |extra: &[(&'static str, Json)], base: Vec<(&'static str, Json)>| {
        let files: Vec<_> = base.into_iter().chain(extra.iter().cloned()).collect();
        resolve(&files, &[]).unwrap().max_length
    };
    let bert = ("sentence_bert_config.json", json!({ "max_seq_length": 256 }));
    let tokenizer = ("tokenizer_config.json", json!({ "model_max_length": 100 }));
    assert_eq!(length(&[bert.clone(), tokenizer.clone()], sentence()), 256, "sentence_bert_config.json wins");
    assert_eq!(length(&[bert, tokenizer.clone()], vec![]), 100, "it is not read without modules.json");
    assert_eq!(length(&[tokenizer], sentence()), 100);
    let placeholder = ("tokenizer_config.json", json!({ "model_max_length": 1e30 }));
    assert_eq!(length(&[placeholder], sentence()), 512, "a placeholder is no limit");
    let beyond = ("sentence_bert_config.json", json!({ "max_seq_length": 1000 }));
    let files: Vec<_> = sentence().into_iter().chain([beyond]).collect();
    let config = resolve(&files, &[]).unwrap();
    assert_eq!((config.max_length, config.warnings.len()), (512, 1), "never beyond the position table");
    assert_eq!(resolve(&[], &[("max_length", "64")]).unwrap().max_length, 64);
    assert!(message(resolve(&[], &[("max_length", "513")])).contains("3 to 512"));
}

#[test]
fn labels_and_activation_follow_transformers() {
    let activation = |extra: Json| match resolve(&classifier(extra), &[]).unwrap() {
        ModelConfig { head: HeadSpec::Classify { num_labels, activation }, labels, .. } => {
            assert_eq!(labels.len(), num_labels);
            (labels.join(" "), activation)
        }
        _ => panic!("a classifier"),
    };
    let names = json!({ "0": "no", "1": "yes" });
    assert_eq!(activation(json!({})), ("LABEL_0 LABEL_1".into(), Activation::Softmax));
    assert_eq!(activation(json!({ "id2label": names })), ("no yes".into(), Activation::Softmax));
    assert_eq!(activation(json!({ "id2label": names, "num_labels": 1 })), ("LABEL_0".into(), Activation::Sigmoid));
    let multi = json!({ "id2label": names, "problem_type": "multi_label_classification" });
    assert_eq!(activation(multi), ("no yes".into(), Activation::Sigmoid));
    let regression = json!({ "num_labels": 1, "problem_type": "regression" });
    assert_eq!(activation(regression), ("LABEL_0".into(), Activation::Identity));
    let gap = json!({ "id2label": { "0": "a", "2": "b" } });
    assert!(message(resolve(&classifier(gap), &[])).contains("id2label"));
}

#[test]
fn impossible_combinations_are_refused_by_name() {
    assert!(message(resolve(&classifier(json!({})), &[("pooling", "cls")])).contains("'pooling'"));
    assert!(message(resolve(&classifier(json!({})), &[("normalize", "true")])).contains("'normalize'"));
    assert!(message(resolve(&[], &[("output_names", "LOGITS:x")])).contains("EMBEDDING"));
    assert!(message(resolve(&[], &[("output_names", "EMBEDDING:x,TOKEN_COUNT:x")])).contains("'x'"));
}

#[test]
fn other_families_and_tasks_are_refused_by_name() {
    let with = |key: &str, value: Json| {
        let mut files = classifier(json!({}));
        files[0].1[key] = value;
        message(resolve(&files, &[]))
    };
    assert!(with("model_type", json!("roberta")).contains("'roberta'"));
    assert!(with("architectures", json!(["BertForMaskedLM"])).contains("BertForMaskedLM"));
    assert!(with("hidden_act", json!("silu")).contains("'silu'"));
    assert!(with("hidden_size", json!(5)).contains("num_attention_heads"));
    assert!(with("vocab_size", json!(u64::MAX)).contains("'vocab_size'"));
    assert!(with("is_decoder", json!(true)).contains("is_decoder"));
}

#[test]
fn tensors_are_renamed() {
    let config = resolve(&[], &[("input_names", "TEXT:text"), ("output_names", "EMBEDDING:vector")]).unwrap();
    assert_eq!((config.inputs[0].name.as_str(), config.outputs[0].1.name.as_str()), ("text", "vector"));
}

fn tokenizer(config: Json) -> TokenizerFile {
    resolve(&[("tokenizer_config.json", config)], &[]).unwrap().tokenizer.unwrap()
}

#[test]
fn a_bert_tokenizer_is_rebuilt_from_tokenizer_config() {
    let normalizer = |config: Json| tokenizer(config).json["normalizer"].clone();
    assert_eq!(normalizer(json!({}))["lowercase"], true, "lower case is the default");
    assert_eq!(normalizer(json!({ "do_lower_case": false }))["lowercase"], false);
    assert_eq!(normalizer(json!({ "tokenizer_class": "PreTrainedTokenizerFast" })), Json::Null, "others stay");
    let missing = resolve(&[("tokenizer_config.json", json!({ "sep_token": "<end>" }))], &[]);
    assert!(message(missing).contains("'<end>'"));
}

#[test]
fn a_generic_tokenizer_has_segments_only_where_it_names_them() {
    let types = |config: Json| tokenizer(config).token_types;
    assert!(types(json!({})));
    assert!(!types(json!({ "tokenizer_class": "PreTrainedTokenizerFast" })));
    let named = json!({ "tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"] });
    assert!(types(named));
}

#[test]
fn truncation_side_comes_from_the_tokenizer() {
    let side = |files: &[(&str, Json)]| resolve(files, &[]).unwrap().truncation;
    assert_eq!(side(&[]), Truncation::Right);
    assert_eq!(side(&[("tokenizer_config.json", json!({ "truncation_side": "left" }))]), Truncation::Left);
    let overridden =
        resolve(&[("tokenizer_config.json", json!({ "truncation_side": "left" }))], &[("truncation", "right")]);
    assert_eq!(overridden.unwrap().truncation, Truncation::Right);
}

#[test]
fn a_model_that_takes_ids_needs_no_tokenizer_and_takes_as_many_as_there_are_positions() {
    let dir = directory(&[("tokenizer_config.json", json!({ "model_max_length": 100 }))]);
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let input = r#"{"input":[{"name":"INPUT_IDS","data_type":"TYPE_INT64","dims":[-1]}]}"#;
    let length = |parameters: &[(&str, &str)]| {
        let parameters = Parameters::parse(parameters.iter().copied()).unwrap();
        let triton = TritonConfig::parse(input).unwrap();
        let config = ModelConfig::resolve(&parameters, &Directory::read(dir.path()).unwrap(), &triton).unwrap();
        assert!(config.tokenizer.is_none() && config.ids.is_some() && !config.is_pair());
        config.max_length
    };
    assert_eq!((length(&[]), length(&[("max_length", "64")])), (512, 64));
}

#[test]
fn missing_and_malformed_files_are_named() {
    for name in ["config.json", "tokenizer.json"] {
        let dir = directory(&[]);
        std::fs::write(dir.path().join(name), "{\"a\": [").unwrap();
        let read = || ModelConfig::resolve(&Parameters::default(), &Directory::read(dir.path())?, &no_config());
        assert!(message(read()).starts_with(name));
        std::fs::remove_file(dir.path().join(name)).unwrap();
        assert!(message(read()).starts_with(name));
    }
}
