//! stub
use super::{Engine, Output, Runner};
use crate::{
    batch::PackedBatch,
    config::parameters::Dtype,
    error::Result,
    head::HeadSpec,
    model::{EncoderSpec, Weights},
    pool::Pool,
};
use std::sync::Arc;
/// stub
#[allow(missing_docs)]
pub struct CpuOptions {
    pub dtype: Dtype,
    pub threads: usize,
}
/// stub
pub fn load(
    _s: &EncoderSpec,
    _h: &HeadSpec,
    _w: &Weights<'_>,
    _o: CpuOptions,
    _p: Arc<Pool>,
) -> Result<Arc<dyn Engine>> {
    Ok(Arc::new(Null))
}
struct Null;
impl Engine for Null {
    fn runner(&self) -> Result<Box<dyn Runner>> {
        Ok(Box::new(Null))
    }
    fn best_pass_tokens(&self) -> usize {
        512
    }
}
impl Runner for Null {
    fn run(&mut self, _b: &PackedBatch, _o: &mut [Output<'_>]) -> Result<()> {
        Ok(())
    }
}
