//! Sessions by a clock that the test turns.

use std::time::Duration;

use triton_abi::{Code, SequenceFlags, SequenceId};

use super::sessions::Sessions;
use crate::config::sequence::{Sequences, Strategy};
use crate::tokenize::{TokenizeOptions, Tokenizer, Tokens, Truncation};

const START: SequenceFlags = SequenceFlags { start: true, end: false };
const NEXT: SequenceFlags = SequenceFlags { start: false, end: false };
const END: SequenceFlags = SequenceFlags { start: false, end: true };
const WHOLE: SequenceFlags = SequenceFlags { start: true, end: true };
const SECOND: u64 = 1_000_000_000;

/// Words are the numbers 10 to 99, each a token; CLS is 1, SEP 2.
fn tokenizer(max_length: usize) -> Tokenizer {
    let words = (10..100).map(|id| (id.to_string(), id));
    let special = [("[UNK]".to_owned(), 0), ("[CLS]".to_owned(), 1), ("[SEP]".to_owned(), 2)];
    let vocabulary: std::collections::BTreeMap<String, u32> = words.chain(special).collect();
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "BertPreTokenizer" }, "decoder": null,
        "post_processor": { "type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1] },
        "model": { "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 100, "vocab": vocabulary },
    });
    let options = TokenizeOptions { max_length, truncation: Truncation::Right, token_types: true };
    Tokenizer::from_json(&json, options).expect("a tokenizer")
}

struct Chat {
    tokenizer: Tokenizer,
    sessions: Sessions,
    now: u64,
}

impl Chat {
    /// Sessions of up to `max_length` tokens, `slots` in progress, which the server ends after a second.
    fn new(strategy: Strategy, slots: usize, max_length: usize) -> Self {
        let tokenizer = tokenizer(max_length);
        let sequences = Sequences { strategy, slots, id: None, ready: None, idle: Duration::from_secs(1) };
        let layout = tokenizer.turn_layout().expect("BERT's");
        Self { sessions: Sessions::new(&sequences, layout, max_length), tokenizer, now: 5 * SECOND }
    }

    /// One request in a batch of its own, in slot `slot`; gives the ids of its context.
    fn say_in(&mut self, slot: usize, id: u64, flags: SequenceFlags, text: &str) -> Result<Vec<u32>, Code> {
        let taken = self.sessions.take(slot, Some(SequenceId::Number(id)), flags, self.now);
        let mut turn = taken.map_err(|error| error.code())?;
        self.sessions.sweep(self.now);
        let tokens = self.sessions.add(&mut turn, &self.tokens(text)).expect("has a session");
        self.sessions.keep(turn);
        Ok(tokens.input_ids)
    }

    fn say(&mut self, id: u64, flags: SequenceFlags, text: &str) -> Result<Vec<u32>, Code> {
        self.say_in(id as usize, id, flags, text)
    }

    fn tokens(&self, text: &str) -> Tokens {
        self.tokenizer.encode(text, None).expect("short")
    }
}

#[test]
fn turns_add_up_until_end_and_start_begins_anew() {
    for strategy in [Strategy::Direct, Strategy::Oldest] {
        let mut chat = Chat::new(strategy, 4, 32);
        assert_eq!(chat.say(1, START, "10 11").unwrap(), [1, 10, 11, 2]);
        assert_eq!(chat.say(2, START, "50").unwrap(), [1, 50, 2]);
        assert_eq!(chat.say(1, NEXT, "12").unwrap(), [1, 10, 11, 2, 12, 2]);
        assert_eq!(chat.say(2, NEXT, "").unwrap(), [1, 50, 2, 2]);
        assert_eq!(chat.say(1, START, "13").unwrap(), [1, 13, 2]);
        assert_eq!(chat.say(1, END, "14").unwrap(), [1, 13, 2, 14, 2]);
        assert_eq!(chat.sessions.len(), 1, "END frees");
        assert_eq!(chat.say(1, NEXT, "15").unwrap_err(), Code::Unavailable);
        assert_eq!(chat.say(1, WHOLE, "15").unwrap(), [1, 15, 2]);
        assert_eq!(chat.sessions.len(), 1);
        assert_eq!(chat.say(2, END, "51").unwrap(), [1, 50, 2, 2, 51, 2]);
        assert_eq!(chat.sessions.len(), 0);
    }
}

#[test]
fn the_newest_whole_turns_that_fit_are_kept() {
    let mut chat = Chat::new(Strategy::Oldest, 4, 10);
    chat.say(1, START, "10 11 12").unwrap();
    assert_eq!(chat.say(1, NEXT, "13 14 15 16").unwrap(), [1, 10, 11, 12, 2, 13, 14, 15, 16, 2], "exactly all");
    assert_eq!(chat.say(1, NEXT, "17").unwrap(), [1, 13, 14, 15, 16, 2, 17, 2]);
    assert_eq!(chat.say(1, NEXT, "18").unwrap(), [1, 13, 14, 15, 16, 2, 17, 2, 18, 2]);
    // One that fills the room itself, cut as a text alone is.
    let long: Vec<String> = (20..60).map(|word| word.to_string()).collect();
    assert_eq!(chat.say(1, NEXT, &long.join(" ")).unwrap(), [1, 20, 21, 22, 23, 24, 25, 26, 27, 2]);
    // What is kept is bounded, also where the turns are empty.
    for _ in 0..1000 {
        assert!(chat.say(1, NEXT, "").unwrap().len() <= 10);
    }
    assert_eq!(chat.say(1, NEXT, "").unwrap(), [1, 2, 2, 2, 2, 2, 2, 2, 2, 2]);
}

#[test]
fn sessions_go_by_the_clock_and_not_before_it() {
    let mut chat = Chat::new(Strategy::Oldest, 8, 32);
    chat.say(1, START, "10").unwrap();
    chat.now += SECOND;
    chat.say(2, START, "20").unwrap();
    chat.now += SECOND - 1;
    chat.say(3, START, "30").unwrap();
    assert_eq!(chat.sessions.len(), 3, "none is two seconds old");
    chat.now += 1;
    chat.say(3, NEXT, "31").unwrap();
    assert_eq!(chat.sessions.len(), 2);
    assert_eq!(chat.say(1, NEXT, "11").unwrap_err(), Code::Unavailable);
    // A turn that waited long in the server's queue still finds its session: it is taken before the sweep.
    chat.now += 10 * SECOND;
    assert_eq!(chat.say(2, NEXT, "21").unwrap(), [1, 20, 2, 21, 2]);
    assert_eq!(chat.sessions.len(), 1);
    chat.now += 10 * SECOND;
    chat.sessions.sweep(chat.now);
    assert_eq!(chat.sessions.len(), 0);
}

#[test]
fn sessions_are_bounded_and_the_idlest_goes_first() {
    let mut chat = Chat::new(Strategy::Oldest, 4, 32);
    for id in 1..=8 {
        chat.now += 1;
        chat.say(id, START, "10").unwrap();
    }
    chat.say(1, NEXT, "11").unwrap();
    for id in 100..1000 {
        chat.now += 1;
        chat.say(id, START, "10").unwrap();
        assert!(chat.sessions.len() <= 8, "{}", chat.sessions.len());
        chat.say(1, NEXT, "11").unwrap();
    }
    assert_eq!(chat.say(2, NEXT, "11").unwrap_err(), Code::Unavailable);

    let mut chat = Chat::new(Strategy::Direct, 4, 32);
    for id in 1..1000 {
        chat.say_in(id as usize % 4, id, START, "10").unwrap();
    }
    assert_eq!(chat.sessions.len(), 4);
}

#[test]
fn with_the_direct_strategy_two_sessions_of_one_id_do_not_mix() {
    let mut chat = Chat::new(Strategy::Direct, 4, 32);
    chat.say_in(0, 7, START, "10").unwrap();
    chat.say_in(1, 7, START, "20").unwrap();
    assert_eq!(chat.say_in(0, 7, END, "11").unwrap(), [1, 10, 2, 11, 2]);
    assert_eq!(chat.say_in(1, 7, END, "21").unwrap(), [1, 20, 2, 21, 2]);
    // The slot's next session is another's.
    chat.say_in(2, 8, START, "30").unwrap();
    assert_eq!(chat.say_in(2, 9, NEXT, "31").unwrap_err(), Code::Unavailable);
}

#[test]
fn with_the_oldest_strategy_an_end_and_the_next_start_may_share_a_batch() {
    let mut chat = Chat::new(Strategy::Oldest, 4, 32);
    chat.say(7, START, "10").unwrap();
    let id = || Some(SequenceId::Number(7));
    let mut old = chat.sessions.take(0, id(), END, chat.now).unwrap();
    let mut new = chat.sessions.take(1, id(), START, chat.now).unwrap();
    assert_eq!(chat.sessions.add(&mut old, &chat.tokens("11")).unwrap().input_ids, [1, 10, 2, 11, 2]);
    assert_eq!(chat.sessions.add(&mut new, &chat.tokens("20")).unwrap().input_ids, [1, 20, 2]);
    chat.sessions.keep(old);
    chat.sessions.keep(new);
    assert_eq!(chat.say(7, NEXT, "21").unwrap(), [1, 20, 2, 21, 2]);
}

#[test]
fn a_turn_that_is_not_added_changes_nothing() {
    let mut chat = Chat::new(Strategy::Oldest, 4, 32);
    let id = || Some(SequenceId::Text((*b"a").into()));
    let refused = chat.sessions.take(0, id(), START, chat.now).unwrap();
    chat.sessions.keep(refused);
    let mut turn = chat.sessions.take(0, id(), NEXT, chat.now).expect("START held all the same");
    assert_eq!(chat.sessions.add(&mut turn, &chat.tokens("10")).unwrap().input_ids, [1, 10, 2]);
    chat.sessions.keep(turn);
    let mut alone = chat.sessions.take(0, None, NEXT, chat.now).unwrap();
    assert_eq!(chat.sessions.add(&mut alone, &chat.tokens("10")), None, "no id, no session");
    chat.sessions.keep(alone);
    assert_eq!(chat.sessions.len(), 1);
}
