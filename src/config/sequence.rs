//! `sequence_batching` of config.pbtxt: with it a model is a conversation, whose requests are the turns of sessions.
//!
//! The server takes no change of a scheduler that the user chose, so nothing here can be completed: what is missing is
//! refused with the lines to add. START, END and CORRID may be declared or not: a request tells its place and its id
//! itself. READY cannot be done without where the server sends requests for empty slots.

use std::time::Duration;

use serde_json::Value as Json;

use super::triton::{TensorDeclaration, TritonConfig, integer};
use crate::error::{Error, Result};

/// What the server uses for `max_sequence_idle_microseconds: 0`.
const DEFAULT_IDLE: u64 = 1_000_000;

/// How the server runs the sequences of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequences {
    /// How a sequence finds its place.
    pub strategy: Strategy,
    /// Sequences that an instance can have in progress, at least 1.
    pub slots: usize,
    /// The type of ids that config.pbtxt declares; both kinds are taken where it declares none.
    pub id: Option<IdType>,
    /// The READY control, where there is one.
    pub ready: Option<Ready>,
    /// After this time without a request the server ends a sequence and tells nobody.
    pub idle: Duration,
}

/// The server's two ways to batch sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Every sequence has a slot: its place in each batch.
    Direct,
    /// A batch holds the oldest requests of any sequences, in no fixed place.
    Oldest,
}

/// The type of a sequence's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdType {
    /// TYPE_UINT64, or one of the other integers that the server allows.
    Number,
    /// TYPE_STRING.
    Text,
}

/// The READY control: a tensor of one element that each request is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The tensor's name.
    pub name: String,
    /// Its bytes where the request is real, and not the filling of an empty slot.
    pub yes: Vec<u8>,
}

impl Sequences {
    /// Reads the section, `None` where there is none. `inputs`: those of the model.
    ///
    /// # Errors
    /// `Invalid` or `Unsupported` with what is wrong or missing, and the lines to write.
    pub fn read(config: &TritonConfig, inputs: &[TensorDeclaration]) -> Result<Option<Self>> {
        let Some(section) = config.sequence_batching() else { return Ok(None) };
        let fail = |kind: fn(String) -> Error, why: &str| Err(kind(format!("config.pbtxt: sequence_batching: {why}")));
        if inputs.len() > 1 {
            return fail(Error::unsupported, "a turn is one text; remove the parameter 'text_pair'");
        }
        if section["state"].as_array().is_some_and(|states| !states.is_empty()) {
            return fail(Error::unsupported, "the model keeps its sessions itself; remove 'state'");
        }
        for key in ["iterative_sequence", "generative_sequence"] {
            if section[key].as_bool() == Some(true) {
                return fail(Error::unsupported, &format!("'{key}' is not available"));
            }
        }
        let controls = Controls::read(section)?;
        if let Some(name) = controls.names.iter().find(|name| inputs.iter().any(|input| input.name == **name)) {
            return fail(Error::invalid, &format!("the control '{name}' has the name of an input; choose another"));
        }
        let oldest = &section["oldest"];
        let strategy = if oldest.is_object() { Strategy::Oldest } else { Strategy::Direct };
        if strategy == Strategy::Direct && controls.ready.is_none() {
            return fail(
                Error::invalid,
                "the direct strategy sends requests for empty slots too, and without the READY control they cannot be \
                 told apart. Add to sequence_batching: control_input [{ name: \"READY\" control [{ kind: \
                 CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }] }], or choose the other strategy: oldest { \
                 max_candidate_sequences: 64 }",
            );
        }
        let batch = config.max_batch_size().max(1);
        let candidates = integer(&oldest["max_candidate_sequences"]).filter(|count| *count > 0);
        let idle = integer(&section["max_sequence_idle_microseconds"]).filter(|time| *time > 0);
        Ok(Some(Self {
            strategy,
            slots: candidates.map_or(batch, |count| count as u64) as usize,
            id: controls.id,
            ready: controls.ready,
            idle: Duration::from_micros(idle.map_or(DEFAULT_IDLE, |time| time as u64)),
        }))
    }
}

/// The control tensors; that their kinds and types are such as the server knows, it has checked.
#[derive(Default)]
struct Controls<'a> {
    names: Vec<&'a str>,
    id: Option<IdType>,
    ready: Option<Ready>,
}

impl<'a> Controls<'a> {
    fn read(section: &'a Json) -> Result<Self> {
        let mut all = Self::default();
        for input in section["control_input"].as_array().into_iter().flatten() {
            let name = input["name"].as_str().unwrap_or("");
            all.names.push(name);
            for control in input["control"].as_array().into_iter().flatten() {
                match control["kind"].as_str() {
                    Some("CONTROL_SEQUENCE_CORRID") => {
                        let text = control["data_type"].as_str() == Some("TYPE_STRING");
                        all.id = Some(if text { IdType::Text } else { IdType::Number });
                    }
                    Some("CONTROL_SEQUENCE_READY") => {
                        let yes = yes(control).ok_or_else(|| {
                            Error::invalid(format!(
                                "config.pbtxt: sequence_batching: the control '{name}' needs one of int32_false_true, \
                                 fp32_false_true, bool_false_true, with two different values"
                            ))
                        })?;
                        all.ready = Some(Ready { name: name.to_owned(), yes });
                    }
                    _ => {}
                }
            }
        }
        Ok(all)
    }
}

/// The bytes that a control's tensor has for "true", where they differ from those for "false".
fn yes(control: &Json) -> Option<Vec<u8>> {
    let values = |key: &str, bytes: fn(&Json) -> Option<Vec<u8>>| -> Option<Vec<u8>> {
        let both: Vec<Vec<u8>> = control[key].as_array()?.iter().map(bytes).collect::<Option<_>>()?;
        let [no, yes] = both.try_into().ok()?;
        (no != yes).then_some(yes)
    };
    let int32 = |value: &Json| Some(i32::try_from(integer(value)?).ok()?.to_le_bytes().to_vec());
    let fp32 = |value: &Json| Some((value.as_f64()? as f32).to_le_bytes().to_vec());
    let bool = |value: &Json| Some(vec![u8::from(value.as_bool()?)]);
    values("int32_false_true", int32)
        .or_else(|| values("fp32_false_true", fp32))
        .or_else(|| values("bool_false_true", bool))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    const READY: &str = r#"{"name":"READY","control":[{"kind":"CONTROL_SEQUENCE_READY","int32_false_true":[0,1]}]}"#;

    fn read(text_pair: bool, max_batch_size: u64, section: &str) -> Result<Option<Sequences>> {
        let text = |name: &str| TensorDeclaration { name: name.into(), data_type: "TYPE_STRING", dims: vec![1] };
        let inputs = if text_pair { vec![text("TEXT"), text("TEXT_PAIR")] } else { vec![text("TEXT")] };
        let config = format!(r#"{{"max_batch_size":{max_batch_size}{section}}}"#);
        Sequences::read(&TritonConfig::parse(&config)?, &inputs)
    }

    fn sequences(max_batch_size: u64, section: &str) -> Sequences {
        read(false, max_batch_size, &format!(r#","sequence_batching":{section}"#)).unwrap().unwrap()
    }

    fn refused(section: &str) -> Error {
        read(false, 8, &format!(r#","sequence_batching":{section}"#)).unwrap_err()
    }

    #[test]
    fn a_model_without_the_section_has_no_sequences() {
        assert_eq!(read(false, 8, "").unwrap(), None);
        assert_eq!(read(false, 8, r#","dynamic_batching":{}"#).unwrap(), None);
    }

    #[test]
    fn oldest_needs_no_control() {
        let plain = sequences(8, r#"{"oldest":{"max_candidate_sequences":32}}"#);
        assert_eq!((plain.strategy, plain.slots, plain.id), (Strategy::Oldest, 32, None));
        assert_eq!(plain.idle, Duration::from_secs(1));
        // As the server writes it, 64-bit numbers as strings.
        let timed = r#"{"oldest":{"max_candidate_sequences":0},"max_sequence_idle_microseconds":"5000000"}"#;
        let timed = sequences(8, timed);
        assert_eq!((timed.slots, timed.idle), (8, Duration::from_secs(5)));
    }

    #[test]
    fn direct_is_refused_without_ready_and_says_what_to_write() {
        for section in ["{}", r#"{"direct":{}}"#] {
            let error = refused(section);
            assert!(error.message.contains("kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ]"), "{error}");
            assert_eq!(error.kind, ErrorKind::Invalid);
        }
        let direct = sequences(4, &format!(r#"{{"direct":{{}},"control_input":[{READY}]}}"#));
        assert_eq!((direct.strategy, direct.slots), (Strategy::Direct, 4));
        assert_eq!(direct.ready.unwrap(), Ready { name: "READY".into(), yes: vec![1, 0, 0, 0] });
        assert_eq!(sequences(0, &format!(r#"{{"control_input":[{READY}]}}"#)).slots, 1, "no batching is one slot");
    }

    #[test]
    fn ready_may_be_of_any_type_and_sense() {
        let yes = |values: &str| {
            let control = format!(r#"{{"name":"R","control":[{{"kind":"CONTROL_SEQUENCE_READY",{values}}}]}}"#);
            read(false, 4, &format!(r#","sequence_batching":{{"control_input":[{control}]}}"#))
                .map(|sequences| sequences.unwrap().ready.unwrap().yes)
        };
        assert_eq!(yes(r#""int32_false_true":[1,0]"#).unwrap(), [0; 4]);
        assert_eq!(yes(r#""int32_false_true":[],"fp32_false_true":[0,1]"#).unwrap(), 1.0f32.to_le_bytes());
        assert_eq!(yes(r#""bool_false_true":[false,true]"#).unwrap(), [1]);
        assert!(yes(r#""int32_false_true":[1,1]"#).unwrap_err().message.contains("two different values"));
        assert!(yes(r#""int32_false_true":[]"#).is_err());
    }

    #[test]
    fn the_type_of_ids_is_that_of_the_corrid_control() {
        let id = |data_type: &str| {
            let control = format!(r#"{{"kind":"CONTROL_SEQUENCE_CORRID","data_type":"{data_type}"}}"#);
            sequences(4, &format!(r#"{{"oldest":{{}},"control_input":[{{"name":"ID","control":[{control}]}}]}}"#)).id
        };
        assert_eq!((id("TYPE_UINT64"), id("TYPE_INT32")), (Some(IdType::Number), Some(IdType::Number)));
        assert_eq!(id("TYPE_STRING"), Some(IdType::Text));
    }

    #[test]
    fn what_a_conversation_does_not_have_is_refused_by_name() {
        for (section, word) in [
            (r#"{"oldest":{},"state":[{"input_name":"S"}]}"#, "'state'"),
            (r#"{"oldest":{},"iterative_sequence":true}"#, "'iterative_sequence'"),
            (r#"{"oldest":{},"control_input":[{"name":"TEXT","control":[]}]}"#, "'TEXT'"),
        ] {
            let error = refused(section);
            assert!(error.message.contains(word), "{error}");
        }
        let error = read(true, 8, r#","sequence_batching":{"oldest":{}}"#).unwrap_err();
        assert!(error.message.contains("'text_pair'"), "{error}");
    }
}
