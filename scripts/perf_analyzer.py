"""Runs NVIDIA's perf_analyzer, which the package tritonclient brings, against a running server:

    python scripts/perf_analyzer.py -m sentiment -i grpc --concurrency-range 1:4

All arguments are perf_analyzer's own. Without -u it asks 127.0.0.1 at HTTP_PORT or GRPC_PORT of the environment; without
--input-data, --string-data or --string-length it sends sentences. Standard library only.
"""

import json
import os
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SENTENCES = ROOT / "model_repo" / "sentiment" / "sentences" / "heldout.tsv"
# What the program asks for, and what the server's package calls it.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


def find():
    """(perf_analyzer, the directory of the server's package that holds its libraries)."""
    for prefix in (Path(sys.prefix), ROOT / ".venv"):
        program = prefix / "bin" / "perf_analyzer"
        site = Path(sysconfig.get_paths(vars={"base": str(prefix), "platbase": str(prefix)})["purelib"])
        if program.is_file() and (site / "nvidia_pytriton.libs").is_dir():
            return program, site / "nvidia_pytriton.libs"
    raise SystemExit("no perf_analyzer in .venv: run `make deps`")


def environment(libraries, directory):
    """The environment in which it finds its libraries, by links in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for wanted, pattern in LIBRARIES.items():
        found = sorted(libraries.glob(pattern))
        link = directory / wanted
        if found and not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(found[0])
    path = [str(directory), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return dict(os.environ, LD_LIBRARY_PATH=os.pathsep.join(path))


def sentences(path):
    """A file of --input-data: one request for each sentence of the held-out list."""
    lines = [line.split("\t", 1)[1] for line in SENTENCES.read_text("utf-8").splitlines()]
    path.write_text(json.dumps({"data": [{"TEXT": [line]} for line in lines]}))
    return path


def main():
    program, libraries = find()
    build = ROOT / "build" / "perf"
    arguments = sys.argv[1:]
    env = environment(libraries, build)
    if "-u" not in arguments:
        grpc = "grpc" in arguments
        arguments += ["-u", "127.0.0.1:" + os.environ.get("GRPC_PORT" if grpc else "HTTP_PORT", "8001" if grpc else "8000")]
    if not any(argument.startswith(("--input-data", "--string-")) for argument in arguments):
        arguments += ["--input-data", str(sentences(build / "sentences.json"))]
    os.execve(program, [str(program), *arguments], env)


if __name__ == "__main__":
    main()
