"""The reference answers of tests/reference for tests that compare with them."""

import json
from dataclasses import dataclass, field
from functools import cache

import numpy as np

import harness  # noqa: F401  (puts tests/reference on the path)
import checkpoints

DIRECTORY = harness.ROOT / "tests" / "reference"


@dataclass
class Reference:
    """What the reference answers for `rows` of the corpus; `said` is its entry in references.json."""

    name: str
    said: dict
    rows: list = field(repr=False)

    def array(self, kind):
        return _arrays()[f"{self.name}/{kind}"]

    def inputs(self, rows=None):
        """The input tensors' texts: TEXT, and TEXT_PAIR for pairs."""
        rows = self.rows if rows is None else rows
        out = {"TEXT": [row["text"] for row in rows]}
        if "text_pair" in rows[0]:
            out["TEXT_PAIR"] = [row["text_pair"] for row in rows]
        return out


@cache
def _json(name):
    return json.loads((DIRECTORY / name).read_text("ascii"))


@cache
def _arrays():
    return checkpoints.read_safetensors(DIRECTORY / "references.safetensors")


@cache
def text(name):
    return next(row["text"] for row in _json("corpus.json")["texts"] if row["name"] == name)


def names(task):
    return [name for name, said in _json("references.json")["models"].items() if said["task"] == task]


@cache
def reference(name):
    said = _json("references.json")["models"][name]
    corpus = {row["name"]: row for row in _json("corpus.json")["pairs" if said.get("pair") else "texts"]}
    return Reference(name, said, [corpus[row] for row in said["rows"]])


def worst(names, values):
    """The row with the lowest value, for a failure's message."""
    index = int(np.argmin(values))
    return f"{names[index]}: {values[index]}"
