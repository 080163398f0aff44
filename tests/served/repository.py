"""Model repositories for the tests: the examples, MiniLM and the small random checkpoints of tests/reference.

`python tests/served/repository.py DIR` writes the one that most tests ask (conftest.py), with no link that leaves DIR.
"""

import json
import os
import shutil
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "reference")]

import assemble_models  # noqa: E402  (scripts)
import checkpoints  # noqa: E402  (tests/reference)

SMALL = ROOT / "build" / "checkpoints"
EXAMPLES = ROOT / "build" / "model_repo"

# Every head, file and name that is served; the rest of CHECKPOINTS is for refusing (test_refused_files.py).
NOT_SERVED = {
    "embed_mean_sqrt_len",
    "embed_weighted_mean",
    "embed_concat",
    "embed_dense",
    "embed_prompt",
    "embed_truncate_dim",
}
SERVED_CHECKPOINTS = [name for name in checkpoints.CHECKPOINTS if name not in NOT_SERVED]


@cache
def directory(name):
    """The Hugging Face directory `minilm`, `sentiment` or that of a small checkpoint."""
    if name == "minilm":
        return checkpoints.minilm_directory()
    if name == "sentiment":
        if not (EXAMPLES / "sentiment_ensemble" / "config.pbtxt").exists():
            assemble_models.assemble(EXAMPLES)
        return EXAMPLES / "sentiment" / "1"
    SMALL.mkdir(parents=True, exist_ok=True)
    return checkpoints.write_checkpoint(name, SMALL / name)


def is_pair(name):
    return name in checkpoints.CHECKPOINTS and checkpoints.spec(name)["pair"]


def pbtxt(parameters=None, text=""):
    """A config.pbtxt of our backend with these parameters and `text` after it."""
    lines = ['backend: "rust"']
    for key, value in (parameters or {}).items():
        lines.append(f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(str(value))} }} }}")
    return "\n".join(lines) + "\n" + text + "\n"


class Repository:
    """A model repository at `path`, which comes to be with the first model."""

    def __init__(self, path):
        self.path = Path(path)

    def __fspath__(self):
        return str(self.path)

    def __str__(self):
        return str(self.path)

    def add(self, name, source, parameters=None, text="", config=True):
        """Adds a model of the Hugging Face directory that `directory(source)` gives; returns its version directory.
        Files of more than a megabyte are hard links where the disk allows: replace them, do not write to them.
        `config`: False for none at all."""
        version = self.path / name / "1"
        shutil.copytree(directory(source), version, copy_function=link_or_copy)
        if config:
            self.configure(name, parameters, text)
        return version

    def configure(self, name, parameters=None, text=""):
        (self.path / name / "config.pbtxt").write_text(pbtxt(parameters, text))


def link_or_copy(source, target):
    source = os.path.realpath(source)
    if os.path.getsize(source) > 1 << 20:
        try:
            os.link(source, target)
            return
        except OSError:  # another disk
            pass
    shutil.copyfile(source, target)


def write_common(path):
    """The repository that most tests ask: see `common` in conftest.py."""
    shutil.rmtree(path, ignore_errors=True)
    repository = Repository(path)
    fp32 = {"dtype": "fp32"}
    # As `make serve` serves them.
    ensemble = ("tokenizer", "bert_classifier", "sentiment_ensemble")
    for name in ("embed", "sentiment", *assemble_models.OPTIONS, *ensemble):
        directory("sentiment")
        shutil.copytree(EXAMPLES / name, repository.path / name, copy_function=link_or_copy)
    repository.add("minilm_fp32", "minilm", fp32)
    repository.add("sentiment_fp32", "sentiment", fp32)
    # Waits for N requests, so that they meet in one batch.
    for size, source, seconds in ((8, "embed_mean_normalize", 3), (32, "minilm", 6)):
        waits = (
            f"dynamic_batching {{ preferred_batch_size: [ {size} ] max_queue_delay_microseconds: {seconds}000000 }}"
        )
        one = f"max_batch_size: {size} instance_group [{{ count: 1 kind: KIND_CPU }}]"
        # The batching library would close a batch of more tokens than a pass.
        budget = {"max_batch_tokens": "100000"}
        repository.add(f"wait_for_{size}", source, {**fp32, **budget}, f"{one}\n{waits}")
    more = {"embed_bare_legacy": {"task": "embed"}}  # its architecture is BertForMaskedLM
    for name in SERVED_CHECKPOINTS:
        pair = {"text_pair": "true"} if is_pair(name) else {}
        repository.add(name, name, {**fp32, **pair, **more.get(name, {})})
    return repository


if __name__ == "__main__":
    write_common(sys.argv[1])
