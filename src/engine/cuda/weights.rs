//! A model's weights on a device: converted once, in one allocation, shared by all instances there.

use std::sync::Arc;

use super::device::Device;
use super::exchange::Exchange;
use super::gemm::{Epilogue, Linear};
use super::kernels::DeviceType;
use super::memory::{ALIGNMENT, DeviceMemory};
use crate::error::{Error, Result};
use crate::model::{self, EncoderSpec, Tensor};

/// Elements that are converted and copied at once.
const CHUNK: usize = 1 << 20;

/// LayerNorm's scale and shift: device addresses of `[h]` fp32.
pub(super) struct Norm {
    pub gamma: u64,
    pub beta: u64,
}

/// One layer.
pub(super) struct Layer {
    /// Query, key and value side by side: `h` to `3 h`.
    pub qkv: Linear,
    /// Adds to the residual stream.
    pub attention_output: Linear,
    pub attention_norm: Norm,
    /// With the activation, or before it.
    pub intermediate: Linear,
    /// Adds to the residual stream.
    pub output: Linear,
    pub output_norm: Norm,
}

/// The classification head.
pub(super) struct Classifier {
    pub pooler: Linear,
    /// `[num_labels, h]`
    pub weight: u64,
    /// `[num_labels]`
    pub bias: u64,
}

/// All weights. Nothing in it refers to the checkpoint.
pub(super) struct Weights {
    /// `[vocab_size, h]`
    pub word: u64,
    /// `[max_position_embeddings, h]`
    pub position: u64,
    /// `[type_vocab_size, h]`
    pub token_type: u64,
    pub norm: Norm,
    pub layers: Vec<Layer>,
    pub classifier: Option<Classifier>,
    /// What everything above points into; dropped after it.
    pub memory: DeviceMemory,
}

impl Weights {
    /// Converts `weights` to `dtype` and copies them to the device. `intermediate` is how the feed-forward layer's first
    /// product may end.
    ///
    /// # Errors
    /// `Unavailable` when the device has no room; `Invalid`, with the tensor's name, for weights that `dtype` cannot hold.
    pub(super) fn load(
        device: &Arc<Device>,
        spec: &EncoderSpec,
        weights: &model::Weights<'_>,
        dtype: DeviceType,
        intermediate: &[Epilogue],
    ) -> Result<Self> {
        let mut parts = Parts { dtype, parts: Vec::new(), bytes: 0 };
        let places = Places::of(weights, &mut parts);
        let memory = DeviceMemory::new(device, "the model's weights", parts.bytes)?;
        parts.copy(device, &memory)?;

        let (h, ff) = (spec.hidden_size, spec.intermediate_size);
        let at = |place: usize| memory.address() + place as u64;
        let norm = |(gamma, beta): (usize, usize)| Norm { gamma: at(gamma), beta: at(beta) };
        let linear = |(weight, bias): (usize, usize), out, input, epilogues: &[Epilogue]| {
            Linear::new(device, dtype, (at(weight), at(bias)), (out, input), epilogues)
        };
        let layers = places.layers.iter().map(|layer| {
            Ok(Layer {
                qkv: linear(layer.qkv, 3 * h, h, &[Epilogue::Bias])?,
                attention_output: linear(layer.attention_output, h, h, &[Epilogue::BiasAdd])?,
                attention_norm: norm(layer.attention_norm),
                intermediate: linear(layer.intermediate, ff, h, intermediate)?,
                output: linear(layer.output, h, ff, &[Epilogue::BiasAdd])?,
                output_norm: norm(layer.output_norm),
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        let classifier = match places.classifier {
            None => None,
            Some((pooler, (weight, bias))) => Some(Classifier {
                pooler: linear(pooler, h, h, &[Epilogue::Bias])?,
                weight: at(weight),
                bias: at(bias),
            }),
        };
        Ok(Self {
            word: at(places.word),
            position: at(places.position),
            token_type: at(places.token_type),
            norm: norm(places.norm),
            layers,
            classifier,
            memory,
        })
    }
}

/// Offsets in the allocation: weight and bias, or scale and shift.
type Pair = (usize, usize);

struct Places {
    word: usize,
    position: usize,
    token_type: usize,
    norm: Pair,
    layers: Vec<LayerPlaces>,
    /// Pooler and classifier.
    classifier: Option<(Pair, Pair)>,
}

struct LayerPlaces {
    qkv: Pair,
    attention_output: Pair,
    attention_norm: Pair,
    intermediate: Pair,
    output: Pair,
    output_norm: Pair,
}

impl Places {
    fn of<'a>(weights: &model::Weights<'a>, parts: &mut Parts<'a>) -> Self {
        let embeddings = &weights.embeddings;
        Self {
            word: parts.add(&[embeddings.word]),
            position: parts.add(&[embeddings.position]),
            token_type: parts.add(&[embeddings.token_type]),
            norm: parts.add_norm(&embeddings.norm),
            layers: weights.layers.iter().map(|layer| LayerPlaces::of(layer, parts)).collect(),
            classifier: weights
                .classifier
                .as_ref()
                .map(|head| (parts.add_linear(&[head.pooler]), parts.add_linear(&[head.classifier]))),
        }
    }
}

impl LayerPlaces {
    fn of<'a>(layer: &model::Layer<'a>, parts: &mut Parts<'a>) -> Self {
        Self {
            qkv: parts.add_linear(&[layer.query, layer.key, layer.value]),
            attention_output: parts.add_linear(&[layer.attention_output]),
            attention_norm: parts.add_norm(&layer.attention_norm),
            intermediate: parts.add_linear(&[layer.intermediate]),
            output: parts.add_linear(&[layer.output]),
            output_norm: parts.add_norm(&layer.output_norm),
        }
    }
}

/// The allocation, laid out before it is made.
struct Parts<'a> {
    dtype: DeviceType,
    /// Tensors with their offsets and the type in which they are stored.
    parts: Vec<(usize, DeviceType, Tensor<'a>)>,
    bytes: usize,
}

impl<'a> Parts<'a> {
    /// Adds tensors one right after another; returns the offset of the first.
    fn add(&mut self, tensors: &[Tensor<'a>]) -> usize {
        self.add_as(self.dtype, tensors)
    }

    fn add_as(&mut self, dtype: DeviceType, tensors: &[Tensor<'a>]) -> usize {
        let start = self.bytes;
        for tensor in tensors {
            self.parts.push((self.bytes, dtype, *tensor));
            self.bytes += tensor.len() * dtype.bytes();
        }
        self.bytes = self.bytes.next_multiple_of(ALIGNMENT);
        start
    }

    fn add_linear(&mut self, linears: &[model::Linear<'a>]) -> Pair {
        let weights: Vec<Tensor<'a>> = linears.iter().map(|linear| linear.weight).collect();
        let biases: Vec<Tensor<'a>> = linears.iter().map(|linear| linear.bias).collect();
        (self.add(&weights), self.add(&biases))
    }

    /// LayerNorm's tensors are fp32 in every format.
    fn add_norm(&mut self, norm: &model::Norm<'a>) -> Pair {
        (self.add_as(DeviceType::F32, &[norm.weight]), self.add_as(DeviceType::F32, &[norm.bias]))
    }

    /// Converts everything and copies it to its place in `memory`.
    fn copy(&self, device: &Arc<Device>, memory: &DeviceMemory) -> Result<()> {
        let _current = device.make_current()?;
        let mut exchange = Exchange::new(device)?;
        let mut values = vec![0.0; CHUNK];
        for &(offset, dtype, ref tensor) in &self.parts {
            let mut start = 0;
            while start < tensor.len() {
                let count = CHUNK.min(tensor.len() - start);
                tensor.read(start, &mut values[..count]);
                let (place, size) = (offset + start * dtype.bytes(), (count * dtype.bytes()).div_ceil(4));
                exchange.write(memory, place, size, |words| {
                    convert(dtype, &values[..count], words).map_err(|value| {
                        Error::invalid(format!(
                            "tensor '{}' holds {value}, which fp16 cannot; use dtype bf16 or fp32",
                            tensor.name()
                        ))
                    })
                })?;
                start += count;
            }
        }
        exchange.wait()
    }
}

/// Writes `values` in `dtype`, two to a word where it has 16 bits. Fails with the first finite value that becomes
/// infinite.
fn convert(dtype: DeviceType, values: &[f32], words: &mut [u32]) -> std::result::Result<(), f32> {
    match dtype {
        DeviceType::F32 => {
            words.iter_mut().zip(values).for_each(|(word, value)| *word = value.to_bits());
        }
        DeviceType::Bf16 => pack(values, words, |value| half::bf16::from_f32(value).to_bits()),
        DeviceType::F16 => {
            const LIMIT: f32 = 65_520.0;
            if let Some(&value) = values.iter().find(|value| value.is_finite() && value.abs() >= LIMIT) {
                return Err(value);
            }
            pack(values, words, |value| half::f16::from_f32(value).to_bits());
        }
    }
    Ok(())
}

fn pack(values: &[f32], words: &mut [u32], bits: impl Fn(f32) -> u16) {
    for (word, pair) in words.iter_mut().zip(values.chunks(2)) {
        let high = pair.get(1).map_or(0, |&value| bits(value));
        *word = u32::from(bits(pair[0])) | u32::from(high) << 16;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_and_what_overflows_is_found() {
        let mut words = [0; 2];
        convert(DeviceType::F16, &[1.0, -2.0, 65_519.0], &mut words).unwrap();
        assert_eq!(words, [0xc000_3c00, 0x7bff]);
        assert_eq!(convert(DeviceType::F16, &[0.0, -65_520.0], &mut words), Err(-65_520.0));
        assert_eq!(convert(DeviceType::F16, &[f32::INFINITY], &mut words), Ok(()), "it was so in the checkpoint");
        convert(DeviceType::Bf16, &[1.0, 1e38], &mut words).unwrap();
        assert_eq!(words[0], 0x7e96_3f80);
        convert(DeviceType::F32, &[1.5, -0.0], &mut words).unwrap();
        assert_eq!(words, [0x3fc0_0000, 0x8000_0000]);
    }
}
