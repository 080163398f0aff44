"""Serves a model repository on 127.0.0.1 until Ctrl-C, says what is served and how to ask.

Called by `make serve`. Exit code 0 after Ctrl-C or SIGTERM, 1 when the server could not start or died.
Standard library only.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import tritonserver

LOG = tritonserver.ROOT / "build" / "serve.log"
EXAMPLE = "The train to the coast leaves at seven."
LOADING = re.compile(r"\] loading: (\S+?):\d+$|\] \"?loading: (\S+?):\d+\"?$")
LOADED = re.compile(r"successfully loaded '([^']+)'")


class Stopped(Exception):
    """Ctrl-C or SIGTERM."""


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", required=True, help="directory that holds rust/libtriton_rust.so")
    parser.add_argument("--model-repo", help="a Triton model repository")
    parser.add_argument("--model", help="a Hugging Face directory: served as one model of its name")
    args = parser.parse_args()
    if (args.model is None) == (args.model_repo is None):
        parser.error("one of --model and --model-repo is needed")
    return args


def ports():
    """The three ports from the environment, each checked to be free."""
    out = {}
    for name, default in (("HTTP_PORT", 8000), ("GRPC_PORT", 8001), ("METRICS_PORT", 8002)):
        value = os.environ.get(name) or str(default)
        if not value.isdigit() or not 0 < int(value) < 65536:
            sys.exit(f"{name}={value} is not a port number")
        port = int(value)
        if port in out.values():
            sys.exit(f"{name}={port} is also another of the three ports: give {name} another number")
        if not tritonserver.port_is_free(port):
            sys.exit(f"Port {port} is in use: give another with {name}=, as in `make serve {name}={port + 1000}`")
        out[name] = port
    return out


def repository_of(directory):
    """Makes a repository with one model of links to the Hugging Face files in `directory`, and returns its path."""
    source = Path(directory).resolve()
    if not source.is_dir():
        sys.exit(f"MODEL={directory} is not a directory")
    if not (source / "config.json").is_file() and not (source / "modules.json").is_file():
        sys.exit(f"MODEL={directory} holds no config.json: it is not a Hugging Face model directory")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.name).strip("-.") or "model"
    repository = tritonserver.ROOT / "build" / "model_of_directory"
    shutil.rmtree(repository, ignore_errors=True)
    version = repository / name / "1"
    version.mkdir(parents=True)
    for entry in sorted(source.iterdir()):
        if not entry.name.startswith("."):
            (version / entry.name).symlink_to(entry)
    (repository / name / "config.pbtxt").write_text('backend: "rust"\n')
    return repository


def ask(port, path, body=None):
    """GET, or POST of `body`, to the server; the answer's JSON (None where it has none)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data)
    # An environment's proxy is not asked for 127.0.0.1.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def wait_until_live(server, port):
    """Waits until the server has tried to load every model, telling which one is being loaded."""
    seen, started = set(), time.monotonic()
    while True:
        if server.poll() is not None:
            died(server)
        for line in LOG.read_text("utf-8", "replace").splitlines():
            loading, loaded = LOADING.search(line), LOADED.search(line)
            if (loading or loaded) and line not in seen:
                seen.add(line)
                name = loaded[1] if loaded else loading[1] or loading[2]
                print(f"  {time.monotonic() - started:5.1f} s  {'loaded' if loaded else 'loading'} {name}", flush=True)
        try:
            ask(port, "/v2/health/live")
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)


def died(server):
    code = server.returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    sys.exit(f"\n{tritonserver.tail(LOG)}\n\ntritonserver {how}; the end of its log is above, all of it in {LOG}")


def describe(tensors):
    return ", ".join(f"{t['name']} {t['datatype']} {t['shape']}".replace(" ", "\u00a0") for t in tensors)


def print_models(port):
    """A table of the models; returns the metadata of those that are ready."""
    rows, ready, failed = [("MODEL", "STATE", "INPUTS", "OUTPUTS")], [], []
    for entry in ask(port, "/v2/repository/index", {}) or []:
        name, state = entry["name"], entry.get("state", "UNKNOWN")
        if state == "READY":
            model = ask(port, f"/v2/models/{name}")
            ready.append(model)
            rows.append((name, state, describe(model["inputs"]), describe(model["outputs"])))
        else:
            rows.append((name, "FAILED" if state == "UNAVAILABLE" else state, "", ""))
            failed.append((name, entry.get("reason", "")))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    print()
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    for name, reason in failed:
        print(f"\n  {name} was not loaded: {reason}")
    return ready


def curl(port, model):
    """A command line that asks `model`, ready to paste."""
    url = f"http://127.0.0.1:{port}/v2/models/{model['name']}"
    policy = ask(port, f"/v2/models/{model['name']}/config").get("model_transaction_policy", {})
    if policy.get("decoupled"):
        body = json.dumps({tensor["name"]: EXAMPLE for tensor in model["inputs"]})
        return f"curl -sN {url}/generate_stream -d {shlex.quote(body)}"
    inputs = []
    for tensor in model["inputs"]:
        shape = [1 if size < 0 else size for size in tensor["shape"]]
        inputs.append({"name": tensor["name"], "shape": shape, "datatype": "BYTES", "data": [EXAMPLE]})
    body = json.dumps({"inputs": inputs})
    return f"curl -s {url}/infer -d {shlex.quote(body)}"


def takes_text(model):
    return all(tensor["datatype"] == "BYTES" for tensor in model["inputs"])


class Foreground:
    """While this lasts, a Ctrl-C at the terminal reaches this process alone and not the `make` that called it, which
    would end with "Interrupt" and a code that is not 0. Does nothing where there is no terminal."""

    def __enter__(self):
        self.terminal = None
        try:
            terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return self
        self.previous = os.tcgetpgrp(terminal)
        if self.previous != os.getpgrp() or self.previous == os.getpid():
            os.close(terminal)
            return self
        self.terminal = terminal
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # nobody could continue us: `make` is in the background
        os.setpgid(0, 0)
        os.tcsetpgrp(terminal, os.getpid())
        return self

    def __exit__(self, *_):
        if self.terminal is not None:
            os.tcsetpgrp(self.terminal, self.previous)
            os.close(self.terminal)


def stop(server):
    """Lets the server answer what it is doing, and ends it; a second Ctrl-C ends it at once."""
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except (Stopped, subprocess.TimeoutExpired):
            server.kill()
            server.wait()


def on_signal(number, _frame):
    raise Stopped


def serve(args):
    library = Path(args.backends) / "rust" / "libtriton_rust.so"
    if not library.is_file():
        sys.exit(f"there is no {library}: run `make install`")
    repository = repository_of(args.model) if args.model else Path(args.model_repo)
    if not repository.is_dir() or not any(entry.is_dir() for entry in repository.iterdir()):
        sys.exit(f"MODEL_REPO={args.model_repo} is not a directory with models in it")
    numbers = ports()
    http = numbers["HTTP_PORT"]
    try:
        binary = tritonserver.find()
    except tritonserver.NotFound as error:
        sys.exit(str(error))
    LOG.parent.mkdir(parents=True, exist_ok=True)
    print(f"Starting tritonserver on 127.0.0.1 (its log: {os.path.relpath(LOG)})", flush=True)
    arguments = tritonserver.command(
        binary,
        repository.resolve(),
        Path(args.backends).resolve(),
        http,
        numbers["GRPC_PORT"],
        numbers["METRICS_PORT"],
        flags=["--exit-timeout-secs=10"],
    )
    server = tritonserver.start(arguments, LOG)
    try:
        wait_until_live(server, http)
        ready = print_models(http)
        metrics = f"http://127.0.0.1:{numbers['METRICS_PORT']}/metrics"
        print(f"\n  HTTP {http}, gRPC {numbers['GRPC_PORT']}, metrics {metrics}")
        askable = [model for model in ready if takes_text(model)]
        if askable:
            first = next((model for model in askable if model["name"] == "embed"), askable[0])
            print(f"\nAsk in another terminal:\n\n{curl(http, first)}")
        print("\nCtrl-C stops the server." if ready else "\nNo model is served. Ctrl-C stops the server.", flush=True)
        server.wait()
        died(server)
    except Stopped:
        print("\nStopping: waiting for clients to hang up; Ctrl-C again ends the server at once", flush=True)
    finally:
        stop(server)
    print("Stopped", flush=True)


def main():
    args = parse_arguments()
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)
    with Foreground():
        try:
            serve(args)
        except Stopped:
            print("\nStopped", flush=True)


if __name__ == "__main__":
    main()
