"""Texts longer than max_length, cut into overlapping windows: combined, or streamed by a decoupled model."""

import json
import queue

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from harness import as_bytes, concurrently, cosine, send_stream, stream, until

STREAM = "model_transaction_policy { decoupled: true }"
ONE_INSTANCE = "instance_group [{ count: 1 kind: KIND_CPU }]"
# Six tokens beside the special ones, of which two are shared with the next window.
WINDOWS = {"max_length": 8, "window_stride": 2, "dtype": "fp32"}
# Words of one token each, so that a window's text alone has the window's tokens.
LONG = "the of and in to was he is as for on with that it"
PLACES = [(0, 20), (14, 33), (27, 49)]
assert [LONG[start:end].split() for start, end in PLACES] == [LONG.split()[i : i + 6] for i in (0, 4, 8)]
SENTENCE = "She said that they were all out of time in the new city. "


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    for kind, source in (("embed", "embed_mean_normalize"), ("classify", "classify_three")):
        models.add(f"{kind}_plain", source, {"max_length": 8, "dtype": "fp32"})
        models.add(f"{kind}_combined", source, WINDOWS)
        models.add(f"{kind}_stream", source, WINDOWS, STREAM)
    models.add("classify_max", "classify_three", {**WINDOWS, "window_combine": "max"})
    models.add("unbatched", "classify_three", WINDOWS, f'input [{{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }}]\n{STREAM}')
    # Windows of 48 tokens.
    long = {"window_stride": 8, "dtype": "fp32"}
    models.add("long", "embed_mean", long, ONE_INSTANCE)
    models.add("long_stream", "embed_mean", {**long, "max_batch_tokens": 480}, f"{STREAM} {ONE_INSTANCE}")
    return serve(models)


def places(responses):
    return [tuple(response[name].item() for name in ("ROW", "WINDOW_START", "WINDOW_END")) for response in responses]


def test_each_window_is_a_response_with_its_place_and_its_own_answer(server):
    responses, error = stream(server, "embed_stream", [LONG])
    assert error is None
    assert places(responses) == [(0, *place) for place in PLACES]
    plain = server.infer("embed_plain", [LONG[start:end] for start, end in PLACES])
    assert plain["TOKEN_COUNT"].ravel().tolist() == [8, 8, 8], "the words are not single tokens"
    for i, response in enumerate(responses):
        assert response["EMBEDDING"].shape == (1, 64)
        np.testing.assert_allclose(response["EMBEDDING"][0], plain["EMBEDDING"][i], atol=1e-6)
        assert response["TOKEN_COUNT"].tolist() == [[8]]


def test_combined_embeddings_are_the_mean_of_the_windows_normalized_again(server, protocol):
    responses, _ = stream(server, "embed_stream", [LONG])
    mean = np.mean([response["EMBEDDING"][0] for response in responses], axis=0)
    answer = server.infer("embed_combined", [LONG, "the of"], protocol=protocol)
    np.testing.assert_allclose(answer["EMBEDDING"][0], mean / np.linalg.norm(mean), atol=1e-6)
    assert answer["TOKEN_COUNT"].ravel().tolist() == [24, 4]
    # It is none of what a text that is cut would get.
    cut = server.infer("embed_plain", [LONG])["EMBEDDING"]
    assert cosine(answer["EMBEDDING"][0], cut)[0] < 0.999


def test_a_text_of_one_window_gets_the_answer_that_it_gets_without_windows(server):
    for kind, names in (("embed", ["EMBEDDING"]), ("classify", ["PROBABILITIES", "LABEL", "SCORE"])):
        with_windows = server.infer(f"{kind}_combined", ["the of and in to was", ""], names)
        without = server.infer(f"{kind}_plain", ["the of and in to was", ""], names)
        for name in names:
            np.testing.assert_array_equal(with_windows[name], without[name])


@pytest.mark.parametrize("model, combine", [("classify_combined", np.mean), ("classify_max", np.max)])
def test_combined_probabilities_are_the_mean_or_the_maximum_of_the_windows(server, model, combine):
    responses, _ = stream(server, "classify_stream", [LONG])
    windows = np.concatenate([response["PROBABILITIES"] for response in responses])
    answer = server.infer(model, [LONG])
    np.testing.assert_allclose(answer["PROBABILITIES"][0], combine(windows, axis=0), atol=1e-6)
    best = int(np.argmax(answer["PROBABILITIES"][0]))
    labels = {response["LABEL"].item(): int(np.argmax(response["PROBABILITIES"])) for response in responses}
    assert answer["SCORE"].item() == answer["PROBABILITIES"][0][best]
    assert labels.get(answer["LABEL"].item(), best) == best


def test_combined_windows_have_no_logits(server):
    assert "LOGITS" not in [output["name"] for output in server.metadata("classify_combined")["outputs"]]
    assert "LOGITS" in [output["name"] for output in server.metadata("classify_stream")["outputs"]]


def test_rows_take_turns_and_each_rows_windows_come_in_order(server):
    texts = [LONG, "the of", LONG + " " + LONG, ""]
    responses, error = stream(server, "embed_stream", texts, ["ROW", "WINDOW_START", "WINDOW_END"])
    assert error is None
    rows = {row: [place[1:] for place in places(responses) if place[0] == row] for row in range(4)}
    assert rows[0] == PLACES and rows[1] == [(0, 6)] and rows[3] == [(0, 0)]
    assert rows[2] == sorted(rows[2]) and rows[2][-1][1] == len(texts[2]) and len(rows[2]) == 7
    assert {place[0] for place in places(responses)[:4]} == {0, 1, 2, 3}
    assert set(responses[0]) == {"ROW", "WINDOW_START", "WINDOW_END"}


def test_places_are_characters_and_not_bytes(server):
    text = "  où est l’été? 国 the of and in to was he is as for on 😀"
    responses, _ = stream(server, "embed_stream", [text])
    first, last = places(responses)[0], places(responses)[-1]
    assert text[first[1] : first[2]].startswith("où est") and last[2] == len(text)


def test_many_streams_at_once_get_their_own_windows(server):
    texts = [" ".join(LONG.split()[i:] * 3) for i in range(8)]
    alone = [stream(server, "embed_stream", [text])[0] for text in texts]
    together = concurrently(lambda text: stream(server, "embed_stream", [text])[0], texts)
    for one, other in zip(alone, together):
        assert places(one) == places(other)
        for a, b in zip(one, other):
            np.testing.assert_allclose(a["EMBEDDING"], b["EMBEDDING"], atol=1e-6)


def test_a_bad_row_ends_the_stream_with_its_error_and_no_response(server):
    responses, error = stream(server, "embed_stream", [LONG, b"\xff"])
    assert responses == [] and "row 1" in error.message() and "UTF-8" in error.message()
    assert error.status() == "StatusCode.INVALID_ARGUMENT" or "embed_stream" in error.message()


def test_statistics_count_the_rows_of_a_stream_and_not_its_windows(server):
    before = server.statistics("classify_stream")["inference_count"]
    stream(server, "classify_stream", [LONG, LONG])
    assert until(lambda: server.statistics("classify_stream")["inference_count"] == before + 2, seconds=5)


def test_generate_stream_sends_an_event_for_each_window(server):
    status, text = server.request("POST", "/v2/models/classify_stream/generate_stream", {"TEXT": LONG})
    assert status == 200
    events = [json.loads(line[len("data: ") :]) for line in text.splitlines() if line.startswith("data: ")]
    assert [(event["WINDOW_START"], event["WINDOW_END"]) for event in events] == PLACES
    assert all(len(event["PROBABILITIES"]) == 3 and event["ROW"] == 0 for event in events)


def test_a_model_without_a_batch_dimension_streams_too(server):
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    got = queue.Queue()
    client.start_stream(lambda result, error: got.put((result, error)))
    tensor = tritonclient.grpc.InferInput("TEXT", [1], "BYTES")
    tensor.set_data_from_numpy(as_bytes(LONG)[0])
    client.async_stream_infer("unbatched", [tensor])
    answers = [got.get(timeout=30) for _ in PLACES]
    assert not [error for _, error in answers if error]
    assert [result.as_numpy("WINDOW_END").tolist() for result, _ in answers] == [[end] for _, end in PLACES]
    client.stop_stream()
    client.close()


def test_a_decoupled_model_refuses_unary_requests(server, protocol):
    """The server does, in its own words."""
    with pytest.raises(InferenceServerException, match="doesn't support models with decoupled transaction policy"):
        server.infer("embed_stream", ["the"], protocol=protocol)


def tokens(server, model):
    return server.metric("rust_tokens_total", model=model) or 0


def test_cancelling_a_stream_stops_the_work(server):
    text = SENTENCE * ((4 << 20) // len(SENTENCE))
    client = tritonclient.grpc.InferenceServerClient(server.grpc)
    got = queue.Queue()
    before = tokens(server, "long_stream")
    client.start_stream(lambda result, error: got.put((result, error)))
    send_stream(client, "long_stream", [text], ["WINDOW_END"])
    result, error = got.get(timeout=60)
    assert error is None and result.as_numpy("WINDOW_END").item() < len(text) / 100
    client.stop_stream(cancel_requests=True)
    client.close()
    # The only instance is free again, long before the text's end.
    responses, error = stream(server, "long_stream", ["the"], ["ROW"])
    assert error is None and len(responses) == 1
    done = tokens(server, "long_stream") - before
    assert done < len(text) / 10, f"{done} tokens of a text of {len(text)} bytes"


def test_cancelling_a_combined_answer_stops_the_work(server):
    tensor = tritonclient.grpc.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(as_bytes(SENTENCE * (3 << 16)))
    got = queue.Queue()
    before = tokens(server, "long")
    call = server.client("grpc").async_infer("long", [tensor], lambda result, error: got.put(error))
    assert until(lambda: tokens(server, "long") > before)
    call.cancel()
    assert got.get(timeout=30).status() == "StatusCode.CANCELLED"
    assert server.infer("long", ["the"])["TOKEN_COUNT"].item() == 3
    assert tokens(server, "long") - before < (3 << 16) * len(SENTENCE) / 10


def test_10_mb_of_text_are_answered_in_little_memory(server):
    """And every token counts: a word of more than 100 characters is one."""
    part = SENTENCE + f"{'x' * 150} " * 60
    parts = (10 << 20) // len(part)
    server.infer("long", ["the"])
    before = server.memory("VmHWM")
    # gRPC, whose client waits as long as it takes.
    answer = server.infer("long", [part * parts], protocol="grpc")
    # 14 tokens and 60; 38 new ones to a window of 46 beside the special ones.
    content = 74 * parts
    windows = -(-(content - 8) // 38)
    assert answer["TOKEN_COUNT"].item() == content + 8 * (windows - 1) + 2 * windows
    assert np.isfinite(answer["EMBEDDING"]).all()
    assert server.memory("VmHWM") - before < 100


REFUSED = {
    "stride_of_a_whole_window": ({"max_length": 8, "window_stride": 6}, "", ["window_stride", "6", "max_length 8"]),
    "stride_below_0": ({"window_stride": -1}, "", ["window_stride", "-1"]),
    "combine_alone": ({"window_combine": "mean"}, "", ["window_combine", "window_stride"]),
    "combine_unknown": ({"window_stride": 2, "window_combine": "median"}, "", ["window_combine", "median", "mean, max"]),
    "combine_of_a_stream": ({"window_stride": 2, "window_combine": "mean"}, STREAM, ["window_combine", "decoupled"]),
    "truncation_left": ({"window_stride": 2, "truncation": "left"}, "", ["window_stride", "truncation", "right"]),
    "decoupled_without_windows": ({}, STREAM, ["decoupled", "window_stride"]),
}


@pytest.fixture(scope="module")
def refusing(serve, new_repository):
    models = new_repository()
    for name, (parameters, text, _) in REFUSED.items():
        models.add(name, "embed_mean", parameters, text)
    models.add("cached_stream", "embed_mean", {"window_stride": 2}, f"{STREAM} response_cache {{ enable: true }}")
    models.add("maximum_of_embeddings", "embed_mean", {"window_stride": 2, "window_combine": "max"})
    models.add("pairs", "classify_pair_three", {"window_stride": 2, "text_pair": "true"})
    logits = 'output [{ name: "LOGITS" data_type: TYPE_FP32 dims: [ 3 ] }]'
    models.add("logits", "classify_three", {"window_stride": 2}, logits)
    return serve(models, "--cache-config=local,size=1048576")


@pytest.mark.parametrize(
    "name, words",
    [(name, words) for name, (_, _, words) in REFUSED.items()]
    + [
        ("maximum_of_embeddings", ["window_combine", "max", "mean"]),
        ("pairs", ["window_stride", "text_pair"]),
        ("logits", ["LOGITS", "PROBABILITIES"]),
    ],
)
def test_what_makes_no_sense_is_refused_at_load(refusing, name, words):
    state, reason = refusing.index()[name]
    assert state == "UNAVAILABLE" and all(word in reason for word in words), reason


def test_a_cache_with_a_decoupled_model_is_refused_by_the_server(refusing):
    assert refusing.index()["cached_stream"] == ("", "")
    words = "Response Cache does not currently support model cached_stream with 'decoupled' transaction policy"
    assert words in refusing.log()
