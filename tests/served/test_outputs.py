"""Only what is asked for comes back, and it is the same whatever else is asked for."""

from itertools import combinations

import numpy as np
import pytest

from harness import as_bytes
from reference import reference

OUTPUTS = {
    "classify_three": ["LOGITS", "PROBABILITIES", "LABEL", "SCORE", "TOKEN_COUNT"],
    "embed_mean": ["EMBEDDING", "TOKEN_COUNT"],
}
TEXTS = ["The cat sat on the mat.", "", "Bread rises."]


def subsets(outputs):
    return [list(s) for n in range(1, len(outputs) + 1) for s in combinations(outputs, n)]


@pytest.mark.parametrize("model, outputs", [(model, s) for model, all_ in OUTPUTS.items() for s in subsets(all_)])
def test_the_requested_outputs_and_no_other_come_back(common, model, outputs):
    everything = common.infer(model, TEXTS)
    assert set(everything) == set(OUTPUTS[model])
    answer = common.infer(model, TEXTS, outputs)
    assert set(answer) == set(outputs)
    for name in outputs:
        np.testing.assert_array_equal(answer[name], everything[name])


def test_over_grpc_too(common):
    answer = common.infer("classify_three", TEXTS, ["SCORE", "LOGITS"], protocol="grpc")
    assert set(answer) == {"SCORE", "LOGITS"} and answer["LOGITS"].shape == (3, 3)


def test_label_and_score_are_one_a_row(common, protocol):
    answer = common.infer("classify_three", TEXTS, ["LABEL", "SCORE"], protocol=protocol)
    assert answer["LABEL"].shape == (3, 1) and answer["SCORE"].shape == (3, 1)
    assert {label.decode() for label in answer["LABEL"].ravel()} <= {"contradiction", "entailment", "neutral"}


def test_labels_that_are_not_ascii_come_back_whole(common, protocol):
    expected = reference("classify_multi_label")
    answer = common.infer("classify_multi_label", expected.inputs(), ["LABEL"], protocol=protocol)
    assert {label.decode() for label in answer["LABEL"].ravel()} <= set(expected.said["labels"])


def test_token_count_counts_after_truncation(common, protocol):
    texts = ["", "the", "the " * 40, "the " * 4000]
    answer = common.infer("embed_mean", texts, ["TOKEN_COUNT"], protocol=protocol)
    assert answer["TOKEN_COUNT"].dtype == np.int32
    assert answer["TOKEN_COUNT"].ravel().tolist() == [2, 3, 42, 48]


def test_a_request_may_hold_as_many_rows_as_the_model_allows(common, protocol):
    most = common.config("embed_mean")["max_batch_size"]
    rows = [f"number {i}" for i in range(most)]
    answer = common.infer("embed_mean", rows, ["EMBEDDING", "TOKEN_COUNT"], protocol=protocol)
    assert answer["EMBEDDING"].shape == (most, 64) and np.isfinite(answer["EMBEDDING"]).all()
    last = common.infer("embed_mean", rows[-1:], ["EMBEDDING"])["EMBEDDING"]
    np.testing.assert_allclose(answer["EMBEDDING"][-1:], last, atol=1e-5)


def test_a_pair_needs_both_texts_and_their_order_matters(common, protocol):
    pair = {"TEXT": as_bytes("A man is playing a guitar."), "TEXT_PAIR": as_bytes("Someone is making music.")}
    swapped = {"TEXT": pair["TEXT_PAIR"], "TEXT_PAIR": pair["TEXT"]}
    there = common.infer("classify_pair_three", pair, ["LOGITS"], protocol=protocol)["LOGITS"]
    back = common.infer("classify_pair_three", swapped, ["LOGITS"], protocol=protocol)["LOGITS"]
    assert there.shape == (1, 3) and np.abs(there - back).max() > 1e-3
