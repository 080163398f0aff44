"""Our counters on the metrics port."""

import http.client

import pytest

from harness import concurrently, until

COUNTERS = [
    "rust_texts_total",
    "rust_tokens_total",
    "rust_estimated_tokens_total",
    "rust_truncated_texts_total",
    "rust_tokenize_seconds_total",
    "rust_encode_seconds_total",
]


def read(server, model):
    return {name: server.metric(name, model=model, version="1") for name in COUNTERS}


def test_texts_tokens_and_truncated_texts_are_counted(common):
    model = "embed_max_normalize"  # max_length 17
    before = read(common, model)
    texts = ["", "the", "the " * 15, "the " * 16, "the " * 500]
    answer = common.infer(model, texts, ["TOKEN_COUNT"])["TOKEN_COUNT"].ravel().tolist()
    assert answer == [2, 3, 17, 17, 17]
    after = read(common, model)
    assert after["rust_texts_total"] - before["rust_texts_total"] == 5
    assert after["rust_tokens_total"] - before["rust_tokens_total"] == sum(answer)
    assert after["rust_truncated_texts_total"] - before["rust_truncated_texts_total"] == 2
    assert after["rust_tokenize_seconds_total"] > before["rust_tokenize_seconds_total"]
    common.infer(model, texts, ["EMBEDDING"])
    assert read(common, model)["rust_encode_seconds_total"] > after["rust_encode_seconds_total"]


def test_concurrent_requests_are_all_counted(common):
    model = "embed_cls"
    before = read(common, model)
    concurrently(lambda i: common.infer(model, [f"text {i}"] * 3), range(40), threads=8)
    assert read(common, model)["rust_texts_total"] - before["rust_texts_total"] == 120


def test_refused_texts_are_not_counted_as_encoded(common):
    model = "embed_relu"
    common.infer(model, ["good"])
    before = read(common, model)
    with pytest.raises(Exception, match="UTF-8"):
        common.infer(model, [b"\xff"])
    assert read(common, model)["rust_tokens_total"] == before["rust_tokens_total"]


def test_batch_tokens_is_a_histogram_of_passes(common):
    model = "embed_gelu_new"
    labels = {"model": model, "version": "1"}
    common.infer(model, ["the " * 10])
    count, total = (common.metric(f"rust_batch_tokens_{part}", **labels) for part in ("count", "sum"))
    common.infer(model, ["the " * 10] * 4)
    assert common.metric("rust_batch_tokens_count", **labels) - count >= 1
    assert common.metric("rust_batch_tokens_sum", **labels) - total == 4 * 12
    assert common.metric("rust_batch_tokens_bucket", **labels, le="+Inf") >= 2


def test_series_are_labelled_by_model_and_each_has_help(common):
    connection = http.client.HTTPConnection(common.metrics, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    for name in COUNTERS:
        assert f"# HELP {name} " in text and f"# TYPE {name} counter" in text
    assert "# TYPE rust_batch_tokens histogram" in text
    assert "embed_mean" in text and "classify_three" in text


def test_unloading_takes_the_series_away(serve, new_repository):
    models = new_repository()
    for name in ("leaves", "stays"):
        models.add(name, "embed_mean")
    server = serve(models, "--model-control-mode=explicit", "--load-model=leaves", "--load-model=stays")
    for name in ("leaves", "stays"):
        server.infer(name, ["hello"])
        assert server.metric("rust_texts_total", model=name) == 1
    status, _ = server.request("POST", "/v2/repository/models/leaves/unload", {})
    assert status == 200
    assert until(lambda: server.metric("rust_texts_total", model="leaves") is None)
    assert server.metric("rust_texts_total", model="stays") == 1
    server.stop()
