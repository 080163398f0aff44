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
        self.for_row_blocks_of_two((matrix, width), (&mut [] as &mut [f32], 0), |first, rows, _| f(first, rows));
    }

    /// The same for the same rows of two matrices, each with its width.
    pub(super) fn for_row_blocks_of_two<T: Send, U: Send, F: Fn(usize, &mut [T], &mut [U]) + Sync>(
        self,
        (matrix, width): (&mut [T], usize),
        (other, other_width): (&mut [U], usize),
        f: F,
    ) {
        // Below some 4,000 numbers a pass over the rows is shorter than handing it over.
        const WORTH: usize = 4096;
        let rows = matrix.len() / width;
        let tasks = if self.threads() == 1 { 1 } else { (matrix.len() / WORTH).clamp(1, 2 * self.threads()) };
        let (shared, other) = (SharedRows::new(matrix, width), SharedRows::new(other, other_width));
        self.for_each(tasks, |task| {
            let block = part(rows, tasks, task);
            let start = block.start;
            // SAFETY: the parts of one splitting do not overlap.
            unsafe { f(start, shared.rows(block.clone()), other.rows(block)) };
        });
    }
}

/// Part `i` of `0..total` cut into `parts` of nearly equal size.
pub(super) fn part(total: usize, parts: usize, i: usize) -> Range<usize> {
    total * i / parts..total * (i + 1) / parts
}

/// `[rows, width]` numbers, of which several tasks write disjoint pieces.
pub(super) struct SharedRows<'a, T = f32> {
    start: *mut T,
    len: usize,
    width: usize,
    of: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]`, whose disjoint pieces may be written by several threads; that they are disjoint
// is what the callers of its unsafe functions promise.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

impl<'a, T> SharedRows<'a, T> {
    pub(super) fn new(matrix: &'a mut [T], width: usize) -> Self {
        Self { start: matrix.as_mut_ptr(), len: matrix.len(), width, of: PhantomData }
    }

    /// Whole rows.
    ///
    /// # Safety
    /// No other piece that is in use holds any of these elements.
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn rows(&self, rows: Range<usize>) -> &mut [T] {
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
    pub(super) unsafe fn columns(&self, row: usize, columns: Range<usize>) -> &mut [T] {
        assert!(columns.start <= columns.end && columns.end <= self.width && (row + 1) * self.width <= self.len);
        // SAFETY: inside of the matrix, and not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.width + columns.start), columns.len()) }
    }
}
