"""The CUDA engine in the real tritonserver, on the software device. None of this ran on a GPU."""

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import software_device
from harness import STATUS, cosine
from reference import reference, worst

EXPECTED = reference("minilm")
# A software device takes its time: some texts of different lengths.
SOME = slice(None, None, 9)
ON_CPU = "instance_group [{ count: 1 kind: KIND_CPU }]"


def check(server, model, protocol="http"):
    got = server.infer(model, EXPECTED.inputs(EXPECTED.rows[SOME]), ["EMBEDDING"], protocol)["EMBEDDING"]
    right = EXPECTED.array("embeddings")[SOME]
    similarity = cosine(got, right)
    assert similarity.min() >= 0.9999, worst(EXPECTED.said["rows"][SOME], similarity)


def memory(server, model):
    """Device number -> bytes, as the statistics have it."""
    usage = server.statistics(model).get("memory_usage", [])
    return {int(entry["id"]): int(entry["byte_size"]) for entry in usage if entry["type"] == "GPU"}


@pytest.fixture(scope="module")
def server(serve, new_repository, tmp_path_factory):
    """Two devices that the engine sees and the server does not, and a file that steers them."""
    models = new_repository()
    models.add("cuda", "minilm", {"engine": "cuda", "max_batch_tokens": "256"}, text=ON_CPU)
    models.add("device", "minilm", {"engine": "cuda", "max_batch_tokens": "256", "device": "1"}, text=ON_CPU)
    models.add("model", "embed_head_dim_32", {"max_batch_tokens": "64"}, text="instance_group [{ kind: KIND_MODEL }]")
    models.add("cpu", "embed_head_dim_32", {"dtype": "fp32"})
    models.add("missing", "embed_head_dim_32", {"engine": "cuda", "device": "2"})
    models.add("int8", "embed_head_dim_32", {"engine": "cuda", "dtype": "int8"})
    control = tmp_path_factory.mktemp("device") / "control"
    environment = software_device.environment(runtime=False, CONTROL=str(control))
    server = serve(models, env=environment)
    server.control = control
    return server


def test_kind_cpu_runs_on_the_device_that_it_names(server):
    for protocol in ("http", "grpc"):
        check(server, "cuda", protocol)
    for model, device in (("cuda", 0), ("device", 1)):
        assert set(memory(server, model)) == {device} and memory(server, model)[device] > 40 << 20
        assert f"CUDA device {device} (" in server.log()
    assert memory(server, "cpu") == {}


def test_kind_model_takes_a_device_where_there_is_one(server):
    assert set(memory(server, "model")) == {0}
    similarity = cosine(*(server.infer(model, "hello there")["EMBEDDING"] for model in ("model", "cpu")))
    assert similarity.min() >= 0.9999


def test_what_the_devices_cannot_do_is_refused_by_name(server):
    for model, words in (("missing", ["engine 'cuda'", "device 2", "[0, 1]"]), ("int8", ["'int8'", "fp16"])):
        state, reason = server.index()[model]
        assert state == "UNAVAILABLE" and all(word in reason for word in words), reason


def fails(server, model, code):
    with pytest.raises(InferenceServerException) as error:
        server.infer(model, "hello")
    assert error.value.status() == code, error.value
    return str(error.value)


def test_a_pass_without_memory_is_unavailable_and_the_next_works(server):
    before = server.infer("cuda", "hello")["EMBEDDING"]
    software_device.steer(server.control, FAIL="cuLaunchKernel:3:2")
    assert "out of memory" in fails(server, "cuda", STATUS["UNAVAILABLE"]["http"])
    np.testing.assert_array_equal(server.infer("cuda", "hello")["EMBEDDING"], before)
    assert server.ready("cuda")


def test_a_lost_device_fails_every_request_and_nothing_else(server):
    software_device.steer(server.control, FAIL="cuLaunchKernel:3:719")
    for _ in range(3):
        assert "CUDA device 0 is lost" in fails(server, "cuda", "500")
    assert server.log().count("model 'cuda': CUDA device 0 is lost") == 1
    assert server.metric("rust_device_lost", model="cuda") == 1
    assert server.metric("rust_device_lost", model="device") == 0
    check(server, "device")
    assert np.isfinite(server.infer("cpu", "hello")["EMBEDDING"]).all()
    assert server.live() and server.stop() == 0


def test_a_model_that_says_nothing_gets_instances_on_every_gpu(serve, new_repository):
    models = new_repository()
    models.add("minilm", "minilm", {"max_batch_tokens": "256"})
    models.add("one", "embed_head_dim_32", text="instance_group [{ count: 1 kind: KIND_GPU gpus: [1] }]")
    models.add("cpu", "embed_head_dim_32", {"engine": "cpu"})
    models.add("both", "embed_head_dim_32", {"device": "0"}, text="instance_group [{ kind: KIND_GPU gpus: [1] }]")
    server = serve(models, *software_device.FLAGS, env=software_device.environment())
    (group,) = server.config("minilm")["instance_group"]
    assert (group["kind"], group["gpus"], group["count"]) == ("KIND_GPU", [0, 1], 2)
    assert set(memory(server, "minilm")) == {0, 1}
    check(server, "minilm")
    assert set(memory(server, "one")) == {1}
    assert np.isfinite(server.infer("one", "hello")["EMBEDDING"]).all()
    assert "KIND_GPU runs on the CPU, because engine is 'cpu'" in server.log()
    state, reason = server.index()["both"]
    assert state == "UNAVAILABLE" and "'device' is 0" in reason and "device 1" in reason
    assert server.stop() == 0


def test_a_machine_without_cuda_says_so_and_serves_what_needs_none(serve, new_repository):
    models = new_repository()
    models.add("cuda", "embed_head_dim_32", {"engine": "cuda"})
    models.add("model", "embed_head_dim_32", text="instance_group [{ kind: KIND_MODEL }]")
    server = serve(models)
    state, reason = server.index()["cuda"]
    assert state == "UNAVAILABLE" and "engine 'cuda'" in reason and "CUDA driver" in reason
    assert np.isfinite(server.infer("model", "hello")["EMBEDDING"]).all()
