"""BERT checkpoints of known shapes with random weights, as Hugging Face directories: what a benchmark of speed needs.

    python checkpoints.py --out DIR [bert-base bert-large minilm]

Needs numpy. Names, shapes and config.json are those that transformers' BertModel writes (`oracle.py` loads the directory
with it, and fails on a missing or an unexpected tensor); tokenizer.json is a WordPiece one of made-up words. Weights are
fp16, from a fixed seed. They are larger than those that training starts from, so that attention is not everywhere alike
and errors show.
"""

import argparse
import json
from pathlib import Path

import numpy as np

SEED = 20261130
SHAPES = {
    "bert-base": dict(hidden=768, layers=12, heads=12),
    "bert-large": dict(hidden=1024, layers=24, heads=16),
    "minilm": dict(hidden=384, layers=6, heads=12),
    # For trying the scripts where there is no card.
    "tiny": dict(hidden=64, layers=2, heads=2, vocabulary=512),
}
VOCABULARY = 30522
POSITIONS = 512
TYPES = 2


def tensors(hidden, layers, vocabulary):
    """(name, shape, mean, standard deviation) of each tensor."""
    inner = 4 * hidden

    def linear(name, out, width, scale=1.0):
        yield f"{name}.weight", (out, width), 0.0, scale / width**0.5
        yield f"{name}.bias", (out,), 0.0, 0.02

    def norm(name):
        yield f"{name}.LayerNorm.weight", (hidden,), 1.0, 0.1
        yield f"{name}.LayerNorm.bias", (hidden,), 0.0, 0.1

    for name, rows in (("word", vocabulary), ("position", POSITIONS), ("token_type", TYPES)):
        yield f"embeddings.{name}_embeddings.weight", (rows, hidden), 0.0, 0.05
    yield from norm("embeddings")
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{name}", hidden, hidden)
        yield from linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from norm(f"{layer}.attention.output")
        yield from linear(f"{layer}.intermediate.dense", inner, hidden)
        yield from linear(f"{layer}.output.dense", hidden, inner)
        yield from norm(f"{layer}.output")
    yield from linear("pooler.dense", hidden, hidden)


def write_safetensors(path, arrays):
    """`arrays` is a list of (name, array); fp16 and fp32 and int32."""
    kinds = {"float16": "F16", "float32": "F32", "int32": "I32"}
    header, end = {}, 0
    for name, array in arrays:
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": kinds[str(array.dtype)], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in arrays:
            file.write(np.ascontiguousarray(array).tobytes())


def config(hidden, layers, heads, vocabulary):
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": TYPES,
        "layer_norm_eps": 1e-12,
        "pad_token_id": 0,
        "torch_dtype": "float16",
    }


def tokenizer(vocabulary):
    """Every id has a word: the special ones, letters and their continuations, and w0, w1, ..."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = special + list(letters) + [f"##{letter}" for letter in letters]
    words += [f"w{i}" for i in range(vocabulary - len(words))]

    def added(i):
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        return {"id": i, "content": special[i], "special": True} | flags

    def token(name, kind):
        return {"SpecialToken": {"id": f"[{name}]", "type_id": kind}}

    def text(name, kind):
        return {"Sequence": {"id": name, "type_id": kind}}

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [added(i) for i in range(len(special))],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [token("CLS", 0), text("A", 0), token("SEP", 0)],
            "pair": [token("CLS", 0), text("A", 0), token("SEP", 0), text("B", 1), token("SEP", 1)],
            "special_tokens": {name: {"id": name, "ids": [words.index(name)], "tokens": [name]} for name in special[2:4]},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: i for i, word in enumerate(words)},
        },
    }


def write_checkpoint(name, directory):
    shape = {"vocabulary": VOCABULARY} | SHAPES[name]
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(SEED)
    arrays = []
    for tensor, size, mean, deviation in tensors(shape["hidden"], shape["layers"], shape["vocabulary"]):
        values = random.standard_normal(size, np.float32)
        values *= np.float32(deviation)
        values += np.float32(mean)
        arrays.append((tensor, values.astype(np.float16)))
    write_safetensors(directory / "model.safetensors", arrays)
    for file, content in (("config.json", config(**shape)), ("tokenizer.json", tokenizer(shape["vocabulary"]))):
        (directory / file).write_text(json.dumps(content), "utf-8")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=["bert-base", "bert-large", "minilm"], choices=list(SHAPES))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    for name in args.names:
        if (args.out / name / "tokenizer.json").exists():
            print(f"{name}: already there")
            continue
        write_checkpoint(name, args.out / name)
        print(f"{name}: {(args.out / name / 'model.safetensors').stat().st_size / 2**20:.0f} MiB of weights")


if __name__ == "__main__":
    main()
