//! Who computes: this thread alone, or a team; and a matrix that the tasks of a team write at once.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;

use crate::pool::Team;

/// Where the tasks of one operation run.
#[derive(Clone, Copy)]
pub(super) enum Exec<'a, 'p> {
    /// On this thread: whole sequences are spread over threads further up.
    Alone,
    /// Split over a team: few tokens, or one long text.
    Team(&'a Team<'p>),
}

impl Exec<'_, '_> {
    /// The number of threads that an operation is worth splitting for.
    pub(super) fn threads(self) -> usize {
        match self {
            Exec::Alone => 1,
            Exec::Team(team) => team.limit(),
        }
    }

    pub(super) fn for_each<F: Fn(usize) + Sync>(self, tasks: usize, f: F) {
        match self {
            Exec::Alone => (0..tasks).for_each(f),
            Exec::Team(team) => team.for_each(tasks, f),
        }
    }

    /// Calls `f(first row, rows)` for blocks of rows of `matrix` `[rows, width]`, several a thread when there is more
    /// than one thread and enough to do.
    pub(super) fn for_row_blocks<F: Fn(usize, &mut [f32]) + Sync>(self, matrix: &mut [f32], width: usize, f: F) {
        // Below some 16 KiB a pass over the rows is shorter than handing it over.
        const WORTH: usize = 4096;
        let rows = matrix.len() / width;
        let tasks = if self.threads() == 1 { 1 } else { (matrix.len() / WORTH).clamp(1, 2 * self.threads()) };
        let shared = SharedRows::new(matrix, width);
        self.for_each(tasks, |task| {
            let block = part(rows, tasks, task);
            let start = block.start;
            // SAFETY: the parts of one splitting do not overlap.
            f(start, unsafe { shared.rows(block) });
        });
    }
}

/// Part `i` of `0..total` cut into `parts` of nearly equal size.
pub(super) fn part(total: usize, parts: usize, i: usize) -> Range<usize> {
    total * i / parts..total * (i + 1) / parts
}

/// `[rows, width]` in fp32, of which several tasks write disjoint pieces.
pub(super) struct SharedRows<'a> {
    start: *mut f32,
    len: usize,
    width: usize,
    of: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for a `&mut [f32]`, whose disjoint pieces may be written by several threads; that they are disjoint
// is what the callers of its unsafe functions promise.
unsafe impl Sync for SharedRows<'_> {}

impl<'a> SharedRows<'a> {
    pub(super) fn new(matrix: &'a mut [f32], width: usize) -> Self {
        Self { start: matrix.as_mut_ptr(), len: matrix.len(), width, of: PhantomData }
    }

    /// Whole rows.
    ///
    /// # Safety
    /// No other piece that is in use holds any of these elements.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn rows(&self, rows: Range<usize>) -> &mut [f32] {
        assert!(rows.start <= rows.end && rows.end * self.width <= self.len);
        // SAFETY: inside of the matrix, and not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(rows.start * self.width), rows.len() * self.width) }
    }

    /// Some columns of one row.
    ///
    /// # Safety
    /// As of [`Self::rows`].
    #[allow(clippy::mut_from_ref)]
    #[inline(always)]
    pub(super) unsafe fn columns(&self, row: usize, columns: Range<usize>) -> &mut [f32] {
        assert!(columns.start <= columns.end && columns.end <= self.width && (row + 1) * self.width <= self.len);
        // SAFETY: inside of the matrix, and not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.width + columns.start), columns.len()) }
    }
}
