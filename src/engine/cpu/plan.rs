//! How a pass is spread over threads.
//!
//! Where there are enough sequences, each thread runs the whole encoder on some of them: no thread waits for another,
//! and a group's rows stay in its core's cache. A few tokens, or one text that is longer than a thread's fair share,
//! are run by all threads together, operation by operation.

use std::ops::Range;

use crate::batch::PackedBatch;

/// Tokens of a group that one thread runs: more would not make the matrix products faster, and leave the cache.
pub(super) const GROUP_TOKENS: usize = 256;
/// Below so many tokens a thread, all threads together are faster than each alone: the weights are read only once.
const SHARE_TOKENS: usize = 48;

/// Consecutive sequences that are run together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub sequences: Range<usize>,
    /// By all threads, or by one.
    pub split: bool,
}

/// Cuts `batch` into groups, those that are run by all threads first.
///
/// The longest sequences are given to all threads together, one after another, until the rest can be shared out to
/// single threads with little waiting at the end.
pub(super) fn plan(batch: &PackedBatch, threads: usize) -> Vec<Group> {
    let count = batch.sequences();
    if threads == 1 {
        return cut(batch, 0..count, batch.tokens().div_ceil(GROUP_TOKENS));
    }
    let mut longest: Vec<usize> = (0..count).collect();
    longest.sort_by_key(|&i| std::cmp::Reverse(batch.range(i).len()));
    let mut together: Vec<usize> = Vec::new();
    loop {
        let groups = share_out(batch, &together, threads);
        if groups.iter().all(|group| group.split) || is_even(batch, &groups, threads) {
            let all = |i: &usize| Group { sequences: *i..*i + 1, split: true };
            return together.iter().map(all).chain(groups).collect();
        }
        // In the order of the batch, so that what is between two of them is a run.
        together.push(longest[together.len()]);
        together.sort_unstable();
    }
}

/// Groups for single threads, of all sequences but those of `together` (ascending). Where too few tokens are left for
/// that, groups for all threads.
fn share_out(batch: &PackedBatch, together: &[usize], threads: usize) -> Vec<Group> {
    let ends = together.iter().copied().chain([batch.sequences()]);
    let starts = [0].into_iter().chain(together.iter().map(|i| i + 1));
    let runs: Vec<Range<usize>> =
        starts.zip(ends).map(|(start, end)| start..end).filter(|run| !run.is_empty()).collect();
    let tokens: usize = runs.iter().map(|run| tokens_of(batch, run)).sum();
    if tokens < SHARE_TOKENS * threads {
        return runs.into_iter().map(|sequences| Group { sequences, split: true }).collect();
    }
    // As many groups for each thread.
    let most = tokens.div_ceil(tokens.div_ceil(GROUP_TOKENS).next_multiple_of(threads));
    runs.into_iter().flat_map(|run| cut(batch, run.clone(), tokens_of(batch, &run).div_ceil(most))).collect()
}

/// Whether threads that take the greatest group that is left, again and again, end at about the same time: the last
/// one at most an eighth later than with equal shares.
fn is_even(batch: &PackedBatch, groups: &[Group], threads: usize) -> bool {
    let mut sizes: Vec<usize> = groups.iter().map(|group| tokens_of(batch, &group.sequences)).collect();
    sizes.sort_unstable_by_key(|&size| std::cmp::Reverse(size));
    let mut loads = vec![0; threads];
    for size in &sizes {
        if let Some(least) = loads.iter_mut().min() {
            *least += size;
        }
    }
    let last = loads.iter().max().copied().unwrap_or(0);
    8 * last * threads <= 9 * sizes.iter().sum::<usize>()
}

fn tokens_of(batch: &PackedBatch, sequences: &Range<usize>) -> usize {
    (batch.cu_seqlens[sequences.end] - batch.cu_seqlens[sequences.start]) as usize
}

/// Cuts `sequences` into at most `parts` groups of about as many tokens.
fn cut(batch: &PackedBatch, sequences: Range<usize>, parts: usize) -> Vec<Group> {
    let offset = |i: usize| batch.cu_seqlens[i] as usize;
    let (first, total) = (offset(sequences.start), offset(sequences.end) - offset(sequences.start));
    let mut groups = Vec::new();
    let mut start = sequences.start;
    for part in 1..=parts {
        let bound = first + total * part / parts;
        // The cut between two sequences that is nearest to the bound.
        let mut end = start;
        while end < sequences.end && offset(end) + offset(end + 1) <= 2 * bound {
            end += 1;
        }
        if part == parts {
            end = sequences.end;
        }
        if start < end {
            groups.push(Group { sequences: start..end, split: false });
            start = end;
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(lengths: &[usize]) -> PackedBatch {
        let mut batch = PackedBatch::new();
        lengths.iter().for_each(|&len| batch.push(&vec![0; len], &vec![0; len]));
        batch
    }

    fn planned(lengths: &[usize], threads: usize) -> Vec<(Range<usize>, bool)> {
        plan(&batch(lengths), threads).into_iter().map(|group| (group.sequences, group.split)).collect()
    }

    #[test]
    fn one_text_is_run_by_all_threads_and_many_by_one_each() {
        assert_eq!(planned(&[16], 2), [(0..1, true)]);
        assert_eq!(planned(&[16], 1), [(0..1, false)]);
        assert_eq!(planned(&[16, 8], 2), [(0..2, true)]);
        assert_eq!(planned(&[128, 128], 2), [(0..1, false), (1..2, false)]);
        assert_eq!(
            planned(&[500, 100, 100, 100], 2),
            [(0..1, true), (1..2, true), (2..3, false), (3..4, false)],
            "all together until the rest is even"
        );
        assert_eq!(planned(&[380, 400], 2), [(0..1, false), (1..2, false)], "almost equal is good enough");
        assert_eq!(planned(&[380, 400, 390], 2), [(1..2, true), (0..1, false), (2..3, false)], "none runs alone");
        assert!(planned(&[], 2).is_empty());
    }

    #[test]
    fn every_sequence_is_in_one_group() {
        let mut state = 7_u32;
        for round in 0..300 {
            let lengths: Vec<usize> = (0..round % 70 + 1)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    1 + (state >> 16) as usize % if round % 3 == 0 { 600 } else { 40 }
                })
                .collect();
            for threads in [1, 2, 5, 64] {
                let mut groups = planned(&lengths, threads);
                groups.sort_by_key(|(sequences, _)| sequences.start);
                let mut next = 0;
                for (sequences, _) in &groups {
                    assert_eq!(sequences.start, next);
                    assert!(!sequences.is_empty());
                    next = sequences.end;
                }
                assert_eq!(next, lengths.len());
            }
        }
    }
}
