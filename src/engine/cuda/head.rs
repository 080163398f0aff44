//! The head on the device: only the rows that were asked for come back, or none where they go to device memory.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::encoder::{Arena, Pass, bucket};
use super::gemm::Plan;
use super::kernels;
use crate::error::{Error, Result};
use crate::head::{HeadSpec, Pooling};

impl Pass<'_> {
    /// The plan of the pooler, to be made before anything is enqueued; `None` for a head without one.
    ///
    /// # Errors
    /// As of [`Self::plan`].
    pub(super) fn pooler_plan(&self) -> Result<Option<Arc<Plan>>> {
        let Some(classifier) = &self.model.weights.classifier else { return Ok(None) };
        let Arena { x, context, .. } = self.arena;
        self.plan(&classifier.pooler, bucket(self.sequences), x, context).map(Some)
    }

    /// Enqueues the head on the last hidden states at `arena.x`.
    ///
    /// # Errors
    /// Of the calls.
    pub(super) fn head(&self, arena: Arena, pooler: Option<&Plan>) -> Result<()> {
        match self.model.head {
            HeadSpec::Embed { pooling, normalize } => self.pool(arena.x, pooling, normalize),
            HeadSpec::Classify { num_labels, activation } => {
                let (Some(classifier), Some(pooler)) = (&self.model.weights.classifier, pooler) else {
                    return Err(Error::internal("the CUDA engine has no weights for its classifier"));
                };
                classifier.pooler.run(&self.tools, pooler, arena.x, arena.context)?;
                for &round in &self.lists.rounds {
                    self.launch("the classifier", |kernels, stream| {
                        // SAFETY: `[sequences, h]` pooled rows are in the arena; the lists hold an address for each
                        // sequence, 0 or with room for `num_labels` fp32.
                        unsafe {
                            kernels.classify(
                                self.model.dtype,
                                &kernels::Classify {
                                    logits_addresses: self.list(round),
                                    probabilities_addresses: self.list(round + 2 * self.sequences),
                                    pooled: arena.context,
                                    weight: classifier.weight,
                                    bias: classifier.bias,
                                    rows: self.sequences as u32,
                                    classes: num_labels as u32,
                                    hidden: self.model.spec.hidden_size as u32,
                                    activation,
                                    not_finite: self.list(self.lists.not_finite),
                                },
                                stream,
                            )
                        }
                    })?;
                }
                Ok(())
            }
        }
    }

    fn pool(&self, hidden_states: u64, pooling: Pooling, normalize: bool) -> Result<()> {
        let lists = self.lists;
        let ranges = if self.first_only { lists.counted } else { lists.cu_seqlens };
        self.launch("pooling", |kernels, stream| {
            // SAFETY: the hidden states are in the arena, as many rows as `ranges` counts; each address has room for a row.
            unsafe {
                kernels.pool(
                    self.model.dtype,
                    &kernels::Pool {
                        out_addresses: self.list(lists.addresses),
                        sequences: self.list(lists.sequences),
                        hidden_states,
                        cu_seqlens: self.list(ranges),
                        rows: lists.row_count as u32,
                        hidden: self.model.spec.hidden_size as u32,
                        pooling,
                        normalize,
                        not_finite: self.list(lists.not_finite),
                    },
                    stream,
                )
            }
        })
    }
}
