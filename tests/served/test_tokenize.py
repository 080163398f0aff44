"""task=tokenize: the ids, masks, segments and offsets that transformers gives."""

import json
import shutil

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import STATUS, as_bytes, until
from reference import DIRECTORY

TASK = {"task": "tokenize"}
OUTPUTS = {"INPUT_IDS": [-1, -1], "ATTENTION_MASK": [-1, -1], "TOKEN_TYPE_IDS": [-1, -1], "OFFSETS": [-1, -1, 2]}
# Every way to truncate, cased, left, pairs; `minilm` has the most texts.
TOKENIZERS = [
    "minilm",
    "embed_mean",
    "embed_left",
    "embed_left_in_json",
    "embed_cased",
    "embed_cased_json_silent_config",
    "embed_lower_json_cased_config",
    "embed_cased_json_fast_class",
    "embed_st_lower",
    "classify_left",
    "classify_pair_sigmoid",
    "classify_pair_three",
    "classify_pair_left",
]
PAIRS = [name for name in TOKENIZERS if "pair" in name]
# As transformers' fast tokenizer of all-MiniLM-L6-v2 gives return_offsets_mapping: in characters, not bytes.
OFFSETS = {
    "Hello, WORLD!": [(0, 0), (0, 5), (5, 6), (7, 12), (12, 13), (0, 0)],
    "Crème brûlée 😀 unaffable": [
        (0, 0), (0, 2), (2, 5), (6, 8), (8, 11), (11, 12), (13, 14), (15, 18), (18, 21), (21, 24), (0, 0),
    ],
    "e\u0301 中国 a\0b [SEP] end": [(0, 0), (0, 1), (3, 4), (4, 5), (6, 9), (10, 15), (16, 19), (0, 0)],
    " two  spaces ": [(0, 0), (1, 4), (6, 12), (0, 0)],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    for name in TOKENIZERS:
        models.add(name, name, {**TASK, **({"text_pair": "true"} if name in PAIRS else {})})
    # Nothing but the tokenizer's own files.
    alone = models.add("alone", "minilm", {**TASK, "max_length": "8"})
    for entry in alone.iterdir():
        if entry.name not in ("tokenizer.json", "tokenizer_config.json"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    names = "INPUT_IDS:input_ids,ATTENTION_MASK:attention_mask"
    models.add("renamed", "minilm", {**TASK, "input_names": "TEXT:text", "output_names": names})
    models.add("strict", "embed_mean", {**TASK, "truncation": "error"})
    models.add("cached", "embed_mean", TASK, "response_cache { enable: true }")
    models.add("one", "embed_mean", TASK, 'input [{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }]')
    models.add("pooled", "embed_mean", {**TASK, "pooling": "mean"})
    models.add("placed", "embed_mean", {**TASK, "engine": "cpu"})
    endless = models.add("endless", "embed_mean", TASK)
    (endless / "config.json").unlink()
    (endless / "sentence_bert_config.json").unlink()
    (endless / "tokenizer_config.json").unlink()
    return serve(models, "--cache-config=local,size=8388608")


def known(name):
    """The reference's texts and what it makes of them."""
    said = json.loads((DIRECTORY / "tokens.json").read_text("ascii"))["tokenizers"][name]
    corpus = json.loads((DIRECTORY / "corpus.json").read_text("ascii"))["pairs" if name in PAIRS else "texts"]
    texts = {row["name"]: row for row in corpus}
    return [(texts[name], row["ids"], row["types_from"]) for name, row in zip(said["names"], said["rows"])]


def row(answer, index):
    """One row of the answer, without its padding."""
    length = int(answer["ATTENTION_MASK"][index].sum())
    return {name: array[index, :length].tolist() for name, array in answer.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_transformers(server, name):
    rows = known(name)
    assert len(rows) >= 20
    for start in range(0, len(rows), 50):
        part = rows[start : start + 50]
        inputs = {"TEXT": as_bytes([text["text"] for text, _, _ in part])}
        if name in PAIRS:
            inputs["TEXT_PAIR"] = as_bytes([text["text_pair"] for text, _, _ in part])
        answer = server.infer(name, inputs, ["INPUT_IDS", "ATTENTION_MASK", "TOKEN_TYPE_IDS"])
        assert answer["INPUT_IDS"].shape[1] == max(len(ids) for _, ids, _ in part)
        for index, (text, ids, types_from) in enumerate(part):
            found = row(answer, index)
            assert found["INPUT_IDS"] == ids, text["name"]
            assert found["TOKEN_TYPE_IDS"] == [int(i >= types_from) for i in range(len(ids))], text["name"]


def test_offsets_are_characters_as_transformers_gives_them(server, protocol):
    answer = server.infer("minilm", list(OFFSETS), ["OFFSETS", "ATTENTION_MASK"], protocol=protocol)
    for index, spans in enumerate(OFFSETS.values()):
        assert list(map(tuple, row(answer, index)["OFFSETS"])) == spans


def test_offsets_of_a_text_that_is_cut_point_at_its_words(server):
    """From the start, and from the end."""
    words = [f"word{i}" if i % 7 else "naïveté" for i in range(400)]
    text = " ".join(words)
    starts = {text.index(f" {word} ") + 1 for word in words[1:-1]} | {0}
    for name in ("embed_mean", "embed_left"):
        answer = row(server.infer(name, [text], ["OFFSETS", "INPUT_IDS", "ATTENTION_MASK"]), 0)
        spans = answer["OFFSETS"][1:-1]
        assert spans[0][0] == 0 if name == "embed_mean" else spans[-1][1] == len(text)
        assert all(0 <= a < b <= len(text) for a, b in spans) and spans == sorted(spans)
        assert not any(" " in text[a:b] for a, b in spans)
        assert name == "embed_left" or {a for a, _ in spans} & starts


def test_rows_are_padded_to_the_longest_of_their_own_request(server, protocol):
    texts = ["one", "one two three", ""]
    answer = server.infer("minilm", texts, protocol=protocol)
    assert {name: array.dtype for name, array in answer.items()} == dict.fromkeys(OUTPUTS, np.int64)
    assert answer["INPUT_IDS"].tolist() == [[101, 2028, 102, 0, 0], [101, 2028, 2048, 2093, 102], [101, 102, 0, 0, 0]]
    assert answer["ATTENTION_MASK"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert answer["OFFSETS"].shape == (3, 5, 2)
    assert not answer["OFFSETS"][answer["ATTENTION_MASK"] == 0].any()
    assert server.infer("minilm", ["one"], protocol=protocol)["INPUT_IDS"].tolist() == [[101, 2028, 102]]


def test_only_requested_outputs_come(server):
    assert set(server.infer("minilm", ["one"], ["INPUT_IDS"])) == {"INPUT_IDS"}


def test_metadata_declares_the_tensors(server):
    outputs = server.metadata("minilm")["outputs"]
    assert {t["name"]: t["shape"] for t in outputs} == OUTPUTS
    assert {t["datatype"] for t in outputs} == {"INT64"}


def test_a_tokenizers_own_files_are_enough(server):
    answer = server.infer("alone", ["one two three four five six seven eight nine"], ["INPUT_IDS"])
    assert answer["INPUT_IDS"].tolist() == [[101, 2028, 2048, 2093, 2176, 2274, 2416, 102]]


def test_names_may_be_the_clients(server):
    answer = server.infer("renamed", {"text": as_bytes("one")}, ["input_ids", "attention_mask"])
    assert answer["input_ids"].tolist() == [[101, 2028, 102]]


def test_without_batching_there_is_no_row_dimension(server):
    answer = server.infer("one", {"TEXT": np.array([b"one"], dtype=object)})
    assert answer["INPUT_IDS"].ndim == 1 and answer["OFFSETS"].shape == (len(answer["INPUT_IDS"]), 2)


def test_a_cached_answer_has_every_output(server):
    first = server.infer("cached", ["twice"], ["INPUT_IDS"])["INPUT_IDS"]
    again = server.infer("cached", ["twice"], ["INPUT_IDS", "OFFSETS"])
    np.testing.assert_array_equal(again["INPUT_IDS"], first)
    assert again["OFFSETS"].shape[1] == first.shape[1]


def test_bad_texts_are_refused_by_row(server, protocol):
    for model, texts, words in [
        ("minilm", ["good", b"bad \xff"], ["'minilm'", "TEXT", "row 1", "UTF-8"]),
        ("strict", ["good", "word " * 200], ["'strict'", "TEXT", "row 1", "truncation"]),
    ]:
        with pytest.raises(InferenceServerException) as error:
            server.infer(model, texts, protocol=protocol)
        assert error.value.status() == STATUS["INVALID_ARG"][protocol]
        assert all(word in error.value.message() for word in words), error.value.message()


def test_what_has_no_meaning_or_no_end_is_refused_at_load(server):
    index = server.index()
    assert index["pooled"][0] == "UNAVAILABLE" and "'pooling'" in index["pooled"][1]
    assert index["placed"][0] == "UNAVAILABLE" and "'engine'" in index["placed"][1]
    assert index["endless"][0] == "UNAVAILABLE" and "'max_length'" in index["endless"][1]


def test_statistics_and_metrics_count_texts(server):
    before = server.metric("rust_texts_total", model="embed_cased") or 0
    rows = server.statistics("embed_cased")["inference_count"]
    server.infer("embed_cased", ["a", "b", "c"])
    assert server.metric("rust_texts_total", model="embed_cased") == before + 3
    assert until(lambda: server.statistics("embed_cased")["inference_count"] == rows + 3, seconds=5)
