//! Who runs the passes of an instance.

use std::sync::Arc;

use triton_abi::Result;

use super::passes::{Passes, Row};
use crate::batch::PackedBatch;
use crate::engine::{Engine, Output, Runner, Slot};
use crate::head::Value;
use crate::tokenize::Tokens;

/// Who runs the passes of an instance.
pub enum Runs {
    /// The instance itself, with nobody else's rows.
    Alone {
        /// On the instance's device.
        runner: Box<dyn Runner>,
        /// The CUDA device, where it is one, whose memory the runner can write to.
        device: Option<u32>,
        /// The tokens of the current pass; kept for its memory.
        batch: PackedBatch,
    },
    /// All instances together.
    Together(Arc<Passes>),
}

impl Runs {
    /// What suits the engine; `passes` are those of all instances.
    ///
    /// # Errors
    /// `Unavailable` when memory for scratch cannot be had.
    pub fn new(engine: Arc<dyn Engine>, passes: impl FnOnce(Arc<dyn Engine>) -> Arc<Passes>) -> Result<Self> {
        if engine.shares_passes() {
            return Ok(Self::Together(passes(engine)));
        }
        Ok(Self::Alone { runner: engine.runner()?, device: engine.device(), batch: PackedBatch::new() })
    }

    /// The CUDA device on which passes run that can write to its memory.
    pub fn device(&self) -> Option<u32> {
        match self {
            Self::Alone { device, .. } => *device,
            Self::Together(_) => None,
        }
    }

    /// Bytes of that device that the instance has for itself.
    pub fn device_bytes(&self) -> usize {
        match self {
            Self::Alone { runner, .. } => runner.device_bytes(),
            Self::Together(_) => 0,
        }
    }

    /// Runs one row, of which `value` is asked for.
    pub fn warm(&mut self, tokens: Tokens, value: Value, width: usize) -> Result<()> {
        match self {
            Self::Alone { runner, batch, .. } => {
                batch.clear();
                batch.push(&tokens.input_ids, &tokens.token_type_ids);
                let mut row = vec![0.0; width];
                Ok(runner.run(batch, &mut [Output { sequence: 0, value, slot: Slot::Host(&mut row) }])?)
            }
            Self::Together(passes) => {
                let row = Row { tokens: Arc::new(tokens), values: Arc::new([(value, width)]) };
                let mut call = passes.enter(vec![row]);
                while let Some(done) = call.next(&|_| {}) {
                    done.into_iter().try_for_each(|done| done.values.map(drop))?;
                }
                Ok(())
            }
        }
    }
}
