"""Reloads and the end of the server under load: no request is lost."""

import os
import signal
import time

import numpy as np
import pytest

from harness import Load, Server, until
from reference import text

QUESTIONS = ["Where is the library?", text("words_20"), "", text("emoji")]


def load_of(server, model, expected):
    """Asks `model` over HTTP in even threads, gRPC in odd ones; a wrong answer is a failure."""

    def ask(number):
        question = number % len(QUESTIONS)
        answer = server.infer(model, [QUESTIONS[question]], ["EMBEDDING"], protocol=("http", "grpc")[number % 2])
        np.testing.assert_allclose(answer["EMBEDDING"], expected[question : question + 1], atol=1e-5)

    return ask


def control(server, action, model):
    status, answer = server.request("POST", f"/v2/repository/models/{model}/{action}", {})
    assert status == 200, answer


@pytest.fixture
def explicit(serve, new_repository):
    """A server of the models `one` and `other` with explicit control, and its repository."""
    models = new_repository()
    for name in ("one", "other"):
        models.add(name, "embed_mean_normalize", {"dtype": "fp32"})
    server = serve(models, "--model-control-mode=explicit", "--load-model=one", "--load-model=other")
    yield server, models
    server.kill()  # after a reload that failed, core 2.51 waits for a model that it has forgotten, with any backend


def test_200_reloads_under_load_without_a_failed_request(explicit):
    """Half of the load asks the model that is reloaded, half its neighbour."""
    server, models = explicit
    expected = server.infer("one", QUESTIONS, ["EMBEDDING"])["EMBEDDING"]
    with Load(load_of(server, "one", expected), threads=2) as same:
        with Load(load_of(server, "other", expected), threads=2) as neighbour:
            for reload in range(200):
                # Triton skips a reload when nothing changed.
                models.configure("one", {"dtype": "fp32"}, f"# reload {reload}")
                control(server, "load", "one")
    assert not same.failures and not neighbour.failures, (same.failures[:3], neighbour.failures[:3])
    assert same.answered > 200 and neighbour.answered > 200
    np.testing.assert_allclose(server.infer("one", QUESTIONS, ["EMBEDDING"])["EMBEDDING"], expected, atol=1e-5)
    assert server.log().count("successfully loaded 'one'") >= 200
    assert server.stop() == 0


def test_loads_and_unloads_leave_nothing_behind(explicit):
    server, _ = explicit

    def cycle(times):
        for _ in range(times):
            control(server, "load", "one")
            server.infer("one", QUESTIONS)
            control(server, "unload", "one")
            assert until(lambda: server.index()["one"][0] == "UNAVAILABLE")

    def descriptors_and_threads():
        process = f"/proc/{server.process.pid}"
        return len(os.listdir(f"{process}/fd")), len(os.listdir(f"{process}/task"))

    cycle(5)
    before, memory = descriptors_and_threads(), server.memory()
    cycle(40)
    assert until(lambda: descriptors_and_threads() <= tuple(n + 2 for n in before), 10), (
        before,
        descriptors_and_threads(),
    )
    assert server.memory() - memory < 20, "40 cycles of a model of 1 MB"


def test_a_reload_takes_up_changed_parameters(explicit):
    server, models = explicit
    models.configure("one", {"max_length": "7"})
    control(server, "load", "one")
    assert server.infer("one", ["the " * 50])["TOKEN_COUNT"].item() == 7


def test_a_reload_that_fails_keeps_the_old_version(explicit):
    server, models = explicit
    models.configure("one", {"pooling": "median"})
    status, answer = server.request("POST", "/v2/repository/models/one/load", {})
    assert status != 200 and "median" in answer
    assert server.infer("one", ["hello"])["EMBEDDING"].shape == (1, 64)


def test_an_unloaded_model_can_be_loaded_again(explicit):
    server, _ = explicit
    control(server, "unload", "other")
    assert until(lambda: server.index()["other"][0] == "UNAVAILABLE")
    assert not server.ready("other") and server.ready("one")
    control(server, "load", "other")
    assert server.infer("other", ["hello"])["EMBEDDING"].shape == (1, 64)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_exits_0_and_answers_what_it_took(new_repository, serve, tmp_path, number):
    models = new_repository()
    models.add("minilm", "minilm", {"dtype": "fp32"})
    server = Server(models, tmp_path / "server.log")
    question = [text("words_300")] * 4

    def ask(thread):
        server.infer("minilm", question, ["EMBEDDING"], protocol=("http", "grpc")[thread % 2])

    with server:
        # The server waits for its clients to hang up, as one that closes at the end does.
        with Load(ask, threads=4, at_end=server.hang_up) as load:
            assert until(lambda: load.answered > 4)
            signalled = time.monotonic()
            server.process.send_signal(number)
            time.sleep(0.2)
        code = server.stop(number)
    assert code == 0, server.log()[-3000:]
    # What was asked just then may have been on its way still; what the server had taken must be answered.
    lost = [error for started, error in load.failures if started < signalled - 0.05]
    assert not lost, lost
    for bad in ("panic", "Signal (11)", "Signal (6)", "double free", "corrupt"):
        assert bad not in server.log()
