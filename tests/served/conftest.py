"""Fixtures of the served tests.

`common` is one server for all tests that only ask. Tests that need flags, files or a life of their own start servers
with `serve`. With TRITON_TEST_HTTP, TRITON_TEST_GRPC and TRITON_TEST_METRICS (host:port each) the first kind runs
against a server that is there already and serves what repository.py writes; the second kind is skipped.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness  # noqa: E402
import repository  # noqa: E402

EXTERNAL = os.environ.get("TRITON_TEST_HTTP")


@pytest.fixture(scope="session")
def common(tmp_path_factory):
    """A server with the examples and every small checkpoint: repository.write_common."""
    if EXTERNAL:
        yield harness.Endpoint(EXTERNAL, os.environ["TRITON_TEST_GRPC"], os.environ["TRITON_TEST_METRICS"])
        return
    path = tmp_path_factory.mktemp("common")
    repository.write_common(path / "models")
    with harness.Server(path / "models", path / "server.log") as server:
        failed = {name: reason for name, (state, reason) in server.index().items() if state != "READY"}
        assert not failed, failed
        yield server
        assert server.stop() == 0, "after all tests the server did not end well"


@pytest.fixture(params=harness.PROTOCOLS)
def protocol(request):
    return request.param


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """serve(repository, *flags, **more) starts a server that ends with the module at the latest."""
    if EXTERNAL:
        pytest.skip("starts servers of its own")
    servers = []

    def start(models, *flags, **more):
        log = tmp_path_factory.mktemp("server") / "server.log"
        server = harness.Server(models, log, flags, **more)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def new_repository(tmp_path_factory):
    return lambda: repository.Repository(tmp_path_factory.mktemp("repository") / "models")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Shows the end of the common server's log with a failure."""
    outcome = yield
    report = outcome.get_result()
    server = item.funcargs.get("common") if hasattr(item, "funcargs") else None
    if report.failed and isinstance(server, harness.Server):
        report.sections.append(("tritonserver's log", harness.tritonserver.tail(server.log_file, 30)))
