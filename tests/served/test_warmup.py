"""Triton's own warm-up, and what the statistics show.

A sample that fails is not among the tests: core 2.51 may then crash where it stops the instance's thread
(TritonBackendThread::StopBackendThread), whatever the backend.
"""

import json
import struct

import pytest

from harness import concurrently, until

SAMPLE = """model_warmup [{ name: "%s" batch_size: %d count: %d
  inputs { key: "TEXT" value { data_type: TYPE_STRING dims: [ 1 ] %s } } }]"""


ONE_INSTANCE = " instance_group [{ count: 1 kind: KIND_CPU }]"
DECOUPLED = " model_transaction_policy { decoupled: true }"

# name -> texts and tokens that its warm-up has. Zero and random data of a string are the empty text, of two tokens.
WARMED = {"zero": (12, 24), "random": (1, 2), "file": (2, 16), "stages": (12, 24), "stream": (2, 4), "none": (0, 0)}


def spoil(version, ending):
    """Makes a number of the tensor whose name ends so NaN."""
    file = version / "model.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = next(name for name in header if name.endswith(ending))
    place = start + header[name]["data_offsets"][0]
    data[place : place + 4] = struct.pack("<f", float("nan"))
    file.unlink()  # it may be a link
    file.write_bytes(data)


@pytest.fixture(scope="module")
def server(serve, new_repository):
    stages = [SAMPLE % (f"stage {rows}", rows, 2, "zero_data: true") for rows in (1, 5)]
    zero = SAMPLE % ("zero", 2, 1, "zero_data: true")
    models = new_repository()
    for name, parameters, text in (
        ("zero", {}, SAMPLE % ("zero", 4, 3, "zero_data: true")),
        ("random", {}, SAMPLE % ("random", 1, 1, "random_data: true")),
        ("file", {}, SAMPLE % ("file", 1, 2, 'input_data_file: "texts"')),
        ("stages", {}, "\n".join(stages)),
        ("stream", {"max_length": 8, "window_stride": 2}, zero + DECOUPLED),
        ("none", {}, ""),
    ):
        models.add(name, "embed_mean", parameters, text + ONE_INSTANCE)
    sample = "the of and in to was".encode()
    (models.path / "file" / "warmup").mkdir()
    (models.path / "file" / "warmup" / "texts").write_bytes(struct.pack("<I", len(sample)) + sample)
    spoil(models.add("spoilt", "embed_mean"), "embeddings.LayerNorm.weight")
    waits = "dynamic_batching { preferred_batch_size: [ 6 ] max_queue_delay_microseconds: 4000000 }"
    models.add("batches", "embed_mean", text=f"max_batch_size: 64 {ONE_INSTANCE} {waits}")
    server = serve(models)
    counters = ("rust_texts_total", "rust_tokens_total")
    server.warmed = {name: tuple(server.metric(counter, model=name) for counter in counters) for name in WARMED}
    return server


@pytest.mark.parametrize("name", ["zero", "random", "file"])
def test_warm_up_samples_run_and_the_model_serves(server, name, protocol):
    assert server.index()[name] == ("READY", "")
    assert server.infer(name, ["hello"], protocol=protocol)["EMBEDDING"].shape == (1, 64)


@pytest.mark.parametrize("name", WARMED)
def test_every_sample_runs_as_often_as_it_says_before_the_model_is_ready(server, name):
    assert server.index()[name] == ("READY", "")
    assert server.warmed[name] == WARMED[name]


def test_no_model_is_ready_before_a_pass_has_run_whatever_its_warm_up(server):
    """What only shows when the encoder runs keeps a model without any model_warmup from becoming ready."""
    state, reason = server.index()["spoilt"]
    assert state == "UNAVAILABLE" and "the first pass" in reason, reason


def test_warm_up_is_not_counted_as_requests(server):
    """Also our own, which every instance does at load."""
    assert server.statistics("none")["inference_count"] == 0


def test_statistics_count_requests_rows_and_batches(server):
    answers = concurrently(lambda i: server.infer("batches", [f"text {i}", "and another"]), range(3))
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    # Statistics follow the answers.
    assert until(lambda: server.batch_sizes("batches") == {6: 1}, seconds=5), server.batch_sizes("batches")
    assert until(lambda: server.statistics("batches")["inference_count"] == 6, seconds=5)
    statistics = server.statistics("batches")
    assert statistics["execution_count"] == 1
    assert statistics["last_inference"] > 0
    totals = statistics["inference_stats"]
    assert totals["success"]["count"] == 3 and totals["fail"]["count"] == 0
    for phase in ("compute_input", "compute_infer", "compute_output"):
        assert totals[phase]["count"] == 3
    assert totals["compute_infer"]["ns"] > 0
    parts = sum(totals[phase]["ns"] for phase in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert parts <= totals["success"]["ns"]


def test_statistics_count_failures(server):
    before = server.statistics("none")["inference_stats"]
    with pytest.raises(Exception, match="UTF-8"):
        server.infer("none", [b"\xff"])
    server.infer("none", ["good"])

    def counted():
        after = server.statistics("none")["inference_stats"]
        return all(after[how]["count"] == before[how]["count"] + 1 for how in ("fail", "success"))

    # They are reported after the answer, as other backends do.
    assert until(counted), server.statistics("none")["inference_stats"]
