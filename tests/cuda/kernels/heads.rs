//! Kernels that make a sequence's answer: pooling and the classifier.

use triton_rust::engine::cuda::kernels::{Classify, DeviceType, MAX_HIDDEN, Pool};
use triton_rust::head::{Activation, Pooling, activate, normalize, pool};

use crate::gpu::{Gpu, Random, assert_close, unit};

const POOLINGS: [Pooling; 4] = [Pooling::Mean, Pooling::Cls, Pooling::Max, Pooling::Last];
const ACTIVATIONS: [Activation; 3] = [Activation::Softmax, Activation::Sigmoid, Activation::Identity];

/// All of them for every type.
pub fn check_all(random: &mut Random, tokens: usize, sequences: usize, widths: &[usize]) {
    let gpu = &Gpu::new();
    for dtype in DeviceType::ALL {
        for &hidden in widths {
            let ends = random.sequences(tokens, sequences);
            let states = random.floats(dtype, tokens * hidden, 1.0, 0.1);
            for pooling in POOLINGS {
                for normalized in [false, true] {
                    pool_rows(gpu, random, dtype, &states, &ends, hidden, pooling, normalized);
                }
            }
            for (activation, classes) in ACTIVATIONS.into_iter().zip([300, 2, 1]) {
                let rows = random.integer(1, sequences);
                classify_rows(gpu, random, dtype, rows, classes, hidden, activation);
            }
        }
    }
}

/// Places of `rows` rows of `width` fp32 elements in a buffer, in another order than theirs and with a gap of one
/// element before each, so that none is aligned to more than 4 bytes: Triton's buffers may be anywhere.
fn places(rows: usize, width: usize) -> Vec<usize> {
    (0..rows).rev().map(|row| row * (width + 1) + 1).collect()
}

fn addresses(base: u64, places: &[usize]) -> Vec<u64> {
    places.iter().map(|&place| base + 4 * place as u64).collect()
}

#[expect(clippy::too_many_arguments, reason = "a test's parameters")]
fn pool_rows(
    gpu: &Gpu,
    random: &mut Random,
    dtype: DeviceType,
    states: &[f32],
    ends: &[u32],
    hidden: usize,
    pooling: Pooling,
    normalized: bool,
) {
    let rows = random.integer(1, ends.len() - 1);
    let sequences = random.integers(rows, ends.len() - 1);
    let places = places(rows, hidden);
    let size = rows * (hidden + 1);
    let (got, not_finite) =
        run_pool(gpu, dtype, states, ends, &sequences, &places, (size, hidden), pooling, normalized);
    assert_eq!(not_finite, 0, "all is finite");
    let what = format!("pool {dtype:?} {pooling:?} normalize {normalized} [{rows}, {hidden}], sequences {ends:?}");
    for (row, (&sequence, &place)) in sequences.iter().zip(&places).enumerate() {
        let tokens = ends[sequence as usize] as usize..ends[sequence as usize + 1] as usize;
        let mut right = vec![0.0; hidden];
        pool(pooling, &states[tokens.start * hidden..tokens.end * hidden], &mut right);
        if normalized {
            normalize(&mut right);
        }
        let right: Vec<f64> = right.into_iter().map(f64::from).collect();
        // The result is fp32 whatever is pooled.
        assert_close(&got[place..place + hidden], &right, 4e-6, 1.0, &format!("{what}, row {row}"));
        assert!(got[place - 1].is_nan(), "{what}: written outside of row {row}");
    }
}

#[expect(clippy::too_many_arguments, reason = "a test's parameters")]
fn run_pool(
    gpu: &Gpu,
    dtype: DeviceType,
    states: &[f32],
    ends: &[u32],
    sequences: &[u32],
    places: &[usize],
    (size, hidden): (usize, usize),
    pooling: Pooling,
    normalize: bool,
) -> (Vec<f32>, u32) {
    let out = gpu.poisoned(DeviceType::F32, size);
    let (out_addresses, sequences) = (gpu.addresses(&addresses(out.address, places)), gpu.words(sequences));
    let (hidden_states, cu_seqlens, not_finite) = (gpu.floats(dtype, states), gpu.words(ends), gpu.words(&[0]));
    let arguments = Pool {
        out_addresses: out_addresses.address,
        sequences: sequences.address,
        hidden_states: hidden_states.address,
        cu_seqlens: cu_seqlens.address,
        rows: places.len() as u32,
        hidden: hidden as u32,
        pooling,
        normalize,
        not_finite: not_finite.address,
    };
    // SAFETY: buffers of these sizes, which live until the result is read.
    unsafe { gpu.kernels.pool(dtype, &arguments, gpu.stream.cu_stream()) }.expect("launches");
    (gpu.read(DeviceType::F32, &out), gpu.read_word(&not_finite))
}

#[test]
fn pooling_tells_what_is_not_finite() {
    let _device = cuda_device::shared();
    let gpu = &Gpu::new();
    let (ends, hidden) = ([0u32, 3, 5], 264);
    for dtype in DeviceType::ALL {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut states = vec![1.0; 5 * hidden];
            states[hidden + 263] = bad;
            for pooling in POOLINGS {
                // The second token of the first sequence: neither the first nor the last token is it.
                for (sequence, told) in [(0, matches!(pooling, Pooling::Mean | Pooling::Max)), (1, false)] {
                    let size = (hidden, hidden);
                    let (_, not_finite) = run_pool(gpu, dtype, &states, &ends, &[sequence], &[0], size, pooling, true);
                    assert_eq!(not_finite == 1, told, "{dtype:?} {pooling:?} {bad} sequence {sequence}");
                }
            }
        }
    }
}

#[test]
fn normalizing_keeps_long_short_and_zero_rows() {
    let _device = cuda_device::shared();
    let gpu = &Gpu::new();
    for (value, right) in [(1e30f32, 0.25), (1e-5, 0.25), (0.0, 0.0)] {
        let (got, not_finite) =
            run_pool(gpu, DeviceType::F32, &[value; 16], &[0, 1], &[0], &[0], (16, 16), Pooling::Cls, true);
        assert_close(&got, &[right; 16], 1e-6, 0.0, &format!("{value}"));
        assert_eq!(not_finite, 0);
    }
}

/// The classifier's arguments and its results.
struct Classifier {
    pooled: Vec<f32>,
    weight: Vec<f32>,
    bias: Vec<f32>,
    classes: usize,
    hidden: usize,
    activation: Activation,
}

impl Classifier {
    /// Logits and probabilities at `places` of two buffers of `size` elements; `wanted` says which a row wants.
    fn run(
        &self,
        gpu: &Gpu,
        dtype: DeviceType,
        places: &[usize],
        size: usize,
        wanted: impl Fn(usize) -> (bool, bool),
    ) -> (Vec<f32>, Vec<f32>, u32) {
        let (logits, probabilities) = (gpu.poisoned(DeviceType::F32, size), gpu.poisoned(DeviceType::F32, size));
        let rows = places.len();
        let keep = |row: usize, wanted: bool, address: u64| if wanted { address + 4 * places[row] as u64 } else { 0 };
        let to: Vec<u64> = (0..rows).map(|row| keep(row, wanted(row).0, logits.address)).collect();
        let logits_addresses = gpu.addresses(&to);
        let to: Vec<u64> = (0..rows).map(|row| keep(row, wanted(row).1, probabilities.address)).collect();
        let probabilities_addresses = gpu.addresses(&to);
        let (pooled, weight) = (gpu.floats(dtype, &self.pooled), gpu.floats(dtype, &self.weight));
        let (bias, not_finite) = (gpu.floats(dtype, &self.bias), gpu.words(&[0]));
        let arguments = Classify {
            logits_addresses: logits_addresses.address,
            probabilities_addresses: probabilities_addresses.address,
            pooled: pooled.address,
            weight: weight.address,
            bias: bias.address,
            rows: rows as u32,
            classes: self.classes as u32,
            hidden: self.hidden as u32,
            activation: self.activation,
            not_finite: not_finite.address,
        };
        // SAFETY: as above.
        unsafe { gpu.kernels.classify(dtype, &arguments, gpu.stream.cu_stream()) }.expect("launches");
        (gpu.read(DeviceType::F32, &logits), gpu.read(DeviceType::F32, &probabilities), gpu.read_word(&not_finite))
    }
}

fn classify_rows(
    gpu: &Gpu,
    random: &mut Random,
    dtype: DeviceType,
    rows: usize,
    classes: usize,
    hidden: usize,
    activation: Activation,
) {
    let classifier = Classifier {
        pooled: random.floats(dtype, rows * hidden, 1.0, 0.0),
        weight: random.floats(dtype, classes * hidden, 2.0 / (hidden as f32).sqrt(), 0.0),
        bias: random.floats(dtype, classes, 1.0, 0.0),
        classes,
        hidden,
        activation,
    };
    let places = places(rows, classes);
    // Both, one, the other, neither.
    let wanted = |row: usize| (row % 4 < 2, row.is_multiple_of(2));
    let (logits, probabilities, not_finite) = classifier.run(gpu, dtype, &places, rows * (classes + 1), wanted);
    assert_eq!(not_finite, 0, "all is finite");
    for (row, &place) in places.iter().enumerate() {
        let pooled = &classifier.pooled[row * hidden..][..hidden];
        let logit = |class: usize| {
            let pairs = pooled.iter().zip(&classifier.weight[class * hidden..][..hidden]);
            let sum: f64 = pairs.map(|(&p, &w)| f64::from(p).tanh() * f64::from(w)).sum();
            sum + f64::from(classifier.bias[class])
        };
        let right: Vec<f64> = (0..classes).map(logit).collect();
        let mut right_probabilities = vec![0.0; classes];
        activate(activation, &right.iter().map(|&x| x as f32).collect::<Vec<_>>(), &mut right_probabilities);
        let right_probabilities: Vec<f64> = right_probabilities.into_iter().map(f64::from).collect();
        let what = format!("classify {dtype:?} {activation:?} [{rows}, {hidden}] -> {classes}, row {row}");
        for (got, right, wanted, what) in [
            (&logits, &right, wanted(row).0, format!("{what}: logits")),
            (&probabilities, &right_probabilities, wanted(row).1, format!("{what}: probabilities")),
        ] {
            let own = &got[place..place + classes];
            if wanted {
                // fp32 sums of what is exactly the reference's input.
                assert_close(own, right, 1e-5, 1.0, &what);
            } else {
                assert!(own.iter().all(|x| x.is_nan()), "{what} are not wanted and were written");
            }
            assert!(got[place - 1].is_nan(), "{what}: written outside");
        }
    }
}

#[test]
fn classifying_tells_what_is_not_finite_and_refuses_what_is_too_wide() {
    let _device = cuda_device::shared();
    let gpu = &Gpu::new();
    for dtype in DeviceType::ALL {
        let fine = || Classifier {
            pooled: vec![0.5; 16],
            weight: vec![1.0; 3 * 16],
            bias: vec![0.0; 3],
            classes: 3,
            hidden: 16,
            activation: Activation::Softmax,
        };
        let told =
            |classifier: &Classifier, wanted: (bool, bool)| classifier.run(gpu, dtype, &[0], 3, |_| wanted).2 == 1;
        assert!(!told(&fine(), (true, true)));
        for bad in [f32::NAN, f32::INFINITY] {
            // Before tanh, which makes 1 of infinity.
            let mut classifier = fine();
            classifier.pooled[15] = bad;
            assert!(told(&classifier, (true, false)) && told(&classifier, (false, true)), "{dtype:?} {bad}");
            assert!(!told(&classifier, (false, false)), "{dtype:?} {bad}: nobody asked for the row");
            let mut classifier = fine();
            classifier.bias[2] = bad;
            assert!(told(&classifier, (true, false)) && told(&classifier, (false, true)), "{dtype:?} {bad}");
        }
        // The widest fits into a block's shared memory.
        let widest = Classifier {
            pooled: vec![1.0; MAX_HIDDEN],
            weight: vec![0.0; MAX_HIDDEN],
            bias: vec![0.5],
            classes: 1,
            hidden: MAX_HIDDEN,
            activation: Activation::Identity,
        };
        assert_eq!(widest.run(gpu, dtype, &[0], 1, |_| (true, false)).0, [0.5]);
        let wide = Classify {
            logits_addresses: 0,
            probabilities_addresses: 0,
            pooled: 0,
            weight: 0,
            bias: 0,
            rows: 1,
            classes: 1,
            hidden: MAX_HIDDEN as u32 + 8,
            activation: Activation::Softmax,
            not_finite: 0,
        };
        // SAFETY: refused before anything is read.
        assert!(unsafe { gpu.kernels.classify(dtype, &wide, gpu.stream.cu_stream()) }.is_err());
    }
}

/// Logits that overflow exp, and as many classes as a block's threads take in several turns.
#[test]
fn probabilities_of_large_logits_are_finite() {
    let _device = cuda_device::shared();
    let gpu = &Gpu::new();
    let classes = 1000;
    let classifier = Classifier {
        pooled: vec![0.0; 8],
        weight: vec![0.0; classes * 8],
        bias: (0..classes).map(|class| if class == 777 { 500.0 } else { -500.0 }).collect(),
        classes,
        hidden: 8,
        activation: Activation::Softmax,
    };
    for dtype in DeviceType::ALL {
        let (_, probabilities, not_finite) = classifier.run(gpu, dtype, &[0], classes, |_| (false, true));
        let right: Vec<f64> = (0..classes).map(|class| f64::from(u8::from(class == 777))).collect();
        assert_close(&probabilities, &right, unit(DeviceType::F32), 1e-6, &format!("{dtype:?}"));
        assert_eq!(not_finite, 0);
    }
}
