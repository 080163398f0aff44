//! A model: loaded once, shared by its instances.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use triton_abi::{InstanceHandle, Kind, Memory, ModelHandle, TokenBudget, log_error, log_info, log_warn};

use super::conversation::{Conversations, Rules};
use super::engines::{Engines, Place, cuda_devices};
use super::metrics::Metrics;
use super::passes::{Passes, Row};
use super::runs::Runs;
use super::{Instance, labels};
use crate::config::ModelConfig;
use crate::config::directory::Directory;
use crate::config::parameters::Parameters;
use crate::config::tokenizer::TokenizerFile;
use crate::config::triton::{TensorDeclaration, TritonConfig};
use crate::error::{Error, Result};
use crate::head::HeadSpec;
use crate::pool::Pool;
use crate::tokenize::{TokenizeOptions, Tokenizer, Tokens};

/// A loaded model.
pub struct Model {
    /// Its name in the repository.
    pub name: String,
    /// What it is.
    pub config: ModelConfig,
    /// Texts to tokens; `None` where the clients tokenize.
    pub tokenizer: Option<Tokenizer>,
    /// Its weights, wherever its instances run.
    pub engines: Engines,
    /// The passes of all instances whose engine shares them.
    passes: OnceLock<Arc<Passes>>,
    /// The process's threads.
    pub pool: Arc<Pool>,
    /// How many of them this model uses.
    pub threads: usize,
    /// Tokens of one pass.
    pub max_batch_tokens: usize,
    /// The same and what else a batching library reads, of which the pipeline learns the bytes per token.
    pub budget: TokenBudget,
    /// Whether shapes have a batch dimension.
    pub batching: bool,
    /// Whether answers may be cached: then each holds every declared output.
    pub response_cache: bool,
    /// The declared outputs that config.pbtxt names.
    pub declared: Vec<String>,
    /// What makes it a conversation, where config.pbtxt has `sequence_batching`.
    pub conversation: Option<Arc<Rules>>,
    /// Its series on the metrics port.
    pub metrics: Metrics,
    /// Whether the loss of a device was told already.
    lost: AtomicBool,
}

impl Model {
    /// Loads the model: configuration, tokenizer, weights.
    pub fn load(
        handle: &ModelHandle,
        parameters: &Parameters,
        mut triton: TritonConfig,
        threads: usize,
    ) -> triton_abi::Result<Self> {
        let name = handle.name()?;
        let directory = Directory::read(&handle.version_directory()?)?;
        let config = ModelConfig::resolve(parameters, &directory, &triton)?;
        for warning in &config.warnings {
            log_warn!("model '{name}': {warning}");
        }
        declare(handle, &name, &config, &mut triton)?;
        let tokenizer = config.tokenizer.as_ref().map(|file| tokenizer(&config, file)).transpose()?;
        let conversation = Rules::load(handle, &config, &triton, tokenizer.as_ref())?.map(Arc::new);
        let pool = Pool::shared(threads);
        let threads = config.threads.unwrap_or(usize::MAX).min(pool.threads());
        let engines = Engines::new(directory.encoder.clone(), threads, Arc::clone(&pool));
        // Loaded before any instance asks: the batching library reads the budget before that.
        let engine = engines.get(first_place(&config, &triton)?, &config)?;
        let max_batch_tokens = config.max_batch_tokens.unwrap_or_else(|| engine.best_pass_tokens());
        log_info!(
            "model '{name}': {:?}; {}; texts of up to {} tokens, passes of up to {max_batch_tokens}",
            config.head,
            engine.describe(),
            config.max_length
        );
        let special_tokens = tokenizer.as_ref().map_or(0, |tokenizer| tokenizer.special_tokens(config.is_pair()));
        // With windows nothing is cut.
        let row_tokens = if config.windows.is_some() { usize::MAX } else { config.max_length };
        let metrics = Metrics::new(&name, handle.version()?)?;
        metrics.max_batch_tokens.set(max_batch_tokens as f64);
        Ok(Self {
            metrics,
            budget: TokenBudget::new(max_batch_tokens, row_tokens, special_tokens),
            batching: triton.max_batch_size() > 0,
            response_cache: triton.response_cache(),
            declared: triton.output_names(),
            name,
            tokenizer,
            engines,
            passes: OnceLock::new(),
            conversation,
            pool,
            threads,
            max_batch_tokens,
            config,
            lost: AtomicBool::new(false),
        })
    }

    /// An error of one request, with the model's name before it.
    pub fn explain(&self, error: triton_abi::Error) -> triton_abi::Error {
        error.context(format!("model '{}'", self.name))
    }

    /// Special tokens of one text, or pair of texts.
    pub fn special_tokens(&self) -> usize {
        self.tokenizer.as_ref().map_or(0, |tokenizer| tokenizer.special_tokens(self.config.is_pair()))
    }

    /// A new instance, warm: it has run one short pass, so that READY means ready.
    pub fn instance(&self, handle: &InstanceHandle) -> triton_abi::Result<Instance> {
        let (kind, device) = (handle.kind()?, u32::try_from(handle.device()?).unwrap_or(0));
        let place = Place::of_instance(self.config.engine, self.config.device, (kind, device), cuda_devices)?;
        if kind == Kind::Gpu && place == Place::Cpu {
            log_warn!(
                "model '{}', instance '{}': KIND_GPU runs on the CPU, because engine is 'cpu'; set instance_group \
                 {{ kind: KIND_CPU }}",
                self.name,
                handle.name()?
            );
        }
        let together = |engine| {
            let new = || Arc::new(Passes::new(engine, Arc::clone(&self.pool), self.max_batch_tokens));
            Arc::clone(self.passes.get_or_init(new))
        };
        let engine = self.engines.get(place, &self.config)?;
        let mut runs = Runs::new(Arc::clone(&engine), together)?;
        if let Some(device) = engine.device().and_then(|device| i32::try_from(device).ok()) {
            handle.model()?.report_memory(&self.engines.device_memory())?;
            handle.report_memory(&[(Memory::Gpu(device), runs.device_bytes())])?;
        }
        let tokens = match &self.tokenizer {
            // The empty text fits any max_length.
            Some(tokenizer) => tokenizer.encode("", self.config.is_pair().then_some(""))?,
            None => Tokens { input_ids: vec![0], token_type_ids: vec![0], truncated: false },
        };
        let value = self.config.head.main_value();
        let width = self.config.head.width(value, &self.config.spec);
        let row = Row { tokens: Arc::new(tokens), values: Arc::new([(value, width)]) };
        let mut warm = Ok(());
        runs.run(vec![row], &|_| {}, |done| warm = done.values.map(drop));
        warm.map_err(|e| e.context("the first pass"))?;
        Ok(Instance { runs, conversations: self.conversation.as_ref().map(Conversations::new) })
    }

    /// Whether the model can still answer.
    ///
    /// # Errors
    /// `Internal` when a device of it is lost.
    pub fn ready(&self) -> Result<()> {
        self.engines.health()
    }

    /// After a pass that failed: tells once, in the log and on the metrics port, when a device is lost.
    pub fn note_failure(&self) {
        if let Err(error) = self.ready()
            && !self.lost.swap(true, Ordering::Relaxed)
        {
            log_error!("model '{}': {error}", self.name);
            self.metrics.device_lost.set(1.0);
        }
    }
}

/// Where the first instance will run.
fn first_place(config: &ModelConfig, triton: &TritonConfig) -> Result<Place> {
    let (kind, device) = triton.first_instance();
    let kind = match kind {
        "KIND_GPU" => Kind::Gpu,
        "KIND_MODEL" => Kind::Model,
        _ => Kind::Cpu,
    };
    let device = u32::try_from(device).unwrap_or(0);
    Place::of_instance(config.engine, config.device, (kind, device), cuda_devices)
}

/// Completes the server's configuration where it lets us, and checks it.
fn declare(
    handle: &ModelHandle,
    name: &str,
    config: &ModelConfig,
    triton: &mut TritonConfig,
) -> triton_abi::Result<()> {
    let outputs: Vec<TensorDeclaration> = config.outputs.iter().map(|(_, tensor)| tensor.clone()).collect();
    if handle.is_auto_complete()? {
        triton.auto_complete(&config.inputs, &outputs);
        if matches!(config.head, HeadSpec::Classify { .. })
            && let Err(why) = labels::declare(config, triton, &handle.repository()?)
        {
            log_warn!("model '{name}': no labels.txt for the classification extension: {why}");
        }
        if config.ids.is_some() && triton.max_batch_size() > 0 {
            triton.allow_ragged_batch();
        }
        handle.set_config_json(&triton.to_text())?;
    }
    if let Some(ids) = &config.ids {
        ids.check(triton)?;
    }
    Ok(triton.validate(&config.inputs, &outputs)?)
}

fn tokenizer(config: &ModelConfig, file: &TokenizerFile) -> Result<Tokenizer> {
    let options =
        TokenizeOptions { max_length: config.max_length, truncation: config.truncation, token_types: file.token_types };
    let tokenizer = Tokenizer::from_json(&file.json, options)?;
    let (ids, types) = (config.spec.vocab_size, config.spec.type_vocab_size);
    if tokenizer.max_token_id() as usize >= ids {
        return Err(Error::invalid(format!(
            "tokenizer.json: has ids up to {}, config.json a vocab_size of {ids}",
            tokenizer.max_token_id()
        )));
    }
    let pair = config.is_pair();
    if file.token_types && tokenizer.max_token_type_id(pair) as usize >= types {
        return Err(Error::invalid(format!(
            "tokenizer.json: has more segments than config.json's type_vocab_size {types}"
        )));
    }
    if tokenizer.special_tokens(pair) >= config.max_length {
        return Err(Error::invalid(format!(
            "parameter 'max_length' is {}; it must be above {}, the special tokens",
            config.max_length,
            tokenizer.special_tokens(pair)
        )));
    }
    if let Some(windows) = config.windows {
        tokenizer.windows("", windows.stride).map_err(|e| e.within("parameter 'window_stride'"))?;
    }
    Ok(tokenizer)
}
