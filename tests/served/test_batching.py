"""Batches by token budget: batchstrategy.so in the real scheduler, and the backend that holds the budget exactly."""

import os
import random
import shutil
import struct
import threading
import time
from functools import cache

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

import closed_loop
import harness
from harness import Load, as_bytes, until

# max_length 48, two layers of 64.
SMALL = "embed_mean"
ONE_INSTANCE = "instance_group [{ count: 1 kind: KIND_CPU }]\n"
# Ten tokens with the two special ones, and 32 bytes: what the batcher expects of them before it has learned.
TEN_TOKENS = "the " * 8


@pytest.fixture(scope="module")
def without_batcher(tmp_path_factory):
    """A backend directory without batchstrategy.so."""
    path = tmp_path_factory.mktemp("backends")
    (path / "rust").mkdir()
    (path / "rust" / harness.LIBRARY.name).symlink_to(harness.LIBRARY.resolve())
    return path


@cache
def sentences():
    """Ordinary sentences, and pieces of them from one word to far beyond the small models' length."""
    table = harness.ROOT / "model_repo" / "sentiment" / "sentences" / "train.tsv"
    lines = [line.split("\t", 1)[1] for line in table.read_text("utf-8").splitlines()]
    words = " ".join(lines).split()
    rng = random.Random(4)

    def piece():
        start, length = rng.randrange(len(words) - 80), rng.choice([1, 2, 4, 8, 8, 12, 16, 24, 40, 80])
        return " ".join(words[start : start + length])

    return [piece() for _ in range(1000)]


def embedding(answer):
    return np.frombuffer(answer.data, np.float32)


def passes(server, model, up_to="+Inf"):
    """Passes of the model so far, of at most so many tokens (a bucket's bound)."""
    return int(server.metric("rust_batch_tokens_bucket", model=model, le=up_to) or 0)


def executed(server, model, count):
    """Whether the statistics come to show `count` executions, and no more. They follow the answers."""

    def shown():
        return server.statistics(model)["execution_count"]

    return until(lambda: shown() == count, seconds=5) and not until(lambda: shown() != count, seconds=0.2)


DELAYS = (0, 1000, 20000)
INSTANCES = (1, 3)
QUEUES = {
    "plain": "",
    "policy": "priority_levels: 2 default_priority_level: 2 default_queue_policy { max_queue_size: 1000"
    " default_timeout_microseconds: 60000000 allow_timeout_override: true }",
}


@pytest.fixture(scope="module")
def budget_server(serve, new_repository):
    models = new_repository()
    models.add("alone", SMALL, {"dtype": "fp32"}, ONE_INSTANCE)
    for delay in DELAYS:
        for instances in INSTANCES:
            for queue, policy in QUEUES.items():
                models.add(
                    f"m_{delay}_{instances}_{queue}",
                    SMALL,
                    {"dtype": "fp32", "max_batch_tokens": 128},
                    f"max_batch_size: 64 instance_group [{{ count: {instances} kind: KIND_CPU }}]"
                    f" dynamic_batching {{ max_queue_delay_microseconds: {delay} {policy} }}",
                )
    return serve(models)


@pytest.fixture(scope="module")
def expected(budget_server):
    """EMBEDDING and TOKEN_COUNT of each of `sentences()`, asked alone."""
    rows = [budget_server.infer("alone", [text]) for text in sentences()]
    return (
        np.concatenate([row["EMBEDDING"] for row in rows]),
        np.array([row["TOKEN_COUNT"].item() for row in rows]),
    )


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("instances", INSTANCES)
@pytest.mark.parametrize("delay", DELAYS)
def test_no_pass_is_above_the_budget(budget_server, expected, delay, instances, queue):
    """10,000 requests of mixed lengths from 64 connections: each answered with its own answer."""
    model = f"m_{delay}_{instances}_{queue}"
    priority = [{"priority": 1 + i % 2} if queue == "policy" else None for i in range(2)]
    requests = [
        closed_loop.request(model, [text], "EMBEDDING", priority[i % 2]) for i, text in enumerate(sentences())
    ]
    answers = closed_loop.run(budget_server.http, requests * 10, connections=64)
    assert len(answers) == 10_000
    assert {answer.status for answer in answers} == {200}
    rows = np.array([answer.index % 1000 for answer in answers])
    embeddings, tokens = expected
    np.testing.assert_allclose([embedding(answer) for answer in answers], embeddings[rows], atol=1e-5)
    assert passes(budget_server, model) > 0
    assert passes(budget_server, model, "128") == passes(budget_server, model)
    assert budget_server.metric("rust_tokens_total", model=model) == 10 * tokens.sum()
    assert budget_server.metric("rust_max_batch_tokens", model=model) == 128


def test_the_estimate_learns_the_traffic(budget_server, expected):
    """The small vocabulary has far fewer bytes a token than the first guess."""
    model = "m_0_1_plain"
    estimated, tokens = (budget_server.metric(f"rust_{n}_total", model=model) for n in ("estimated_tokens", "tokens"))
    if not tokens:
        pytest.skip("needs the traffic of the test above")
    assert 0.85 < estimated / tokens < 1.15, (estimated, tokens)


@pytest.mark.parametrize("queue", QUEUES)
def test_a_text_above_the_budget_is_served_among_small_ones(serve, new_repository, queue):
    """It is a pass of its own. No hang, no spin: all are answered, and then the server is idle."""
    models = new_repository()
    models.add(
        "m", SMALL, {"max_batch_tokens": 16}, f"max_batch_size: 64 dynamic_batching {{ {QUEUES[queue]} }} {ONE_INSTANCE}"
    )
    server = serve(models)
    texts = ["the " * (200 if i % 10 == 0 else 1 + i % 8) for i in range(1000)]
    requests = [closed_loop.request("m", [text], "EMBEDDING") for text in texts]
    answers = closed_loop.run(server.http, requests, connections=32, timeout=10)
    assert len(answers) == 1000 and {answer.status for answer in answers} == {200}
    assert passes(server, "m") - passes(server, "m", "16") == 100
    # A single one, and nothing after it.
    assert len(closed_loop.run(server.http, requests[:1], connections=1, timeout=10)) == 1
    assert cpu_share(server, seconds=10) < 0.02
    server.stop()


def cpu_share(server, seconds):
    """What part of a processor all threads of the server use together."""

    def used():
        fields = open(f"/proc/{server.process.pid}/stat").read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(0.5)
    before, start = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - start)


def test_a_client_batch_above_the_budget_is_split(serve, new_repository, protocol):
    models = new_repository()
    models.add("whole", SMALL, {"dtype": "fp32", "max_batch_tokens": 8192})
    models.add("split", SMALL, {"dtype": "fp32", "max_batch_tokens": 64})
    server = serve(models)
    texts = sentences()[:200]
    whole = server.infer("whole", texts, protocol=protocol)
    split = server.infer("split", texts, protocol=protocol)
    np.testing.assert_array_equal(split["TOKEN_COUNT"], whole["TOKEN_COUNT"])
    np.testing.assert_allclose(split["EMBEDDING"], whole["EMBEDDING"], atol=1e-5)
    assert passes(server, "whole") == 1
    assert passes(server, "split") == passes(server, "split", "64") >= whole["TOKEN_COUNT"].sum() / 64
    server.stop()


def test_a_request_that_is_cancelled_between_passes_stops_there(serve, new_repository):
    """Its neighbours in the queue are answered."""
    models = new_repository()
    models.add("m", "minilm", {"max_batch_tokens": 16, "dtype": "fp32"}, ONE_INSTANCE)
    server = serve(models)
    rows = 128
    tensor = tritonclient.grpc.InferInput("TEXT", [rows, 1], "BYTES")
    tensor.set_data_from_numpy(as_bytes(["the " * 250] * rows))
    done, outcome = threading.Event(), []

    def callback(result, error):
        outcome.append(error)
        done.set()

    call = server.client("grpc").async_infer("m", [tensor], callback)
    assert until(lambda: passes(server, "m") > 2)
    call.cancel()
    assert done.wait(10) and isinstance(outcome[0], InferenceServerException)
    # The one that waits behind it is answered as soon as the pass that was running is done.
    assert server.infer("m", ["hello"])["EMBEDDING"].shape == (1, 384)
    assert passes(server, "m") < rows
    server.stop()


@pytest.fixture
def held(serve, new_repository):
    """held(text, parameters, count=12, ...) is a server of one model whose scheduler starts when `count` requests are in its queue."""

    def start(text, parameters, count=12, source=SMALL, instances=1, **more):
        models = new_repository()
        group = f"instance_group [{{ count: {instances} kind: KIND_CPU }}]"
        models.add("m", source, parameters, f"{group} {text}")
        return serve(models, env={"TRITONSERVER_DELAY_SCHEDULER": str(count)}, **more)

    return start


def ask_at_once(server, requests, gap=0):
    """The answers to requests that are all sent before any is answered, in the order in which they came."""
    answers = closed_loop.run(server.http, requests, connections=len(requests), timeout=10, gap=gap)
    assert {answer.status for answer in answers} == {200}, [answer.data for answer in answers]
    return answers


@pytest.mark.parametrize("delay", [0, 1000])
@pytest.mark.parametrize("requests, least, most", [(3, 4, 6), (1, 12, 12), (12, 1, 1)])
def test_twelve_requests_in_the_queue_become_batches_of_the_budget(held, requests, least, most, delay):
    """What NVIDIA shows of its own example of a custom batcher."""
    server = held(
        f"max_batch_size: 64 dynamic_batching {{ max_queue_delay_microseconds: {delay} }}",
        {"max_batch_tokens": 10 * requests},
    )
    ask_at_once(server, [closed_loop.request("m", [TEN_TOKENS], "EMBEDDING")] * 12)
    assert least <= passes(server, "m") <= most
    assert executed(server, "m", passes(server, "m"))
    server.stop()


def test_rows_and_both_texts_of_a_pair_count(held):
    """Four rows of 2 + 3 + 2 words make 40 tokens: two requests fill 80."""
    server = held(
        "max_batch_size: 64 dynamic_batching {}",
        {"max_batch_tokens": 80, "text_pair": "true"},
        source="classify_pair_three",
    )
    rows = [("the the", "the the the the the")] * 4
    request = closed_loop.request("m", rows, "LOGITS", names=("TEXT", "TEXT_PAIR"))
    ask_at_once(server, [request] * 12)
    assert executed(server, "m", 6)
    server.stop()


def test_without_the_library_all_are_one_batch_and_the_budget_holds(held, without_batcher):
    server = held("max_batch_size: 64 dynamic_batching {}", {"max_batch_tokens": 30}, backends=without_batcher)
    ask_at_once(server, [closed_loop.request("m", [TEN_TOKENS], "EMBEDDING")] * 12)
    assert executed(server, "m", 1)
    assert passes(server, "m") == 4
    server.stop()


def test_the_library_of_the_parameter_is_used(new_repository, serve, without_batcher):
    """In the model's directory, where every version of the server accepts it."""
    models = new_repository()
    library = models.add("m", SMALL).parent / "batching.so"
    shutil.copy(harness.BATCHER, library)
    models.configure(
        "m",
        {"max_batch_tokens": 30, "TRITON_BATCH_STRATEGY_PATH": library},
        f"max_batch_size: 64 dynamic_batching {{}} {ONE_INSTANCE}",
    )
    server = serve(models, backends=without_batcher, env={"TRITONSERVER_DELAY_SCHEDULER": "12"})
    ask_at_once(server, [closed_loop.request("m", [TEN_TOKENS], "EMBEDDING")] * 12)
    assert executed(server, "m", 4)
    assert f"{library} for model m" in server.log()
    server.stop()


def test_priorities_hold(held):
    """Ten requests of low priority, then two of high: with batches of one these two are answered first."""
    server = held(
        "max_batch_size: 64 dynamic_batching { priority_levels: 2 default_priority_level: 2 }", {"max_batch_tokens": 10}
    )
    requests = [closed_loop.request("m", [TEN_TOKENS], "EMBEDDING", {"priority": 1 if i >= 10 else 2}) for i in range(12)]
    answers = ask_at_once(server, requests)
    assert {answer.index for answer in answers[:2]} == {10, 11}
    assert executed(server, "m", 12)
    server.stop()


@pytest.mark.parametrize("preserve", [True, False])
def test_preserve_ordering_holds(held, preserve):
    """A long request, and in the next batch, on the other instance, short ones that are done before it."""
    server = held(
        f"max_batch_size: 64 dynamic_batching {{ preserve_ordering: {str(preserve).lower()} }}",
        {"max_batch_tokens": 110, "dtype": "fp32"},
        source="minilm",
        instances=2,
    )
    long = closed_loop.request("m", ["the " * 250] * 16, "EMBEDDING")
    answers = ask_at_once(server, [long] + [closed_loop.request("m", [TEN_TOKENS], "EMBEDDING")] * 11, gap=0.02)
    assert executed(server, "m", 2)
    times = {answer.index: answer.received for answer in answers}
    first = min(times[index] for index in range(1, 12))
    # Answers leave in order, on connections and threads of their own.
    assert first > times[0] - 0.01 if preserve else first < times[0] - 0.05, times
    server.stop()


def test_preferred_sizes_and_the_queue_delay_hold(serve, new_repository):
    models = new_repository()
    for name, text in (
        ("preferred", "preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 3000000"),
        ("delay", "max_queue_delay_microseconds: 300000"),
    ):
        models.add(name, SMALL, {"max_batch_tokens": 100}, f"{ONE_INSTANCE} max_batch_size: 64 dynamic_batching {{ {text} }}")
    server = serve(models)
    start = time.monotonic()
    ask_at_once(server, [closed_loop.request("preferred", [TEN_TOKENS], "EMBEDDING")] * 4)
    assert time.monotonic() - start < 2, "four are the preferred size: no delay"
    assert until(lambda: server.batch_sizes("preferred") == {4: 1}, seconds=5), server.batch_sizes("preferred")
    start = time.monotonic()
    ask_at_once(server, [closed_loop.request("delay", [TEN_TOKENS], "EMBEDDING")] * 3)
    assert time.monotonic() - start > 0.25
    assert until(lambda: server.batch_sizes("delay") == {3: 1}, seconds=5), server.batch_sizes("delay")
    # Above the budget: a full batch and the rest, no later than the delay.
    start = time.monotonic()
    ask_at_once(server, [closed_loop.request("delay", [TEN_TOKENS], "EMBEDDING")] * 15)
    assert time.monotonic() - start < 2
    assert passes(server, "delay", "128") == passes(server, "delay")
    server.stop()


def test_queue_policies_hold(serve, new_repository):
    """While a long request is computed: what is beyond the queue's size is refused, what waits too long too."""
    policy = (
        "default_queue_policy { max_queue_size: 4 timeout_action: REJECT default_timeout_microseconds: 10000000"
        " allow_timeout_override: true }"
    )
    models = new_repository()
    models.add(
        "m", "minilm", {"max_batch_tokens": 64, "dtype": "fp32"}, f"{ONE_INSTANCE} dynamic_batching {{ {policy} }}"
    )
    server = serve(models)
    long = closed_loop.Connection(server.http, 60)
    long.send(0, closed_loop.request("m", ["the " * 250] * 80, "EMBEDDING"))
    assert until(lambda: passes(server, "m") > 0)
    requests = [closed_loop.request("m", [TEN_TOKENS], "EMBEDDING", {"timeout": 100_000})] * 12
    answers = closed_loop.run(server.http, requests, connections=12)
    full = [answer for answer in answers if b"Exceeds maximum queue size" in answer.body]
    late = [answer for answer in answers if b"Request timeout expired" in answer.body]
    assert (len(full), len(late)) == (8, 4), [answer.body for answer in answers]
    assert {answer.status for answer in answers} == {503}
    answer = None
    while answer is None:
        answer = long.receive()
    assert answer.status == 200 and len(answer.data) == 80 * 384 * 4
    long.socket.close()
    server.stop()


def test_models_without_dynamic_batching_are_not_disturbed(serve, new_repository):
    declared = 'input [{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }]'
    models = new_repository()
    models.add("unbatched", SMALL, {"max_batch_tokens": 16}, declared)
    server = serve(models)
    assert not server.config("unbatched").get("dynamic_batching")
    value = np.array([b"the library is loaded for it too"], dtype=object)
    for _ in range(20):
        assert server.infer("unbatched", {"TEXT": value})["EMBEDDING"].shape == (64,)
    assert "custom batching strategy library" in server.log()
    server.stop()


def test_200_loads_and_unloads_under_load(serve, new_repository):
    """The batcher is finalized before the scheduler's thread has ended. Half of the load asks a neighbour."""
    models = new_repository()
    for name in ("one", "other"):
        models.add(name, SMALL, {"dtype": "fp32", "max_batch_tokens": 32})
    server = serve(models, "--model-control-mode=explicit", "--load-model=one", "--load-model=other")
    expected = server.infer("other", ["hello"], ["EMBEDDING"])["EMBEDDING"]

    def ask(number):
        if number % 2:
            np.testing.assert_allclose(server.infer("other", ["hello"], ["EMBEDDING"])["EMBEDDING"], expected, atol=1e-5)
            return
        try:
            server.infer("one", ["hello"] * (1 + number))
        except InferenceServerException as error:
            if not any(known in str(error) for known in ("is not ready", "unknown model", "not found", "no available")):
                raise

    with Load(ask, threads=4, at_end=server.hang_up) as load:
        for _ in range(200):
            for action in ("unload", "load"):
                status, answer = server.request("POST", f"/v2/repository/models/one/{action}", {})
                assert status == 200, answer
    assert not load.failures, load.failures[:3]
    assert load.answered > 400
    log = server.log()
    assert log.count("custom batching strategy library") >= 200
    for bad in ("panic", "Signal (", "double free", "corrupt", "Custom batch"):
        assert bad not in log.replace("custom batching", "")
    assert cpu_share(server, seconds=3) < 0.02
    assert server.stop() == 0


def test_empty_and_endless_texts_are_estimated_as_they_are_cut(serve, new_repository):
    models = new_repository()
    models.add("m", SMALL, {"max_batch_tokens": 64}, ONE_INSTANCE)
    server = serve(models)
    requests = [closed_loop.request("m", [text], "TOKEN_COUNT") for text in ("", "the " * 500_000)] * 20
    answers = ask_at_once(server, requests)
    counts = {struct.unpack("<i", answer.data)[0] for answer in answers}
    assert counts == {2, 48}
    assert server.metric("rust_estimated_tokens_total", model="m") == 20 * 2 + 20 * 48
    server.stop()


def test_short_texts_of_all_instances_share_a_pass_and_overtake_long_ones(serve, new_repository):
    """Batches of one request in ten instances. Two long texts run, two wait, and then six short ones come."""
    models = new_repository()
    models.add(
        "m",
        "minilm",
        {"dtype": "fp32", "max_length": 512},
        "max_batch_size: 1 dynamic_batching {} instance_group [{ count: 10 kind: KIND_CPU }]",
    )
    server = serve(models)
    texts = ["the " * 500] * 4 + ["the " * (3 + i) for i in range(6)]
    alone = [server.infer("m", [text], ["EMBEDDING"])["EMBEDDING"][0] for text in texts]
    # The statistics of a batch follow its answers.
    assert executed(server, "m", 10)
    before = passes(server, "m")
    answers = ask_at_once(server, [closed_loop.request("m", [text], "EMBEDDING") for text in texts], gap=0.002)
    assert all(answer.index < 4 for answer in answers[-2:]), "the two that waited are overtaken"
    assert executed(server, "m", 20)
    assert passes(server, "m") - before <= 7
    for answer in answers:
        np.testing.assert_array_equal(embedding(answer), alone[answer.index])
    server.stop()
