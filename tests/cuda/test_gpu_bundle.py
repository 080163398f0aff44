"""`make gpu-bundle` on the software CUDA device: that it is whole, and that its scripts run. Nothing here is tested on a GPU."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ROOT / os.environ.get("BACKENDS", "build/backends") / "rust"
sys.path.insert(0, str(ROOT / "benches" / "gpu"))

import table  # noqa: E402: after the path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    assert (LIBRARIES / "libtriton_rust.so").is_file(), "run `make install`"
    out = tmp_path_factory.mktemp("gpu") / "bundle"
    # In the profile of `cargo test`, whose test programs are there already.
    command = [sys.executable, ROOT / "scripts" / "gpu_bundle.py", "--portable", "--profile", "test"]
    done = subprocess.run(
        [*command, "--out", out, "--libraries", LIBRARIES], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MiB, of at most 60" in done.stdout
    return out


def run(bundle, tmp_path, *sections, libraries, **variables):
    environment = os.environ | variables | {"PYTHON": sys.executable, "SIZE": "tiny", "LD_LIBRARY_PATH": libraries}
    environment |= {"RESULTS": str(tmp_path / "results"), "SCRATCH": str(tmp_path / "scratch")}
    return subprocess.run([bundle / "run.sh", *sections], capture_output=True, text=True, env=environment, cwd=tmp_path)


def test_it_tests_and_benchmarks_on_the_software_device(bundle, tmp_path):
    done = run(bundle, tmp_path, libraries=str(bundle / "software"))
    summary = done.stdout[done.stdout.find("==== Summary") :]
    assert done.returncode == 0, done.stdout + done.stderr
    for step in ("attention kernels against their host twins", "kernel tests", "engine tests", "benchmark", "table"):
        assert f"ok       {step} (" in summary, summary
    assert "this is no GPU" in summary
    [written] = (tmp_path / "results").iterdir()
    assert written.name.endswith("-software-cuda-device-0")
    with open(written / "gpu.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["texts"]) for row in rows] == [("tiny", "16"), ("tiny", "64"), ("tiny", "natural")]
    assert all(row["device"] == "Software CUDA device 0" and float(row["sequences_per_s"]) > 0 for row in rows)
    assert "| tiny" in (written / "gpu.md").read_text("utf-8")


def test_a_failed_step_is_named_and_the_rest_runs(bundle, tmp_path):
    """Kernels that the device refuses to load: every step that needs them fails, and the next is run all the same."""
    done = run(bundle, tmp_path, "test", libraries=str(bundle / "software"), CUDA_DEVICE_FAIL="cuModuleLoadData:1:200")
    summary = done.stdout[done.stdout.find("==== Summary") :]
    assert done.returncode == 1
    for step in ("attention kernels against their host twins", "kernel tests", "engine tests"):
        assert f"FAILED   {step}" in summary, summary


def test_without_a_gpu_it_says_so(bundle, tmp_path):
    done = run(bundle, tmp_path, libraries="")
    assert done.returncode == 1
    assert "No GPU that the CUDA engine can use" in done.stderr


def test_the_table_compares_with_rivals_and_goals(tmp_path):
    (tmp_path / "run.txt").write_text("driver: 1.2\ndate: 2030-01-02\ncommit: abc\n")
    (tmp_path / "facts.txt").write_text("device: A card\ncublasLt: 13.0.0\nmatmul: fp16 8 x 8 x 8, 1.0 TFLOP/s\n")
    (tmp_path / "rivals.json").write_text('{"torch": "torch 1"}')
    (tmp_path / "sweep.csv").write_text(
        "model,texts,pass_tokens,sequences_per_s,tokens_per_s,percent_of_matmul\nbert-base,128,4096,1,128,61.5\n"
    )
    (tmp_path / "ours.csv").write_text(
        "contestant,model,texts,batch_tokens,sequences_per_s,percent_of_matmul,latency_p50_ms,latency_p99_ms\n"
        "triton-rust,bert-base,128,4096,3000,55.00,0.4000,0.5000\ntriton-rust,bert-base,natural,4096,9000,40.00,,\n"
    )
    (tmp_path / "rivals.csv").write_text(
        "contestant,model,texts,batch_tokens,sequences_per_s,latency_p50_ms,latency_p99_ms\n"
        "torch,bert-base,128,4096,2000,0.8,0.9\ntorch,bert-base,natural,4096,3000,,\ntorch,bert-base,natural sorted,4096,6000,,\n"
    )
    page = table.page(table.Figures(tmp_path))
    lines = [line for line in page.split("by the tokens of a pass")[0].splitlines() if line.startswith("|")]
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in lines}
    cells = [cell.strip() for cell in rows["bert-base", "128"].split("|")[3:-1]]
    assert cells == ["3,000", "55.0", "0.400", "0.500", "2,000", "1.50", "0.800"]
    assert [cell.strip() for cell in rows["bert-base", "natural sorted"].split("|")[7:9]] == ["6,000", "1.50"]
    assert ">= 60.0 % of the fp16 product's rate: 55.00, NOT met" in page
    assert ">= 1.2 x PyTorch: 1.50, met" in page
    assert ">= 2.0 x PyTorch, padded in the order of arrival: 3.00, met" in page
