"""What README and NVIDIA's client documentation show, against the examples as `make serve` serves them."""

import json

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from harness import cosine, stream
from reference import reference


def test_two_sentences_in_one_request_get_two_rows_of_logits_over_http(common):
    client = tritonclient.http.InferenceServerClient(url=common.http)
    texts = np.array([["I loved every minute of it."], ["A dull, noisy and overpriced place."]], dtype=object)
    text = tritonclient.http.InferInput("TEXT", [2, 1], "BYTES")
    text.set_data_from_numpy(texts, binary_data=True)
    logits = tritonclient.http.InferRequestedOutput("LOGITS", binary_data=True)
    response = client.infer("sentiment", inputs=[text], outputs=[logits])
    rows = response.as_numpy("LOGITS")
    assert rows.shape == (2, 2) and np.isfinite(rows).all()
    assert rows[0, 1] > rows[0, 0] and rows[1, 0] > rows[1, 1]


def test_two_sentences_in_one_request_get_two_rows_of_logits_over_grpc(common):
    client = tritonclient.grpc.InferenceServerClient(url=common.grpc)
    texts = np.array([[b"I loved every minute of it."], [b"A dull, noisy and overpriced place."]], dtype=object)
    text = tritonclient.grpc.InferInput("TEXT", [2, 1], "BYTES")
    text.set_data_from_numpy(texts)
    response = client.infer("sentiment", [text], outputs=[tritonclient.grpc.InferRequestedOutput("LOGITS")])
    rows = response.as_numpy("LOGITS")
    assert rows.shape == (2, 2)
    assert rows[0, 1] > rows[0, 0] and rows[1, 0] > rows[1, 1]


def test_plain_json_gets_an_embedding_of_384_numbers_of_norm_1(common):
    """The curl that `make serve` prints."""
    body = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["The train leaves at seven."]}]}
    status, text = common.request("POST", "/v2/models/embed/infer", json.dumps(body))
    assert status == 200, text
    outputs = {output["name"]: output for output in json.loads(text)["outputs"]}
    embedding = outputs["EMBEDDING"]
    assert embedding["shape"] == [1, 384] and embedding["datatype"] == "FP32"
    assert np.linalg.norm(embedding["data"]) == pytest.approx(1, abs=1e-3)


def test_the_dtype_that_the_server_chooses_stays_near_the_reference(common):
    expected = reference("minilm")
    vectors = common.infer("embed", expected.inputs(), ["EMBEDDING"])["EMBEDDING"]
    assert cosine(vectors, expected.array("embeddings")).min() >= 0.999


def test_generate_answers_with_plain_json(common):
    """Triton's /generate extension: inputs and outputs by name."""
    status, text = common.request("POST", "/v2/models/sentiment/generate", {"TEXT": "A lovely walk."})
    assert status == 200, text
    answer = json.loads(text)
    assert len(answer["LOGITS"]) == 2 and len(answer["PROBABILITIES"]) == 2


@pytest.mark.parametrize(
    "model, inputs, outputs",
    [
        ("embed", {"TEXT": "BYTES"}, {"EMBEDDING": ("FP32", [-1, 384]), "TOKEN_COUNT": ("INT32", [-1, 1])}),
        (
            "sentiment",
            {"TEXT": "BYTES"},
            {
                "LOGITS": ("FP32", [-1, 2]),
                "PROBABILITIES": ("FP32", [-1, 2]),
                "LABEL": ("BYTES", [-1, 1]),
                "SCORE": ("FP32", [-1, 1]),
                "TOKEN_COUNT": ("INT32", [-1, 1]),
            },
        ),
    ],
)
def test_metadata_declares_the_tensors(common, model, inputs, outputs):
    metadata = common.metadata(model)
    assert {t["name"]: t["datatype"] for t in metadata["inputs"]} == inputs
    assert [t["shape"] for t in metadata["inputs"]] == [[-1, 1]]
    assert {t["name"]: (t["datatype"], t["shape"]) for t in metadata["outputs"]} == outputs
    assert metadata["platform"] == "" or "rust" in metadata["platform"]


REVIEW = "The food was excellent and the staff could not have been kinder. " * 20


def test_windows_embeds_a_text_of_any_length(common):
    """The mean of its windows, where `embed` sees the first 256 tokens."""
    answer = common.infer("windows", [REVIEW, "A short text."])
    assert np.linalg.norm(answer["EMBEDDING"], axis=1) == pytest.approx([1, 1], abs=1e-5)
    assert answer["TOKEN_COUNT"][0] > 256
    short = common.infer("embed", ["A short text."], ["EMBEDDING"])["EMBEDDING"]
    assert cosine(answer["EMBEDDING"][1:], short).min() > 0.999


def test_windows_stream_judges_every_part_of_a_text(common):
    text = REVIEW + "But the soup was cold and the bill was a disgrace. " * 20
    responses, error = stream(common, "windows_stream", [text], ["LABEL", "WINDOW_START", "WINDOW_END"])
    assert error is None and len(responses) > 5
    assert responses[0]["LABEL"].item() == b"POSITIVE" and responses[-1]["LABEL"].item() == b"NEGATIVE"
    places = [(response["WINDOW_START"].item(), response["WINDOW_END"].item()) for response in responses]
    assert places[0][0] == 0 and places[-1][1] == len(text.rstrip())
    assert all(start < before_end < end for (_, before_end), (start, end) in zip(places, places[1:]))


def test_priorities_takes_both_priorities(common, protocol):
    scheduler = common.config("priorities")["dynamic_batching"]
    assert [int(scheduler[key]) for key in ("priority_levels", "default_priority_level")] == [2, 2]
    for priority in (0, 1, 2):
        assert common.infer("priorities", ["Fine."], ["LABEL"], protocol=protocol, priority=priority)["LABEL"].item()
