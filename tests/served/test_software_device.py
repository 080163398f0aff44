"""The real tritonserver accepts the software CUDA device: what its own CUDA calls need is there."""

import numpy as np
import pytest

import software_device

GPUS = "instance_group [{ count: 1 kind: KIND_GPU gpus: [0, 1] }]"


def test_the_server_sees_two_devices_and_makes_instances_on_them(serve, new_repository):
    models = new_repository()
    models.add("minilm", "minilm", {"engine": "cpu"}, text=GPUS)
    server = serve(models, *software_device.FLAGS, env=software_device.environment())
    assert server.ready("minilm"), server.log()
    assert server.config("minilm")["instance_group"][0]["gpus"] == [0, 1]
    for device in (0, 1):
        assert f"CUDA memory pool is created on device {device} with size 1048576" in server.log()
    assert "Pinned memory pool is created" in server.log()
    assert np.isfinite(server.infer("minilm", ["hello"])["EMBEDDING"]).all()
    assert server.stop() == 0


@pytest.mark.parametrize("call", ["cudaGetDeviceCount", "cudaHostAlloc", "cudaMalloc"])
def test_the_server_does_without_what_fails(call, serve, new_repository):
    models = new_repository()
    models.add("minilm", "minilm", {"engine": "cpu"}, text="instance_group [{ kind: KIND_CPU }]")
    server = serve(models, *software_device.FLAGS, env=software_device.environment(FAIL=f"{call}:1:2"))
    assert np.isfinite(server.infer("minilm", ["hello"])["EMBEDDING"]).all()
    assert server.stop() == 0
