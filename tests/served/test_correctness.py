"""Answers in fp32 are those of sentence-transformers and transformers, however the texts come."""

import numpy as np
import pytest

from harness import concurrently, cosine, until
from reference import names, reference, text, worst
from repository import NOT_SERVED

EMBED = [name for name in names("embed") if name not in NOT_SERVED]
SERVED_AS = {"minilm": "minilm_fp32", "sentiment": "sentiment_fp32"}


def both_protocols_for(large, rest):
    """(name, protocol): gRPC and HTTP where the corpus is complete, HTTP for the variants."""
    return [(name, protocol) for name in large for protocol in ("http", "grpc")] + [
        (name, "http") for name in rest if name not in large
    ]


@pytest.mark.parametrize("name, protocol", both_protocols_for(["minilm"], EMBED))
def test_embeddings_equal_the_reference(common, name, protocol):
    expected = reference(name)
    answer = common.infer(SERVED_AS.get(name, name), expected.inputs(), protocol=protocol)
    vectors, wanted = answer["EMBEDDING"], expected.array("embeddings")
    assert vectors.dtype == np.float32 and vectors.shape == wanted.shape
    similarity = cosine(vectors, wanted)
    assert similarity.min() >= 0.99999, worst(expected.said["rows"], similarity)
    # The lengths too: 1 where the model normalizes, else the reference's.
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), np.linalg.norm(wanted, axis=1), rtol=1e-4)
    np.testing.assert_array_equal(answer["TOKEN_COUNT"].ravel(), expected.said["token_counts"])


@pytest.mark.parametrize("name, protocol", both_protocols_for(["sentiment"], names("classify")))
def test_logits_probabilities_and_labels_equal_the_reference(common, name, protocol):
    expected = reference(name)
    outputs = ["LOGITS", "PROBABILITIES", "LABEL", "SCORE"]
    answer = common.infer(SERVED_AS.get(name, name), expected.inputs(), outputs, protocol=protocol)
    for output, kind in (("LOGITS", "logits"), ("PROBABILITIES", "probabilities")):
        wanted = expected.array(kind)
        assert answer[output].shape == wanted.shape and answer[output].dtype == np.float32
        closeness = -np.abs(answer[output] - wanted).max(axis=1)
        assert closeness.min() >= -1e-4, f"{output} of {worst(expected.said['rows'], closeness)}"
    probabilities = answer["PROBABILITIES"]
    np.testing.assert_array_equal(answer["SCORE"].ravel(), probabilities.max(axis=1))
    labels = [label.decode() for label in answer["LABEL"].ravel()]
    for row, label, best, logits in zip(expected.said["rows"], labels, expected.said["best"], answer["LOGITS"]):
        two_best = np.sort(logits)[-2:]
        tie = len(logits) > 1 and two_best[1] - two_best[0] < 1e-3
        assert label == best or tie, row


# Short and long, empty and odd: what meets in a batch of a busy server.
MIX = (
    "empty plain words_1000 emoji_zwj tokens_255 nul_inside question words_60 white_long tokens_17 chinese code "
    "controls words_120 one_letter list arabic tokens_129 special_glued recipe accents_stacked space words_300 "
    "numbers korean removed_long tokens_64 words_20 word_101 cjk_long url greek"
).split()


def alone(common, model, rows, protocol="http"):
    return np.concatenate([common.infer(model, [row], ["EMBEDDING"], protocol=protocol)["EMBEDDING"] for row in rows])


@pytest.fixture(scope="module")
def solo(common):
    return alone(common, "minilm_fp32", [text(name) for name in MIX])


def test_a_client_batch_answers_as_each_text_alone(common, solo, protocol):
    together = common.infer("minilm_fp32", [text(name) for name in MIX], ["EMBEDDING"], protocol=protocol)["EMBEDDING"]
    similarity = cosine(together, solo)
    assert similarity.min() >= 0.999999, worst(MIX, similarity)


def test_a_batch_of_32_requests_answers_as_each_text_alone(common, solo, protocol):
    """`wait_for_32` holds requests back until 32 are there, so all of these share one batch."""
    assert len(MIX) == 32
    before = common.batch_sizes("wait_for_32").get(32, 0)
    answers = concurrently(
        lambda name: common.infer("wait_for_32", [text(name)], ["EMBEDDING"], protocol=protocol)["EMBEDDING"], MIX
    )
    assert not [a for a in answers if isinstance(a, Exception)]
    # Statistics follow the answers.
    met = until(lambda: common.batch_sizes("wait_for_32").get(32, 0) == before + 1, seconds=5)
    assert met, f"the requests did not meet in one batch: {common.batch_sizes('wait_for_32')}"
    similarity = cosine(np.concatenate(answers), solo)
    assert similarity.min() >= 0.999999, worst(MIX, similarity)


def test_requests_of_several_rows_share_a_batch_and_keep_their_rows(common, solo, protocol):
    parts = [[text(name) for name in part] for part in (MIX[0:1], MIX[1:4], MIX[4:12], MIX[12:32])]
    answers = concurrently(
        lambda part: common.infer("wait_for_32", part, ["EMBEDDING"], protocol=protocol)["EMBEDDING"], parts
    )
    assert not [a for a in answers if isinstance(a, Exception)]
    assert [len(a) for a in answers] == [len(part) for part in parts]
    similarity = cosine(np.concatenate(answers), solo)
    assert similarity.min() >= 0.999999, worst(MIX, similarity)


def test_the_same_text_gets_the_same_bytes_again(common):
    first, second = (common.infer("minilm_fp32", [text("recipe")])["EMBEDDING"] for _ in range(2))
    np.testing.assert_array_equal(first, second)
