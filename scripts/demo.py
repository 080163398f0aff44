"""Sends a handful of texts to the models of `make serve` with NVIDIA's tritonclient, and prints what comes back."""

import os
import sys

import numpy as np
import tritonclient.http as triton

TEXTS = [
    "The train to the coast leaves at seven.",
    "When does the first railway service to the sea depart?",
    "Whisk three eggs and fold in the flour.",
    "How do I make pancakes?",
    "Die Straße führt über eine schmale Brücke.",
]
OPINIONS = [
    "What a wonderful evening, I would come back tomorrow.",
    "The soup was cold and nobody apologised.",
    "Friendly staff and a lovely view.",
    "It broke after two days.",
]


def ask(client, model, texts, outputs):
    """Sends all texts in one request; returns the outputs as arrays of one row a text."""
    tensor = triton.InferInput("TEXT", [len(texts), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=object))
    answer = client.infer(model, [tensor], outputs=[triton.InferRequestedOutput(name) for name in outputs])
    return [answer.as_numpy(name) for name in outputs]


def show_embed(client):
    (vectors,) = ask(client, "embed", TEXTS, ["EMBEDDING"])
    cosines = vectors @ vectors.T / np.outer(*[np.linalg.norm(vectors, axis=1)] * 2)
    print(f"\nembed: cosine similarity of {len(TEXTS)} vectors of {vectors.shape[1]} numbers\n")
    width = max(map(len, TEXTS)) + 5
    print(" " * width + "".join(f"{f'[{i + 1}]':>7}" for i in range(len(TEXTS))))
    for i, text in enumerate(TEXTS):
        print(f"[{i + 1}] {text:<{width - 4}}" + "".join(f"{value:7.2f}" for value in cosines[i]))


def show_sentiment(client):
    logits, probabilities = ask(client, "sentiment", OPINIONS, ["LOGITS", "PROBABILITIES"])
    print("\nsentiment: probability of each label, and the logits\n")
    width = max(map(len, OPINIONS)) + 2
    print(f"{'':<{width}}{'NEGATIVE':>10}{'POSITIVE':>10}   LOGITS")
    for text, row, raw in zip(OPINIONS, probabilities, logits):
        print(f"{text:<{width}}{row[0]:>10.1%}{row[1]:>10.1%}   [{raw[0]:.3f}, {raw[1]:.3f}]")


def main():
    address = f"127.0.0.1:{os.environ.get('HTTP_PORT') or 8000}"
    client = triton.InferenceServerClient(address)
    try:
        client.is_server_live()
    except (OSError, triton.InferenceServerException) as error:
        sys.exit(f"No server answers at {address} ({error}): run `make serve` in another terminal first")
    shown = 0
    for model, show in (("embed", show_embed), ("sentiment", show_sentiment)):
        if client.is_model_ready(model):
            show(client)
            shown += 1
    if not shown:
        sys.exit(f"The server at {address} serves neither `embed` nor `sentiment`: the demo is about these two")


if __name__ == "__main__":
    main()
