//! The CUDA engine on one GPU: what `benches/gpu/run.sh` runs beside the tests.
//!
//! - `gpu facts`: device, driver and libraries, one `name: value` a line.
//! - `gpu twin FILE`: the attention kernels on fixed numbers; writes what they give, fp32.
//! - `gpu same FILE FILE`: whether two such files agree: one of a card, one of the software device.
//! - `gpu check DIRECTORY`: the engine's answers against `oracle.safetensors` in a model directory.
//! - `gpu bench DIRECTORY... [options]`: sequences/s, share of cublasLt's rate, and latency of a batch of one (see
//!   `measure.rs`). Options, with their defaults: `--out .`, `--seconds 0.4` a figure, `--matmul 8192`,
//!   `--lengths 16,64,128,384,512`, `--texts 4096` of the natural mix, `--passes 2048,4096,...` tokens of the sweep.

mod check;
mod device;
mod matmul;
mod measure;
mod noise;
#[path = "../texts/mod.rs"]
mod texts;
mod twin;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use triton_rust::engine::Engine;
use triton_rust::engine::cuda::{self, CudaOptions};
use triton_rust::head::{HeadSpec, Pooling};
use triton_rust::model::{Checkpoint, EncoderSpec, bert};

/// What a command fails with: a sentence.
type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    // `cargo bench` adds `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["facts"] => device::facts().map(|facts| facts.iter().for_each(|(name, value)| println!("{name}: {value}"))),
        ["twin", file] => twin::write(Path::new(file)),
        ["same", one, other] => twin::compare(Path::new(one), Path::new(other)),
        ["check", directory] => check::check(Path::new(directory)),
        ["bench", rest @ ..] => Options::parse(rest).and_then(|options| measure::bench(&options)),
        _ => {
            Err("usage: gpu facts | twin FILE | same FILE FILE | check DIRECTORY | bench DIRECTORY... [options]".into())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What `gpu bench` measures.
pub struct Options {
    /// Hugging Face directories.
    pub models: Vec<PathBuf>,
    /// Where the CSV files go.
    pub out: PathBuf,
    /// About how long each figure is measured.
    pub seconds: f64,
    /// Rows, columns and depth of the matrix product that figures are compared with.
    pub matmul: usize,
    /// Tokens of the texts of one length.
    pub lengths: Vec<usize>,
    /// Texts of the natural mix.
    pub texts: usize,
    /// Tokens of the passes in the sweep.
    pub passes: Vec<usize>,
}

impl Options {
    fn parse(words: &[&str]) -> Result<Self> {
        let named = words.iter().position(|word| word.starts_with("--")).unwrap_or(words.len());
        let (models, named) = words.split_at(named);
        let mut values = HashMap::from([
            ("--out", "."),
            ("--seconds", "0.4"),
            ("--matmul", "8192"),
            ("--lengths", "16,64,128,384,512"),
            ("--texts", "4096"),
            ("--passes", "2048,4096,5632,8192,11264,16384,22528,33792"),
        ]);
        for pair in named.chunks(2) {
            let known = values.get_mut(pair[0]).ok_or_else(|| format!("unknown option '{}'", pair[0]))?;
            *known = pair.get(1).ok_or_else(|| format!("{} needs a value", pair[0]))?;
        }
        let numbers = |name: &str| -> Result<Vec<usize>> {
            let numbers = values[name].split(',').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>();
            numbers.map_err(|_| format!("{name} is numbers with commas between them, not '{}'", values[name]).into())
        };
        let number = |name: &str| numbers(name).map(|numbers| numbers[0]);
        if models.is_empty() {
            return Err("bench needs a model directory".into());
        }
        Ok(Self {
            models: models.iter().map(PathBuf::from).collect(),
            out: PathBuf::from(values["--out"]),
            seconds: values["--seconds"].parse().map_err(|_| "--seconds is a number")?,
            matmul: number("--matmul")?,
            lengths: numbers("--lengths")?,
            texts: number("--texts")?,
            passes: numbers("--passes")?,
        })
    }
}

/// A Hugging Face directory on device 0.
pub struct Model {
    /// The directory's name.
    pub name: String,
    /// From its config.json.
    pub spec: EncoderSpec,
    /// Embeddings with `pooling`.
    pub engine: Arc<dyn Engine>,
}

impl Model {
    /// Loads it.
    pub fn load(directory: &Path, options: CudaOptions, pooling: Pooling, normalize: bool) -> Result<Self> {
        let fail = |what: &str, why: &dyn std::fmt::Display| format!("{}: {what}: {why}", directory.display());
        let config = std::fs::read_to_string(directory.join("config.json")).map_err(|why| fail("config.json", &why))?;
        let spec = bert::spec(&serde_json::from_str(&config)?)?;
        let head = HeadSpec::Embed { pooling, normalize };
        let checkpoint = Checkpoint::open(directory)?;
        let weights = bert::weights(&checkpoint, &spec, &head)?;
        let engine = cuda::load(&spec, &head, &weights, options)?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, spec, engine })
    }
}
