"""Raw ids instead of texts: clients that tokenize for themselves, in any task of ours."""

import json
import struct

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import STATUS, concurrently, until
from reference import DIRECTORY, reference

NAMES = ("INPUT_IDS", "ATTENTION_MASK", "TOKEN_TYPE_IDS")
WAIT_FOR_8 = """instance_group [{ count: 1 kind: KIND_CPU }]
dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 3000000 }"""
CACHED = "response_cache { enable: true }"
FP32 = {"dtype": "fp32"}
VOCABULARY, POSITIONS = 1656, 128  # of embed_mean


def declare(names=NAMES, data_type="TYPE_INT64", dims="-1"):
    tensors = ", ".join(f'{{ name: "{name}" data_type: {data_type} dims: [ {dims} ] }}' for name in names)
    return f"max_batch_size: 64\ninput [ {tensors} ]"


def warm_up(kind, data):
    inputs = [
        f'inputs {{ key: "{name}" value {{ data_type: TYPE_INT64 dims: [ 4 ] {data(name)} }} }}' for name in NAMES[:2]
    ]
    return f'{declare(NAMES[:2])}\nmodel_warmup [{{ name: "{kind}" batch_size: 1 {" ".join(inputs)} }}]'


# name -> (parameters, the rest of config.pbtxt, words of the load error)
REFUSED = {
    "cache": ({}, f"{declare()}\n{CACHED}", ["response_cache", "INPUT_IDS"]),
    "cache_fixed": ({}, f"{declare(dims='8')}\n{CACHED}", ["response_cache", "INPUT_IDS"]),
    "random_warm_up": ({}, warm_up("random", lambda _: "random_data: true"), ["vocabulary", "input_data_file"]),
    "zero_mask": ({}, warm_up("zero", lambda _: "zero_data: true"), ["ATTENTION_MASK", "input_data_file"]),
    "fp32": ({}, declare(data_type="TYPE_FP32"), ["INPUT_IDS", "TYPE_INT32 or TYPE_INT64"]),
    "two_dims": ({}, declare(dims="-1, -1"), ["INPUT_IDS", "one dimension"]),
    "mask_alone": ({}, declare(NAMES[1:2]), ["ATTENTION_MASK", "INPUT_IDS"]),
    "truncation": ({"truncation": "left"}, declare(), ["truncation", "INPUT_IDS"]),
    "text_too": ({}, declare().replace("TYPE_INT64", "TYPE_STRING", 1), ["INPUT_IDS", "TYPE_INT32 or TYPE_INT64"]),
}


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    models.add("ids", "embed_mean", FP32, declare())
    lower = ",".join(f"{name}:{name.lower()}" for name in NAMES[:2])
    text = declare([name.lower() for name in NAMES[:2]], "TYPE_INT32")
    version = models.add("lower", "embed_mean", {**FP32, "input_names": lower}, text)
    (version / "tokenizer.json").unlink()  # nobody tokenizes
    models.add("alone", "embed_mean", {**FP32, "max_length": "8"}, declare(NAMES[:1]))
    models.add("pair", "classify_pair_three", FP32, declare())
    models.add("waits", "embed_mean", FP32, f"{declare(NAMES[:2])}\n{WAIT_FOR_8}")
    models.add("unbatched", "embed_mean", FP32, declare(NAMES[:1]).replace("max_batch_size: 64", ""))
    zeros = warm_up("mixed", lambda name: "zero_data: true" if name == "INPUT_IDS" else 'input_data_file: "ones"')
    models.add("warm", "embed_mean", FP32, zeros)
    (models.path / "warm" / "warmup").mkdir()
    (models.path / "warm" / "warmup" / "ones").write_bytes(struct.pack("<4q", 1, 1, 0, 0))
    for name, (parameters, text, _) in REFUSED.items():
        models.add(name, "embed_mean", {**FP32, **parameters}, text)
    return serve(models, "--cache-config=local,size=1048576")


def known(name):
    """(ids, types) of each reference text of a checkpoint, by the text's name."""
    said = json.loads((DIRECTORY / "tokens.json").read_text("ascii"))["tokenizers"][name]
    rows = [(row["ids"], [int(i >= row["types_from"]) for i in range(len(row["ids"]))]) for row in said["rows"]]
    return dict(zip(said["names"], rows))


def tensors(rows, names=NAMES, dtype=np.int64):
    """The inputs of one request, rows padded to the longest: with ids that no table has, which nobody may look at."""
    length = max(len(ids) for ids, _ in rows)
    out = np.full((3, len(rows), length), -1, dtype)
    out[1] = 0
    for row, (ids, types) in enumerate(rows):
        out[0, row, : len(ids)], out[1, row, : len(ids)], out[2, row, : len(ids)] = ids, 1, types
    return dict(zip(names, out))


def test_ids_are_answered_as_their_texts_are(server, common, protocol):
    expected, tokens = reference("embed_mean"), known("embed_mean")
    rows = [row for row in expected.rows if row["name"] in tokens]
    assert len(rows) > 40
    inputs = tensors([tokens[row["name"]] for row in rows])
    for part in range(0, len(rows), 64):
        piece = {name: array[part : part + 64] for name, array in inputs.items()}
        answer = server.infer("ids", piece, ["EMBEDDING", "TOKEN_COUNT"], protocol=protocol)
        texts = [row["text"] for row in rows[part : part + 64]]
        as_texts = common.infer("embed_mean", texts, ["EMBEDDING", "TOKEN_COUNT"])
        np.testing.assert_array_equal(answer["EMBEDDING"], as_texts["EMBEDDING"])
        np.testing.assert_array_equal(answer["TOKEN_COUNT"], as_texts["TOKEN_COUNT"])


def test_segments_are_used(server, common):
    expected, tokens = reference("classify_pair_three"), known("classify_pair_three")
    rows = [row for row in expected.rows if row["name"] in tokens][:32]
    inputs = tensors([tokens[row["name"]] for row in rows])
    answer = server.infer("pair", inputs, ["LOGITS"])["LOGITS"]
    texts = common.infer("classify_pair_three", expected.inputs(rows), ["LOGITS"])["LOGITS"]
    np.testing.assert_array_equal(answer, texts)
    without = server.infer("pair", {**inputs, "TOKEN_TYPE_IDS": 0 * inputs["TOKEN_TYPE_IDS"]}, ["LOGITS"])["LOGITS"]
    assert np.abs(answer - without).max() > 1e-3


def test_lower_case_names_32_bits_and_a_directory_without_a_tokenizer(server, protocol):
    row = known("embed_mean")["plain"]
    names = [name.lower() for name in NAMES[:2]]
    answer = server.infer("lower", tensors([row], names, np.int32), protocol=protocol)
    np.testing.assert_array_equal(answer["EMBEDDING"], server.infer("ids", tensors([row]))["EMBEDDING"])


def test_without_a_mask_every_id_is_a_token(server):
    ids, _ = known("embed_mean")["two_words"]
    answer = server.infer("alone", {"INPUT_IDS": np.array([ids])})
    assert answer["TOKEN_COUNT"].tolist() == [[len(ids)]]
    np.testing.assert_array_equal(answer["EMBEDDING"], server.infer("ids", tensors([(ids, [0] * len(ids))]))["EMBEDDING"])


def test_without_batching_a_request_is_one_row(server):
    ids, types = known("embed_mean")["plain"]
    answer = server.infer("unbatched", {"INPUT_IDS": np.array(ids)})["EMBEDDING"]
    assert answer.shape == (64,)
    np.testing.assert_array_equal(answer, server.infer("ids", tensors([(ids, types)]))["EMBEDDING"][0])


def test_requests_of_eight_lengths_share_a_batch(server):
    """With nothing in config.pbtxt that says so."""
    config = server.config("waits")
    assert all(tensor["allow_ragged_batch"] for tensor in config["input"])
    tokens = known("embed_mean")
    by_length = {len(ids): (ids, types) for ids, types in tokens.values()}
    rows = [by_length[length] for length in sorted(by_length)[:8]]
    asked = [tensors([row], NAMES[:2]) for row in rows]
    before = server.batch_sizes("waits").get(8, 0)
    answers = concurrently(lambda inputs: server.infer("waits", inputs), asked)
    assert until(lambda: server.batch_sizes("waits").get(8, 0) == before + 1, seconds=5), server.batch_sizes("waits")
    for row, answer in zip(rows, answers):
        np.testing.assert_array_equal(answer["EMBEDDING"], server.infer("ids", tensors([row]))["EMBEDDING"])


def changed(name, row, column, value):
    inputs = tensors([([2, 7, 3], [0, 0, 0]), ([2, 7, 8, 3], [0, 0, 0, 0])])
    inputs[name][row, column] = value
    return inputs


BAD = {
    "above the vocabulary": (changed("INPUT_IDS", 1, 2, VOCABULARY), ["INPUT_IDS", "row 1", str(VOCABULARY), f"0 to {VOCABULARY - 1}"]),
    "negative": (changed("INPUT_IDS", 0, 0, -7), ["INPUT_IDS", "row 0", "-7", f"0 to {VOCABULARY - 1}"]),
    "beyond 32 bits": (changed("INPUT_IDS", 1, 0, 2**40 + 2), ["INPUT_IDS", "row 1", str(2**40 + 2)]),
    "no such segment": (changed("TOKEN_TYPE_IDS", 1, 1, 2), ["TOKEN_TYPE_IDS", "row 1", "0 to 1"]),
    "a hole in the mask": (changed("ATTENTION_MASK", 1, 1, 0), ["ATTENTION_MASK", "row 1", "padding"]),
    "padding first": (changed("ATTENTION_MASK", 0, 0, 0), ["ATTENTION_MASK", "row 0", "padding"]),
    "no mask": (changed("ATTENTION_MASK", 0, 1, 5), ["ATTENTION_MASK", "row 0", "5"]),
    "no token": (changed("ATTENTION_MASK", 1, slice(None), 0), ["INPUT_IDS", "row 1", "0 tokens"]),
    "too long": (tensors([([2] * (POSITIONS + 1), [0] * (POSITIONS + 1))]), ["row 0", "129 tokens", "1 to 128"]),
    "other shapes": ({**changed("INPUT_IDS", 0, 0, 2), "ATTENTION_MASK": np.ones((2, 3), np.int64)}, ["ATTENTION_MASK"]),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_ids_are_refused_by_input_and_row(server, protocol, what):
    inputs, words = BAD[what]
    with pytest.raises(InferenceServerException) as error:
        server.infer("ids", inputs, protocol=protocol)
    assert error.value.status() == STATUS["INVALID_ARG"][protocol]
    assert all(word in error.value.message() for word in words), error.value.message()


def test_a_bad_request_does_not_harm_the_batch_that_it_is_in(server):
    row = known("embed_mean")["plain"]
    good = tensors([row], NAMES[:2])
    bad = {name: array[1:] for name, array in changed("INPUT_IDS", 1, 2, VOCABULARY).items() if name in NAMES[:2]}
    before = server.statistics("waits")["execution_count"]
    answers = concurrently(lambda inputs: server.infer("waits", inputs), [good] * 3 + [bad] + [good] * 4)
    assert until(lambda: server.statistics("waits")["execution_count"] == before + 1, seconds=5)
    assert isinstance(answers.pop(3), InferenceServerException)
    expected = server.infer("ids", tensors([row]))["EMBEDDING"]
    for answer in answers:
        np.testing.assert_array_equal(answer["EMBEDDING"], expected)


def test_the_limit_may_be_set(server):
    with pytest.raises(InferenceServerException, match="9 tokens, allowed are 1 to 8"):
        server.infer("alone", {"INPUT_IDS": np.full((1, 9), 2)})


def test_a_warm_up_with_a_mask_from_a_file_loads(server):
    assert server.index()["warm"] == ("READY", "")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_at_load(server, name):
    state, reason = server.index()[name]
    assert state == "UNAVAILABLE"
    assert all(word in reason for word in REFUSED[name][2]), reason
