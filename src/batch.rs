//! The packed batch: the tokens of many sequences one after another, with no padding, and the plan that cuts many
//! sequences into passes of a token budget.

/// The tokens of one pass, `T = total_tokens`, `B` sequences.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PackedBatch {
    /// `[T]` token ids, each below the model's `vocab_size`.
    pub input_ids: Vec<u32>,
    /// `[T]` segment of each token, each below the model's `type_vocab_size`.
    pub token_type_ids: Vec<u32>,
    /// `[B + 1]`: sequence `i` holds the tokens `cu_seqlens[i] .. cu_seqlens[i + 1]`; the first entry is 0.
    pub cu_seqlens: Vec<u32>,
}

impl PackedBatch {
    /// An empty batch.
    pub fn new() -> Self {
        Self { input_ids: Vec::new(), token_type_ids: Vec::new(), cu_seqlens: vec![0] }
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.input_ids.clear();
        self.token_type_ids.clear();
        self.cu_seqlens.clear();
        self.cu_seqlens.push(0);
    }

    /// Appends one sequence. `input_ids` and `token_type_ids` are `[S]` with the same, non-zero `S`.
    pub fn push(&mut self, input_ids: &[u32], token_type_ids: &[u32]) {
        assert_eq!(input_ids.len(), token_type_ids.len(), "one segment a token");
        assert!(!input_ids.is_empty(), "a sequence has at least one token");
        self.input_ids.extend_from_slice(input_ids);
        self.token_type_ids.extend_from_slice(token_type_ids);
        self.cu_seqlens.push(u32::try_from(self.input_ids.len()).expect("a pass has fewer than 2^32 tokens"));
    }

    /// `B`, the number of sequences.
    pub fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// `T`, the number of tokens.
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// The token range of sequence `i`.
    pub fn range(&self, i: usize) -> std::ops::Range<usize> {
        self.cu_seqlens[i] as usize..self.cu_seqlens[i + 1] as usize
    }
}

/// Cuts sequences into passes of at most `max_batch_tokens` tokens each and returns the sequence indices of each pass.
/// A sequence that is longer than the budget is a pass of its own. Sequences are taken shortest first: a pass then holds
/// sequences of like length, and short texts are answered before the long ones that came with them (the mean waiting time
/// is the least that any order gives); equal lengths keep their order.
pub fn plan_passes(lengths: &[usize], max_batch_tokens: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&i| lengths[i]);
    let mut passes: Vec<Vec<usize>> = Vec::new();
    let mut tokens = 0;
    for i in order {
        match passes.last_mut() {
            Some(pass) if tokens + lengths[i] <= max_batch_tokens => {
                pass.push(i);
                tokens += lengths[i];
            }
            _ => {
                passes.push(vec![i]);
                tokens = lengths[i];
            }
        }
    }
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_without_padding() {
        let mut batch = PackedBatch::new();
        batch.push(&[101, 7, 102], &[0, 0, 0]);
        batch.push(&[101, 102], &[0, 1]);
        assert_eq!(batch.input_ids, [101, 7, 102, 101, 102]);
        assert_eq!(batch.cu_seqlens, [0, 3, 5]);
        assert_eq!((batch.sequences(), batch.tokens(), batch.range(1)), (2, 5, 3..5));
        batch.clear();
        assert_eq!((batch.sequences(), batch.tokens()), (0, 0));
    }

    #[test]
    fn passes_hold_the_budget_shortest_first_and_lose_nothing() {
        let lengths = [3, 9, 4, 20, 1, 4];
        let passes = plan_passes(&lengths, 10);
        assert_eq!(passes, [vec![4, 0, 2], vec![5], vec![1], vec![3]]);
        for pass in &passes {
            let tokens: usize = pass.iter().map(|&i| lengths[i]).sum();
            assert!(tokens <= 10 || pass.len() == 1);
        }
        assert!(plan_passes(&[], 10).is_empty());
    }
}
