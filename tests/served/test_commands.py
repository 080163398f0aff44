"""`make serve`, as a person at a terminal uses it."""

import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import conftest
import repository
from harness import ROOT, tritonserver

pytestmark = pytest.mark.skipif(bool(conftest.EXTERNAL), reason="starts servers of its own")


# Makes the terminal on its standard input its own, and becomes the command.
BECOME = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, *command, **variables):
        self.file, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", BECOME, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, words, seconds=120):
        end = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < end, f"no {words!r} in:\n{self.text}"
            assert self._read(), f"ended before {words!r}:\n{self.text}"
        return self.text

    def _read(self):
        if not select.select([self.file], [], [], 1)[0]:
            return True
        try:
            data = os.read(self.file, 65536)
        except OSError:  # the other end is closed
            return False
        self.text += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data)

    def type(self, keys):
        os.write(self.file, keys)

    def exit_code(self, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self._read():
                break
        return self.process.wait(5)

    def kill(self):
        """Ends what is left: closing the terminal hangs up on it."""
        os.close(self.file)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def terminal():
    opened = []

    def start(*command, **variables):
        opened.append(Terminal(*command, **variables))
        return opened[-1]

    yield start
    for one in opened:
        one.kill()


@pytest.fixture
def ports():
    return dict(zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), map(str, tritonserver.free_ports(3))))


def pasted(screen):
    """Runs the curl that the screen shows, through a shell; the answer's outputs by name."""
    command = re.search(r"^curl .*$", screen, re.M)[0]
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    return {output["name"]: output for output in json.loads(answer)["outputs"]}


def test_make_serve_shows_the_models_and_a_curl_that_works_and_ctrl_c_ends_it_with_0(terminal, ports):
    make = terminal("make", "serve", **ports)
    screen = make.read_until("Ctrl-C stops the server.")
    assert re.search(r"embed +READY .*EMBEDDING", screen) and re.search(r"sentiment +READY .*LOGITS", screen)
    embedding = pasted(screen)["EMBEDDING"]
    assert embedding["shape"] == [1, 384]
    assert np.linalg.norm(embedding["data"]) == pytest.approx(1, abs=1e-3)
    demo = subprocess.run(["make", "demo"], cwd=ROOT, env={**os.environ, **ports}, capture_output=True, text=True)
    assert demo.returncode == 0, demo.stderr
    assert "cosine similarity of 5 vectors of 384 numbers" in demo.stdout and "POSITIVE" in demo.stdout
    make.type(b"\x03")
    assert make.exit_code() == 0, make.text


def test_the_curl_for_a_decoupled_model_streams(terminal, ports, new_repository):
    models = new_repository()
    decoupled = "model_transaction_policy { decoupled: true }"
    models.add("stream", "embed_mean", {"max_length": 8, "window_stride": 2}, decoupled)
    make = terminal("make", "serve", f"MODEL_REPO={models}", **ports)
    command = re.search(r"^curl .*$", make.read_until("Ctrl-C stops the server."), re.M)[0]
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert answer.count("data: {") > 1 and "WINDOW_END" in answer
    make.type(b"\x03")
    assert make.exit_code() == 0, make.text


def test_any_hugging_face_directory_is_served(terminal, ports):
    directory = repository.directory("classify_three")
    make = terminal("make", "serve", f"MODEL={directory}", **ports)
    screen = make.read_until("Ctrl-C stops the server.")
    assert re.search(r"classify_three +READY", screen)
    assert len(pasted(screen)["LOGITS"]["data"]) == 3
    make.type(b"\x03")
    assert make.exit_code() == 0, make.text


def serve(*arguments, **variables):
    command = ["make", "serve", *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_a_port_in_use_is_named_with_its_variable(ports):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = str(taken.getsockname()[1])
        done = serve(**{**ports, "GRPC_PORT": number})
    assert done.returncode != 0
    assert number in done.stderr and "GRPC_PORT" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "variable, value",
    [("MODEL", "no/such/directory"), ("MODEL_REPO", "no/such/directory"), ("TRITONSERVER", "no/such/file")],
)
def test_a_wrong_variable_is_named(ports, variable, value):
    done = serve(**{**ports, variable: value})
    assert done.returncode != 0
    assert variable in done.stderr and value in done.stderr and "Traceback" not in done.stderr


def test_a_model_that_fails_says_why_and_the_others_are_served(terminal, ports, tmp_path):
    models = repository.Repository(tmp_path / "models")
    models.add("good", "embed_mean")
    models.add("bad", "embed_mean", {"pooling": "median"})
    make = terminal("make", "serve", f"MODEL_REPO={models}", **ports)
    screen = make.read_until("Ctrl-C stops the server.")
    assert re.search(r"good +READY", screen) and re.search(r"bad +FAILED", screen)
    assert re.search(r"bad was not loaded: .*median", screen)
    assert len(pasted(screen)["EMBEDDING"]["data"]) == 64
    make.type(b"\x03")
    assert make.exit_code() == 0, make.text


def test_a_server_that_dies_leaves_its_log_and_a_code(ports, tmp_path):
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\necho 'the reason why'\nexit 7\n")
    binary.chmod(0o755)
    done = serve(TRITONSERVER=str(binary), **ports)
    assert done.returncode != 0
    assert "the reason why" in done.stderr and "exit code 7" in done.stderr


def test_make_alone_is_help():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for target in ("deps", "build", "install", "models", "serve", "demo", "test", "check", "test-container", "clean"):
        assert re.search(rf"^  {target} ", done.stdout, re.M), target
