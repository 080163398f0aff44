"""The tokenizer and the ONNX model that Triton connects, against the fused model of the same weights."""

import os
import subprocess
import sys

import numpy as np
import pytest

import conftest
from harness import ROOT, concurrently, until
from reference import reference

MEMBERS = ("tokenizer", "bert_classifier")


def executions(server):
    return {name: server.statistics(name)["execution_count"] for name in MEMBERS}


def test_the_ensemble_answers_as_the_fused_model_does(common, protocol):
    expected = reference("sentiment")
    texts = [row["text"] for row in expected.rows][:64]
    before = executions(common)
    logits = common.infer("sentiment_ensemble", texts, ["LOGITS"], protocol=protocol)["LOGITS"]
    np.testing.assert_allclose(logits, expected.array("logits")[:64], atol=2e-4)
    fused = common.infer("sentiment_fp32", texts, ["LOGITS"], protocol=protocol)["LOGITS"]
    np.testing.assert_allclose(logits, fused, atol=2e-4)
    assert until(lambda: all(count > before[name] for name, count in executions(common).items()), seconds=5)


def test_requests_of_many_lengths_share_batches_of_the_classifier(common):
    """Each is padded for itself by the tokenizer, and none has another's length."""
    words = "It was a long and winding road to the sea, and every mile of it was worth the walk.".split()
    texts = [" ".join(words[:length]) for length in range(1, len(words) + 1)]
    alone = [common.infer("sentiment_ensemble", [text])["LOGITS"] for text in texts]
    statistics = common.statistics("bert_classifier")
    before = statistics["inference_count"], statistics["execution_count"]
    together = concurrently(lambda text: common.infer("sentiment_ensemble", [text])["LOGITS"], texts * 4)
    np.testing.assert_allclose(np.concatenate(together), np.concatenate(alone * 4), atol=1e-5)
    assert until(lambda: common.statistics("bert_classifier")["inference_count"] == before[0] + len(together), seconds=5)
    passes = common.statistics("bert_classifier")["execution_count"] - before[1]
    assert passes < len(together), passes


def test_every_row_of_a_client_batch_is_answered(common, protocol):
    rows = common.infer("sentiment_ensemble", ["Lovely.", "Awful, cold, slow and rude.", ""], protocol=protocol)
    assert rows["LOGITS"].shape == (3, 2)
    assert rows["LOGITS"][0, 1] > rows["LOGITS"][0, 0] and rows["LOGITS"][1, 0] > rows["LOGITS"][1, 1]


def test_a_bad_row_is_named_through_the_ensemble(common, protocol):
    with pytest.raises(Exception, match="row 1: not valid UTF-8"):
        common.infer("sentiment_ensemble", ["good", b"\xff"], protocol=protocol)


@pytest.mark.skipif(bool(conftest.EXTERNAL), reason="the program asks 127.0.0.1")
def test_the_recipes_client_gets_equal_answers_from_both(common):
    said = {}
    for model in ("sentiment_ensemble", "sentiment_fp32"):
        done = subprocess.run(
            [sys.executable, ROOT / "scripts" / "sentiment_client.py", model],
            env={**os.environ, "HTTP_PORT": common.http.rpartition(":")[2]},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        said[model] = done.stdout
    lines = said["sentiment_ensemble"].splitlines()
    assert [line.split()[-2] for line in lines] == ["POSITIVE", "NEGATIVE"]
    assert all(0.5 < float(line.split()[-1]) <= 1 for line in lines)
    assert said["sentiment_ensemble"] == said["sentiment_fp32"]
