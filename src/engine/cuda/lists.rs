//! What the kernels of a pass read beside the hidden states: one block of words, copied to the device at once.

use super::kernels::{DeviceType, SHORT_ROWS};
use crate::batch::PackedBatch;
use crate::engine::{Output, Slot};
use crate::head::Value;

/// The block of one pass of `T` tokens, `B` sequences, `N` rows of output, and where in it what is. Places are counted
/// in words of 4 bytes.
#[derive(Default)]
pub(super) struct Lists {
    words: Vec<u32>,
    /// `[T]` each.
    pub input_ids: usize,
    pub token_type_ids: usize,
    pub position_ids: usize,
    /// `[B + 1]`; without the last, the index of each sequence's first token.
    pub cu_seqlens: usize,
    /// `[B + 1]`: 0, 1, 2 ..., for rows of which there is one a sequence.
    pub counted: usize,
    /// `[tile_count, 2]`: sequence and first query row. The `first_tile_count` tiles with first tokens come first.
    pub tiles: usize,
    pub tile_count: usize,
    pub first_tile_count: usize,
    /// `[short_count]`: sequences that one warp a head can do, the longest of `short_longest` tokens.
    pub short: usize,
    pub short_count: usize,
    pub short_longest: usize,
    /// Of an embed head, `[N]`: addresses (u64) and sequences.
    pub addresses: usize,
    pub sequences: usize,
    pub row_count: usize,
    /// Of a classify head: each `[B]` addresses (u64) of logits, then as many of probabilities; 0 where none is wanted.
    pub rounds: Vec<usize>,
    /// The word that a kernel sets when a result is not finite, followed by the rows for host memory.
    pub not_finite: usize,
}

/// Words from the flag to the first row.
pub(super) const FLAG_WORDS: usize = 4;

impl Lists {
    /// All words, to be copied to the beginning of the block.
    pub(super) fn words(&self) -> &[u32] {
        &self.words
    }

    /// Words of the block with the rows for host memory.
    pub(super) fn total_words(&self, rows: usize) -> usize {
        self.not_finite + FLAG_WORDS + rows
    }

    /// Words of the block of any pass of `tokens` tokens with up to `width` fp32 of output a sequence: a text has two
    /// tokens at least.
    pub(super) fn usual_words(tokens: usize, width: usize) -> usize {
        let sequences = tokens.div_ceil(2);
        // Three ids; two lengths, two tiles or a short sequence, two addresses.
        3 * tokens + sequences * (2 + 4 + 4 + width) + 64
    }

    /// Makes the lists of a pass, but for the addresses of its output rows. A tile of attention has `tile_rows` query
    /// rows.
    pub(super) fn fill(&mut self, batch: &PackedBatch, outputs: &[Output<'_>], dtype: DeviceType, tile_rows: usize) {
        self.words.clear();
        self.rounds.clear();
        self.fill_tokens(batch);
        self.fill_attention(batch, dtype, tile_rows);
        self.align(2);
        let embed = outputs.first().is_some_and(|output| output.value == Value::Embedding);
        if embed {
            self.row_count = outputs.len();
            self.addresses = self.zeros(2 * outputs.len());
            self.sequences = self.push(outputs.iter().map(|output| output.sequence as u32));
        } else {
            // A sequence that is asked twice for a value (for two places) needs a second round.
            let twins = |(i, output): (usize, &Output<'_>)| {
                let same = outputs[..i].iter().rev().take_while(|other| other.sequence == output.sequence);
                same.filter(|other| other.value == output.value).count()
            };
            let rounds = outputs.iter().enumerate().map(twins).max().map_or(0, |most| most + 1);
            for _ in 0..rounds {
                let round = self.zeros(4 * batch.sequences());
                self.rounds.push(round);
            }
        }
        self.align(4);
        self.not_finite = self.zeros(FLAG_WORDS);
    }

    /// Writes where each output row goes: a device slot's own address, or a place among the rows of the block at `base`,
    /// one after another. Returns how many words those rows have.
    pub(super) fn fill_addresses(&mut self, batch: &PackedBatch, outputs: &[Output<'_>], base: u64) -> usize {
        let rows = self.not_finite + FLAG_WORDS;
        let mut used = 0;
        for (row, output) in outputs.iter().enumerate() {
            let address = match &output.slot {
                Slot::Device { address, .. } => *address,
                Slot::Host(slot) => {
                    let address = base + 4 * (rows + used) as u64;
                    used += slot.len();
                    address
                }
            };
            let place = match output.value {
                Value::Embedding => self.addresses + 2 * row,
                value => {
                    let half = if value == Value::Logits { 0 } else { 2 * batch.sequences() };
                    let free = |round: &&usize| {
                        let at = **round + half + 2 * output.sequence;
                        self.words[at] == 0 && self.words[at + 1] == 0
                    };
                    self.rounds.iter().find(free).map_or(0, |round| round + half + 2 * output.sequence)
                }
            };
            self.words[place] = address as u32;
            self.words[place + 1] = (address >> 32) as u32;
        }
        used
    }

    fn fill_tokens(&mut self, batch: &PackedBatch) {
        self.input_ids = self.push(batch.input_ids.iter().copied());
        self.token_type_ids = self.push(batch.token_type_ids.iter().copied());
        self.position_ids = self.push((0..batch.sequences()).flat_map(|i| 0..batch.range(i).len() as u32));
        self.cu_seqlens = self.push(batch.cu_seqlens.iter().copied());
        self.counted = self.push(0..batch.cu_seqlens.len() as u32);
    }

    fn fill_attention(&mut self, batch: &PackedBatch, dtype: DeviceType, tile_rows: usize) {
        let short = |len: usize| dtype != DeviceType::F32 && len <= SHORT_ROWS;
        // The longest first: what runs at the end is then small.
        let mut order: Vec<(usize, u32)> = (0..batch.sequences()).map(|i| (batch.range(i).len(), i as u32)).collect();
        order.sort_unstable_by_key(|&(len, i)| (std::cmp::Reverse(len), i));
        let split = order.partition_point(|&(len, _)| !short(len));
        let (long, short) = order.split_at(split);
        let firsts = long.iter().map(|&(_, i)| [i, 0]);
        let later =
            long.iter().flat_map(|&(len, i)| (0..len).step_by(tile_rows).skip(1).map(move |row| [i, row as u32]));
        self.tiles = self.push(firsts.chain(later).flatten());
        self.first_tile_count = long.len();
        self.tile_count = (self.words.len() - self.tiles) / 2;
        self.short = self.push(short.iter().map(|&(_, i)| i));
        self.short_count = short.len();
        self.short_longest = short.first().map_or(0, |&(len, _)| len);
    }

    fn push(&mut self, words: impl Iterator<Item = u32>) -> usize {
        let start = self.words.len();
        self.words.extend(words);
        start
    }

    fn zeros(&mut self, count: usize) -> usize {
        self.push(std::iter::repeat_n(0, count))
    }

    fn align(&mut self, words: usize) {
        self.words.resize(self.words.len().next_multiple_of(words), 0);
    }
}
