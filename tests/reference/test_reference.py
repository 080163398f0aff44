"""The committed references fit together, and what is made at test time comes out as it was when they were made."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parents[1] / "scripts"))

import assemble_models  # noqa: E402
import checkpoints  # noqa: E402
import corpus  # noqa: E402

MODELS = json.loads((HERE / "references.json").read_text("ascii"))["models"]
TOKENS = json.loads((HERE / "tokens.json").read_text("ascii"))["tokenizers"]
TENSORS = checkpoints.read_safetensors(HERE / "references.safetensors")
DIGESTS = dict(reversed(line.split()) for line in (HERE / "checkpoints.sha256").read_text().splitlines())


def test_corpus_is_what_the_script_writes():
    written = json.loads((HERE / "corpus.json").read_text("ascii"))
    assert written == {"texts": corpus.texts(), "pairs": corpus.pairs()}
    for rows in written.values():
        assert len({row["name"] for row in rows}) == len(rows)


def test_every_model_has_references():
    assert set(MODELS) == {"minilm", "sentiment", *checkpoints.CHECKPOINTS}
    assert set(DIGESTS) == set(checkpoints.CHECKPOINTS)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_tensors_and_names_agree(name):
    model = MODELS[name]
    rows = len(model["rows"])
    assert len(model["token_counts"]) == len(model["full_token_counts"]) == rows
    assert model["token_counts"] == [min(n, model["max_length"]) for n in model["full_token_counts"]]
    if model["task"] == "embed":
        embeddings = TENSORS[f"{name}/embeddings"]
        assert embeddings.shape == (rows, model["dimension"])
        if model["normalize"] and model["truncate_dim"] is None:
            np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-5)
    else:
        logits = TENSORS[f"{name}/logits"].astype(np.float64)
        assert logits.shape == (rows, len(model["labels"]))
        if model["function"] == "softmax":
            scores = np.exp(logits - logits.max(1, keepdims=True))
            scores /= scores.sum(1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-logits)) if model["function"] == "sigmoid" else logits
        np.testing.assert_allclose(TENSORS[f"{name}/probabilities"], scores, atol=1e-6)
        assert model["best"] == [model["labels"][i] for i in scores.argmax(1)]
        assert np.ptp(logits, axis=0).min() > 0.3, "a head that says the same of every text proves nothing"
    for row, ids in model.get("hidden", {}).items():
        assert TENSORS[f"{name}/hidden/{row}"].shape[1] == len(ids)


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_agree_with_counts(name):
    entry = TOKENS[name]
    assert max(len(row["ids"]) for row in entry["rows"]) == entry["max_length"]
    if name in MODELS:
        assert [len(row["ids"]) for row in entry["rows"]] == MODELS[name]["token_counts"]
        assert entry["names"] == MODELS[name]["rows"]


@pytest.mark.parametrize("name", checkpoints.CHECKPOINTS)
def test_small_checkpoint_is_the_one_of_the_references(name, tmp_path):
    directory = checkpoints.write_checkpoint(name, tmp_path / name)
    assert checkpoints.digest(directory) == DIGESTS[name]
    config = json.loads((directory / "config.json").read_text("utf-8"))
    vocab = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(config["vocab_size"]))
    tensors = {}
    for path in directory.glob("*.safetensors"):
        tensors.update(checkpoints.read_safetensors(path))
    embeddings = [t for key, t in tensors.items() if key.endswith("word_embeddings.weight")]
    assert [t.shape for t in embeddings] == [(config["vocab_size"], config["hidden_size"])]
    if config["architectures"] == ["BertForSequenceClassification"]:
        assert tensors["classifier.weight"].shape == (len(MODELS[name]["labels"]), config["hidden_size"])
    assert all(np.isfinite(t.astype(np.float32)).all() for t in tensors.values())


def test_writing_a_checkpoint_again_replaces_it(tmp_path):
    directory = checkpoints.write_checkpoint("embed_sharded", tmp_path / "model")
    checkpoints.write_checkpoint("embed_mean", directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert checkpoints.digest(directory) == DIGESTS["embed_mean"]


def test_bf16_rounds_to_nearest_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), 3e38, 1e-40], dtype=np.float32)
    bits = np.frombuffer(checkpoints.encode(values, "BF16"), "<u2")
    assert [hex(b) for b in bits] == ["0x3f80", "0x3f80", "0x3f82", "0xbf81", "0x7f62", "0x1"]


def test_assembled_repository(tmp_path):
    said = []
    assemble_models.assemble(tmp_path, said.append)
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    models = {p.parent.name for p in assemble_models.SOURCES.glob("*/config.pbtxt")}
    assert not [p for p in files if p.name.endswith(".tmp")]
    assert {p.parent.name for p in tmp_path.glob("*/config.pbtxt")} == models
    for name in ("embed", "sentiment"):
        assert 'backend: "rust"' in (tmp_path / name / "config.pbtxt").read_text()
    package = assemble_models.body_directory()
    for name in assemble_models.EMBED_FILES:
        copied = tmp_path / "embed" / "1" / name
        assert copied.read_bytes() == (package / name).read_bytes()
        assert copied.stat().st_ino != (package / name).stat().st_ino
    body = checkpoints.read_safetensors(package / "model.safetensors")
    head = checkpoints.read_safetensors(assemble_models.SOURCES / "sentiment" / "head.safetensors")
    whole = checkpoints.read_safetensors(tmp_path / "sentiment" / "1" / "model.safetensors")
    expected = {f"bert.{key}": value for key, value in body.items() if not key.endswith("position_ids")}
    expected.update(head)
    assert whole.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(whole[key], value), key
    config = json.loads((tmp_path / "sentiment" / "1" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert [config["id2label"][str(i)] for i in range(2)] == MODELS["sentiment"]["labels"] == assemble_models.LABELS

    before = {p: p.stat().st_mtime_ns for p in files}
    assemble_models.assemble(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in files} == before, "a second run writes nothing"


def test_sentences_are_apart():
    def rows(file):
        return [line.split("\t") for line in (folder / file).read_text("utf-8").splitlines()]

    folder = assemble_models.SOURCES / "sentiment" / "sentences"
    train, held_out = rows("train.tsv"), rows("heldout.tsv")
    assert len(train) >= 300 and len(held_out) == 100
    assert {label for label, _ in train + held_out} == set(assemble_models.LABELS)
    texts = [text for _, text in train + held_out]
    assert len(set(texts)) == len(texts)
