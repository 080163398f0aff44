//! What the inputs and outputs of a user's model.onnx mean, by their names, types and shapes.

use crate::error::{Error, Result};
use crate::head::{HeadSpec, Value};
use crate::model::EncoderSpec;

/// An input or output as the graph declares it.
#[derive(Clone, Debug)]
pub(super) struct Outlet {
    pub(super) name: String,
    pub(super) element: Element,
    /// -1 where it is not fixed.
    pub(super) dims: Vec<i64>,
}

/// An element type, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Int32,
    Int64,
    Fp32,
    Other,
}

/// An input of `[batch, length]` integers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Input {
    pub(super) name: String,
    /// INT64 instead of INT32.
    pub(super) wide: bool,
}

/// What an output holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// `[batch, length, hidden_size]`: the encoder's last hidden states, to be pooled here.
    Tokens,
    /// `[batch, width]`: pooled already, or logits.
    Rows,
}

/// How to ask the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Signature {
    pub(super) ids: Input,
    /// Without it nothing can be padded.
    pub(super) mask: Option<Input>,
    pub(super) types: Option<Input>,
    pub(super) output: String,
    pub(super) meaning: Meaning,
    /// Numbers of a token, or of a row.
    pub(super) width: usize,
}

const IDS: &[&str] = &["input_ids"];
const MASK: &[&str] = &["attention_mask", "input_mask"];
const TYPES: &[&str] = &["token_type_ids", "segment_ids"];
const TOKEN_VECTORS: &[&str] = &["last_hidden_state", "token_embeddings"];
const SENTENCE_VECTORS: &[&str] = &["sentence_embedding", "sentence_embeddings"];

impl Signature {
    /// Finds the inputs, and the output that the head needs.
    ///
    /// # Errors
    /// `Invalid` or `Unsupported`, with the name of the input or output that does not fit and what would.
    pub(super) fn find(inputs: &[Outlet], outputs: &[Outlet], head: &HeadSpec, spec: &EncoderSpec) -> Result<Self> {
        let known = [IDS, MASK, TYPES].concat();
        if let Some(other) = inputs.iter().find(|input| !named(input, &known)) {
            return Err(Error::unsupported(format!(
                "model.onnx: input '{}' is not available in this version; available: {}",
                other.name,
                known.join(", ")
            )));
        }
        let input = |names: &[&str]| inputs.iter().find(|input| named(input, names)).map(integers).transpose();
        let (output, meaning) = output(outputs, head)?;
        let width = head.width(head.main_value(), spec);
        let (rank, what) = match meaning {
            Meaning::Tokens => (3, "[batch, length, "),
            Meaning::Rows => (2, "[batch, "),
        };
        let fits = output.dims.last().is_some_and(|&last| last == -1 || last == width as i64);
        if output.element != Element::Fp32 || output.dims.len() != rank || !fits {
            return Err(Error::invalid(format!(
                "model.onnx: output '{}' with dims {:?} must be FP32 {what}{width}]",
                output.name, output.dims
            )));
        }
        Ok(Self {
            ids: input(IDS)?.ok_or_else(|| Error::invalid("model.onnx: has no input 'input_ids'"))?,
            mask: input(MASK)?,
            types: input(TYPES)?,
            output: output.name.clone(),
            meaning,
            width,
        })
    }
}

/// Exports differ in case.
fn named(outlet: &Outlet, names: &[&str]) -> bool {
    names.iter().any(|name| outlet.name.eq_ignore_ascii_case(name))
}

fn integers(input: &Outlet) -> Result<Input> {
    if !matches!(input.element, Element::Int32 | Element::Int64) || input.dims != [-1, -1] {
        return Err(Error::unsupported(format!(
            "model.onnx: input '{}' with dims {:?} must be INT32 or INT64 [-1, -1]; export it with dynamic axes",
            input.name, input.dims
        )));
    }
    Ok(Input { name: input.name.clone(), wide: input.element == Element::Int64 })
}

/// The output that the head needs: by name, else the only one of FP32 that has a shape that fits.
fn output<'o>(outputs: &'o [Outlet], head: &HeadSpec) -> Result<(&'o Outlet, Meaning)> {
    let candidates: &[(&[&str], Meaning)] = match head.main_value() {
        Value::Embedding => &[(TOKEN_VECTORS, Meaning::Tokens), (SENTENCE_VECTORS, Meaning::Rows)],
        _ => &[(&["logits"], Meaning::Rows)],
    };
    for (names, meaning) in candidates {
        if let Some(found) = outputs.iter().find(|output| named(output, names)) {
            return Ok((found, *meaning));
        }
    }
    let by_shape = |output: &&Outlet| {
        let rank = output.dims.len();
        output.element == Element::Fp32
            && !named(output, &["pooler_output"])
            && candidates.iter().any(|(_, meaning)| rank == if *meaning == Meaning::Tokens { 3 } else { 2 })
    };
    let fitting: Vec<&Outlet> = outputs.iter().filter(by_shape).collect();
    match fitting[..] {
        [only] => Ok((only, if only.dims.len() == 3 { Meaning::Tokens } else { Meaning::Rows })),
        _ => {
            let wanted: Vec<&str> = candidates.iter().flat_map(|(names, _)| names.iter().copied()).collect();
            let there: Vec<&str> = outputs.iter().map(|output| output.name.as_str()).collect();
            Err(Error::invalid(format!(
                "model.onnx: has the outputs {}; this task needs one of {}",
                there.join(", "),
                wanted.join(", ")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::SPEC;
    use super::*;
    use crate::head::{Activation, Pooling};

    const EMBED: HeadSpec = HeadSpec::Embed { pooling: Pooling::Mean, normalize: true };
    const CLASSIFY: HeadSpec = HeadSpec::Classify { num_labels: 3, activation: Activation::Softmax };

    fn outlet(name: &str, element: Element, dims: &[i64]) -> Outlet {
        Outlet { name: name.to_owned(), element, dims: dims.to_vec() }
    }

    fn inputs() -> Vec<Outlet> {
        vec![outlet("input_ids", Element::Int64, &[-1, -1]), outlet("attention_mask", Element::Int64, &[-1, -1])]
    }

    fn find(inputs: &[Outlet], outputs: &[Outlet], head: &HeadSpec) -> Result<Signature> {
        Signature::find(inputs, outputs, head, &SPEC)
    }

    #[test]
    fn names_decide_and_then_shapes() {
        let tokens = outlet("last_hidden_state", Element::Fp32, &[-1, -1, 4]);
        let pooler = outlet("pooler_output", Element::Fp32, &[-1, 4]);
        let sentence = outlet("sentence_embedding", Element::Fp32, &[-1, 4]);
        let found = |outputs: &[Outlet], head: &HeadSpec| find(&inputs(), outputs, head).map(|s| (s.output, s.meaning));
        let expect = |name: &str, meaning| Ok((name.to_owned(), meaning));
        assert_eq!(found(&[pooler.clone(), tokens.clone()], &EMBED), expect("last_hidden_state", Meaning::Tokens));
        assert_eq!(found(&[sentence.clone(), tokens], &EMBED), expect("last_hidden_state", Meaning::Tokens));
        assert_eq!(found(&[sentence], &EMBED), expect("sentence_embedding", Meaning::Rows));
        let unnamed = outlet("output", Element::Fp32, &[-1, -1]);
        assert_eq!(found(&[unnamed.clone(), pooler.clone()], &EMBED), expect("output", Meaning::Rows));
        assert_eq!(found(&[outlet("LOGITS", Element::Fp32, &[-1, 3])], &CLASSIFY), expect("LOGITS", Meaning::Rows));
        for (outputs, head, word) in [
            (vec![pooler], &EMBED, "last_hidden_state"),
            (vec![unnamed.clone(), unnamed], &CLASSIFY, "logits"),
            (vec![outlet("logits", Element::Fp32, &[-1, 2])], &CLASSIFY, "FP32 [batch, 3]"),
            (vec![outlet("logits", Element::Other, &[-1, 3])], &CLASSIFY, "must be FP32"),
            (vec![outlet("last_hidden_state", Element::Fp32, &[-1, 4])], &EMBED, "[batch, length, 4]"),
        ] {
            let error = found(&outputs, head).unwrap_err();
            assert!(error.message.contains(word), "{error}");
        }
    }

    #[test]
    fn inputs_are_found_in_any_case_and_others_refused_by_name() {
        let logits = [outlet("logits", Element::Fp32, &[-1, 3])];
        let upper = [outlet("INPUT_IDS", Element::Int32, &[-1, -1]), outlet("Segment_Ids", Element::Int64, &[-1, -1])];
        let found = find(&upper, &logits, &CLASSIFY).unwrap();
        assert_eq!(found.ids, Input { name: "INPUT_IDS".to_owned(), wide: false });
        assert_eq!((found.mask, found.types.map(|types| types.wide)), (None, Some(true)));
        let mut fixed = inputs();
        fixed[0].dims = vec![1, 128];
        let mut more = inputs();
        more.push(outlet("position_ids", Element::Int64, &[-1, -1]));
        for (inputs, word) in
            [(fixed, "dynamic axes"), (more, "'position_ids'"), (inputs()[1..].to_vec(), "'input_ids'")]
        {
            let error = find(&inputs, &logits, &CLASSIFY).unwrap_err();
            assert!(error.message.contains(word), "{error}");
        }
    }
}
