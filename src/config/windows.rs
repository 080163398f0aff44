//! What happens to a text longer than `max_length`, where it is not cut: `window_stride`, `window_combine`, and
//! `model_transaction_policy { decoupled: true }`.

use super::parameters::Parameters;
use super::triton::TritonConfig;
use crate::error::{Error, Result};
use crate::head::HeadSpec;
use crate::tokenize::Truncation;

/// How one value is made of a row's windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// The mean over the windows.
    Mean,
    /// The greatest over the windows, class by class.
    Max,
}

/// The windows of a model's texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSpec {
    /// Tokens that two neighbouring windows share, 1 or more.
    pub stride: usize,
    /// How a row's one answer is made; `None` where each window is answered by itself (decoupled).
    pub combine: Option<Combine>,
}

impl WindowSpec {
    /// The windows that config.pbtxt asks for, or `None`.
    ///
    /// # Errors
    /// `Invalid` or `Unsupported`, naming the parameter, where windows or what is said of them make no sense.
    pub fn resolve(
        parameters: &Parameters,
        triton: &TritonConfig,
        head: &HeadSpec,
        truncation: Truncation,
    ) -> Result<Option<Self>> {
        let decoupled = triton.decoupled();
        let invalid = |why: &str| Err(Error::invalid(why));
        if parameters.window_stride == 0 {
            return match parameters.window_combine {
                Some(_) => invalid("parameter 'window_combine' has no meaning without 'window_stride'; remove it"),
                None if decoupled => invalid(
                    "config.pbtxt: decoupled needs the parameter 'window_stride': its responses are the windows of each \
                     text",
                ),
                None => Ok(None),
            };
        }
        if parameters.text_pair {
            return Err(Error::unsupported(
                "parameter 'window_stride' is for single texts; with 'text_pair' it is not available",
            ));
        }
        triton.refuse_sequences("a model with 'window_stride'")?;
        if truncation == Truncation::Left {
            return invalid(
                "parameter 'window_stride': windows begin at a text's start and nothing is cut; truncation is 'left' (by \
                 the parameter or the tokenizer's files), set 'truncation' to 'right'",
            );
        }
        let combine = match (decoupled, parameters.window_combine, head) {
            (true, Some(_), _) => {
                return invalid(
                    "parameter 'window_combine' has no meaning for a decoupled model, which answers each window; remove it",
                );
            }
            (true, None, _) => None,
            (false, Some(Combine::Max), HeadSpec::Embed { .. }) => {
                return invalid("parameter 'window_combine' is 'max'; allowed for embeddings: mean");
            }
            (false, combine, _) => Some(combine.unwrap_or(Combine::Mean)),
        };
        let logits = parameters.output_names.get("LOGITS").map_or("LOGITS", String::as_str);
        if combine.is_some() && triton.output_names().iter().any(|name| name == logits) {
            return Err(Error::unsupported(format!(
                "config.pbtxt: output '{logits}': combined windows have no logits, since no combination of them gives the \
                 combined PROBABILITIES; ask for those, or make the model decoupled"
            )));
        }
        Ok(Some(Self { stride: parameters.window_stride, combine }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::{Activation, Pooling};

    const EMBED: HeadSpec = HeadSpec::Embed { pooling: Pooling::Mean, normalize: true };
    const CLASSIFY: HeadSpec = HeadSpec::Classify { num_labels: 2, activation: Activation::Softmax };

    fn resolve(pairs: &[(&str, &str)], triton: &str, head: &HeadSpec) -> Result<Option<WindowSpec>> {
        let parameters = Parameters::parse(pairs.iter().copied()).unwrap();
        let truncation = parameters.truncation.unwrap_or(Truncation::Right);
        WindowSpec::resolve(&parameters, &TritonConfig::parse(triton).unwrap(), head, truncation)
    }

    const STREAM: &str = r#"{"model_transaction_policy":{"decoupled":true}}"#;

    #[test]
    fn windows_are_combined_or_streamed() {
        assert_eq!(resolve(&[], "{}", &EMBED), Ok(None));
        assert_eq!(resolve(&[("window_stride", "0")], "{}", &EMBED), Ok(None));
        let mean = Some(WindowSpec { stride: 8, combine: Some(Combine::Mean) });
        assert_eq!(resolve(&[("window_stride", "8")], "{}", &EMBED), Ok(mean));
        let max = Some(WindowSpec { stride: 8, combine: Some(Combine::Max) });
        assert_eq!(resolve(&[("window_stride", "8"), ("window_combine", "max")], "{}", &CLASSIFY), Ok(max));
        let stream = Some(WindowSpec { stride: 8, combine: None });
        assert_eq!(resolve(&[("window_stride", "8"), ("truncation", "error")], STREAM, &CLASSIFY), Ok(stream));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let logits = r#"{"output":[{"name":"LOGITS","data_type":"TYPE_FP32","dims":[2]}]}"#;
        for (pairs, triton, head, words) in [
            (&[("window_combine", "mean")][..], "{}", EMBED, "without 'window_stride'"),
            (&[], STREAM, EMBED, "decoupled needs the parameter 'window_stride'"),
            (&[("window_stride", "8"), ("text_pair", "true")], "{}", CLASSIFY, "'text_pair'"),
            (&[("window_stride", "8"), ("truncation", "left")], "{}", CLASSIFY, "'left'"),
            (&[("window_stride", "8"), ("window_combine", "max")], STREAM, CLASSIFY, "decoupled"),
            (&[("window_stride", "8"), ("window_combine", "max")], "{}", EMBED, "embeddings: mean"),
            (&[("window_stride", "8")], r#"{"sequence_batching":{}}"#, CLASSIFY, "sequence_batching"),
            (&[("window_stride", "8")], logits, CLASSIFY, "no logits"),
        ] {
            let error = resolve(pairs, triton, &head).unwrap_err();
            assert!(error.message.contains(words), "{error}");
        }
    }
}
