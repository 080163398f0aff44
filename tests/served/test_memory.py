"""What the server's process holds: weights once, no Python."""

import re

import pytest

from harness import concurrently
from reference import reference

GROUP = "instance_group [{ count: %d kind: KIND_CPU }]"


def busy(server):
    """All of the corpus in batches from several clients at once, over both protocols."""
    texts = reference("minilm").inputs()["TEXT"]
    parts = [texts[i : i + 32] for i in range(0, len(texts), 32)]
    jobs = [(part, protocol) for part in parts for protocol in ("http", "grpc")]
    answers = concurrently(lambda job: server.infer("minilm", job[0], ["EMBEDDING"], protocol=job[1]), jobs)
    assert not [answer for answer in answers if isinstance(answer, Exception)]


@pytest.fixture(scope="module")
def with_instances(serve, new_repository):
    """with_instances(n) -> a server of MiniLM alone as `make serve` serves it, with n instances."""

    def start(count):
        models = new_repository()
        models.add("minilm", "minilm", text=GROUP % count)
        return serve(models)

    return start


def test_minilm_alone_peaks_below_400_mib_and_a_third_instance_adds_less_than_30(with_instances):
    peak, resident = {}, {}
    for count in (2, 3):
        server = with_instances(count)
        busy(server)
        # The peak is that of loading, which instances do not change: what they add shows in what stays.
        peak[count], resident[count] = server.memory("VmHWM"), server.memory()
        server.stop()
    assert peak[2] < 400
    assert peak[3] - peak[2] < 30, peak
    assert resident[3] - resident[2] < 30, resident


def test_fp32_too_peaks_below_400_mib(serve, new_repository):
    models = new_repository()
    models.add("minilm", "minilm", {"dtype": "fp32"})
    server = serve(models)
    busy(server)
    assert server.memory("VmHWM") < 400
    server.stop()


def test_the_process_maps_no_python(serve, new_repository):
    models = new_repository()
    models.add("minilm", "minilm")
    server = serve(models)
    server.infer("minilm", ["hello"])
    mapped = server.mapped_files()
    assert any("libtriton_rust.so" in path for path in mapped)
    assert not [path for path in mapped if re.search(r"libpython|/python3[^/]*$|\.cpython-", path)]
    server.stop()
