//! What `gpu bench` measures, for each model, in fp16:
//!
//! - a sweep of the pass's token count, on texts of 128 tokens (or the length nearest to that) and on the natural mix: the
//!   best is what a `max_batch_tokens` should be;
//! - sequences/s on texts of each length and on the natural mix, at the sweep's best (of the mix, for the mix);
//! - latency of one text of each length.
//!
//! Token ids start in host memory and embeddings end there, as they do in a server. Two instances take passes from one
//! queue, so that one's copies and launches overlap the other's work, as by default in Triton. The matrix product's rate is
//! measured before and after each model, and the mean is what its figures are compared with: a GPU's clock moves.

use std::fmt::Write;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use triton_rust::batch::{PackedBatch, plan_passes};
use triton_rust::engine::cuda::CudaOptions;
use triton_rust::engine::{Dtype, Output, Runner, Slot};
use triton_rust::head::{Pooling, Value};

use crate::texts::{batch, flops, natural};
use crate::{Model, Options, Result, device, matmul};

const INSTANCES: usize = 2;
/// Latencies are of at least so many runs.
const LATENCIES: usize = 20;

/// Measures and writes `facts.txt`, `sweep.csv` and `ours.csv`.
pub fn bench(options: &Options) -> Result<()> {
    let mut facts = device::facts()?;
    let mut sweep = String::from("model,texts,pass_tokens,sequences_per_s,tokens_per_s,percent_of_matmul\n");
    let mut ours = String::from(
        "contestant,model,texts,batch_tokens,sequences_per_s,percent_of_matmul,latency_p50_ms,latency_p99_ms\n",
    );
    let mut rates = vec![matmul::rate(options.matmul, options.seconds)?];
    for directory in &options.models {
        let fp16 = CudaOptions { dtype: Dtype::Fp16, ..CudaOptions::default() };
        let model = Model::load(directory, fp16, Pooling::Mean, true)?;
        println!("\n{}: {}", model.name, model.engine.describe());
        let rows = rows(&model, options)?;
        rates.push(matmul::rate(options.matmul, options.seconds)?);
        let rate = rates[rates.len() - 2..].iter().sum::<f64>() / 2.0;
        println!("fp16 product of {0} x {0} x {0}: {1:.1} TFLOP/s", options.matmul, rate / 1e12);
        for row in rows {
            let percent = 100.0 * row.flops_per_s / rate;
            row.print(percent);
            let Row { texts, pass_tokens, sequences_per_s, latency, .. } = &row;
            if row.of_sweep {
                let tokens = row.tokens_per_s;
                writeln!(sweep, "{},{texts},{pass_tokens},{sequences_per_s:.2},{tokens:.0},{percent:.2}", model.name)?;
            } else {
                let (p50, p99) = latency.map_or(Default::default(), |(p50, p99)| (ms(p50), ms(p99)));
                writeln!(
                    ours,
                    "triton-rust,{},{texts},{pass_tokens},{sequences_per_s:.2},{percent:.2},{p50},{p99}",
                    model.name
                )?;
            }
        }
    }
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    facts.push(("matmul", format!("fp16 {0} x {0} x {0}, {1:.1} TFLOP/s", options.matmul, mean / 1e12)));
    let facts: String = facts.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
    for (name, text) in [("facts.txt", facts), ("sweep.csv", sweep), ("ours.csv", ours)] {
        write(&options.out.join(name), &text)?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|why| format!("{}: {why}", path.display()).into())
}

fn ms(seconds: f64) -> String {
    format!("{:.4}", seconds * 1e3)
}

/// One figure.
struct Row {
    texts: String,
    pass_tokens: usize,
    of_sweep: bool,
    sequences_per_s: f64,
    tokens_per_s: f64,
    flops_per_s: f64,
    /// Seconds, p50 and p99.
    latency: Option<(f64, f64)>,
}

impl Row {
    fn print(&self, percent: f64) {
        let latency =
            self.latency.map_or(String::new(), |(p50, p99)| format!(", one text {} / {} ms", ms(p50), ms(p99)));
        println!(
            "{} {:<8} passes of {:>6}: {:>10.1} sequences/s, {:>10.0} tokens/s, {:>5.1}% of the product's rate{latency}",
            if self.of_sweep { "sweep" } else { "     " },
            self.texts,
            self.pass_tokens,
            self.sequences_per_s,
            self.tokens_per_s,
            percent
        );
    }
}

/// All figures of a model.
fn rows(model: &Model, options: &Options) -> Result<Vec<Row>> {
    let mut runners: Vec<Box<dyn Runner>> = Vec::new();
    for _ in 0..INSTANCES {
        runners.push(model.engine.runner()?);
    }
    let mut measure = |texts: &str, lengths: &[usize], pass_tokens: usize, of_sweep: bool| -> Result<Row> {
        let passes = plan_passes(lengths, pass_tokens);
        let lengths_of = |pass: &Vec<usize>| pass.iter().map(|&i| lengths[i]).collect::<Vec<usize>>();
        let batches: Vec<PackedBatch> = passes.iter().map(|pass| batch(&model.spec, &lengths_of(pass))).collect();
        let cycle = cycle_seconds(&mut runners, &batches, model.spec.hidden_size, options.seconds)?;
        Ok(Row {
            texts: texts.to_owned(),
            pass_tokens,
            of_sweep,
            sequences_per_s: lengths.len() as f64 / cycle,
            tokens_per_s: lengths.iter().sum::<usize>() as f64 / cycle,
            flops_per_s: lengths.iter().map(|&len| flops(&model.spec, len)).sum::<f64>() / cycle,
            latency: None,
        })
    };
    // Passes of one length are all alike: two of them make a cycle, one for each instance.
    let uniform = |len: usize, pass_tokens: usize| vec![len; INSTANCES * (pass_tokens / len).max(1)];
    let mix = natural(options.texts, 24.0, 0.8);
    let usual = *options.lengths.iter().min_by_key(|len| len.abs_diff(128)).ok_or("--lengths is empty")?;
    let (mut rows, mut best) = (Vec::new(), [options.passes[0]; 2]);
    for (best, of_mix) in best.iter_mut().zip([false, true]) {
        let mut most = 0.0;
        for &pass_tokens in &options.passes {
            let (name, lengths) = if of_mix {
                ("natural".to_owned(), mix.clone())
            } else {
                (usual.to_string(), uniform(usual, pass_tokens))
            };
            let row = measure(&name, &lengths, pass_tokens, true)?;
            if row.tokens_per_s > most {
                (most, *best) = (row.tokens_per_s, pass_tokens);
            }
            rows.push(row);
        }
    }
    for &len in &options.lengths {
        rows.push(measure(&len.to_string(), &uniform(len, best[0]), best[0], false)?);
    }
    rows.push(measure("natural", &mix, best[1], false)?);
    for row in rows.iter_mut().filter(|row| !row.of_sweep) {
        if let Ok(len) = row.texts.parse() {
            row.latency = Some(latency(&mut *runners[0], &batch(&model.spec, &[len]), model, options.seconds)?);
        }
    }
    Ok(rows)
}

/// Seconds in which all runners together run all passes once, over about `seconds` after warming up.
fn cycle_seconds(runners: &mut [Box<dyn Runner>], batches: &[PackedBatch], width: usize, seconds: f64) -> Result<f64> {
    let mut rows =
        vec![vec![0.0; batches.iter().map(PackedBatch::sequences).max().unwrap_or(0) * width]; runners.len()];
    // The first cycle makes plans and memory, the second says how long one takes.
    let mut alone = 0.0;
    for _ in 0..2 {
        let start = Instant::now();
        for batch in batches {
            run(&mut *runners[0], batch, &mut rows[0], width)?;
        }
        alone = start.elapsed().as_secs_f64();
    }
    for (runner, rows) in runners.iter_mut().zip(&mut rows).skip(1) {
        for batch in batches {
            run(&mut **runner, batch, rows, width)?;
        }
    }
    let cycles = (seconds / alone).ceil().max(2.0) as usize;
    let (next, ready) = (AtomicUsize::new(0), Barrier::new(runners.len() + 1));
    std::thread::scope(|scope| {
        let work = |runner: &mut dyn Runner, rows: &mut [f32]| -> triton_rust::error::Result<Instant> {
            ready.wait();
            loop {
                let pass = next.fetch_add(1, Ordering::Relaxed);
                if pass >= cycles * batches.len() {
                    return Ok(Instant::now());
                }
                run(runner, &batches[pass % batches.len()], rows, width)?;
            }
        };
        let threads: Vec<_> = runners
            .iter_mut()
            .zip(&mut rows)
            .map(|(runner, rows)| scope.spawn(move || work(&mut **runner, rows)))
            .collect();
        ready.wait();
        let start = Instant::now();
        let mut time = Duration::ZERO;
        for thread in threads {
            let end = thread.join().map_err(|_| "a thread of the benchmark panicked")??;
            time = time.max(end - start);
        }
        Ok(time.as_secs_f64() / cycles as f64)
    })
}

/// p50 and p99 of one pass after another, in seconds.
fn latency(runner: &mut dyn Runner, batch: &PackedBatch, model: &Model, seconds: f64) -> Result<(f64, f64)> {
    let width = model.spec.hidden_size;
    let mut rows = vec![0.0; width];
    for _ in 0..5 {
        run(runner, batch, &mut rows, width)?;
    }
    let (mut times, begin) = (Vec::new(), Instant::now());
    while times.len() < LATENCIES || begin.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        run(runner, batch, &mut rows, width)?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok((times[times.len() / 2], times[times.len() * 99 / 100]))
}

/// One pass, all embeddings into `rows`.
fn run(runner: &mut dyn Runner, batch: &PackedBatch, rows: &mut [f32], width: usize) -> triton_rust::error::Result<()> {
    let slots = rows.chunks_mut(width).take(batch.sequences()).map(Slot::Host);
    let mut outputs: Vec<_> =
        slots.enumerate().map(|(sequence, slot)| Output { sequence, value: Value::Embedding, slot }).collect();
    runner.run(batch, &mut outputs)
}
