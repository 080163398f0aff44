"""Asks a sentiment model for the logits of two sentences, and makes probabilities of them:

    python scripts/sentiment_client.py [sentiment_ensemble | sentiment]

The ensemble and the model that does it all are asked in the same way.
"""

import os
import sys

import numpy as np
import tritonclient.http as httpclient

SENTENCES = ["I loved every minute of it.", "A dull, noisy and overpriced place."]
LABELS = ["NEGATIVE", "POSITIVE"]


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def main():
    model = sys.argv[1] if len(sys.argv) > 1 else "sentiment_ensemble"
    client = httpclient.InferenceServerClient(f"127.0.0.1:{os.environ.get('HTTP_PORT') or 8000}")
    texts = np.array([[sentence] for sentence in SENTENCES], dtype=object)
    text = httpclient.InferInput("TEXT", texts.shape, "BYTES")
    text.set_data_from_numpy(texts, binary_data=True)
    logits = httpclient.InferRequestedOutput("LOGITS", binary_data=True)
    rows = client.infer(model, [text], outputs=[logits]).as_numpy("LOGITS")  # [2, 2]: one row a sentence
    for sentence, row in zip(SENTENCES, softmax(rows)):
        print(f"{sentence:<40} {LABELS[row.argmax()]} {row.max():.3f}")


if __name__ == "__main__":
    main()
