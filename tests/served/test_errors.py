"""Bad requests: Triton's codes, messages that say what was wrong, and nobody else harmed."""

import json
import threading

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from harness import STATUS, as_bytes, concurrently, until
from reference import text

BAD_UTF8 = [b"\xff", b"caf\xe9", b"cut \xe2\x82", b"\xed\xa0\x80 surrogate", b"\xc0\x80 overlong", b"\xf5\x80\x80\x80"]


def refused(endpoint, code, model, inputs, outputs=None, protocol="http", **more):
    """Asks, expects an error of `code`, and returns its message."""
    with pytest.raises(InferenceServerException) as error:
        endpoint.infer(model, inputs, outputs, protocol, **more)
    assert error.value.status() == STATUS[code][protocol], error.value
    return error.value.message()


@pytest.mark.parametrize("bad", BAD_UTF8, ids=repr)
def test_invalid_utf8_names_model_input_and_row(common, protocol, bad):
    message = refused(common, "INVALID_ARG", "embed_mean", ["good", "fine", bad, "well"], protocol=protocol)
    for word in ("embed_mean", "TEXT", "UTF-8", "2"):
        assert word in message, message


def test_invalid_utf8_in_the_second_of_a_pair_names_that_input(common, protocol):
    inputs = {"TEXT": as_bytes(["a", "b"]), "TEXT_PAIR": as_bytes(["c", b"\xff"])}
    message = refused(common, "INVALID_ARG", "classify_pair_three", inputs, protocol=protocol)
    assert "TEXT_PAIR" in message and "1" in message, message


def test_an_error_shows_no_text_of_the_user(common, protocol):
    message = refused(common, "INVALID_ARG", "embed_mean", [b"my secret word \xff"], protocol=protocol)
    assert "secret" not in message


@pytest.mark.parametrize(
    "inputs",
    [
        {"TEXT": np.zeros((1, 1), np.int32)},
        {"TEXT": np.zeros((1, 1), np.float32)},
        {"TEXT": as_bytes(["a", "b"]).reshape(1, 2)},
        {"TEXT": as_bytes(["a", "b"]).reshape(2)},
        {"TEXT": as_bytes(["a", "b"]).reshape(1, 2, 1)},
        {"TEXTS": as_bytes("a")},
        {"TEXT": as_bytes("a"), "MORE": as_bytes("b")},
        {"TEXT": as_bytes("a"), "TEXT_PAIR": as_bytes("b")},
    ],
    ids=["INT32", "FP32", "two in a row", "no batch dimension", "three dimensions", "other name", "one more", "a pair"],
)
def test_wrong_inputs_are_refused(common, protocol, inputs):
    message = refused(common, "INVALID_ARG", "embed_mean", inputs, protocol=protocol)
    assert "embed_mean" in message


def test_a_missing_input_is_refused(common, protocol):
    message = refused(common, "INVALID_ARG", "classify_pair_three", {"TEXT": as_bytes("a")}, protocol=protocol)
    assert "classify_pair_three" in message


def test_an_unknown_output_is_refused(common, protocol):
    message = refused(common, "INVALID_ARG", "embed_mean", ["a"], ["LOGITS"], protocol=protocol)
    assert "LOGITS" in message


def test_more_rows_than_max_batch_size_are_refused(common, protocol):
    most = common.config("embed_mean")["max_batch_size"]
    message = refused(common, "INVALID_ARG", "embed_mean", ["a"] * (most + 1), protocol=protocol)
    assert str(most) in message


def test_an_unknown_model_or_version_is_not_found(common, protocol):
    assert "nobody" in refused(common, "NOT_FOUND", "nobody", ["a"], protocol=protocol)
    refused(common, "NOT_FOUND", "embed_mean", ["a"], protocol=protocol, model_version="7")


def raw_text_body(raw):
    """An HTTP inference request of one BYTES element whose tensor is `raw`, unchecked by any client."""
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "TEXT",
                    "shape": [1, 1],
                    "datatype": "BYTES",
                    "parameters": {"binary_data_size": len(raw)},
                }
            ]
        }
    ).encode()
    return head + raw, {"Inference-Header-Content-Length": str(len(head))}


@pytest.mark.parametrize(
    "raw",
    [b"", b"\x05", b"\x05\0\0\0abc", b"\xff\xff\xff\xffabc", b"\1\0\0\0a\1\0\0\0b", b"\1\0\0\0ab"],
    ids=["nothing", "cut length", "cut string", "huge length", "two strings", "one byte more"],
)
def test_broken_string_tensors_are_refused(common, raw):
    body, headers = raw_text_body(raw)
    status, answer = common.request("POST", "/v2/models/embed_mean/infer", body, headers)
    assert status == 400, answer
    assert common.infer("embed_mean", ["still here"])["EMBEDDING"].shape == (1, 64)


def test_invalid_utf8_in_one_of_8_concurrent_requests_fails_alone(common, protocol):
    """`wait_for_8` holds requests back until 8 are there, so all of these share one batch."""
    texts = [text(n).encode() for n in ("plain", "empty", "emoji", "words_1000", "chinese", "nul_inside", "url")]
    texts.insert(3, b"bad \xff byte")
    before = common.statistics("wait_for_8")["execution_count"]
    answers = concurrently(lambda t: common.infer("wait_for_8", [t], protocol=protocol)["EMBEDDING"], texts)
    met = until(lambda: common.statistics("wait_for_8")["execution_count"] == before + 1, seconds=5)
    assert met, "the requests did not meet in one batch"
    assert isinstance(answers[3], InferenceServerException)
    assert answers[3].status() == STATUS["INVALID_ARG"][protocol]
    for i in (0, 1, 2, 4, 5, 6, 7):
        assert isinstance(answers[i], np.ndarray), answers[i]
        alone = common.infer("embed_mean_normalize", [texts[i]])["EMBEDDING"]
        np.testing.assert_allclose(answers[i], alone, atol=1e-5)


def test_a_cancelled_request_says_so_and_its_neighbours_are_answered(common):
    client = tritonclient.grpc.InferenceServerClient(common.grpc)
    tensor = tritonclient.grpc.InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(as_bytes("to be cancelled"))
    done, results = threading.Semaphore(0), []

    def callback(result, error):
        results.append((result, error))
        done.release()

    # Alone in a queue that waits three seconds for 8: there is time to cancel.
    cancelled = client.async_infer("wait_for_8", [tensor], callback)
    kept = client.async_infer("wait_for_8", [tensor], callback)
    cancelled.cancel()
    for _ in range(2):
        assert done.acquire(timeout=30)
    errors = [error for _, error in results if error is not None]
    answers = [result for result, error in results if error is None]
    assert [error.status() for error in errors] == [STATUS["CANCELLED"]["grpc"]]
    assert len(answers) == 1 and np.isfinite(answers[0].as_numpy("EMBEDDING")).all()
    assert kept is not None


def test_a_deadline_ends_the_wait_and_the_server_goes_on(common):
    with pytest.raises(InferenceServerException) as error:
        common.infer("wait_for_8", ["late"], protocol="grpc", client_timeout=0.2)
    assert error.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert common.infer("wait_for_8", ["in time"], protocol="grpc")["EMBEDDING"].shape == (1, 64)


@pytest.fixture(scope="module")
def limits(serve, new_repository):
    """Models with a short queue and with truncation=error."""
    models = new_repository()
    queue = """max_batch_size: 256 instance_group [{ count: 1 kind: KIND_CPU }]
dynamic_batching { preferred_batch_size: [ 256 ] max_queue_delay_microseconds: 1000000
                   default_queue_policy { max_queue_size: 2 } }"""
    models.add("short_queue", "embed_mean", text=queue)
    models.add("no_truncation", "embed_mean", {"truncation": "error"})
    return serve(models)


def test_a_full_queue_is_unavailable(limits, protocol):
    answers = concurrently(lambda i: limits.infer("short_queue", [f"text {i}"], protocol=protocol), range(8))
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    assert errors and len(errors) < 8
    assert {error.status() for error in errors} == {STATUS["UNAVAILABLE"][protocol]}


def test_truncation_error_refuses_a_long_text_and_says_the_limit(limits, protocol):
    assert limits.infer("no_truncation", ["the " * 46], ["TOKEN_COUNT"])["TOKEN_COUNT"].tolist() == [[48]]
    message = refused(limits, "INVALID_ARG", "no_truncation", ["short", "the " * 47], protocol=protocol)
    assert "48" in message and "1" in message and "no_truncation" in message, message
