"""What a user sets in config.pbtxt for PyTriton's binding options, and what the server then does with our models: batches,
priorities, queue policies. Delays, preferred sizes and preserve_ordering are in test_batching.py.

A queue is filled while the model's only instance computes a text that would take minutes; then that request is cancelled.
"""

import queue
import threading
import time

import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness import STATUS, as_bytes, until

ONE_INSTANCE = "instance_group [{ count: 1 kind: KIND_CPU }]"
# Windows make long texts long work; a short pass notices soon that a request was cancelled.
SLOW = {"window_stride": 1, "max_batch_tokens": 512, "dtype": "fp32"}
# So much work that two answers do not overtake each other on their way.
SOME_WORK = "the " * 4000
MINUTES = "the " * (1 << 21)
REJECT = "timeout_action: REJECT default_timeout_microseconds"

# name -> the scheduler
MODELS = {
    "four": "max_batch_size: 4 dynamic_batching {}",
    "priorities": "max_batch_size: 1 dynamic_batching { priority_levels: 3 default_priority_level: 2 }",
    "policy_of_one": "max_batch_size: 1 dynamic_batching { priority_levels: 2 default_priority_level: 2"
    " default_queue_policy { max_queue_size: 8 } priority_queue_policy { key: 1 value { max_queue_size: 1 } } }",
    "full": "max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 2 } }",
    "reject": f"max_batch_size: 1 dynamic_batching {{ default_queue_policy {{ {REJECT}: 2000000 }} }}",
    "delay": "max_batch_size: 1 dynamic_batching { default_queue_policy {"
    " timeout_action: DELAY default_timeout_microseconds: 2000000 } }",
    "override": f"max_batch_size: 1 dynamic_batching {{ default_queue_policy {{ {REJECT}: 60000000"
    " allow_timeout_override: true } }",
    "no_override": f"max_batch_size: 1 dynamic_batching {{ default_queue_policy {{ {REJECT}: 60000000 }} }}",
}
UNBATCHED = 'input [{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }]'


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    for name, scheduler in {**MODELS, "off": UNBATCHED}.items():
        models.add(name, "embed_mean", SLOW, f"{ONE_INSTANCE} {scheduler}")
    return serve(models)


class Held:
    """A model whose instance is busy until `release`, and the requests that wait for it, in the order in which they were
    sent. Use with `with`."""

    def __init__(self, server, model):
        self.server, self.model, self.sent, self.ended = server, model, 0, []
        self._client = tritonclient.grpc.InferenceServerClient(server.grpc)
        self._all = threading.Condition()
        self._held = queue.Queue()

    def __enter__(self):
        before = self.server.metric("rust_tokens_total", model=self.model) or 0
        self._call = self._infer(MINUTES, lambda result, error: self._held.put(error))
        assert until(lambda: (self.server.metric("rust_tokens_total", model=self.model) or 0) > before)
        return self

    def __exit__(self, *_):
        self._call.cancel()
        self._client.close()

    def _infer(self, text, callback, **more):
        text = as_bytes(text)
        tensor = tritonclient.grpc.InferInput("TEXT", [1] if self.model == "off" else [1, 1], "BYTES")
        tensor.set_data_from_numpy(text[0] if self.model == "off" else text)
        return self._client.async_infer(self.model, [tensor], callback, **more)

    def waiting(self):
        return self.server.metric("nv_inference_pending_request_count", model=self.model)

    def add(self, name, text=SOME_WORK, **more):
        """Sends a request and waits until it is in the queue, or has ended."""

        def callback(result, error):
            with self._all:
                self.ended.append((name, error))
                self._all.notify_all()

        before = self.waiting()
        self.sent += 1
        ended = len(self.ended)
        self._infer(text, callback, **more)
        assert until(lambda: self.waiting() == before + 1 or len(self.ended) > ended, seconds=10)

    def release(self):
        """Lets the instance go. Returns the names of the requests that were answered in that order, and name -> error."""
        self._call.cancel()
        with self._all:
            assert self._all.wait_for(lambda: len(self.ended) == self.sent, timeout=30), self.ended
        return [name for name, error in self.ended if error is None], {n: e for n, e in self.ended if e is not None}


def unavailable(error, words):
    return error.status() == STATUS["UNAVAILABLE"]["grpc"] and words in error.message()


def new_sizes(server, model, before):
    after = server.batch_sizes(model)
    return {size: count - before.get(size, 0) for size, count in after.items() if count != before.get(size, 0)}


def test_with_batching_requests_that_wait_share_a_batch_of_at_most_max_batch_size(server):
    before = server.batch_sizes("four")
    with Held(server, "four") as held:
        for i in range(8):
            held.add(i, "few tokens, or the batching library would close the batch")
        answered, errors = held.release()
    assert sorted(answered) == list(range(8)) and not errors
    # And the one that held the instance.
    assert until(lambda: new_sizes(server, "four", before) == {1: 1, 4: 2}, seconds=5), new_sizes(server, "four", before)


def test_a_client_batch_above_max_batch_size_is_refused(server, protocol):
    assert server.infer("four", ["text"] * 4, protocol=protocol)["EMBEDDING"].shape == (4, 64)
    with pytest.raises(InferenceServerException, match="batch-size must be <= 4") as error:
        server.infer("four", ["text"] * 5, protocol=protocol)
    assert error.value.status() == STATUS["INVALID_ARG"][protocol]


def test_without_batching_each_request_is_computed_alone(server):
    before = server.statistics("off")["execution_count"]
    with Held(server, "off") as held:
        for i in range(4):
            held.add(i)
        answered, errors = held.release()
    assert sorted(answered) == list(range(4)) and not errors
    assert until(lambda: server.statistics("off")["execution_count"] == before + 5, seconds=5)
    assert server.metadata("off")["outputs"][0]["shape"] == [64]


def test_a_request_without_a_priority_has_the_default_one(server):
    with Held(server, "priorities") as held:
        held.add("none")
        held.add("lowest", priority=3)
        held.add("none again")
        held.add("highest", priority=1)
        answered, errors = held.release()
    assert answered == ["highest", "none", "none again", "lowest"] and not errors


def test_each_priority_has_its_own_queue_policy(server):
    with Held(server, "policy_of_one") as held:
        for i in range(3):
            held.add(("urgent", i), priority=1)
        for i in range(3):
            held.add(("usual", i))
        answered, errors = held.release()
    assert answered == [("urgent", 0), ("usual", 0), ("usual", 1), ("usual", 2)]
    assert set(errors) == {("urgent", 1), ("urgent", 2)}
    assert all(unavailable(error, "Exceeds maximum queue size") for error in errors.values()), errors


def test_a_full_queue_refuses_with_503(server):
    with Held(server, "full") as held:
        held.add("first")
        held.add("second")
        held.add("third")
        with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as error:
            server.infer("full", ["one too many"], protocol="http")
        assert error.value.status() == STATUS["UNAVAILABLE"]["http"]
        answered, errors = held.release()
    assert answered == ["first", "second"] and unavailable(errors["third"], "Exceeds maximum queue size")


def test_a_request_that_waits_too_long_is_rejected(server):
    with Held(server, "reject") as held:
        held.add("late")
        time.sleep(2.1)
        held.add("in time")
        answered, errors = held.release()
    assert answered == ["in time"] and unavailable(errors["late"], "Request timeout expired")


def test_a_request_that_waits_too_long_is_delayed_behind_the_others(server):
    with Held(server, "delay") as held:
        held.add("late")
        time.sleep(2.1)
        held.add("in time")
        answered, errors = held.release()
    assert answered == ["in time", "late"] and not errors


@pytest.mark.parametrize("model, rejected", [("override", True), ("no_override", False)])
def test_a_clients_timeout_counts_where_the_policy_allows_it(server, model, rejected):
    with Held(server, model) as held:
        held.add("impatient", timeout=100_000)
        time.sleep(0.3)
        held.add("patient")
        answered, errors = held.release()
    assert "patient" in answered
    if rejected:
        assert unavailable(errors["impatient"], "Request timeout expired")
    else:
        assert answered == ["impatient", "patient"]


def test_a_request_that_is_cancelled_in_the_queue_is_not_computed(server):
    before = server.metric("rust_texts_total", model="four") or 0
    with Held(server, "four") as held:
        ended = queue.Queue()
        call = held._infer(SOME_WORK, lambda result, error: ended.put(error))
        assert until(lambda: held.waiting() == 1)
        held.add("neighbour")
        call.cancel()
        assert ended.get(timeout=10).status() == STATUS["CANCELLED"]["grpc"]
        answered, errors = held.release()
    assert answered == ["neighbour"] and not errors
    assert server.metric("rust_texts_total", model="four") == before + 1


REFUSED = {
    "ordered_priorities": (
        "dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
        ["priority", "preserve"],
    ),
    "ordered_delay": (
        "dynamic_batching { preserve_ordering: true default_queue_policy {"
        " timeout_action: DELAY default_timeout_microseconds: 1000 } }",
        ["DELAY", "preserve"],
    ),
    "no_default_priority": ("dynamic_batching { priority_levels: 2 }", ["default priority level"]),
    "preferred_above_the_maximum": (
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 8 ] }",
        ["preferred size must be <= max batch size"],
    ),
}


@pytest.fixture(scope="module")
def refusing(serve, new_repository):
    models = new_repository()
    for name, (text, _) in REFUSED.items():
        models.add(name, "embed_mean", text=text)
    return serve(models)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_server_refuses_is_refused_in_its_words(refusing, name):
    """Before our backend sees it."""
    assert refusing.index()[name][0] != "READY"
    said = [line for line in refusing.log().splitlines() if name in line]
    assert any(all(word in line for word in REFUSED[name][1]) for line in said), said
