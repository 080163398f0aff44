"""Parameters that are unknown, bad, impossible together or not there yet are refused by name; good ones work."""

import numpy as np
import pytest

from harness import cosine
from reference import reference

# name -> (checkpoint, parameters, words that the load error must hold)
REFUSED = {
    # Unknown keys name the nearest.
    "unknown_pooling": ("embed_mean", {"poolin": "mean"}, ["poolin", "pooling"]),
    "unknown_max_length": ("embed_mean", {"max_lenght": "16"}, ["max_lenght", "max_length"]),
    "unknown_normalise": ("embed_mean", {"normalise": "true"}, ["normalise", "normalize"]),
    "unknown_dashes": ("embed_mean", {"max-batch-tokens": "512"}, ["max-batch-tokens", "max_batch_tokens"]),
    "unknown_capitals": ("embed_mean", {"Engine": "cpu"}, ["Engine", "engine"]),
    "unknown_thread_count": ("embed_mean", {"intra_op_thread_counts": "1"}, ["intra_op_thread_count"]),
    # Bad values name the key, the value and what is allowed.
    "bad_pooling": ("embed_mean", {"pooling": "median"}, ["pooling", "median", "mean", "cls", "max"]),
    "bad_normalize": ("embed_mean", {"normalize": "maybe"}, ["normalize", "maybe", "true", "false"]),
    "bad_max_length_word": ("embed_mean", {"max_length": "many"}, ["max_length", "many"]),
    "bad_max_length_zero": ("embed_mean", {"max_length": "0"}, ["max_length"]),
    "bad_max_length_negative": ("embed_mean", {"max_length": "-5"}, ["max_length", "-5"]),
    "bad_max_length_positions": ("embed_mean", {"max_length": "129"}, ["max_length", "129", "128"]),
    "bad_max_length_huge": ("embed_mean", {"max_length": "99999999999999999999999"}, ["max_length"]),
    "bad_truncation": ("embed_mean", {"truncation": "middle"}, ["truncation", "middle", "left", "right", "error"]),
    "bad_task": ("embed_mean", {"task": "dance"}, ["task", "dance", "embed", "classify"]),
    "bad_engine": ("embed_mean", {"engine": "tpu"}, ["engine", "tpu", "cpu"]),
    "bad_device": ("embed_mean", {"device": "-1"}, ["device", "-1", "number"]),
    "bad_dtype": ("embed_mean", {"dtype": "fp12"}, ["dtype", "fp12", "fp32"]),
    "bad_text_pair": ("classify_pair_three", {"text_pair": "yes please"}, ["text_pair", "true", "false"]),
    "bad_batch_tokens": ("embed_mean", {"max_batch_tokens": "0"}, ["max_batch_tokens"]),
    "bad_threads": ("embed_mean", {"intra_op_thread_count": "0"}, ["intra_op_thread_count"]),
    "empty_value": ("embed_mean", {"pooling": ""}, ["pooling"]),
    # Impossible together.
    "classify_without_a_head": ("embed_mean", {"task": "classify"}, ["classifi"]),
    "pooling_of_a_classifier": ("classify_three", {"pooling": "mean"}, ["pooling", "classify"]),
    "normalize_of_a_classifier": ("classify_three", {"normalize": "true"}, ["normalize", "classify"]),
    "device_of_the_cpu": ("embed_mean", {"engine": "cpu", "device": "0"}, ["device", "cpu"]),
    "aggregation_of_an_embedder": ("embed_mean", {"aggregation": "simple"}, ["aggregation"]),
    "calibration_of_fp32": ("embed_mean", {"dtype": "fp32", "calibration_file": "x.txt"}, ["calibration_file"]),
    # Known, and not there yet.
    "task_ner": ("embed_mean", {"task": "ner"}, ["task", "ner"]),
    "task_rerank": ("classify_pair_one", {"task": "rerank"}, ["task", "rerank"]),
    "task_fill_mask": ("embed_bare_legacy", {"task": "fill_mask"}, ["task", "fill_mask"]),
    "engine_cuda": ("embed_mean", {"engine": "cuda"}, ["engine", "cuda"]),
    "engine_onnx_without_its_file": ("embed_mean", {"engine": "onnx"}, ["model.onnx", "not found"]),
    "dtype_fp16": ("embed_mean", {"dtype": "fp16"}, ["dtype", "fp16", "CPU"]),
    "dtype_fp8": ("embed_mean", {"dtype": "fp8"}, ["dtype", "fp8"]),
}

# name -> (checkpoint, parameters); each is then asked something in a test of its own.
ACCEPTED = {
    "as_its_files_say": ("embed_mean", {}),
    "cls": ("embed_mean", {"pooling": "cls"}),
    "max": ("embed_mean", {"pooling": "max"}),
    "last": ("embed_mean", {"pooling": "last"}),
    "normalized": ("embed_mean", {"normalize": "true"}),
    "not_normalized": ("embed_mean_normalize", {"normalize": "false"}),
    "short": ("embed_mean", {"max_length": "8"}),
    "short_left": ("embed_mean", {"max_length": "8", "truncation": "left"}),
    "strict": ("embed_mean", {"max_length": "3", "truncation": "error"}),
    "longest": ("embed_mean", {"max_length": "128"}),
    "one_token_passes": ("embed_mean", {"max_batch_tokens": "1"}),
    "one_thread": ("embed_mean", {"intra_op_thread_count": "1"}),
    "all_spelled_out": (
        "embed_mean",
        {"task": "embed", "engine": "cpu", "dtype": "fp32", "pooling": "mean", "normalize": "false"},
    ),
    "of_the_server": ("embed_mean", {"TRITON_BATCH_STRATEGY_NOTE": "not ours"}),
    "renamed": ("embed_mean", {"input_names": "TEXT:sentence", "output_names": "EMBEDDING:vector"}),
    "renamed_pair": (
        "classify_pair_three",
        {"text_pair": "true", "input_names": "TEXT:a,TEXT_PAIR:b", "output_names": "LOGITS:raw,LABEL:name"},
    ),
}

# Served where the CPU has the instructions, else refused by name.
BY_CPU = ["bf16", "int8"]

LONG = "one two three four five six seven eight nine ten eleven twelve"


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    for name, (source, parameters, _) in REFUSED.items():
        models.add(name, source, parameters)
    for name, (source, parameters) in ACCEPTED.items():
        models.add(name, source, {"dtype": "fp32", **parameters})
    for dtype in BY_CPU:
        models.add(dtype, "embed_mean", {"dtype": dtype})
    return serve(models)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(server, name):
    state, reason = server.index()[name]
    assert state == "UNAVAILABLE", "it was loaded"
    for word in REFUSED[name][2]:
        assert word in reason, reason


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(server, name):
    assert server.index()[name] == ("READY", "")


@pytest.mark.parametrize("dtype", BY_CPU)
def test_a_dtype_of_some_cpus_is_near_fp32_or_refused_by_name(server, dtype):
    state, reason = server.index()[dtype]
    if state == "READY":
        assert cosine(vector(server, dtype), vector(server, "as_its_files_say"))[0] >= 0.98
    else:
        assert "dtype" in reason and dtype in reason, reason


def vector(server, model, text="the cat sat on the mat"):
    return server.infer(model, [text], ["EMBEDDING"])["EMBEDDING"][0]


@pytest.mark.parametrize("pooling", ["cls", "max", "last"])
def test_pooling_overrides_the_directory(server, pooling):
    assert cosine(vector(server, pooling), vector(server, "as_its_files_say"))[0] < 0.999


def test_normalize_overrides_the_directory(server):
    plain, unit = vector(server, "as_its_files_say"), vector(server, "normalized")
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-5)
    assert abs(np.linalg.norm(plain) - 1) > 0.01
    assert cosine(plain, unit)[0] >= 0.999999
    assert abs(np.linalg.norm(vector(server, "not_normalized")) - 1) > 0.01


def test_max_length_and_truncation_side(server):
    right = server.infer("short", [LONG])
    left = server.infer("short_left", [LONG])
    assert right["TOKEN_COUNT"].item() == left["TOKEN_COUNT"].item() == 8
    assert cosine(right["EMBEDDING"], left["EMBEDDING"])[0] < 0.999
    assert server.infer("longest", ["the " * 500])["TOKEN_COUNT"].item() == 128


def test_a_token_budget_below_one_text_still_answers_all(server):
    expected = reference("embed_mean")
    answer = server.infer("one_token_passes", expected.inputs(), ["EMBEDDING"])["EMBEDDING"]
    assert cosine(answer, expected.array("embeddings")).min() >= 0.99999


def test_one_thread_and_spelled_out_values_answer_alike(server):
    for model in ("one_thread", "all_spelled_out", "of_the_server"):
        assert cosine(vector(server, model), vector(server, "as_its_files_say"))[0] >= 0.999999


def test_renamed_tensors_answer_under_their_names(server, protocol):
    metadata = server.metadata("renamed")
    assert [t["name"] for t in metadata["inputs"]] == ["sentence"]
    assert "vector" in [t["name"] for t in metadata["outputs"]]
    texts = {"sentence": np.array([[b"the cat sat on the mat"]], dtype=object)}
    answer = server.infer("renamed", texts, ["vector"], protocol=protocol)["vector"]
    assert cosine(answer, vector(server, "as_its_files_say"))[0] >= 0.999999


def test_renamed_pair(server, protocol):
    texts = {"a": np.array([[b"one"]], dtype=object), "b": np.array([[b"two"]], dtype=object)}
    answer = server.infer("renamed_pair", texts, ["raw", "name"], protocol=protocol)
    assert answer["raw"].shape == (1, 3) and answer["name"].shape == (1, 1)
