//! Who runs the passes of an instance.

use std::sync::Arc;
use std::time::Instant;

use triton_abi::Result;

use super::passes::{Done, Passes, Report, Row, Values, run_rows};
use crate::batch::PackedBatch;
use crate::engine::{Engine, Runner};

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

    /// Runs the rows of one call, reports each pass that it leads to `observe`, and hands each row to `done` when it was run.
    pub fn run(&mut self, rows: Vec<Row>, observe: &dyn Fn(&Report), done: impl FnMut(Done)) {
        match self {
            Self::Alone { runner, batch, .. } => {
                let started = Instant::now();
                let pass = run_rows(&mut **runner, batch, &rows.iter().collect::<Vec<_>>());
                observe(&Report { tokens: batch.tokens(), time: started.elapsed() });
                Values::of_rows(pass.map(Arc::new), rows.iter())
                    .enumerate()
                    .map(|(row, values)| Done { row, values })
                    .for_each(done);
            }
            Self::Together(passes) => {
                let mut done = done;
                let mut call = passes.enter(rows);
                while let Some(some) = call.next(observe) {
                    some.into_iter().for_each(&mut done);
                }
            }
        }
    }
}
