"""The tritonserver of the benchmark: our backend beside the Python backend, with the interpreter that runs this."""

import http.client
import json
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np

LIBRARY = "libtriton_rust.so"
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import tritonserver  # noqa: E402  (scripts/tritonserver.py)


def lay_backends(path, binary, rust):
    """A directory of backends: links to ours and to the wheel's Python backend, with the stub of this Python."""
    wheel = binary.parent.parent
    stub = wheel / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    if not stub.is_dir():
        raise SystemExit(f"the server's wheel has no Python backend for Python {stub.name}")
    shutil.rmtree(path, ignore_errors=True)
    python = [*(wheel / "backends" / "python").iterdir(), *stub.iterdir()]
    for target, sources in (("rust", (rust / "rust").iterdir()), ("python", python)):
        (path / target).mkdir(parents=True)
        for source in sources:
            if source.is_file():
                (path / target / source.name).symlink_to(source.resolve())


def environment(binary):
    """What the stub, which embeds Python, needs to be this interpreter with these packages."""
    libdir = Path(sysconfig.get_config_var("LIBDIR"))
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if not (libdir / name).exists():
        raise SystemExit(f"there is no {name} in {libdir}, and the Python backend needs it: try another PYTHON=")
    libraries = binary.parents[3] / "nvidia_pytriton.libs"
    return os.environ | {
        "RIVALS_PACKAGES": sysconfig.get_paths()["purelib"],
        "LD_LIBRARY_PATH": f"{libraries}:{libdir}",
        # The rivals' ONNX Runtime would report to its maker.
        "ORT_DISABLE_TELEMETRY": "1",
    }


class Server:
    """Starts with every model; `ready` are those that loaded, `failed` the others with the reason."""

    def __init__(self, work, repository, rust):
        self.log = work / "server.log"
        binary = tritonserver.find()
        lay_backends(work / "backends", binary, rust)
        self.port, grpc, metrics = tritonserver.free_ports(3)
        arguments = tritonserver.command(binary, repository, work / "backends", self.port, grpc, metrics)
        self.process = tritonserver.start(arguments, self.log, environment(binary))
        try:
            self._wait()
            models = self.json("POST", "/v2/repository/index", b"{}")
            self.ready = {entry["name"] for entry in models if entry.get("state") == "READY"}
            self.failed = {
                entry["name"]: entry.get("reason") or "no reason given"
                for entry in models
                if entry["name"] not in self.ready
            }
            self.version = self.json("GET", "/v2")["version"]
        except BaseException:
            self.stop()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except Exception:  # noqa: BLE001 - it ends either way
                self.process.kill()
                self.process.wait()

    def _wait(self, seconds=300):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise SystemExit(f"tritonserver ended:\n{tritonserver.tail(self.log)}")
            try:
                if self.request("GET", "/v2/health/live")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"tritonserver is not live after {seconds} s:\n{tritonserver.tail(self.log)}")

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(self.address, timeout=120)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def json(self, method, path, body=None):
        status, data, _ = self.request(method, path, body)
        if status != 200:
            raise RuntimeError(f"{method} {path}: {status} {data.decode(errors='replace')}")
        return json.loads(data)

    def embed(self, model, texts):
        """EMBEDDING [texts, hidden] of one request with all texts."""
        data = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (text.encode() for text in texts))
        header = {
            "inputs": [
                {
                    "name": "TEXT",
                    "datatype": "BYTES",
                    "shape": [len(texts), 1],
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "outputs": [{"name": "EMBEDDING", "parameters": {"binary_data": True}}],
        }
        header = json.dumps(header).encode()
        sizes = {"Inference-Header-Content-Length": str(len(header))}
        status, body, headers = self.request("POST", f"/v2/models/{model}/infer", header + data, sizes)
        if status != 200:
            raise RuntimeError(f"{model}: {status} {body.decode(errors='replace')}")
        start = int(headers["Inference-Header-Content-Length"])
        return np.frombuffer(body[start:], np.float32).reshape(len(texts), -1)

    def pids(self):
        """The server and everything that it started."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            except OSError:  # it ended
                pass
        found = [self.process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found
