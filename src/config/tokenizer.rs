//! tokenizer.json as the reference loads it. transformers takes vocabulary and added tokens of a BERT tokenizer from
//! tokenizer.json, but builds its normalizer and its post-processor anew from tokenizer_config.json; any other
//! tokenizer is taken as the file has it.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::directory::read_json;
use crate::error::{Error, Result};
use crate::tokenize::Truncation;

const FILE: &str = "tokenizer.json";

/// The tokenizer of a model directory.
#[derive(Clone, Debug)]
pub struct TokenizerFile {
    /// tokenizer.json, adjusted.
    pub json: Json,
    /// The side that loses tokens where the user says nothing: `truncation_side`, else tokenizer.json's own direction.
    pub truncation: Truncation,
    /// Whether the second text of a pair gets segment 1. transformers feeds a model without segments where the
    /// tokenizer's class is the generic one and `model_input_names` does not ask for them.
    pub token_types: bool,
    /// The id of `pad_token`, where there is one.
    pub pad_id: Option<u32>,
    /// Whether padding would come first.
    pub pads_left: bool,
}

impl TokenizerFile {
    /// Reads tokenizer.json, tokenizer_config.json and sentence_bert_config.json in `encoder`. `sentence` says that the
    /// model is a sentence-transformers directory, `model_type` is that of config.json.
    ///
    /// # Errors
    /// `Invalid` with the file's name when tokenizer.json is missing or a file is malformed.
    pub fn read(encoder: &Path, sentence: bool, model_type: &str) -> Result<Self> {
        let Some(mut json) = read_json(encoder, FILE)? else {
            return Err(Error::invalid(format!(
                "{FILE}: not found in the version directory; save it with transformers' AutoTokenizer.save_pretrained"
            )));
        };
        if !json.is_object() {
            return Err(Error::invalid(format!("{FILE}: is not a JSON object")));
        }
        let config = read_json(encoder, "tokenizer_config.json")?.unwrap_or(Json::Null);
        let truncation = truncation(&config, &json);
        let class = config["tokenizer_class"].as_str();
        if matches!(class, Some("BertTokenizer" | "BertTokenizerFast")) || class.is_none() && model_type == "bert" {
            as_bert(&mut json, &config)?;
        }
        if sentence {
            let sentence = read_json(encoder, "sentence_bert_config.json")?.unwrap_or(Json::Null);
            if sentence["do_lower_case"].as_bool() == Some(true) {
                lowercase_first(&mut json);
            }
        }
        let generic = matches!(class, Some("PreTrainedTokenizerFast" | "TokenizersBackend"));
        let mut names = config["model_input_names"].as_array().into_iter().flatten();
        let token_types = !generic || names.any(|name| name == "token_type_ids");
        let pad_id = special(&json, &config, "pad_token", "[PAD]").ok().and_then(|pad| pad[1].as_u64());
        let pads_left = config["padding_side"].as_str() == Some("left");
        let pad_id = pad_id.and_then(|id| u32::try_from(id).ok());
        Ok(Self { json, truncation, token_types, pad_id, pads_left })
    }
}

fn truncation(config: &Json, tokenizer: &Json) -> Truncation {
    let side = config["truncation_side"].as_str().or(tokenizer["truncation"]["direction"].as_str());
    if side.is_some_and(|s| s.eq_ignore_ascii_case("left")) { Truncation::Left } else { Truncation::Right }
}

/// transformers' BertTokenizer: `do_lower_case` is true where tokenizer_config.json says nothing.
fn as_bert(tokenizer: &mut Json, config: &Json) -> Result<()> {
    let flag = |key: &str| config[key].as_bool();
    tokenizer["normalizer"] = json!({
        "type": "BertNormalizer",
        "clean_text": true,
        "handle_chinese_chars": flag("tokenize_chinese_chars").unwrap_or(true),
        "strip_accents": flag("strip_accents"),
        "lowercase": flag("do_lower_case").unwrap_or(true),
    });
    let cls = special(tokenizer, config, "cls_token", "[CLS]")?;
    let sep = special(tokenizer, config, "sep_token", "[SEP]")?;
    tokenizer["post_processor"] = json!({ "type": "BertProcessing", "sep": sep, "cls": cls });
    Ok(())
}

/// `[token, id]` of a special token, by the name that tokenizer_config.json gives it (a string or an object).
fn special(tokenizer: &Json, config: &Json, key: &str, default: &str) -> Result<Json> {
    let token = config[key].as_str().or(config[key]["content"].as_str()).unwrap_or(default);
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    let id =
        added.into_iter().find(|t| t["content"] == *token).map_or(&tokenizer["model"]["vocab"][token], |t| &t["id"]);
    match id.as_u64() {
        Some(id) => Ok(json!([token, id])),
        None => Err(Error::invalid(format!("{FILE}: the {key} '{token}' of tokenizer_config.json is not in it"))),
    }
}

/// sentence_bert_config.json's `do_lower_case` puts a lower-casing step in front of the normalizer.
fn lowercase_first(tokenizer: &mut Json) {
    let normalizer = tokenizer["normalizer"].take();
    if normalizer["lowercase"].as_bool() == Some(true) {
        tokenizer["normalizer"] = normalizer;
        return;
    }
    let mut steps = vec![json!({ "type": "Lowercase" })];
    if !normalizer.is_null() {
        steps.push(normalizer);
    }
    tokenizer["normalizer"] = json!({ "type": "Sequence", "normalizers": steps });
}
