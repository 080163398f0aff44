//! config.pbtxt as the server hands it over (JSON): what of it concerns this backend, and auto-complete, which fills in
//! what the user left out.

use serde_json::{Value as Json, json};

use crate::error::{Error, Result};

/// `max_batch_size` where the user gave neither it nor any input.
const DEFAULT_MAX_BATCH_SIZE: u64 = 256;

/// One input or output that a model has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorDeclaration {
    /// The name that clients use.
    pub name: String,
    /// As config.pbtxt spells it: TYPE_STRING, TYPE_FP32 ...
    pub data_type: &'static str,
    /// Without the batch dimension.
    pub dims: Vec<i64>,
}

/// The model configuration, in the server's own JSON.
#[derive(Clone, Debug)]
pub struct TritonConfig(Json);

impl TritonConfig {
    /// Parses the server's JSON.
    ///
    /// # Errors
    /// `Internal` when it is not an object.
    pub fn parse(text: &str) -> Result<Self> {
        match serde_json::from_str(text) {
            Ok(json @ Json::Object(_)) => Ok(Self(json)),
            _ => Err(Error::internal("the server's model configuration is not a JSON object")),
        }
    }

    /// The server's JSON, with what auto-complete added.
    pub fn to_text(&self) -> String {
        self.0.to_string()
    }

    /// The `(key, string_value)` pairs of `parameters`.
    pub fn parameters(&self) -> Vec<(&str, &str)> {
        let pairs = self.0["parameters"].as_object().into_iter().flatten();
        pairs.map(|(key, value)| (key.as_str(), value["string_value"].as_str().unwrap_or(""))).collect()
    }

    /// 0 when batching is off.
    pub fn max_batch_size(&self) -> u64 {
        integer(&self.0["max_batch_size"]).unwrap_or(0).max(0) as u64
    }

    /// The `kind` of the first instance group, and the first of its devices. The server has filled in its defaults.
    pub fn first_instance(&self) -> (&str, i64) {
        let group = &self.0["instance_group"][0];
        (group["kind"].as_str().unwrap_or("KIND_CPU"), integer(&group["gpus"][0]).unwrap_or(0))
    }

    /// The section `sequence_batching`, where there is one.
    pub fn sequence_batching(&self) -> Option<&Json> {
        Some(&self.0["sequence_batching"]).filter(|section| section.is_object())
    }

    /// # Errors
    /// `Unsupported` for a model with `sequence_batching`, where `what` has no use for it.
    pub fn refuse_sequences(&self, what: &str) -> Result<()> {
        match self.sequence_batching() {
            Some(_) => {
                Err(Error::unsupported(format!("config.pbtxt: {what} cannot have sequence_batching; remove it")))
            }
            None => Ok(()),
        }
    }

    /// Whether `response_cache { enable: true }`.
    pub fn response_cache(&self) -> bool {
        self.0["response_cache"]["enable"].as_bool().unwrap_or(false)
    }

    /// Type and dims of the declared input of that name.
    pub fn input(&self, input: &str) -> Option<(&str, Vec<i64>)> {
        let tensor = self.list("input").iter().find(|t| name(t) == input)?;
        Some((tensor["data_type"].as_str().unwrap_or(""), dims(tensor)))
    }

    /// Each input of each warm-up sample: the sample's name, the input's, and where its data comes from.
    pub fn warm_up_inputs(&self) -> impl Iterator<Item = (&str, &str, &'static str)> {
        self.list("model_warmup").iter().flat_map(|sample| {
            let inputs = sample["inputs"].as_object().into_iter().flatten();
            inputs.map(move |(input, from)| {
                let on = |kind: &&&str| from[**kind].as_bool() == Some(true);
                let kind = ["zero_data", "random_data"].iter().find(on).copied().unwrap_or("input_data_file");
                (name(sample), input.as_str(), kind)
            })
        })
    }

    /// Lets requests of different lengths share a batch: each input keeps the shape that its request gave it.
    pub fn allow_ragged_batch(&mut self) {
        let inputs = self.0["input"].as_array_mut().into_iter().flatten();
        inputs.for_each(|tensor| tensor["allow_ragged_batch"] = json!(true));
    }

    /// Whether `model_transaction_policy { decoupled: true }`.
    pub fn decoupled(&self) -> bool {
        self.0["model_transaction_policy"]["decoupled"].as_bool().unwrap_or(false)
    }

    /// The names of the declared outputs, in config.pbtxt's order.
    pub fn output_names(&self) -> Vec<String> {
        self.list("output").iter().map(|t| name(t).to_owned()).collect()
    }

    /// The `label_filename` of an output, where the user gave one.
    pub fn label_filename(&self, output: &str) -> Option<&str> {
        let tensor = self.list("output").iter().find(|t| name(t) == output)?;
        tensor["label_filename"].as_str().filter(|f| !f.is_empty())
    }

    /// Points the output's `label_filename` at `file`.
    pub fn set_label_filename(&mut self, output: &str, file: &str) {
        let outputs = self.0["output"].as_array_mut().into_iter().flatten();
        outputs.filter(|t| name(t) == output).for_each(|t| t["label_filename"] = json!(file));
    }

    /// Fills in inputs, outputs, max_batch_size and dynamic batching where the user gave none. With inputs in
    /// config.pbtxt and no max_batch_size, batching stays off, as the server has it.
    pub fn auto_complete(&mut self, inputs: &[TensorDeclaration], outputs: &[TensorDeclaration]) {
        let own_inputs = !self.list("input").is_empty();
        if !own_inputs {
            self.0["input"] = inputs.iter().map(TensorDeclaration::to_json).collect();
            if self.max_batch_size() == 0 {
                self.0["max_batch_size"] = json!(DEFAULT_MAX_BATCH_SIZE);
            }
        }
        if self.list("output").is_empty() {
            self.0["output"] = outputs.iter().map(TensorDeclaration::to_json).collect();
        }
        let scheduled =
            ["dynamic_batching", "sequence_batching", "ensemble_scheduling"].iter().any(|key| self.0[key].is_object());
        if self.max_batch_size() > 0 && !scheduled {
            self.0["dynamic_batching"] = json!({});
        }
    }

    /// Checks the configuration against what the model has: every one of `inputs` must be declared and no other, and
    /// every declared output must be one of `outputs`.
    ///
    /// # Errors
    /// `Invalid`, naming the tensor and what is allowed.
    pub fn validate(&self, inputs: &[TensorDeclaration], outputs: &[TensorDeclaration]) -> Result<()> {
        for (section, known) in [("input", inputs), ("output", outputs)] {
            if self.list(section).is_empty() {
                return Err(Error::invalid(format!(
                    "config.pbtxt: declare an {section}; the model has {}",
                    list(known)
                )));
            }
            for tensor in self.list(section) {
                check(section, tensor, known)?;
            }
        }
        for wanted in inputs {
            if !self.list("input").iter().any(|t| name(t) == wanted.name) {
                return Err(Error::invalid(format!("config.pbtxt: declare the input {wanted}")));
            }
        }
        Ok(())
    }

    fn list(&self, section: &str) -> &[Json] {
        self.0[section].as_array().map_or(&[], Vec::as_slice)
    }
}

/// Checks one declared tensor against those that the model has.
fn check(section: &str, tensor: &Json, known: &[TensorDeclaration]) -> Result<()> {
    let name = name(tensor);
    let Some(wanted) = known.iter().find(|t| t.name == name) else {
        return Err(Error::invalid(format!("config.pbtxt: unknown {section} '{name}'; the model has {}", list(known))));
    };
    let data_type = tensor["data_type"].as_str().unwrap_or("");
    let dims = dims(tensor);
    if data_type != wanted.data_type || dims != wanted.dims {
        return Err(Error::invalid(format!(
            "config.pbtxt: {section} '{name}' is {data_type} {dims:?}, must be {wanted}"
        )));
    }
    if !tensor["reshape"].is_null() {
        return Err(Error::unsupported(format!("config.pbtxt: {section} '{name}': reshape is not supported")));
    }
    if tensor["optional"].as_bool() == Some(true) {
        return Err(Error::invalid(format!("config.pbtxt: {section} '{name}' cannot be optional")));
    }
    Ok(())
}

fn name(tensor: &Json) -> &str {
    tensor["name"].as_str().unwrap_or("")
}

fn dims(tensor: &Json) -> Vec<i64> {
    tensor["dims"].as_array().into_iter().flatten().filter_map(integer).collect()
}

/// Protobuf's JSON writes 64-bit integers as strings; the server's writer as numbers.
pub(super) fn integer(value: &Json) -> Option<i64> {
    value.as_i64().or_else(|| value.as_str()?.parse().ok())
}

fn list(tensors: &[TensorDeclaration]) -> String {
    tensors.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl TensorDeclaration {
    fn to_json(&self) -> Json {
        json!({ "name": self.name, "data_type": self.data_type, "dims": self.dims })
    }
}

impl std::fmt::Display for TensorDeclaration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.data_type, self.dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors() -> ([TensorDeclaration; 1], [TensorDeclaration; 2]) {
        let tensor = |name: &str, data_type, dims: &[i64]| TensorDeclaration {
            name: name.to_owned(),
            data_type,
            dims: dims.to_vec(),
        };
        (
            [tensor("TEXT", "TYPE_STRING", &[1])],
            [tensor("EMBEDDING", "TYPE_FP32", &[384]), tensor("TOKEN_COUNT", "TYPE_INT32", &[1])],
        )
    }

    fn config(text: &str) -> TritonConfig {
        TritonConfig::parse(text).unwrap()
    }

    #[test]
    fn a_bare_config_becomes_complete_and_valid() {
        let (inputs, outputs) = tensors();
        let mut config = config(r#"{"name":"m","backend":"rust","max_batch_size":0,"input":[],"output":[]}"#);
        assert!(config.validate(&inputs, &outputs).unwrap_err().message.contains("TEXT TYPE_STRING [1]"));
        config.auto_complete(&inputs, &outputs);
        config.validate(&inputs, &outputs).unwrap();
        assert_eq!(config.max_batch_size(), 256);
        assert!(config.to_text().contains("dynamic_batching"));
    }

    #[test]
    fn with_inputs_given_batching_stays_off() {
        let (inputs, outputs) = tensors();
        let mut config = config(r#"{"input":[{"name":"TEXT","data_type":"TYPE_STRING","dims":["1"]}]}"#);
        config.auto_complete(&inputs, &outputs);
        config.validate(&inputs, &outputs).unwrap();
        assert_eq!(config.max_batch_size(), 0);
        assert!(!config.to_text().contains("dynamic_batching"));
    }

    #[test]
    fn names_the_tensor_that_is_wrong() {
        let (inputs, outputs) = tensors();
        let text = r#"{"name":"TEXT","data_type":"TYPE_STRING","dims":[1]}"#;
        for (section, tensor, words) in [
            ("output", r#"{"name":"EMBEDING","data_type":"TYPE_FP32","dims":[384]}"#, "'EMBEDING'"),
            ("output", r#"{"name":"EMBEDDING","data_type":"TYPE_FP32","dims":[768]}"#, "TYPE_FP32 [384]"),
            ("output", r#"{"name":"EMBEDDING","data_type":"TYPE_FP64","dims":[384]}"#, "TYPE_FP64"),
            ("input", r#"{"name":"QUERY","data_type":"TYPE_STRING","dims":[1]}"#, "'QUERY'"),
        ] {
            let inputs_json = if section == "input" { format!("{text},{tensor}") } else { text.to_owned() };
            let outputs_json = if section == "output" { tensor } else { "" };
            let config = config(&format!(r#"{{"input":[{inputs_json}],"output":[{outputs_json}]}}"#));
            let error = config.validate(&inputs, &outputs).unwrap_err();
            assert!(error.message.contains(words), "{error}");
        }
    }
}
