"""bf16 and int8: near the reference, and the same alone and among others."""

from pathlib import Path

import numpy as np
import pytest

from harness import cosine
from reference import reference, worst

CPU = set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())
HAS = {"bf16": {"avx512_bf16", "avx512_vnni"} <= CPU, "int8": {"avx2", "fma"} <= CPU}
# Without VNNI the weights have not quite 8 bits.
LEAST_COSINE = {"bf16": 0.9999, "int8": 0.995 if "avx512_vnni" in CPU else 0.994}


def here(dtype):
    if not HAS[dtype]:
        pytest.skip(f"this CPU has no instructions for {dtype}")


@pytest.fixture(scope="module")
def minilm(serve, new_repository):
    models = new_repository()
    for dtype in LEAST_COSINE:
        models.add(dtype, "minilm", {"dtype": dtype})
    return serve(models)


@pytest.mark.parametrize("dtype", LEAST_COSINE)
def test_embeddings_stay_near_the_reference(minilm, dtype):
    here(dtype)
    expected = reference("minilm")
    vectors = minilm.infer(dtype, expected.inputs(), ["EMBEDDING"])["EMBEDDING"]
    similarity = cosine(vectors, expected.array("embeddings"))
    assert similarity.min() >= LEAST_COSINE[dtype], worst(expected.said["rows"], similarity)


@pytest.mark.parametrize("dtype", LEAST_COSINE)
def test_an_answer_does_not_depend_on_its_neighbours(minilm, dtype):
    here(dtype)
    texts = ["one", "two words", "Ten words in a row that nobody will ever read.", "x " * 200, ""]
    together = minilm.infer(dtype, texts, ["EMBEDDING"])["EMBEDDING"]
    for text, vector in zip(texts, together):
        np.testing.assert_array_equal(minilm.infer(dtype, [text], ["EMBEDDING"])["EMBEDDING"][0], vector)


@pytest.mark.skipif(all(HAS.values()), reason="this CPU has all")
def test_a_dtype_that_the_cpu_lacks_is_refused_by_name(minilm):
    for dtype in LEAST_COSINE:
        if not HAS[dtype]:
            state, reason = minilm.index()[dtype]
            assert state == "UNAVAILABLE" and dtype in reason and "it needs av" in reason
