//! What is computed from the encoder's last hidden states: the head's description and its plain arithmetic in fp32.
//! Engines call these functions, or compute the same on their device.

use crate::model::EncoderSpec;

/// How the token vectors of one sequence become one vector (sentence-transformers' `pooling_mode_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all tokens.
    Mean,
    /// The first token.
    Cls,
    /// The maximum of each dimension over all tokens.
    Max,
    /// The last token.
    Last,
}

/// How logits become probabilities (transformers' `function_to_apply`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// One class out of many.
    Softmax,
    /// Each class on its own.
    Sigmoid,
    /// Regression: the logits themselves.
    Identity,
}

/// The head of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadSpec {
    /// One vector of `hidden_size` a sequence.
    Embed {
        /// How tokens are combined.
        pooling: Pooling,
        /// Whether the vector is scaled to length 1.
        normalize: bool,
    },
    /// BERT's pooler (dense + tanh on the first token), then a linear layer of `num_labels`.
    Classify {
        /// Number of classes.
        num_labels: usize,
        /// How logits become probabilities.
        activation: Activation,
    },
}

/// One kind of row that a head can yield for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// `[hidden_size]` of an embed head.
    Embedding,
    /// `[num_labels]` of a classify head.
    Logits,
    /// `[num_labels]` of a classify head, after its activation.
    Probabilities,
}

impl HeadSpec {
    /// The number of elements of a row of `value`.
    pub fn width(&self, value: Value, spec: &EncoderSpec) -> usize {
        match (self, value) {
            (Self::Classify { num_labels, .. }, Value::Logits | Value::Probabilities) => *num_labels,
            _ => spec.hidden_size,
        }
    }

    /// The value that every other of this head is derived from.
    pub fn main_value(&self) -> Value {
        match self {
            Self::Embed { .. } => Value::Embedding,
            Self::Classify { .. } => Value::Logits,
        }
    }
}

/// Pools `hidden`, the `[S, out.len()]` token vectors of one sequence (row-major, `S >= 1`), into `out`.
pub fn pool(pooling: Pooling, hidden: &[f32], out: &mut [f32]) {
    let h = out.len();
    debug_assert!(!hidden.is_empty() && hidden.len().is_multiple_of(h));
    match pooling {
        Pooling::Cls => out.copy_from_slice(&hidden[..h]),
        Pooling::Last => out.copy_from_slice(&hidden[hidden.len() - h..]),
        Pooling::Max => {
            out.copy_from_slice(&hidden[..h]);
            for token in hidden.chunks_exact(h).skip(1) {
                out.iter_mut().zip(token).for_each(|(o, &x)| *o = o.max(x));
            }
        }
        Pooling::Mean => {
            out.copy_from_slice(&hidden[..h]);
            for token in hidden.chunks_exact(h).skip(1) {
                out.iter_mut().zip(token).for_each(|(o, &x)| *o += x);
            }
            let scale = h as f32 / hidden.len() as f32;
            out.iter_mut().for_each(|o| *o *= scale);
        }
    }
}

/// Scales `row` to Euclidean length 1; a zero row stays zero (torch's `F.normalize`, eps 1e-12).
pub fn normalize(row: &mut [f32]) {
    let norm = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt().max(1e-12);
    let scale = (1.0 / norm) as f32;
    row.iter_mut().for_each(|x| *x *= scale);
}

/// Writes the probabilities of `logits` `[num_labels]` to `out` of the same length.
pub fn activate(activation: Activation, logits: &[f32], out: &mut [f32]) {
    out.copy_from_slice(logits);
    match activation {
        Activation::Identity => {}
        Activation::Sigmoid => out.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        Activation::Softmax => {
            let max = out.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let mut sum = 0.0;
            for x in out.iter_mut() {
                *x = (*x - max).exp();
                sum += *x;
            }
            out.iter_mut().for_each(|x| *x /= sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poolings_of_a_small_matrix() {
        let hidden = [1.0, -2.0, 3.0, 4.0, 5.0, -9.0];
        let pooled = |pooling| {
            let mut out = [0.0; 2];
            pool(pooling, &hidden, &mut out);
            out
        };
        assert_eq!(pooled(Pooling::Cls), [1.0, -2.0]);
        assert_eq!(pooled(Pooling::Last), [5.0, -9.0]);
        assert_eq!(pooled(Pooling::Max), [5.0, 4.0]);
        let mean = pooled(Pooling::Mean);
        assert!((mean[0] - 3.0).abs() < 1e-6 && (mean[1] + 7.0 / 3.0).abs() < 1e-6);
    }

    #[test]
    fn normalizing_keeps_direction_and_a_zero_row() {
        let mut row = [3.0, 4.0];
        normalize(&mut row);
        assert!((row[0] - 0.6).abs() < 1e-6 && (row[1] - 0.8).abs() < 1e-6);
        let mut zero = [0.0; 3];
        normalize(&mut zero);
        assert_eq!(zero, [0.0; 3]);
    }

    #[test]
    fn activations_of_extreme_logits_are_finite() {
        let mut out = [0.0; 3];
        activate(Activation::Softmax, &[1e30, -1e30, 0.0], &mut out);
        assert_eq!(out, [1.0, 0.0, 0.0]);
        activate(Activation::Sigmoid, &[200.0, -200.0, 0.0], &mut out);
        assert_eq!(out, [1.0, 0.0, 0.5]);
        activate(Activation::Identity, &[7.0, -2.0, 0.5], &mut out);
        assert_eq!(out, [7.0, -2.0, 0.5]);
    }
}
