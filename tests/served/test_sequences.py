"""Conversations: sequence_batching, where each request is a turn of a session and the answer is about the newest turns.

Expected answers come from the same checkpoint without sequence_batching: its text is the turns with [SEP] between them.
"""

import json
import queue
import random
import shutil
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness import PROTOCOLS, ROOT, STATUS, as_bytes, concurrently, until

IDLE = 60_000_000
CONTROLS = """control_input [
    { name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }] },
    { name: "END" control [{ kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] }] },
    { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }] },
    { name: "CORRID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: %s }] }
  ]"""
NUMBERS, STRINGS = CONTROLS % "TYPE_UINT64", CONTROLS % "TYPE_STRING"
READY_FP32 = """control_input [
    { name: "READY" control [{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 1, 0 ] }] }]"""
ONE = "instance_group [{ count: 1 kind: KIND_CPU }]"


def sequences(strategy, controls="", idle=IDLE, more="max_batch_size: 8"):
    return f"{more}\nsequence_batching {{ max_sequence_idle_microseconds: {idle} {strategy} {controls} }}"


def oldest(candidates, more=""):
    return f"oldest {{ max_candidate_sequences: {candidates} {more} }}"


# name -> (checkpoint, parameters, config.pbtxt)
MODELS = {
    "oldest": ("embed_mean", {}, sequences(oldest(64))),
    "direct": ("embed_mean", {}, sequences("direct {}", NUMBERS)),
    "named": ("embed_mean", {}, sequences("direct {}", STRINGS)),
    "numbered": ("embed_mean", {}, sequences(oldest(64), NUMBERS)),
    "classes": ("classify_three", {}, sequences(oldest(64))),
    "short": ("embed_mean", {"max_length": "12"}, sequences(oldest(64))),
    "strict": ("embed_mean", {"max_length": "12", "truncation": "error"}, sequences(oldest(64))),
    "slots": ("embed_mean", {}, sequences("direct {}", READY_FP32, more=f"max_batch_size: 8 {ONE}")),
    "perf": ("embed_mean", {}, sequences(oldest(64))),
    "silent": ("embed_mean", {}, sequences(oldest(8), idle=1_000_000, more=f"max_batch_size: 8 {ONE}")),
    "brief": ("embed_mean", {}, sequences(oldest(8), idle=300_000, more=f"max_batch_size: 8 {ONE}")),
    "single": ("embed_mean", {}, sequences(oldest(1), more=f"max_batch_size: 8 {ONE}")),
    "few": (
        "embed_mean",
        {},
        sequences(
            oldest(2, "preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 1000000"),
            more=f"max_batch_size: 8 {ONE}",
        ),
    ),
    "warm": (
        "embed_mean",
        {},
        sequences("direct {}", NUMBERS)
        + 'model_warmup [{ name: "w" batch_size: 1 inputs { key: "TEXT" value { data_type: TYPE_STRING dims: [ 1 ] '
        "zero_data: true } } }]",
    ),
    "unbatched": (
        "embed_mean",
        {},
        sequences(oldest(64), more='max_batch_size: 0 input [{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }]'),
    ),
    "plain": ("embed_mean", {}, ""),
    "plain_classes": ("classify_three", {}, ""),
    "plain_short": ("embed_mean", {"max_length": "12"}, ""),
}
# name -> (config.pbtxt, parameters, words of the load error)
REFUSED = {
    "no_ready": (
        sequences("direct {}"),
        {},
        ["READY", "kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ]", "oldest { max_candidate_sequences"],
    ),
    "no_strategy": (sequences(""), {}, ["direct", "READY"]),
    "pair": (sequences(oldest(8)), {"text_pair": "true"}, ["sequence_batching", "text_pair"]),
    "tokenizer": (sequences(oldest(8)), {"task": "tokenize"}, ["tokenize", "sequence_batching"]),
    "raw_ids": (
        sequences(oldest(8))
        + """input [{ name: "INPUT_IDS" data_type: TYPE_INT64 dims: [ -1 ] },
                   { name: "ATTENTION_MASK" data_type: TYPE_INT64 dims: [ -1 ] }]""",
        {},
        ["INPUT_IDS", "sequence_batching"],
    ),
    "name_of_an_input": (sequences("direct {}", READY_FP32.replace("READY", "TEXT", 1)), {}, ["TEXT", "input"]),
    "state": (
        sequences(
            oldest(8)
            + ' state [{ input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ] }]',
        ),
        {},
        ["state"],
    ),
}


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    for name, (checkpoint, parameters, text) in MODELS.items():
        models.add(name, checkpoint, {"dtype": "fp32", **parameters}, text)
    for name, (text, parameters, _) in REFUSED.items():
        models.add(name, "embed_mean", parameters, text)
    # The example as it is.
    for name in ("conversation", "plain_sentiment"):
        models.add(name, "sentiment")
    example = ROOT / "model_repo" / "conversation" / "config.pbtxt"
    shutil.copyfile(example, models.path / "conversation" / "config.pbtxt")
    models.add("cached", "embed_mean", text=sequences(oldest(8)) + "response_cache { enable: true }")
    server = serve(models, "--cache-config=local,size=1048576")
    failed = {name: reason for name, (state, reason) in server.index().items() if state != "READY"}
    assert set(failed) == {*REFUSED, "cached"}, failed
    yield server
    # It waits for sessions that are in progress: every test ends its own.
    assert server.stop() == 0, server.log()[-3000:]


@pytest.fixture(params=["number", "string"])
def fresh(request):
    """fresh() is an id that no session had."""
    number = random.randrange(1, 1 << 60)

    def new():
        nonlocal number
        number += 1
        return number if request.param == "number" else f"session {number} \u00fc"

    return new


class Session:
    """A client's session of one model; the first turn starts it."""

    def __init__(self, server, model, identity, protocol="http"):
        self.ask = partial(server.infer, model, protocol=protocol, sequence_id=identity)
        self.started = False

    def say(self, text, start=False, end=False):
        """Output name -> array, without the row."""
        flags = dict(sequence_start=start or not self.started, sequence_end=end)
        self.started = True
        return {name: array[0] for name, array in self.ask([text], **flags).items()}


def same(answer, server, turns, plain="plain"):
    """Whether an answer is that of the turns in one text."""
    expected = server.infer(plain, [" [SEP] ".join(turns)])
    return all(np.array_equal(answer[name], expected[name][0]) for name in expected)


def refused(code, say, protocol="http"):
    with pytest.raises(InferenceServerException) as error:
        say()
    assert error.value.status() == STATUS[code][protocol], error.value
    return error.value.message()


def held(server, model):
    return server.metric("rust_sessions", model=model)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("model", ["oldest", "direct", "named", "unbatched"])
def test_turns_add_up_start_begins_anew_and_end_frees(server, model, protocol):
    identity = f"{model} {protocol}" if model == "named" else 1 + PROTOCOLS.index(protocol)
    ask = (lambda text: np.array([text.encode()], object)) if model == "unbatched" else (lambda text: as_bytes(text))

    def say(text, **flags):
        answer = server.infer(model, {"TEXT": ask(text)}, protocol=protocol, sequence_id=identity, **flags)
        return answer if model == "unbatched" else {name: array[0] for name, array in answer.items()}

    turns = ["Hello, who is there?", "", "It is me: open the door!", "No."]
    answers = [say(turn, sequence_start=i == 0) for i, turn in enumerate(turns)]
    for i, answer in enumerate(answers):
        assert same(answer, server, turns[: i + 1]), i
    assert len({answer["EMBEDDING"].tobytes() for answer in answers}) == len(turns)
    assert held(server, model) == 1
    assert same(say("again", sequence_start=True), server, ["again"]), "START resets"
    assert same(say("bye", sequence_end=True), server, ["again", "bye"]), "END answers over the whole session"
    assert held(server, model) == 0
    assert same(say("alone", sequence_start=True, sequence_end=True), server, ["alone"])
    assert held(server, model) == 0


def test_a_classifier_answers_about_the_dialogue(server, protocol):
    session, turns = Session(server, "classes", 5, protocol), ["A dog sleeps.", "An animal is awake.", "Is it?"]
    for i, turn in enumerate(turns):
        answer = session.say(turn, end=i == 2)
        assert same(answer, server, turns[: i + 1], "plain_classes")
    assert {"LOGITS", "PROBABILITIES", "LABEL", "SCORE", "TOKEN_COUNT"} == set(answer)


def test_the_example_judges_the_dialogue_and_not_the_last_turn(server, protocol):
    turns = ["The food was awful and the staff were rude.", "We waited two hours for cold soup.", "Thank you."]
    assert server.infer("plain_sentiment", [turns[2]])["LABEL"][0, 0] == b"POSITIVE"
    session = Session(server, "conversation", 42, protocol)
    for i, turn in enumerate(turns):
        answer = session.say(turn, end=i == 2)
        assert same(answer, server, turns[: i + 1], "plain_sentiment")
    assert answer["LABEL"][0] == b"NEGATIVE"


def test_plain_http_names_the_session_in_its_parameters(server):
    def say(text, **parameters):
        body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}
        answer = server.json("POST", "/v2/models/oldest/infer", json.dumps({**body, "parameters": parameters}))
        return {output["name"]: output["data"] for output in answer["outputs"]}

    say("one", sequence_id="http", sequence_start=True)
    answer = say("two", sequence_id="http", sequence_end=True)
    expected = server.infer("plain", ["one [SEP] two"])
    assert answer["TOKEN_COUNT"] == expected["TOKEN_COUNT"][0].tolist()
    assert np.array_equal(np.array(answer["EMBEDDING"], np.float32), expected["EMBEDDING"][0])


def test_the_newest_whole_turns_that_fit_max_length_are_kept(server):
    count = lambda text: int(server.infer("plain_short", [text])["TOKEN_COUNT"][0, 0])  # noqa: E731
    turns = ["one two three", "four five", "six", "seven eight nine ten", "a " * 40, "end"]
    session = Session(server, "short", 9)
    for i, turn in enumerate(turns):
        kept, tokens = [], 1
        for earlier in reversed(turns[: i + 1]):
            tokens += count(earlier) - 1  # its own and one [SEP]
            if kept and tokens > 12:
                break
            kept.insert(0, earlier)
        answer = session.say(turn)
        assert same(answer, server, kept, "plain_short"), (i, kept)
        assert answer["TOKEN_COUNT"][0] <= 12
    assert len(kept) == 1, "the turn of 40 words left no room"
    session.say("", end=True)


def test_a_turn_that_alone_is_too_long_is_refused_where_the_user_wants_that(server):
    session = Session(server, "strict", 9)
    session.say("one")
    assert "truncation" in refused("INVALID_ARG", lambda: session.say("a " * 40))
    assert same(session.say("two", end=True), server, ["one", "two"]), "what was refused is not part of it"


@pytest.mark.parametrize("model", ["oldest", "direct"])
def test_many_interleaved_sessions_never_mix(server, model):
    """24 clients with three sessions each, in any order; direct has 16 slots, the others wait in the backlog."""
    dice = random.Random(f"sessions of {model}")
    words = "door rain is not the a very good bad never always we you they book film".split()
    scripts = [[" ".join(dice.choices(words, k=dice.randint(0, 5))) for _ in range(6)] for _ in range(72)]
    prefixes = [" [SEP] ".join(script[: i + 1]) for script in scripts for i in range(6)]
    known = server.infer("plain", prefixes[:216], ["EMBEDDING"])["EMBEDDING"]
    known = np.concatenate([known, server.infer("plain", prefixes[216:], ["EMBEDDING"])["EMBEDDING"]])
    known = known.reshape(72, 6, -1)

    def client(number):
        own = random.Random(number)
        # With the direct strategy a client that waits for a slot of its second session must not hold one itself.
        at_once = 3 if model == "oldest" else 1
        for first in range(0, 3, at_once):
            sessions = [3 * number + first + i for i in range(at_once)]
            left = {session: 0 for session in sessions}
            while left:
                session = own.choice(list(left))
                turn = left[session]
                flags = dict(sequence_start=turn == 0, sequence_end=turn == 5)
                protocol = PROTOCOLS[session % 2]
                text = [scripts[session][turn]]
                answer = server.infer(model, text, ["EMBEDDING"], protocol, sequence_id=1000 + session, **flags)
                assert np.array_equal(answer["EMBEDDING"][0], known[session, turn]), (session, turn)
                left[session] += 1
                if turn == 5:
                    del left[session]
        server.hang_up()

    failures = [error for error in concurrently(client, range(24)) if error is not None]
    assert not failures, failures[0]
    assert held(server, model) == 0


@pytest.mark.parametrize("model, candidates", [("oldest", 128), ("direct", 16), ("named", 16)])
def test_a_stream_that_does_not_wait_keeps_the_order_of_each_session(server, model, candidates):
    dice = random.Random(model)
    names = [f"stream {i}" if model == "named" else 5000 + i for i in range(24)]
    steps = [i for i in range(24) for _ in range(4)]
    dice.shuffle(steps)
    answers, done = queue.Queue(), {i: 0 for i in range(24)}
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    client.start_stream(lambda result, error: answers.put(error or result))
    for i in steps:
        turn = done[i]
        done[i] += 1
        text = tritonclient.grpc.InferInput("TEXT", [1, 1], "BYTES")
        text.set_data_from_numpy(as_bytes(f"session {i} says {turn}"))
        flags = dict(sequence_id=names[i], sequence_start=turn == 0, sequence_end=turn == 3)
        client.async_stream_infer(model, [text], request_id=f"{i} {turn}", **flags)
    seen, order = 0, {i: [] for i in range(24)}
    while seen < len(steps):
        result = answers.get(timeout=30)
        assert not isinstance(result, Exception), result
        i, turn = map(int, result.get_response().id.split())
        turns = [f"session {i} says {t}" for t in range(turn + 1)]
        answer = {name: result.as_numpy(name)[0] for name in ("EMBEDDING", "TOKEN_COUNT")}
        assert same(answer, server, turns), (i, turn)
        order[i].append(turn)
        seen += 1
    client.stop_stream()
    client.close()
    assert all(turns == [0, 1, 2, 3] for turns in order.values())
    assert held(server, model) == 0


def test_ids_of_both_types_are_taken_and_never_the_same(server, protocol):
    number, string = Session(server, "oldest", 77, protocol), Session(server, "oldest", "77", protocol)
    number.say("one")
    string.say("two")
    assert same(number.say("three", end=True), server, ["one", "three"])
    assert same(string.say("four", end=True), server, ["two", "four"])


def test_ids_are_told_apart_to_the_last_byte(server, protocol):
    greatest = (1 << (64 if protocol == "http" else 63)) - 1  # of gRPC's parameter
    ids = [f"{'x' * 127}{end}" for end in "ab"] + [greatest, greatest - 1]
    sessions = [Session(server, "oldest", identity, protocol) for identity in ids]
    for i, session in enumerate(sessions):
        session.say(f"first of {i}")
    for i, session in enumerate(sessions):
        assert same(session.say("last", end=True), server, [f"first of {i}", "last"])
    too_long = Session(server, "oldest", "x" * 129, protocol)
    with pytest.raises(InferenceServerException, match="128"):
        too_long.say("no")


@pytest.mark.parametrize("model, wrong", [("direct", "7"), ("numbered", "7"), ("named", 7)])
def test_an_id_of_the_wrong_type_is_refused_and_harms_nobody(server, model, wrong, protocol):
    """The string is short: core 2.51 copies it into the 8 bytes of the control, and crashes with one of 128."""
    good = Session(server, model, "good" if model == "named" else 99, protocol)
    good.say("one")
    message = refused("INVALID_ARG", lambda: Session(server, model, wrong, protocol).say("no", end=True), protocol)
    assert "CORRID" in message and ("STRING" in message or "a string" in message), message
    assert same(good.say("two", end=True), server, ["one", "two"])


def test_what_core_refuses(server, protocol):
    say = lambda **flags: refused(  # noqa: E731
        "INVALID_ARG", lambda: server.infer("oldest", ["a"], protocol=protocol, **flags), protocol
    )
    assert "must specify the START flag on the first request of the sequence" in say(sequence_id=123456)
    assert "must specify the START flag" in say(sequence_id="nobody")
    assert "must specify a non-zero or non-empty correlation ID" in say(sequence_start=True)
    two_rows = partial(server.infer, "oldest", ["a", "b"], protocol=protocol, sequence_id=4, sequence_start=True)
    assert "must specify batch-size 1" in refused("INVALID_ARG", two_rows, protocol)


def test_generate_has_no_way_to_name_a_session(server):
    """Its parameters are the backend's; core takes none of them for the sequence."""
    body = {"TEXT": "a", "sequence_id": 4, "sequence_start": True, "sequence_end": True}
    status, text = server.request("POST", "/v2/models/oldest/generate", body)
    assert status == 400 and "must specify a non-zero or non-empty correlation ID" in text


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_at_load(server, name):
    state, reason = server.index()[name]
    assert state == "UNAVAILABLE"
    for word in REFUSED[name][2]:
        assert word in reason, reason


def test_core_refuses_a_response_cache(server):
    assert "Response Cache does not currently support model cached with sequence batching scheduler" in server.log()


def test_a_control_that_lets_clients_crash_an_old_server_is_warned_of(server):
    warnings = [line for line in server.log().splitlines() if line.startswith("W") and "CORRID" in line]
    assert {name for name in MODELS for line in warnings if f"'{name}'" in line} == {"direct", "numbered", "warm"}


@pytest.mark.parametrize("model", ["oldest", "direct"])
def test_a_turn_that_fails_is_not_part_of_the_session(server, model, protocol):
    session = Session(server, model, 31, protocol)
    session.say("old")
    session.started = False
    message = refused("INVALID_ARG", lambda: session.say(b"\xff"), protocol)
    assert model in message and "UTF-8" in message
    assert same(session.say("new"), server, ["new"]), "its START held all the same"
    refused("INVALID_ARG", lambda: session.say(b"\xff"), protocol)
    assert same(session.say("newer"), server, ["new", "newer"])
    refused("INVALID_ARG", lambda: session.say(b"\xff", end=True), protocol)
    assert held(server, model) == 0, "its END held all the same"


def test_requests_for_empty_slots_touch_nothing_and_cost_nothing(server):
    """Sessions take slots 0 to 7; when all but the last have ended or are silent, core fills their places."""
    sessions = [Session(server, "slots", 1 + i) for i in range(8)]
    for i, session in enumerate(sessions):
        session.say(f"first of {i}")
    for session in sessions[1:6:2]:
        session.say("bye", end=True)
    answers = [sessions[7].say(f"turn {i}") for i in range(5)]
    for i, answer in enumerate(answers):
        assert same(answer, server, ["first of 7", *(f"turn {t}" for t in range(i + 1))])
    for i in (0, 2, 4, 6, 7):
        turns = [f"first of {i}", *(f"turn {t}" for t in range(5) if i == 7), "bye"]
        assert same(sessions[i].say("bye", end=True), server, turns)
    assert until(lambda: server.statistics("slots")["inference_count"] == 8 + 3 + 5 + 5, seconds=5)
    statistics = server.statistics("slots")["inference_stats"]
    assert (statistics["success"]["count"], statistics["fail"]["count"]) == (21, 0)
    assert server.metric("rust_texts_total", model="slots") == 21, "nothing else was encoded"


def test_a_silent_session_ends_in_the_server_and_then_here(server, protocol):
    session, other = Session(server, "silent", 1, protocol), Session(server, "silent", 2, protocol)
    session.say("first")
    time.sleep(0.3)
    assert same(session.say("second"), server, ["first", "second"]), "not silent for long enough"
    time.sleep(2.3)
    assert "must specify the START flag" in refused("INVALID_ARG", lambda: session.say("third"), protocol)
    # Our own clock is looked at with the next batch; the other session alone is left.
    other.say("hello")
    assert held(server, "silent") == 1
    session.started = False
    assert same(session.say("fourth"), server, ["fourth"])
    assert same(session.say("fifth", end=True), server, ["fourth", "fifth"])
    other.say("bye", end=True)


def test_a_session_that_waits_too_long_for_a_place_times_out(server, protocol):
    """Its timeout counts in core's backlog; the session that has the place goes on."""
    first = Session(server, "single", 1, protocol)
    first.say("one")
    start = partial(server.infer, "single", ["two"], protocol=protocol, sequence_id=2, sequence_start=True, timeout=200_000)
    assert "timeout of the corresponding sequence has been expired" in refused("UNAVAILABLE", start, protocol)
    assert same(first.say("three", end=True), server, ["one", "three"])
    second = Session(server, "single", 2, protocol)
    assert same(second.say("four", end=True), server, ["four"])


def test_sessions_that_never_end_are_bounded(server):
    """80 sessions without END; 8 sessions may be in progress, and each is kept for 0.6 s at the most."""
    most = 0

    def client(number):
        nonlocal most
        Session(server, "brief", 1000 + number).say("hello")
        most = max(most, held(server, "brief"))

    failures = [error for error in concurrently(client, range(80), threads=16) if error is not None]
    assert not failures, failures[0]
    assert 8 <= most <= 16, most
    time.sleep(1)
    Session(server, "brief", 1).say("last", end=True)
    assert held(server, "brief") == 0


def test_sessions_whose_clients_go_away_are_bounded(server):
    """Core ends a sequence with a cancelled request and tells nobody; twice the sessions in progress are kept, 4."""
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    text = tritonclient.grpc.InferInput("TEXT", [1, 1], "BYTES")
    text.set_data_from_numpy(as_bytes("hello"))
    seen = []
    for number in range(1, 9, 2):
        done = queue.Queue()
        started = [
            client.async_infer("few", [text], lambda result, error: done.put(error), sequence_id=i, sequence_start=True)
            for i in (number, number + 1)
        ]
        time.sleep(0.05)
        cancelled = [
            client.async_infer("few", [text], lambda result, error: None, sequence_id=i) for i in (number, number + 1)
        ]
        time.sleep(0.05)
        for call in cancelled:
            call.cancel()
        assert [done.get(timeout=10) for _ in started] == [None, None]
        seen.append(held(server, "few"))
    client.close()
    assert seen == [2, 4, 4, 4]


def test_a_model_with_warm_up_samples_serves(server):
    """They have no id and no controls."""
    session = Session(server, "warm", 1)
    session.say("one")
    assert same(session.say("two", end=True), server, ["one", "two"])


def test_perf_analyzer_measures_whole_sessions(server):
    """8 sessions of 5 turns of 3 tokens: contexts of 5, 9, 13, 17 and 21 tokens."""
    arguments = "-m perf -i http --request-count 40 --sequence-length 5 --sequence-length-variation 0 --num-of-sequences 2"
    script = [sys.executable, ROOT / "scripts" / "perf_analyzer.py", "-u", server.http, "--string-data", "a good film"]
    ended = subprocess.run([*script, *arguments.split()], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and "Sequence count: 8" in ended.stdout, ended.stdout + ended.stderr
    assert server.metric("rust_texts_total", model="perf") == 40
    assert server.metric("rust_tokens_total", model="perf") == 8 * (5 + 9 + 13 + 17 + 21)
    assert held(server, "perf") == 0


def test_a_reload_ends_the_sessions(serve, new_repository):
    models = new_repository()
    models.add("chat", "embed_mean", {"dtype": "fp32"}, sequences(oldest(8), idle=1_000_000))
    with serve(models, "--model-control-mode=explicit", "--load-model=chat") as server:
        session = Session(server, "chat", 1)
        session.say("one")
        assert held(server, "chat") == 1
        models.configure("chat", {"dtype": "fp32", "max_length": "20"}, sequences(oldest(8), idle=1_000_000))
        server.json("POST", "/v2/repository/models/chat/load", {})
        assert "must specify the START flag" in refused("INVALID_ARG", lambda: session.say("two"))
        assert until(lambda: held(server, "chat") == 0, seconds=10)
        session.started = False
        assert session.say("one", end=True)["TOKEN_COUNT"][0] == 3
        server.json("POST", "/v2/repository/models/chat/unload", {})
        assert until(lambda: held(server, "chat") is None, seconds=10)
