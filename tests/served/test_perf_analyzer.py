"""NVIDIA's perf_analyzer against our models: over HTTP, over gRPC with shared memory, and over a gRPC stream."""

import re
import subprocess
import sys

import pytest

from harness import ROOT, until

SCRIPT = ROOT / "scripts" / "perf_analyzer.py"


def analyze(model, *arguments):
    command = [sys.executable, str(SCRIPT), "-m", model, "--request-count", "40", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize(
    "model, arguments",
    [
        ("embed_mean", ("-i", "http")),
        ("classify_three", ("-i", "grpc", "--shared-memory", "system", "--output-shared-memory-size", "1024")),
        ("windows_stream", ("-i", "grpc", "--streaming")),
    ],
)
def test_perf_analyzer_measures_a_model(common, model, arguments):
    address = common.http if "http" in arguments else common.grpc
    before = common.statistics(model)["inference_count"]
    screen = analyze(model, "-u", address, "--concurrency-range", "2", *arguments)
    assert float(re.search(r"Throughput: ([0-9.]+) infer/sec", screen)[1]) > 0, screen
    assert until(lambda: common.statistics(model)["inference_count"] >= before + 40, seconds=5)
