//! Memory of the device under test, and what numbers become in it.

use std::sync::Arc;

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};
use half::{bf16, f16};
use triton_rust::engine::cuda::kernels::{DeviceType, Kernels};

/// The device under test.
pub struct Gpu {
    pub kernels: Kernels,
    pub stream: Arc<CudaStream>,
}

/// Some of its memory.
pub struct Buffer {
    bytes: CudaSlice<u8>,
    pub address: CUdeviceptr,
}

impl Gpu {
    pub fn new() -> Self {
        let context = CudaContext::new(0).expect("a device");
        let stream = context.default_stream();
        Self { kernels: Kernels::load().expect("the kernels load"), stream }
    }

    pub fn bytes(&self, bytes: &[u8]) -> Buffer {
        // Nothing is a valid size, but not for the driver.
        let bytes = self.stream.clone_htod(if bytes.is_empty() { &[0][..] } else { bytes }).expect("copies");
        let address = bytes.device_ptr(&self.stream).0;
        Buffer { bytes, address }
    }

    /// `n` elements, NaN each.
    pub fn poisoned(&self, dtype: DeviceType, n: usize) -> Buffer {
        self.bytes(&vec![0xff; n * dtype.bytes()])
    }

    pub fn floats(&self, dtype: DeviceType, values: &[f32]) -> Buffer {
        self.bytes(&match dtype {
            DeviceType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect::<Vec<_>>(),
            DeviceType::Bf16 => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            DeviceType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
    }

    pub fn words(&self, values: &[u32]) -> Buffer {
        self.bytes(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn addresses(&self, values: &[u64]) -> Buffer {
        self.bytes(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn read(&self, dtype: DeviceType, buffer: &Buffer) -> Vec<f32> {
        let bytes = self.stream.clone_dtoh(&buffer.bytes).expect("copies back");
        match dtype {
            DeviceType::F16 => bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
            DeviceType::Bf16 => bytes.as_chunks().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
            DeviceType::F32 => bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        }
    }

    pub fn read_word(&self, buffer: &Buffer) -> u32 {
        self.read(DeviceType::F32, buffer)[0].to_bits()
    }
}

/// `values` as elements of `dtype` hold them.
pub fn rounded(dtype: DeviceType, values: Vec<f32>) -> Vec<f32> {
    match dtype {
        DeviceType::F16 => values.into_iter().map(|x| f16::from_f32(x).to_f32()).collect(),
        DeviceType::Bf16 => values.into_iter().map(|x| bf16::from_f32(x).to_f32()).collect(),
        DeviceType::F32 => values,
    }
}

/// Relative distance of two neighbouring numbers, for fp32 with room for sums of some hundred numbers.
pub fn unit(dtype: DeviceType) -> f64 {
    match dtype {
        DeviceType::F16 => 1.0 / 1024.0,
        DeviceType::Bf16 => 1.0 / 128.0,
        DeviceType::F32 => 4e-6,
    }
}

/// Fails unless each number is within `unit * (|right number| + size)`.
pub fn assert_close(got: &[f32], right: &[f64], unit: f64, size: f64, what: &str) {
    assert_eq!(got.len(), right.len(), "{what}");
    for (i, (&got, &right)) in got.iter().zip(right).enumerate() {
        let error = (f64::from(got) - right).abs();
        // Written so that NaN fails.
        assert!(error <= unit * (right.abs() + size), "{what}: element {i} is {got}, not {right}");
    }
}

/// Random numbers that are the same everywhere (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In `low ..= high`.
    pub fn integer(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() >> 33) as usize % (high - low + 1)
    }

    /// Bell-shaped: the sum of 12 even ones, of variance 1.
    pub fn float(&mut self) -> f32 {
        let mut even = || (self.next() >> 40) as f32 / (1 << 24) as f32;
        (0..12).map(|_| even()).sum::<f32>() - 6.0
    }

    pub fn floats(&mut self, dtype: DeviceType, n: usize, scale: f32, shift: f32) -> Vec<f32> {
        rounded(dtype, (0..n).map(|_| self.float() * scale + shift).collect())
    }

    pub fn integers(&mut self, n: usize, below: usize) -> Vec<u32> {
        (0..n).map(|_| self.integer(0, below - 1) as u32).collect()
    }

    /// Ends of up to `sequences` sequences of 1 to 512 tokens, `tokens` in all at most, the first 0.
    pub fn sequences(&mut self, tokens: usize, sequences: usize) -> Vec<u32> {
        let mut ends = vec![0];
        let mut left = tokens;
        for after in (0..sequences).rev() {
            // Some are longer than their share of what is left, so that lengths differ much.
            let most = left.saturating_sub(after).min(512).min(4 * left / (after + 1));
            if most == 0 {
                break;
            }
            let length = if after == 0 { most } else { self.integer(1, most) };
            left -= length;
            ends.push(ends[ends.len() - 1] + length as u32);
        }
        ends
    }
}
