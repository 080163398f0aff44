"""Triton's own warm-up, and what the statistics show.

A sample that fails is not among the tests: core 2.51 may then crash where it stops the instance's thread
(TritonBackendThread::StopBackendThread), whatever the backend.
"""

import struct

import pytest

from harness import concurrently, until

SAMPLE = """model_warmup [{ name: "%s" batch_size: %d count: %d
  inputs { key: "TEXT" value { data_type: TYPE_STRING dims: [ 1 ] %s } } }]"""


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    models.add("zero", "embed_mean", text=SAMPLE % ("zero", 4, 3, "zero_data: true"))
    models.add("random", "embed_mean", text=SAMPLE % ("random", 1, 1, "random_data: true"))
    models.add("file", "embed_mean", text=SAMPLE % ("file", 1, 2, 'input_data_file: "texts"'))
    sample = "a sentence to warm up with".encode()
    (models.path / "file" / "warmup").mkdir()
    (models.path / "file" / "warmup" / "texts").write_bytes(struct.pack("<I", len(sample)) + sample)
    models.add("none", "embed_mean")
    one = "instance_group [{ count: 1 kind: KIND_CPU }]"
    waits = "dynamic_batching { preferred_batch_size: [ 6 ] max_queue_delay_microseconds: 4000000 }"
    models.add("batches", "embed_mean", text=f"max_batch_size: 64\n{one}\n{waits}")
    return serve(models)


@pytest.mark.parametrize("name", ["zero", "random", "file"])
def test_warm_up_samples_run_and_the_model_serves(server, name, protocol):
    assert server.index()[name] == ("READY", "")
    assert server.infer(name, ["hello"], protocol=protocol)["EMBEDDING"].shape == (1, 64)


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
