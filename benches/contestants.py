"""Who takes part in the served benchmark, and the model repository that holds them all.

The rivals are what PyPI can put behind the same tritonserver: models of its Python backend. Each is set up as well as
we know: hand-fused graphs, all cores used once, no padding where the recipe allows it, Hugging Face's fast tokenizer.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RIVALS = HERE / "rivals"
MAX_LENGTH = 512
MAX_BATCH = 32


@dataclass(frozen=True)
class Contestant:
    name: str  # of the model
    title: str
    dtype: str
    ours: bool = False

    @property
    def least_cosine(self):
        """What the answers to the reference texts must reach for a contestant to be timed."""
        return 0.97 if self.dtype == "int8" else 0.999

    def rivals(self, contestants):
        """Who this one is compared with: nobody who computes with fewer bits."""
        allowed = {"fp32": ("fp32",), "bf16": ("fp32", "bf16"), "int8": ("int8",)}[self.dtype]
        return [other for other in contestants if not other.ours and other.dtype in allowed]


CORES = len(os.sched_getaffinity(0))
ALONE = f"{CORES} x 1 thread"

# From the common recipe to the fastest.
CONTESTANTS = [
    Contestant("ensemble_delay_10", "Tokenizer + ONNX Runtime ensemble, padded, delay 10 ms", "fp32"),
    Contestant("ensemble_delay_0", "Tokenizer + ONNX Runtime ensemble, padded, no delay", "fp32"),
    Contestant("onnx_fp32", f"ONNX Runtime fp32, {ALONE}, 1 text a call", "fp32"),
    Contestant("openvino_bf16", f"OpenVINO bf16, {ALONE}, 1 text a call", "bf16"),
    Contestant("openvino_bf16_chunks", "OpenVINO bf16, sorted chunks of 8", "bf16"),
    Contestant("onnx_int8", f"ONNX Runtime int8, {ALONE}, 1 text a call", "int8"),
    Contestant("rust_ensemble", "triton-rust tokenizer + ONNX Runtime as an ensemble", "fp32", ours=True),
    Contestant("rust_fp32", "triton-rust fp32", "fp32", ours=True),
    Contestant("rust_bf16", "triton-rust bf16", "bf16", ours=True),
    Contestant("rust_int8", "triton-rust int8", "int8", ours=True),
]

TEXT = ("TEXT", "TYPE_STRING", 1)
IDS = [("INPUT_IDS", "TYPE_INT32", -1), ("ATTENTION_MASK", "TYPE_INT32", -1)]


def tensors(kind, entries, ragged=False):
    more = ", allow_ragged_batch: true" if ragged else ""
    items = [f'  {{ name: "{name}", data_type: {dtype}, dims: [ {dims} ]{more} }}' for name, dtype, dims in entries]
    return f"{kind} [\n" + ",\n".join(items) + "\n]\n"


def parameters(values):
    return "".join(
        f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(str(value))} }} }}\n"
        for key, value in values.items()
    )


class Repository:
    """Writes the models into `path`; `model` is the Hugging Face directory, `onnx` holds what rival_onnx.py wrote."""

    def __init__(self, path, model, onnx):
        self.path, self.model, self.onnx = Path(path), Path(model), Path(onnx).resolve()
        self.hidden = json.loads((self.model / "config.json").read_text("utf-8"))["hidden_size"]

    @property
    def embedding(self):
        return [("EMBEDDING", "TYPE_FP32", self.hidden)]

    def add(self, name, config):
        version = self.path / name / "1"
        version.mkdir(parents=True)
        (self.path / name / "config.pbtxt").write_text(config)
        return version

    def rust(self, name, dtype):
        version = self.add(name, 'backend: "rust"\n' + parameters({"dtype": dtype, "max_length": MAX_LENGTH}))
        for entry in self.model.iterdir():
            (version / entry.name).symlink_to(entry)

    def rust_ensemble(self, name):
        """The recipe with our two models in it: the same graph, in the same library."""
        tokenizer, encoder = f"{name}_tokenizer", f"{name}_encoder"
        version = self.add(tokenizer, 'backend: "rust"\n' + parameters({"task": "tokenize", "max_length": MAX_LENGTH}))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (version / file).symlink_to(self.model / file)
        long = [(name, "TYPE_INT64", dims) for name, _, dims in IDS]
        version = self.add(encoder, f'backend: "rust"\nmax_batch_size: {MAX_BATCH}\n' + tensors("input", long))
        for file in ("config.json", "modules.json", "1_Pooling"):
            (version / file).symlink_to(self.model / file)
        (version / "model.onnx").symlink_to(self.onnx / "fused_masked.onnx")
        self.connect(name, tokenizer, encoder)

    def python(self, name, file, inputs, outputs, said, instances=1, delay=0, batches=True):
        """A model of the Python backend that runs rivals/<file>; `batches`: the server joins requests for it."""
        version = self.add(
            name,
            f'backend: "python"\nmax_batch_size: {MAX_BATCH}\n'
            + tensors("input", inputs, ragged=inputs is IDS)
            + tensors("output", outputs)
            + (f"dynamic_batching {{ max_queue_delay_microseconds: {delay} }}\n" if batches else "")
            + f"instance_group [ {{ count: {instances}, kind: KIND_CPU }} ]\n"
            + parameters({"tokenizer": self.model / "tokenizer.json"} | said),
        )
        shutil.copyfile(RIVALS / file, version / "model.py")
        shutil.copyfile(RIVALS / "engines.py", version / "engines.py")

    def engine(self, engine, file, threads, **more):
        return {"engine": engine, "model": self.onnx / file, "threads": threads} | more

    def ensemble(self, name, delay):
        """Tokenizer and encoder as two models that the server connects; the delay is that of the encoder's batches."""
        encoder = f"{name}_encoder"
        said = self.engine("onnx", "fused_masked.onnx", CORES)
        self.python(encoder, "padded.py", IDS, self.embedding, said, delay=delay)
        self.connect(name, "ensemble_tokenizer", encoder)

    def connect(self, name, tokenizer, encoder):
        between = [name for name, *_ in IDS]
        steps = [(tokenizer, ["TEXT"], between), (encoder, between, ["EMBEDDING"])]
        self.add(
            name,
            f'platform: "ensemble"\nmax_batch_size: {MAX_BATCH}\n'
            + tensors("input", [TEXT])
            + tensors("output", self.embedding)
            + "ensemble_scheduling { step [\n"
            + ",\n".join(step(*entry) for entry in steps)
            + "\n] }\n",
        )

    def write(self):
        shutil.rmtree(self.path, ignore_errors=True)
        self.python("ensemble_tokenizer", "tokenize.py", [TEXT], IDS, {})
        self.ensemble("ensemble_delay_10", 10_000)
        self.ensemble("ensemble_delay_0", 0)
        # One text a call gains nothing from batches: one instance would take all that wait, and the other none.
        for name, said in [
            ("onnx_fp32", self.engine("onnx", "fused.onnx", 1)),
            ("onnx_int8", self.engine("onnx", "int8.onnx", 1)),
            ("openvino_bf16", self.engine("openvino", "plain.onnx", 1, precision="bf16")),
        ]:
            self.python(name, "single.py", [TEXT], self.embedding, said, CORES, batches=False)
        said = self.engine("openvino", "plain_masked.onnx", CORES, precision="bf16")
        self.python("openvino_bf16_chunks", "chunks.py", [TEXT], self.embedding, said)
        self.rust_ensemble("rust_ensemble")
        for contestant in CONTESTANTS:
            if contestant.ours and contestant.name != "rust_ensemble":
                self.rust(contestant.name, contestant.dtype)


def step(model, inputs, outputs):
    maps = [f'input_map {{ key: "{name}", value: "{name}" }}' for name in inputs]
    maps += [f'output_map {{ key: "{name}", value: "{name}" }}' for name in outputs]
    return f'  {{ model_name: "{model}", model_version: -1, ' + ", ".join(maps) + " }"
