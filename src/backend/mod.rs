//! The backend that Triton loads: a model and its instances. What happens to a batch of requests is in [`pipeline`].

mod answer;
mod conversation;
mod engines;
mod ids;
mod inputs;
mod jobs;
mod labels;
mod metrics;
mod model;
mod passes;
mod pipeline;
mod runs;
mod sessions;
#[cfg(test)]
mod sessions_tests;
mod stream;
mod tokenizer;
mod windows;

use triton_abi::{
    Backend, BackendHandle, Batch, InstanceGroup, InstanceHandle, Kind, ModelHandle, Result, TokenBudget,
};

use crate::config::parameters::{self, Parameters, Task};
use crate::config::triton::TritonConfig;
use crate::error::{Error, ErrorKind};
use crate::pool::Pool;
use conversation::Conversations;
use engines::cuda_devices;
use model::Model;
use runs::Runs;
use tokenizer::TokenizerModel;

/// Instances on the CPU of a model whose config.pbtxt names none. A batch in which a long text waits keeps its instance;
/// with so many there is nearly always one left to let short texts in. They share weights and passes: each costs a thread.
const CPU_INSTANCES: u64 = 12;

/// The same for each GPU: while one encodes, the other tokenizes.
const GPU_INSTANCES: u64 = 2;

/// One value for the server's life.
pub struct TextBackend {
    /// Size of the process-wide pool.
    threads: usize,
}

/// A loaded model: one that computes, or a tokenizer alone.
pub enum Loaded {
    /// Texts or ids to answers.
    Encoder(Box<Model>),
    /// Texts to ids.
    Tokenizer(Box<TokenizerModel>),
}

/// What one Triton instance, that is one thread at a time, needs for itself.
pub struct Instance {
    runs: Runs,
    /// The sessions, where the model is a conversation.
    conversations: Option<Conversations>,
}

impl Backend for TextBackend {
    type Model = Loaded;
    /// `None` of a tokenizer, which needs nothing for itself.
    type Instance = Option<Instance>;

    fn initialize(host: &BackendHandle) -> Result<Self> {
        let threads = parameters::pool_threads(&host.config_json()?)?;
        Ok(Self { threads: threads.unwrap_or_else(Pool::default_threads) })
    }

    /// The server takes the first group that it can have: none on a GPU where it sees none.
    fn default_instances(&self) -> Vec<InstanceGroup> {
        let on_gpus = |devices: Vec<u32>| {
            let devices = devices.into_iter().map(u64::from).collect();
            InstanceGroup { kind: Kind::Gpu, count: GPU_INSTANCES, devices }
        };
        let on_cpu = InstanceGroup { kind: Kind::Cpu, count: CPU_INSTANCES, devices: Vec::new() };
        cuda_devices().ok().map(on_gpus).into_iter().chain([on_cpu]).collect()
    }

    fn load_model(&self, handle: &ModelHandle) -> Result<Loaded> {
        let triton = TritonConfig::parse(&handle.config_json()?)?;
        let parameters = Parameters::parse(triton.parameters())?;
        Ok(match parameters.task {
            Some(Task::Tokenize) => {
                Loaded::Tokenizer(Box::new(TokenizerModel::load(handle, &parameters, triton, self.threads)?))
            }
            _ => Loaded::Encoder(Box::new(Model::load(handle, &parameters, triton, self.threads)?)),
        })
    }

    fn load_instance(&self, model: &Loaded, instance: &InstanceHandle) -> Result<Option<Instance>> {
        match model {
            Loaded::Encoder(model) => model.instance(instance).map(Some),
            Loaded::Tokenizer(_) => Ok(None),
        }
    }

    fn execute(&self, model: &Loaded, instance: &mut Option<Instance>, mut batch: Batch<'_>) {
        // A conversation looks at START and END first.
        if !matches!(model, Loaded::Encoder(model) if model.conversation.is_some()) {
            batch.drop_cancelled();
        }
        match (model, instance) {
            (Loaded::Encoder(model), Some(instance)) => match model.config.windows {
                Some(spec) => windows::run(model, instance, spec, batch),
                None => pipeline::run(model, instance, batch),
            },
            (Loaded::Tokenizer(model), _) => model.run(batch),
            (Loaded::Encoder(_), None) => unreachable!("an encoder's instances have one"),
        }
    }

    fn ready(&self, model: &Loaded) -> Result<()> {
        match model {
            Loaded::Encoder(model) => Ok(model.ready()?),
            Loaded::Tokenizer(_) => Ok(()),
        }
    }

    fn uncacheable_output<'m>(&self, model: &'m Loaded) -> Option<&'m str> {
        match model {
            Loaded::Encoder(model) => model.response_cache.then(|| model.config.outputs[0].1.name.as_str()),
            Loaded::Tokenizer(model) => model.uncacheable_output(),
        }
    }

    fn token_budget<'m>(&self, model: &'m Loaded) -> Option<&'m TokenBudget> {
        Some(match model {
            Loaded::Encoder(model) => &model.budget,
            Loaded::Tokenizer(model) => model.token_budget(),
        })
    }
}

impl From<Error> for triton_abi::Error {
    fn from(error: Error) -> Self {
        match error.kind {
            ErrorKind::Invalid => Self::invalid_arg(error.message),
            ErrorKind::Unsupported => Self::unsupported(error.message),
            ErrorKind::Unavailable => Self::unavailable(error.message),
            ErrorKind::Internal => Self::internal(error.message),
        }
    }
}
