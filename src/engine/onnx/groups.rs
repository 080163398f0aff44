//! Length groups: which sequences run together, padded to the longest of them.

use std::ops::Range;

/// What one run of the graph costs beside its tokens, in tokens: calls, threads that wake up, small matrix products.
const RUN_TOKENS: usize = 32;

/// Cuts sequences, given by their lengths in ascending order, into the groups of least cost: every sequence of a group
/// costs as much as the longest. Without `padding` the sequences of a group have one length.
pub(super) fn plan(lengths: &[usize], padding: bool) -> Vec<Range<usize>> {
    // Sequences of one length are never parted, so what counts is where a new length begins.
    let mut ends: Vec<usize> = (1..lengths.len()).filter(|&i| lengths[i] != lengths[i - 1]).collect();
    if !lengths.is_empty() {
        ends.push(lengths.len());
    }
    // The least cost of the sequences before each place, and where the last group of those begins.
    let mut best = vec![(0, 0); ends.len() + 1];
    for (last, &end) in ends.iter().enumerate() {
        let longest = lengths[end - 1];
        let from = if padding { 0 } else { last };
        let cost = |first: usize| {
            let start = first.checked_sub(1).map_or(0, |before| ends[before]);
            best[first].0 + RUN_TOKENS + (end - start) * longest
        };
        best[last + 1] = (from..=last).map(|first| (cost(first), first)).min().unwrap_or((0, 0));
    }
    let mut groups = Vec::new();
    let mut at = ends.len();
    while at > 0 {
        let first = best[at].1;
        groups.push(first.checked_sub(1).map_or(0, |before| ends[before])..ends[at - 1]);
        at = first;
    }
    groups.reverse();
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(lengths: &[usize], groups: &[Range<usize>]) -> usize {
        groups.iter().map(|group| RUN_TOKENS + group.len() * lengths[group.end - 1]).sum()
    }

    #[test]
    fn no_cut_is_cheaper() {
        let lengths = [3, 3, 5, 9, 9, 40, 41, 200, 260];
        let groups = plan(&lengths, true);
        let all = 1 << (lengths.len() - 1);
        let least = (0..all).map(|cuts: usize| {
            let places = (0..lengths.len() - 1).filter(|i| cuts >> i & 1 == 1).map(|i| i + 1);
            let edges: Vec<usize> = [0].into_iter().chain(places).chain([lengths.len()]).collect();
            cost(&lengths, &edges.windows(2).map(|pair| pair[0]..pair[1]).collect::<Vec<_>>())
        });
        assert_eq!(Some(cost(&lengths, &groups)), least.min());
        assert_eq!(groups, [0..5, 5..7, 7..8, 8..9]);
    }

    #[test]
    fn without_padding_a_group_has_one_length() {
        assert_eq!(plan(&[3, 3, 5, 9, 9], false), [0..2, 2..3, 3..5]);
        assert_eq!(plan(&[4, 4, 90], true), [0..2, 2..3]);
        assert!(plan(&[], true).is_empty());
    }
}
