//! The backend that Triton loads: a model and its instances. What happens to a batch of requests is in [`pipeline`].

mod answer;
mod engines;
mod ids;
mod inputs;
mod jobs;
mod labels;
mod metrics;
mod model;
mod pipeline;

use triton_abi::{
    Backend, BackendHandle, Batch, InstanceGroup, InstanceHandle, Kind, ModelHandle, Result, TokenBudget,
};

use crate::batch::PackedBatch;
use crate::config::parameters;
use crate::engine::Runner;
use crate::error::{Error, ErrorKind};
use crate::pool::Pool;
use model::Model;

/// Instances of a model whose config.pbtxt names none: while one encodes, the other tokenizes.
const DEFAULT_INSTANCES: u64 = 2;

/// One value for the server's life.
pub struct TextBackend {
    /// Size of the process-wide pool.
    threads: usize,
}

/// What one Triton instance, that is one thread at a time, needs for itself.
pub struct Instance {
    runner: Box<dyn Runner>,
    /// The tokens of the current pass; kept for its memory.
    batch: PackedBatch,
}

impl Backend for TextBackend {
    type Model = Model;
    type Instance = Instance;

    fn initialize(host: &BackendHandle) -> Result<Self> {
        let threads = parameters::pool_threads(&host.config_json()?)?;
        Ok(Self { threads: threads.unwrap_or_else(Pool::default_threads) })
    }

    fn default_instances(&self) -> Vec<InstanceGroup> {
        vec![InstanceGroup { kind: Kind::Cpu, count: DEFAULT_INSTANCES, devices: Vec::new() }]
    }

    fn load_model(&self, handle: &ModelHandle) -> Result<Model> {
        Model::load(handle, self.threads)
    }

    fn load_instance(&self, model: &Model, instance: &InstanceHandle) -> Result<Instance> {
        model.instance(instance)
    }

    fn execute(&self, model: &Model, instance: &mut Instance, mut batch: Batch<'_>) {
        batch.drop_cancelled();
        pipeline::run(model, instance, batch);
    }

    fn uncacheable_output<'m>(&self, model: &'m Model) -> Option<&'m str> {
        model.response_cache.then(|| model.config.outputs[0].1.name.as_str())
    }

    fn token_budget<'m>(&self, model: &'m Model) -> Option<&'m TokenBudget> {
        Some(&model.budget)
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
