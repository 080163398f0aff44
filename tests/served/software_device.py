"""The software CUDA device (tests/cuda_device) in a server: how it is started, and steered while it runs."""

import os
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Triton's own pools, small: their memory is the host's.
FLAGS = (
    "--pinned-memory-pool-byte-size=16777216",
    "--cuda-memory-pool-byte-size=0:1048576",
    "--cuda-memory-pool-byte-size=1:1048576",
)


@cache
def directory():
    """Where the stand-in libraries lie; built if they are not there."""
    command = [os.environ.get("CARGO", "cargo"), "run", "--quiet", "--locked", "-p", "cuda-device"]
    return Path(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip())


def environment(runtime=True, **settings):
    """The environment of a server that has two software devices. `runtime`: whether the server itself sees them, as
    KIND_GPU needs. `settings`: CUDA_DEVICE_... variables, such as FAIL="cuMemAlloc_v2:3:2"."""
    path = os.pathsep.join([str(directory()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    variables = {"LD_LIBRARY_PATH": path}
    if runtime:
        variables["LD_PRELOAD"] = str(directory() / "libcudart_device.so")
    return variables | {f"CUDA_DEVICE_{name}": value for name, value in settings.items()}


def steer(control_file, **settings):
    """Changes settings of the device in a running server that was started with CONTROL=control_file. They hold from
    the device's next call on."""
    partial = Path(f"{control_file}.partial")
    partial.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    partial.rename(control_file)
