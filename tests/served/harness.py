"""The real tritonserver for tests: starts it on free ports, asks it over HTTP and gRPC, always stops it."""

import gc
import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tritonclient.grpc
import tritonclient.http

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "reference")]

import tritonserver  # noqa: E402  (scripts/tritonserver.py)

BACKENDS = ROOT / os.environ.get("BACKENDS", "build/backends")
LIBRARY = BACKENDS / "rust" / "libtriton_rust.so"
BATCHER = BACKENDS / "rust" / "batchstrategy.so"
PROTOCOLS = ("http", "grpc")

# What tritonclient's InferenceServerException.status() says for each of Triton's codes.
STATUS = {
    "INVALID_ARG": {"http": "400", "grpc": "StatusCode.INVALID_ARGUMENT"},
    "NOT_FOUND": {"http": "404", "grpc": "StatusCode.NOT_FOUND"},
    "UNAVAILABLE": {"http": "503", "grpc": "StatusCode.UNAVAILABLE"},
    "CANCELLED": {"http": "400", "grpc": "StatusCode.CANCELLED"},
}


def accepts(address):
    """Whether something listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        return True
    except OSError:
        return False


def as_bytes(texts):
    """BYTES tensor [N, 1] of one text or a list of them, as str or bytes."""
    texts = [texts] if isinstance(texts, (str, bytes)) else list(texts)
    out = np.empty((len(texts), 1), dtype=object)
    out[:, 0] = [text.encode() if isinstance(text, str) else text for text in texts]
    return out


class Endpoint:
    """A server that answers at three addresses; asks it."""

    def __init__(self, http_address, grpc_address, metrics_address):
        self.http, self.grpc, self.metrics = http_address, grpc_address, metrics_address
        self._local = threading.local()

    def client(self, protocol):
        """A tritonclient of this thread (the HTTP one is not to be shared between threads)."""
        clients = self._local.__dict__.setdefault("clients", {})
        if protocol not in clients:
            if protocol == "http":
                clients[protocol] = tritonclient.http.InferenceServerClient(
                    self.http, connection_timeout=60.0, network_timeout=60.0
                )
            else:
                clients[protocol] = tritonclient.grpc.InferenceServerClient(self.grpc)
        return clients[protocol]

    def hang_up(self):
        """Closes the connections of this thread."""
        for client in self._local.__dict__.pop("clients", {}).values():
            client.close()

    def infer(self, model, inputs, outputs=None, protocol="http", class_count=0, **more):
        """Asks `model`. `inputs`: name -> array, or texts for TEXT alone. Returns name -> array of each output."""
        module = tritonclient.http if protocol == "http" else tritonclient.grpc
        if not isinstance(inputs, dict):
            inputs = {"TEXT": inputs}
        tensors = []
        for name, value in inputs.items():
            if not isinstance(value, np.ndarray):
                value = as_bytes(value)
            tensor = module.InferInput(name, list(value.shape), tritonclient.utils.np_to_triton_dtype(value.dtype))
            tensor.set_data_from_numpy(value)
            tensors.append(tensor)
        if outputs is not None:
            outputs = [module.InferRequestedOutput(name, class_count=class_count) for name in outputs]
        result = self.client(protocol).infer(model, tensors, outputs=outputs, **more)
        answer = result.get_response()
        if protocol == "http":
            names = [output["name"] for output in answer.get("outputs", [])]
        else:
            names = [output.name for output in answer.outputs]
        return {name: result.as_numpy(name) for name in names}

    def request(self, method, path, body=None, headers=None):
        """A plain HTTP request: (status, text)."""
        connection = http.client.HTTPConnection(self.http, timeout=60)
        try:
            if isinstance(body, (dict, list)):
                body = json.dumps(body)
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def json(self, method, path, body=None):
        status, text = self.request(method, path, body)
        assert status == 200, f"{method} {path}: {status} {text}"
        return json.loads(text) if text else None

    def live(self):
        try:
            return self.request("GET", "/v2/health/live")[0] == 200
        except OSError:
            return False

    def ready(self, model):
        return self.request("GET", f"/v2/models/{model}/ready")[0] == 200

    def index(self):
        """name -> (state, reason)."""
        entries = self.json("POST", "/v2/repository/index", {}) or []
        return {entry["name"]: (entry.get("state", ""), entry.get("reason", "")) for entry in entries}

    def config(self, model):
        return self.json("GET", f"/v2/models/{model}/config")

    def metadata(self, model):
        return self.json("GET", f"/v2/models/{model}")

    def statistics(self, model):
        return self.json("GET", f"/v2/models/{model}/stats")["model_stats"][0]

    def batch_sizes(self, model):
        """Batch size -> how many passes of it the statistics show."""
        stats = self.statistics(model).get("batch_stats", [])
        return {entry["batch_size"]: entry["compute_infer"]["count"] for entry in stats}

    def metric(self, name, **labels):
        """The value of one series on the metrics port, or None."""
        connection = http.client.HTTPConnection(self.metrics, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        for line in text.splitlines():
            found = re.fullmatch(rf"{re.escape(name)}\{{(.*)\}} (\S+)", line)
            if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
                return float(found[2])
        return None


class Server(Endpoint):
    """A tritonserver of our own, in a process group of its own. Use with `with`."""

    def __init__(self, repository, log, flags=(), backends=None, env=None):
        binary = tritonserver.find()
        self.log_file = Path(log)
        for attempt in range(3):
            ports = tritonserver.free_ports(3)
            super().__init__(*(f"127.0.0.1:{port}" for port in ports))
            arguments = tritonserver.command(binary, repository, backends or BACKENDS, *ports, flags=flags)
            self.process = tritonserver.start(arguments, log, env=dict(os.environ, **(env or {})))
            try:
                if self._wait_until_live():
                    return
            except BaseException:
                self.kill()
                raise
            if "in use" not in self.log() or attempt == 2:
                raise RuntimeError(f"tritonserver ended with {self.process.returncode}:\n{tritonserver.tail(log, 60)}")

    def _wait_until_live(self, seconds=120):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                return False
            # In this order: the server opens the port of the metrics last.
            if self.live() and accepts(self.grpc) and accepts(self.metrics):
                return True
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"tritonserver was not live after {seconds} s:\n{tritonserver.tail(self.log_file, 60)}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def log(self):
        return self.log_file.read_text("utf-8", "replace")

    def stop(self, number=signal.SIGTERM, seconds=60):
        """Ends the server and returns its exit code. It waits for its clients to hang up, which we do."""
        self.hang_up()
        gc.collect()  # the clients of threads that have ended
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
                raise RuntimeError(f"tritonserver did not end within {seconds} s:\n{tritonserver.tail(self.log_file)}")
        self.kill()
        return self.process.returncode

    def kill(self):
        """Ends whatever is left of the process group."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def memory(self, field="VmRSS"):
        """MiB of resident memory now, or at its highest (VmHWM)."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.M)[1]) / 1024

    def mapped_files(self):
        lines = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return {line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6}


def stream(server, model, texts, outputs=None, **more):
    """Asks a decoupled model over a gRPC stream. Returns (responses, error): name -> array of each response, and what
    ended the request if it was no success."""
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    got = queue.Queue()
    try:
        client.start_stream(lambda result, error: got.put((result, error)))
        send_stream(client, model, texts, outputs, **more)
        responses = []
        while True:
            result, error = got.get(timeout=60)
            if error is not None:
                return responses, error
            answer = result.get_response()
            if answer.outputs:
                responses.append({output.name: result.as_numpy(output.name) for output in answer.outputs})
            if answer.parameters["triton_final_response"].bool_param:
                return responses, None
    finally:
        client.stop_stream()
        client.close()


def send_stream(client, model, texts, outputs=None, **more):
    """Sends `texts` over the stream that `client` has open."""
    texts = as_bytes(texts)
    tensor = tritonclient.grpc.InferInput("TEXT", list(texts.shape), "BYTES")
    tensor.set_data_from_numpy(texts)
    if outputs is not None:
        outputs = [tritonclient.grpc.InferRequestedOutput(name) for name in outputs]
    client.async_stream_infer(model, [tensor], outputs=outputs, **more)


def concurrently(function, items, threads=None):
    """[function(item)] of all items at once; an exception is returned in its place."""

    def guarded(item):
        try:
            return function(item)
        except Exception as error:  # noqa: BLE001 - given to the caller
            return error

    items = list(items)
    with ThreadPoolExecutor(threads or len(items)) as pool:
        return list(pool.map(guarded, items))


class Load:
    """Keeps asking in threads of its own until it is stopped; counts answers and keeps every failure, each with the
    time at which its request was made."""

    def __init__(self, ask, threads=4, at_end=lambda: None):
        self.answered, self.failures, self._at_end = 0, [], at_end
        self._ask, self._stop, self._lock = ask, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(threads)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number):
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self._ask(number)
                with self._lock:
                    self.answered += 1
            except Exception as error:  # noqa: BLE001 - shown by the test
                with self._lock:
                    self.failures.append((started, error))
                time.sleep(0.01)
        self._at_end()


def cosine(a, b):
    """Row-wise cosine of two arrays of rows, in fp64."""
    a, b = np.atleast_2d(a).astype(np.float64), np.atleast_2d(b).astype(np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def until(condition, seconds=30, every=0.05):
    """Waits for `condition()` to hold; whether it came to hold."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(every)
    return bool(condition())
