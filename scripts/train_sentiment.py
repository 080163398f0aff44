"""Trains the head of model_repo/sentiment from its sentences, and says how often it is right on the held-out ones.

    gold/bin/python scripts/train_sentiment.py     (the venv of tests/reference/requirements.txt)

The body and its pooler are MiniLM's and stay frozen; the head is a logistic regression on the pooled features, fitted
by Newton's method in float64, so that it comes out the same each time. Writes head.safetensors: classifier.weight
[2, 384] and classifier.bias [2]. It is an example to serve and compare, not a product.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "reference"))
sys.path.insert(0, str(ROOT / "scripts"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModel, AutoTokenizer  # noqa: E402

from assemble_models import LABELS, body_directory  # noqa: E402
from checkpoints import write_safetensors  # noqa: E402

SENTIMENT = ROOT / "model_repo" / "sentiment"
RIDGE = 0.1  # penalty on the squared weights


def sentences(file):
    rows = [line.split("\t") for line in (SENTIMENT / "sentences" / file).read_text("utf-8").splitlines()]
    return [text for _, text in rows], np.array([LABELS.index(label) for label, _ in rows])


def pooled(model, tokenizer, texts):
    """[texts, 384], float64: tanh(pooler(CLS))."""
    with torch.no_grad():
        return np.stack([model(**tokenizer(t, return_tensors="pt")).pooler_output[0].double().numpy() for t in texts])


def fit(features, positive):
    """Weights and bias (last) of the ridge-penalized logistic regression."""
    x = np.hstack([features, np.ones((len(features), 1))])
    penalty = np.full(x.shape[1], RIDGE)
    penalty[-1] = 1e-6
    w = np.zeros(x.shape[1])
    for _ in range(50):
        p = 1 / (1 + np.exp(-x @ w))
        gradient = x.T @ (p - positive) + penalty * w
        step = np.linalg.solve((x.T * (p * (1 - p))) @ x + np.diag(penalty), gradient)
        w -= step
        if np.abs(step).max() < 1e-10:
            return w
    raise SystemExit("the regression did not converge")


def main():
    torch.set_num_threads(1)
    model = AutoModel.from_pretrained(body_directory(), dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(body_directory())
    texts, labels = sentences("train.tsv")
    features = pooled(model, tokenizer, texts)
    w = fit(features, labels)
    head = {
        "classifier.weight": np.stack([-w[:-1] / 2, w[:-1] / 2]).astype(np.float32),
        "classifier.bias": np.array([-w[-1] / 2, w[-1] / 2], dtype=np.float32),
    }
    write_safetensors(SENTIMENT / "head.safetensors", head, metadata={"format": "pt"})
    for name, x, y, shown in (
        ("train", features, labels, texts),
        ("held out", pooled(model, tokenizer, sentences("heldout.tsv")[0]), *sentences("heldout.tsv")[::-1]),
    ):
        logits = x @ head["classifier.weight"].T + head["classifier.bias"]
        right = logits.argmax(1) == y
        print(f"{name}: {right.sum()} of {len(y)} right ({right.mean():.1%}); logits {np.abs(logits).mean():.2f} on average")
        if name != "train":
            for text, label in zip(np.array(shown)[~right], y[~right]):
                print(f"  not {LABELS[label]}: {text}")


if __name__ == "__main__":
    main()
