//! Raw ids: the inputs of a model whose clients tokenize for themselves. A model takes them where config.pbtxt declares
//! INPUT_IDS, and texts where it does not.

use super::parameters::Parameters;
use super::rename;
use super::triton::{TensorDeclaration, TritonConfig};
use crate::error::{Error, Result};

const INPUT_IDS: &str = "INPUT_IDS";
const ATTENTION_MASK: &str = "ATTENTION_MASK";
const TOKEN_TYPE_IDS: &str = "TOKEN_TYPE_IDS";

/// The names of a model's raw-id inputs, each INT32 or INT64 `[length]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdInputs {
    /// INPUT_IDS.
    pub input_ids: String,
    /// ATTENTION_MASK; without it every id is a token.
    pub attention_mask: Option<String>,
    /// TOKEN_TYPE_IDS; without it all are 0.
    pub token_type_ids: Option<String>,
}

impl IdInputs {
    /// The raw-id inputs that config.pbtxt declares under the user's names, with their declarations, or `None`.
    ///
    /// # Errors
    /// `Invalid` for a mask or segments without ids, for another type or shape, and for parameters that only mean
    /// something for texts.
    pub fn declared(parameters: &Parameters, triton: &TritonConfig) -> Result<Option<(Self, Vec<TensorDeclaration>)>> {
        let find = |ours: &'static str| {
            let theirs = parameters.input_names.get(ours).map_or(ours, String::as_str);
            triton.input(theirs).map(|(data_type, dims)| declaration(theirs, data_type, dims)).transpose()
        };
        let (ids, mask, types) = (find(INPUT_IDS)?, find(ATTENTION_MASK)?, find(TOKEN_TYPE_IDS)?);
        let Some(ids) = ids else {
            return match mask.or(types) {
                None => Ok(None),
                Some(other) => Err(Error::invalid(format!(
                    "config.pbtxt: input '{}' means nothing without the input {INPUT_IDS}",
                    other.name
                ))),
            };
        };
        for (key, given) in [
            ("truncation", parameters.truncation.is_some()),
            ("text_pair", parameters.text_pair),
            ("window_stride", parameters.window_stride > 0),
        ] {
            if given {
                return Err(Error::invalid(format!(
                    "parameter '{key}' has no meaning for a model that takes {INPUT_IDS}; remove it"
                )));
            }
        }
        let name = |tensor: &Option<TensorDeclaration>| tensor.as_ref().map(|tensor| tensor.name.clone());
        let inputs = Self { input_ids: ids.name.clone(), attention_mask: name(&mask), token_type_ids: name(&types) };
        let ours = [(INPUT_IDS, true), (ATTENTION_MASK, mask.is_some()), (TOKEN_TYPE_IDS, types.is_some())];
        let ours: Vec<&str> = ours.iter().filter(|(_, here)| *here).map(|(name, _)| *name).collect();
        rename("input_names", &parameters.input_names, &ours)?;
        Ok(Some((inputs, [Some(ids), mask, types].into_iter().flatten().collect())))
    }

    /// Refuses what could answer wrongly, or fail by itself: equal bytes may be ids of different shapes, which the
    /// response cache does not tell apart; random ids are out of any vocabulary, and a mask of zeros has no token.
    ///
    /// # Errors
    /// `Invalid`, with the remedy.
    pub fn check(&self, triton: &TritonConfig) -> Result<()> {
        if triton.response_cache() {
            return Err(Error::invalid(format!(
                "config.pbtxt: response_cache cannot be enabled with the input '{}': the cache compares bytes and not \
                 shapes, so ids of another shape would get this answer; remove response_cache",
                self.input_ids
            )));
        }
        let masks = self.attention_mask.as_deref();
        for (sample, input, kind) in triton.warm_up_inputs() {
            let why = match kind {
                "random_data" => "random numbers are not in the vocabulary",
                "zero_data" if Some(input) == masks => "a mask of zeros leaves no token",
                _ => continue,
            };
            return Err(Error::invalid(format!(
                "config.pbtxt: model_warmup '{sample}', input '{input}': {why}; use input_data_file"
            )));
        }
        Ok(())
    }
}

fn declaration(name: &str, data_type: &str, dims: Vec<i64>) -> Result<TensorDeclaration> {
    let data_type = match data_type {
        "TYPE_INT32" => Some("TYPE_INT32"),
        "TYPE_INT64" => Some("TYPE_INT64"),
        _ => None,
    };
    match (data_type, &dims[..]) {
        (Some(data_type), [-1 | 1..]) => Ok(TensorDeclaration { name: name.to_owned(), data_type, dims }),
        _ => Err(Error::invalid(format!(
            "config.pbtxt: input '{name}' must be TYPE_INT32 or TYPE_INT64 with one dimension, as [-1]"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declared(inputs: &str, parameters: &[(&str, &str)]) -> Result<Option<(IdInputs, Vec<TensorDeclaration>)>> {
        let triton = TritonConfig::parse(&format!(r#"{{"input":[{inputs}]}}"#))?;
        IdInputs::declared(&Parameters::parse(parameters.iter().copied())?, &triton)
    }

    fn tensor(name: &str, data_type: &str, dims: &str) -> String {
        format!(r#"{{"name":"{name}","data_type":"{data_type}","dims":{dims}}}"#)
    }

    #[test]
    fn inputs_are_found_under_the_users_names() {
        assert_eq!(declared(&tensor("TEXT", "TYPE_STRING", "[1]"), &[]).unwrap(), None);
        let ids = tensor("input_ids", "TYPE_INT32", r#"["-1"]"#);
        let types = tensor("TOKEN_TYPE_IDS", "TYPE_INT64", "[16]");
        let (inputs, tensors) =
            declared(&format!("{types},{ids}"), &[("input_names", "INPUT_IDS:input_ids")]).unwrap().unwrap();
        let expected = IdInputs {
            input_ids: "input_ids".to_owned(),
            attention_mask: None,
            token_type_ids: Some("TOKEN_TYPE_IDS".to_owned()),
        };
        assert_eq!(inputs, expected);
        let shown: Vec<String> = tensors.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["input_ids TYPE_INT32 [-1]", "TOKEN_TYPE_IDS TYPE_INT64 [16]"]);
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let ids = tensor("INPUT_IDS", "TYPE_INT64", "[-1]");
        for (inputs, parameters, word) in [
            (tensor("INPUT_IDS", "TYPE_FP32", "[-1]"), None, "'INPUT_IDS' must be"),
            (tensor("INPUT_IDS", "TYPE_INT64", "[-1,-1]"), None, "one dimension"),
            (tensor("ATTENTION_MASK", "TYPE_INT64", "[-1]"), None, "'ATTENTION_MASK'"),
            (ids.clone(), Some(("truncation", "left")), "'truncation'"),
            (ids.clone(), Some(("text_pair", "true")), "'text_pair'"),
            (ids.clone(), Some(("input_names", "ATTENTION_MASK:mask")), "the model has no 'ATTENTION_MASK'"),
        ] {
            let error = declared(&inputs, parameters.as_slice()).unwrap_err();
            assert!(error.message.contains(word), "{error}");
        }
    }

    #[test]
    fn caches_and_warm_up_that_could_not_be_right_are_refused_with_the_remedy() {
        let inputs = IdInputs {
            input_ids: "INPUT_IDS".to_owned(),
            attention_mask: Some("ATTENTION_MASK".to_owned()),
            token_type_ids: None,
        };
        let warm_up = |input: &str, kind: &str| {
            format!(r#"{{"model_warmup":[{{"name":"sample","inputs":{{"{input}":{{"dims":[4],"{kind}":true}}}}}}]}}"#)
        };
        for (config, word) in [
            (r#"{"response_cache":{"enable":true}}"#.to_owned(), "remove response_cache"),
            (warm_up("INPUT_IDS", "random_data"), "not in the vocabulary; use input_data_file"),
            (warm_up("ATTENTION_MASK", "zero_data"), "no token; use input_data_file"),
        ] {
            let error = inputs.check(&TritonConfig::parse(&config).unwrap()).unwrap_err();
            assert!(error.message.contains(word), "{error}");
        }
        inputs.check(&TritonConfig::parse(&warm_up("INPUT_IDS", "zero_data")).unwrap()).unwrap();
    }
}
