//! Linear layers on packed weights: `c = epilogue(a W^T + bias)`.
#![allow(unsafe_code)]

use super::aligned::Aligned;
use super::exec::{Exec, SharedRows, part};
use super::kernels::{Kernels, PANEL, TILE_ROWS, Tile};
use super::rows::Epilogue;
use crate::error::Result;
use crate::model;

/// Bytes of `a` that one sweep over the weights uses: they stay in the second-level cache beside one panel.
const A_BLOCK: usize = 384 * 1024;

/// Weights and bias of a linear layer, packed once.
pub(super) struct Linear {
    /// Inputs and outputs.
    pub k: usize,
    pub n: usize,
    /// `[ceil(n / 32), k, 32]`: panel `p` holds the outputs `32 p .. 32 p + 32`, zero past `n`.
    panels: Aligned<f32>,
    /// `[n]`.
    bias: Vec<f32>,
}

impl Linear {
    /// Packs `parts`, whose outputs follow one another; each is multiplied by its factor.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory.
    pub(super) fn pack(parts: &[(model::Linear<'_>, f32)]) -> Result<Self> {
        let k = parts[0].0.weight.shape()[1];
        let n = parts.iter().map(|(part, _)| part.bias.len()).sum::<usize>();
        let mut panels = Aligned::zeroed(n.div_ceil(PANEL) * k * PANEL)?;
        let mut row = vec![0.0; k];
        let mut bias = Vec::with_capacity(n);
        for (part, factor) in parts {
            for i in 0..part.bias.len() {
                part.weight.read(i * k, &mut row);
                let (panel, column) = ((bias.len() + i) / PANEL, (bias.len() + i) % PANEL);
                let panel = &mut panels[panel * k * PANEL..][..k * PANEL];
                panel.iter_mut().skip(column).step_by(PANEL).zip(&row).for_each(|(p, x)| *p = x * factor);
            }
            bias.extend(part.bias.to_f32().iter().map(|x| x * factor));
        }
        Ok(Self { k, n, panels, bias })
    }

    /// `c [rows, n] = epilogue(a [rows, k] W^T + bias)`.
    pub(super) fn run(&self, kernels: &Kernels, exec: Exec<'_, '_>, a: &[f32], epilogue: Epilogue, c: &mut [f32]) {
        let (k, n) = (self.k, self.n);
        let rows = a.len() / k;
        assert!(a.len() == rows * k && c.len() == rows * n, "a linear layer's shapes do not fit");
        let c = SharedRows::new(c, n);
        let (row_parts, panel_parts) = self.split(exec.threads(), rows);
        exec.for_each(row_parts * panel_parts, |task| {
            let mut rows = part(rows, row_parts, task / panel_parts);
            let panels = part(n.div_ceil(PANEL), panel_parts, task % panel_parts);
            let step = (A_BLOCK / (k * size_of::<f32>())).next_multiple_of(TILE_ROWS).max(TILE_ROWS);
            while !rows.is_empty() {
                let block = rows.start..rows.end.min(rows.start + step);
                rows.start = block.end;
                let tiles = block.len().div_ceil(TILE_ROWS);
                for panel in panels.clone() {
                    let b = &self.panels[panel * k * PANEL..][..k * PANEL];
                    let bias = &self.bias[panel * PANEL..n.min((panel + 1) * PANEL)];
                    for tile in 0..tiles {
                        let at = part(block.len(), tiles, tile);
                        let (first, rows) = (block.start + at.start, at.len());
                        let mut out = [[0.0; PANEL]; TILE_ROWS];
                        let product = out.as_flattened_mut();
                        (kernels.tile)(Tile { rows, k, a: &a[first * k..], lda: k, b, out: product, ldo: PANEL });
                        // SAFETY: this piece of `c` belongs to this task: the grid of parts does not overlap.
                        unsafe { (kernels.epilogue)(epilogue, &out[..rows], bias, &c, first, panel * PANEL) };
                    }
                }
            }
        });
    }

    /// Into how many parts of the rows and of the panels to cut the work for `threads`: by panels, so that each
    /// thread reads its own part of the weights, and by rows as well where there are too few panels.
    fn split(&self, threads: usize, rows: usize) -> (usize, usize) {
        if threads == 1 {
            return (1, 1);
        }
        // Three tasks a thread: one that is late holds up the others by a third of its share.
        let wanted = 3 * threads;
        let panel_parts = self.n.div_ceil(PANEL).min(wanted);
        let row_parts = wanted.div_ceil(panel_parts).min(rows.div_ceil(4 * TILE_ROWS));
        (row_parts, panel_parts)
    }
}
