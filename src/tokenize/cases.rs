//! Single cases: what a text becomes, what is refused, and floods of 10 MB.

use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use super::tests::{MINILM, Whole, edited, load, options};
use super::*;
use std::path::Path;

use crate::error::ErrorKind;

const CLS: u32 = 101;
const SEP: u32 = 102;
const UNK: u32 = 100;

fn ids(text: &str) -> Vec<u32> {
    load(16, Truncation::Right).encode(text, None).unwrap().input_ids
}

#[test]
fn texts_get_special_tokens_and_no_padding() {
    assert_eq!(ids(""), [CLS, SEP]);
    assert_eq!(ids(" \0\n"), [CLS, SEP]);
    assert_eq!(ids("Hello, WORLD"), [CLS, 7592, 1010, 2088, SEP]);
    assert_eq!(ids("hel\0lo"), [CLS, 7592, SEP], "NUL follows the tokenizer, which drops it");
    assert_eq!(ids("a [SEP] b"), [CLS, 1037, SEP, 1038, SEP], "added tokens are found in texts, as the reference does");
}

#[test]
fn the_file_s_own_length_is_not_used() {
    let tokens = load(256, Truncation::Right).encode(&"hello ".repeat(300), None).unwrap();
    assert_eq!((tokens.input_ids.len(), tokens.truncated), (256, true));
    let tokens = load(256, Truncation::Right).encode(&"hello ".repeat(254), None).unwrap();
    assert_eq!((tokens.input_ids.len(), tokens.truncated), (256, false));
}

#[test]
fn pairs_have_two_segments_and_lose_tokens_longest_first() {
    let encode = |max_length, first: usize, second: usize, truncation| {
        let (first, second) = ("hello ".repeat(first), "world ".repeat(second));
        let tokens = load(max_length, truncation).encode(&first, Some(&second)).unwrap();
        let kept = |id| tokens.input_ids.iter().filter(|&&found| found == id).count();
        let seconds = tokens.token_type_ids.iter().filter(|&&segment| segment == 1).count();
        assert_eq!(seconds, kept(2088) + 1, "the second text and its [SEP]");
        (kept(7592), kept(2088), tokens.truncated)
    };
    assert_eq!(encode(16, 3, 4, Truncation::Right), (3, 4, false));
    assert_eq!(encode(16, 3, 100, Truncation::Right), (3, 10, true));
    assert_eq!(encode(16, 100, 3, Truncation::Left), (10, 3, true));
    assert_eq!(encode(17, 100, 200, Truncation::Right), (7, 7, true));
    // The odd token goes to the longer text, however far behind the cut the difference is.
    assert_eq!(encode(16, 5000, 5001, Truncation::Right), (6, 7, true));
    assert_eq!(encode(16, 5001, 5000, Truncation::Left), (7, 6, true));
    assert_eq!(encode(16, 5000, 5000, Truncation::Right), (6, 7, true));
    // Texts that are both longer than anyone counts are equal.
    assert_eq!(encode(16, 100_001, 100_000, Truncation::Right), (6, 7, true));
}

#[test]
fn empty_halves_of_pairs_stay() {
    let encode = |first, second| load(16, Truncation::Right).encode(first, Some(second)).unwrap();
    assert_eq!(encode("", "").input_ids, [CLS, SEP, SEP]);
    assert_eq!(encode("hello", "").token_type_ids, [0, 0, 0, 1]);
}

#[test]
fn token_types_can_be_off() {
    let options = TokenizeOptions { token_types: false, ..options(16, Truncation::Right) };
    let tokens = Tokenizer::from_bytes(&MINILM, options).unwrap().encode("hello", Some("world")).unwrap();
    assert_eq!(tokens.token_type_ids, [0; 5]);
}

#[test]
fn templates_follow_the_post_processor() {
    let encode = |post_processor: Json| {
        let json = edited(|file| file["post_processor"] = post_processor);
        let tokenizer = Tokenizer::from_bytes(&json, options(16, Truncation::Right)).unwrap();
        assert_eq!(tokenizer.max_token_type_id(false), 0);
        tokenizer.encode("hello", Some("world")).unwrap()
    };
    let bert = encode(json!({"type": "BertProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101]}));
    assert_eq!((bert.input_ids, bert.token_type_ids), (vec![101, 7592, 102, 2088, 102], vec![0, 0, 0, 1, 1]));
    let roberta = encode(json!({"type": "RobertaProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101],
                                "trim_offsets": true, "add_prefix_space": false}));
    assert_eq!((roberta.input_ids, roberta.token_type_ids), (vec![101, 7592, 102, 102, 2088, 102], vec![0; 6]));
    let none = encode(json!(null));
    assert_eq!(none.input_ids, [7592, 2088]);
}

#[test]
fn too_long_texts_are_refused_when_asked() {
    let tokenizer = load(5, Truncation::Error);
    assert!(tokenizer.encode("one two three", None).is_ok());
    let error = tokenizer.encode("one two three secret", None).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Invalid);
    assert!(error.message.contains("max_length 5") && !error.message.contains("secret"), "{error}");
    assert!(tokenizer.encode("one", Some("two")).is_ok());
    assert_eq!(tokenizer.encode("one two", Some("three")).unwrap_err().kind, ErrorKind::Invalid);
}

#[test]
fn a_length_without_room_for_text_is_refused() {
    let refused = |max_length| Tokenizer::from_bytes(&MINILM, options(max_length, Truncation::Right)).err();
    assert!(refused(2).is_some_and(|error| error.message.contains("at least 3")));
    let error = load(3, Truncation::Right).encode("a", Some("b")).unwrap_err();
    assert!(error.message.contains("pair"), "{error}");
    assert_eq!(load(4, Truncation::Right).encode("a a", Some("b b")).unwrap().input_ids, [CLS, SEP, 1038, SEP]);
}

#[test]
fn ids_have_a_known_maximum() {
    let tokenizer = load(16, Truncation::Right);
    assert_eq!(tokenizer.max_token_id(), 30521);
    assert_eq!((tokenizer.max_token_type_id(false), tokenizer.max_token_type_id(true)), (0, 1));
    assert_eq!((tokenizer.special_tokens(false), tokenizer.special_tokens(true)), (2, 3));
}

#[test]
fn hostile_files_are_refused() {
    let model = |model: Json| json!({"version": "1.0", "model": model}).to_string().into_bytes();
    let files: Vec<(&str, Vec<u8>)> = vec![
        ("empty", vec![]),
        ("cut off", MINILM[..MINILM.len() / 2].to_vec()),
        ("not UTF-8", vec![0xff; 1000]),
        ("deep arrays", "[".repeat(100_000).into_bytes()),
        ("deep objects", "{\"a\":".repeat(100_000).into_bytes()),
        ("deep normalizers", edited_text("normalizer", &nested(50_000, "normalizers"))),
        ("an array", b"[]".to_vec()),
        ("no model", b"{\"version\":\"1.0\"}".to_vec()),
        ("another version", edited(|file| file["version"] = json!("9"))),
        ("model of another type", edited(|file| file["model"] = json!(7))),
        ("vocabulary of another type", edited(|file| file["model"]["vocab"] = json!(["a", "b"]))),
        ("negative id", edited(|file| file["model"]["vocab"]["the"] = json!(-1))),
        ("huge id", edited(|file| file["model"]["vocab"]["the"] = json!(1u64 << 40))),
        ("huge number", edited_text("model", "1e400")),
        ("no unknown token", edited(|file| file["model"]["unk_token"] = json!("[NONE]"))),
        ("unknown normalizer", edited(|file| file["normalizer"] = json!({"type": "Nonsense"}))),
        (
            "broken precompiled map (a panic inside the crate)",
            edited(|file| file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA////"})),
        ),
        ("template with an unknown token", edited(|file| file["post_processor"]["special_tokens"] = json!({}))),
        (
            "bad expression",
            edited(|file| {
                let split =
                    json!({"type": "Split", "pattern": {"Regex": "(((("}, "behavior": "Isolated", "invert": false});
                file["pre_tokenizer"] = split;
            }),
        ),
        ("merges of nothing", model(json!({"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}))),
        ("unigram without its unknown", model(json!({"type": "Unigram", "unk_id": 9, "vocab": []}))),
    ];
    for (what, json) in files {
        match Tokenizer::from_bytes(&json, options(16, Truncation::Right)) {
            Ok(_) => panic!("{what}: accepted"),
            Err(error) => assert_eq!(error.kind, ErrorKind::Invalid, "{what}: {error}"),
        }
    }
}

/// MiniLM's file with a member replaced by a text that need not be JSON that anyone can parse.
fn edited_text(member: &str, text: &str) -> Vec<u8> {
    let json = String::from_utf8(edited(|file| file[member] = json!("REPLACED"))).unwrap();
    json.replace("\"REPLACED\"", text).into_bytes()
}

fn nested(depth: usize, member: &str) -> String {
    format!("{{\"type\":\"Sequence\",\"{member}\":[").repeat(depth) + &"]}".repeat(depth)
}

/// 10 MB of anything take a moment, and give what they should.
#[test]
fn floods_are_cheap() {
    let floods: [(&str, &[u32]); 14] = [
        (" ", &[]),
        ("\0", &[]),
        (" \0", &[]),
        ("\u{301}", &[]),
        ("a", &[UNK]),
        ("e\u{301}", &[UNK]),
        ("😀", &[UNK]),
        ("\u{302e}", &[UNK]),
        ("0123456789abcdef", &[UNK]),
        ("中", &[1746; 14]),
        ("!", &[999; 14]),
        ("[SEP]", &[SEP; 14]),
        ("hello ", &[7592; 14]),
        ("[", &[1031; 14]),
    ];
    for truncation in [Truncation::Right, Truncation::Left] {
        let tokenizer = load(16, truncation);
        for (of, expected) in floods {
            let text = of.repeat(10_000_000 / of.len());
            let started = Instant::now();
            let tokens = tokenizer.encode(&text, None).unwrap();
            let took = started.elapsed();
            assert_eq!(tokens.input_ids, [&[CLS], expected, &[SEP]].concat(), "{of:?}, {truncation:?}");
            assert_eq!(tokens.truncated, expected.len() == 14, "{of:?}, {truncation:?}");
            // A tenth of a second on an idle core; other tests run beside this one.
            assert!(took < Duration::from_secs(5), "{of:?}, {truncation:?}: {took:?}");
        }
    }
}

/// Both sides of a flood are found: what it hides is tokenized as if it were not there.
#[test]
fn floods_hide_nothing() {
    let tokenizer = load(16, Truncation::Right);
    let flood = |of: &str| of.repeat(300_000 / of.len());
    let nothing = [flood("\0"), flood("\u{301}"), flood("\0\u{301}\u{ad}")];
    for nothing in nothing {
        let text = format!("hel{nothing}lo{nothing} wor{nothing}ld{nothing}");
        assert_eq!(tokenizer.encode(&text, None).unwrap().input_ids, [CLS, 7592, 2088, SEP]);
    }
    let text = format!("hello{}world{}[SEP]", flood(" "), flood("\n\t"));
    assert_eq!(tokenizer.encode(&text, None).unwrap().input_ids, [CLS, 7592, 2088, SEP, SEP]);
}

/// A mark that vanishes keeps the two beside it in their order, however many others vanish with it.
#[test]
fn floods_keep_what_parts_two_marks() {
    let json = edited(|file| {
        file["model"]["vocab"]["##\u{302e}"] = json!(30522);
        file["model"]["vocab"]["##\u{1d165}"] = json!(30523);
    });
    let options = options(16, Truncation::Right);
    let (tokenizer, whole) = (Tokenizer::from_bytes(&json, options).unwrap(), Whole::new(&json));
    let flood = "\u{301}\0".repeat(5000);
    for (between, expected) in [("", [30523, 30522]), ("\u{941}", [30522, 30523])] {
        let text = format!("x\u{302e}{flood}{between}{flood}\u{1d165}");
        let found = tokenizer.encode(&text, None).unwrap();
        assert_eq!(found.input_ids[2..4], expected);
        assert_eq!(found, whole.encode(&text, None, options));
    }
}

/// The crate can run on all cores by itself, in threads that nobody ends; here it must not.
#[test]
fn the_crate_starts_no_threads_and_many_may_encode() {
    let tokenizer = load(64, Truncation::Right);
    let texts: Vec<String> = (0..200).map(|i| format!("text {i} \u{e9} {}", "word ".repeat(i))).collect();
    let alone: Vec<Tokens> = texts.iter().map(|text| tokenizer.encode(text, None).unwrap()).collect();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for (text, alone) in texts.iter().zip(&alone) {
                    assert_eq!(tokenizer.encode(text, None).unwrap(), *alone);
                }
            });
        }
    });
    assert!(!tokenizers::parallelism::has_parallelism_been_used());
}

/// Each character that parts words, and a sample of the ideographs, between neighbours of every kind.
#[test]
fn cuts_beside_every_splitting_character_are_exact() {
    let mut tokenizer = load(64, Truncation::Right);
    let (mut whole, mut cut) = (String::new(), 0);
    for c in (0..=0x2ffff).filter_map(char::from_u32) {
        let boundaries = tokenizer.boundaries.as_ref().unwrap();
        if matches!(boundaries.image(c), boundaries::Image::Word(_) | boundaries::Image::Nothing)
            || c as u32 % 64 > 8 && c.is_alphabetic()
        {
            continue;
        }
        cut += 1;
        whole.clear();
        for (before, after) in
            [("a", "b"), ("e\u{301}", "\u{334}\u{302e}\u{1d165}x"), ("\u{302e}", "\u{323}"), ("\0", "中")]
        {
            whole.push_str(before);
            whole.push(c);
            whole.push_str(after);
        }
        tokenizer.window = usize::MAX;
        tokenizer.options.max_length = 64;
        let expected = tokenizer.encode(&whole, None).unwrap();
        tokenizer.window = 1;
        assert_eq!(tokenizer.encode(&whole, None).unwrap(), expected, "{c:?}");
    }
    assert!(cut > 1000, "{cut} characters split");
}

/// The ids that transformers gives, for every text and pair of the corpus.
#[test]
fn ids_are_those_of_transformers() {
    let read = |file: &str| -> Json {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference").join(file);
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    };
    let (corpus, tokens) = (read("corpus.json"), read("tokens.json"));
    for (model, list) in [("minilm", "texts"), ("sentiment_pairs", "pairs")] {
        let model = &tokens["tokenizers"][model];
        let tokenizer = load(model["max_length"].as_u64().unwrap() as usize, Truncation::Right);
        let names = model["names"].as_array().unwrap();
        for (name, row) in names.iter().zip(model["rows"].as_array().unwrap()) {
            let entry = corpus[list].as_array().unwrap().iter().find(|entry| entry["name"] == *name).unwrap();
            let found = tokenizer.encode(entry["text"].as_str().unwrap(), entry["text_pair"].as_str()).unwrap();
            assert_eq!(json!(found.input_ids), row["ids"], "{name}");
            let types_from = found.token_type_ids.iter().take_while(|&&segment| segment == 0).count();
            assert_eq!(json!(types_from), row["types_from"], "{name}");
        }
    }
}
