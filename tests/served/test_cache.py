"""Triton's response cache knows a request by model, version, input names and bytes alone: nothing else may matter."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from harness import STATUS, as_bytes, until

CACHED = "response_cache { enable: true }"


@pytest.fixture(scope="module")
def cached(serve, new_repository):
    models = new_repository()
    models.add("embed", "embed_mean", text=CACHED)
    models.add("classify", "classify_three", text=CACHED)
    models.add("pair", "classify_pair_three", {"text_pair": "true"}, CACHED)
    variable = 'input [{ name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }]'
    models.add("variable", "embed_mean", text=f"{variable}\nmax_batch_size: 8\n{CACHED}")
    return serve(models, "--cache-config=local,size=8388608")


def hits(server, model):
    return server.statistics(model)["inference_stats"].get("cache_hit", {}).get("count", 0)


def test_the_second_answer_comes_from_the_cache_and_is_the_first(cached, protocol):
    question = [f"asked twice over {protocol}", "second row"]
    first = cached.infer("embed", question, protocol=protocol)
    before = hits(cached, "embed")
    second = cached.infer("embed", question, protocol=protocol)
    assert until(lambda: hits(cached, "embed") == before + 1, seconds=5)
    np.testing.assert_array_equal(first["EMBEDDING"], second["EMBEDDING"])
    np.testing.assert_array_equal(first["TOKEN_COUNT"], second["TOKEN_COUNT"])


@pytest.mark.parametrize(
    "first, second",
    [
        (["LOGITS"], ["LOGITS", "PROBABILITIES", "LABEL", "SCORE"]),
        (["LOGITS", "PROBABILITIES", "LABEL", "SCORE"], ["LABEL"]),
        (["LABEL"], ["LOGITS"]),
        (["SCORE"], None),
        (None, ["PROBABILITIES"]),
    ],
)
def test_requests_for_other_outputs_get_them(cached, protocol, first, second):
    question = [f"other outputs {first} {second} {protocol}"]
    cached.infer("classify", question, first, protocol=protocol)
    answer = cached.infer("classify", question, second, protocol=protocol)
    fresh = cached.infer("classify", [question[0] + " "], protocol=protocol)  # the same tokens, another key
    for name in second or ["LOGITS", "PROBABILITIES", "LABEL", "SCORE"]:
        np.testing.assert_array_equal(answer[name], fresh[name])


def test_the_same_bad_request_twice_is_refused_twice(cached, protocol):
    for attempt in range(3):
        with pytest.raises(InferenceServerException) as error:
            cached.infer("embed", [b"bad \xff " + protocol.encode()], protocol=protocol)
        assert error.value.status() == STATUS["INVALID_ARG"][protocol], attempt
        assert "UTF-8" in error.value.message(), attempt


def test_a_bad_row_twice_does_not_poison_the_others(cached, protocol):
    for _ in range(2):
        with pytest.raises(InferenceServerException):
            cached.infer("classify", ["good", b"\xff", "fine"], protocol=protocol)
    answer = cached.infer("classify", ["good", "", "fine"], protocol=protocol)
    assert answer["LOGITS"].shape == (3, 3) and np.isfinite(answer["LOGITS"]).all()


def test_two_rows_and_one_row_of_both_texts_are_not_mixed_up(cached):
    two = cached.infer("embed", ["a", "b"])["EMBEDDING"]
    one = cached.infer("embed", ["ab"])["EMBEDDING"]
    again = cached.infer("embed", ["a", "b"])["EMBEDDING"]
    assert two.shape == (2, 64) and one.shape == (1, 64)
    np.testing.assert_array_equal(two, again)


def test_a_pair_and_its_swap_are_not_mixed_up(cached):
    a, b = as_bytes("A man is playing a guitar."), as_bytes("Someone is making music.")
    for _ in range(2):
        there = cached.infer("pair", {"TEXT": a, "TEXT_PAIR": b}, ["LOGITS"])["LOGITS"]
        back = cached.infer("pair", {"TEXT": b, "TEXT_PAIR": a}, ["LOGITS"])["LOGITS"]
        assert np.abs(there - back).max() > 1e-3


def test_a_model_whose_shapes_may_differ_with_equal_bytes_is_refused(cached):
    """[2, 1] and [1, 2] of the same texts would be one key, so such a model must not load with the cache."""
    state, reason = cached.index()["variable"]
    assert state == "UNAVAILABLE" and "TEXT" in reason, reason
