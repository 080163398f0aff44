"""Texts of every size: nothing, a lot, far too much."""

import time

import numpy as np
import pytest

from harness import cosine, until
from reference import text


def test_empty_text_gets_a_finite_embedding_of_norm_1(common, protocol):
    answer = common.infer("minilm_fp32", [""], protocol=protocol)
    assert np.isfinite(answer["EMBEDDING"]).all()
    assert np.linalg.norm(answer["EMBEDDING"]) == pytest.approx(1, abs=1e-5)
    assert answer["TOKEN_COUNT"].tolist() == [[2]]


@pytest.mark.parametrize("odd", ["", "\0", "\0" * 1000, " ", "\u200b", "\ufffd", "\U000e0001", "a" * 100000])
def test_odd_texts_get_finite_answers(common, protocol, odd):
    assert np.isfinite(common.infer("embed_mean", [odd], protocol=protocol)["EMBEDDING"]).all()
    assert np.isfinite(common.infer("classify_three", [odd], protocol=protocol)["LOGITS"]).all()


def sizes_of_10_mb():
    size = 10_000_000
    sentence = "The train to the coast leaves at seven and the first carriage is always empty. "
    return {
        "words": (sentence * (size // len(sentence) + 1))[:size],
        "one word": "a" * size,
        "white space": " " * size,
        "removed characters": "\u200b" * (size // 3),
        "accents": "e\u0301" * (size // 3),
        "emoji": "\U0001f600" * (size // 4),
        "special tokens": "[SEP]" * (size // 5),
    }


TOKENS = {
    "words": 256,
    "one word": 3,
    "white space": 2,
    "removed characters": 2,
    "accents": 3,
    "emoji": 3,
    "special tokens": 256,
}


@pytest.fixture(scope="module")
def minilm(serve, new_repository):
    models = new_repository()
    models.add("minilm", "minilm", {"dtype": "fp32"})
    return serve(models)


@pytest.mark.parametrize("kind", sizes_of_10_mb())
def test_10_mb_answer_within_5_seconds_as_the_truncated_text_does(minilm, kind, protocol):
    large = sizes_of_10_mb()[kind]
    started = time.monotonic()
    answer = minilm.infer("minilm", [large], protocol=protocol)
    assert time.monotonic() - started < 5
    tokens = answer["TOKEN_COUNT"].item()
    assert tokens == TOKENS[kind]
    # The same text, cut to a size that is tokenized whole: no word of over 100 characters is anything but [UNK].
    small = minilm.infer("minilm", [large[:20000]], ["EMBEDDING"])["EMBEDDING"]
    assert cosine(answer["EMBEDDING"], small).min() >= 0.999999


def test_memory_comes_back_after_10_mb_texts(serve, new_repository):
    """Over HTTP: the server's gRPC front end keeps the buffers of large requests, also of those it refuses itself."""
    models = new_repository()
    models.add("minilm", "minilm", {"dtype": "fp32"})
    server = serve(models)
    server.infer("minilm", [text("words_5000")] * 8)
    before = server.memory()
    for _ in range(2):
        for large in sizes_of_10_mb().values():
            server.infer("minilm", [large])
            server.infer("minilm", [large, large])
    assert until(lambda: server.memory() < before + 64, seconds=10), (before, server.memory())
