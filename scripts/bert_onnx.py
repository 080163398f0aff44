"""Writes a Hugging Face BERT directory as ONNX, without PyTorch: python scripts/bert_onnx.py DIRECTORY --out model.onnx

The graph is what an export with dynamic axes has: inputs input_ids, attention_mask and token_type_ids, INT64
[batch, length]; output `logits` [batch, labels] of a BertForSequenceClassification, `last_hidden_state`
[batch, length, hidden] of anything else. Weights are written as FP32.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 20
# What opset 20 was published with.
IR_VERSION = 9
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def read_safetensors(path):
    """name -> FP32 array of a safetensors file; what is not F32, F16 or BF16 is left out."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    out = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in ("F32", "F16", "BF16"):
            continue
        begin, end = entry["data_offsets"]
        raw = data[start + begin : start + end]
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        out[name] = array.reshape(entry["shape"])
    return out


class Graph:
    """Collects nodes and initializers; every method that adds a node returns the name of its first output."""

    def __init__(self):
        self.nodes, self.initializers, self._known = [], [], set()

    def constant(self, name, array):
        if name not in self._known:
            self._known.add(name)
            self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def integers(self, *values):
        return self.constant("i_" + "_".join(map(str, values)), np.array(values, np.int64))

    def add(self, op, *inputs, domain="", outputs=1, **attributes):
        names = [f"{op}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, domain=domain, **attributes))
        return names[0]


class Bert:
    """The encoder of `directory` as nodes of a graph."""

    def __init__(self, directory):
        directory = Path(directory)
        self.config = json.loads((directory / "config.json").read_text("utf-8"))
        if self.config.get("hidden_act", "gelu") != "gelu":
            raise SystemExit(f"hidden_act {self.config['hidden_act']} is not written here, only gelu is")
        weights = read_safetensors(directory / "model.safetensors")
        # Task models keep the encoder under `bert.`.
        self.weights = {name.removeprefix("bert."): array for name, array in weights.items()}
        self.hidden, self.heads = self.config["hidden_size"], self.config["num_attention_heads"]
        self.eps = float(self.config["layer_norm_eps"])

    def constant(self, graph, name, array=None):
        return graph.constant(name, self.weights[name] if array is None else array)

    def scalar(self, graph, name, value):
        return graph.constant(name, np.array(value, np.float32))

    def norm(self, graph, name):
        return self.constant(graph, f"{name}.LayerNorm.weight"), self.constant(graph, f"{name}.LayerNorm.bias")

    def matmul(self, graph, x, name):
        """x times the linear layer `name`, without its bias."""
        return graph.add("MatMul", x, self.constant(graph, f"{name}.weight_t", self.weights[f"{name}.weight"].T))

    def linear(self, graph, x, name):
        return graph.add("Add", self.matmul(graph, x, name), self.constant(graph, f"{name}.bias"))

    def words(self, graph):
        return self.constant(graph, "embeddings.word_embeddings.weight")

    def positions(self, graph, segments=False):
        """The table of positions, with the row of segment 0 added where no segment ids are given."""
        table = self.weights["embeddings.position_embeddings.weight"]
        segment = 0 if segments else self.weights["embeddings.token_type_embeddings.weight"][0]
        return self.constant(graph, "positions", table + segment)

    def layers(self):
        return [f"encoder.layer.{i}" for i in range(self.config["num_hidden_layers"])]

    def plain(self, graph, ids, mask="", types=""):
        """[batch, length] integers -> [batch, length, hidden] in the operators of ONNX; mask and types may be ""."""
        words = graph.add("Gather", self.words(graph), ids)
        length = graph.add("Shape", ids, start=1, end=2)
        table = self.positions(graph, bool(types))
        positions = graph.add("Slice", table, graph.integers(0), length, graph.integers(0))
        if types:
            segments = self.constant(graph, "embeddings.token_type_embeddings.weight")
            words = graph.add("Add", words, graph.add("Gather", segments, types))
        bias = self.mask_bias(graph, mask) if mask else ""
        x = self.layer_norm(graph, graph.add("Add", words, positions), "embeddings")
        for layer in self.layers():
            attended = self.attention(graph, x, layer, bias)
            output = self.linear(graph, attended, f"{layer}.attention.output.dense")
            x = self.layer_norm(graph, graph.add("Add", output, x), f"{layer}.attention.output")
            inner = graph.add("Gelu", self.linear(graph, x, f"{layer}.intermediate.dense"))
            output = self.linear(graph, inner, f"{layer}.output.dense")
            x = self.layer_norm(graph, graph.add("Add", output, x), f"{layer}.output")
        return x

    def layer_norm(self, graph, x, name):
        return graph.add("LayerNormalization", x, *self.norm(graph, name), axis=-1, epsilon=self.eps)

    def mask_bias(self, graph, mask):
        """0 for a token, -10000 for padding: [batch, 1, 1, length]."""
        tokens = graph.add("Cast", mask, to=TensorProto.FLOAT)
        padding = graph.add("Sub", self.scalar(graph, "one", 1.0), tokens)
        bias = graph.add("Mul", padding, self.scalar(graph, "minus", -1e4))
        return graph.add("Unsqueeze", bias, graph.integers(1, 2))

    def attention(self, graph, x, layer, bias):
        size = self.hidden // self.heads

        def split(which, order):
            projected = self.linear(graph, x, f"{layer}.attention.self.{which}")
            parts = graph.add("Reshape", projected, graph.integers(0, 0, self.heads, size))
            return graph.add("Transpose", parts, perm=order)

        query, value = split("query", [0, 2, 1, 3]), split("value", [0, 2, 1, 3])
        scale = self.scalar(graph, "scale", size**-0.5)
        scores = graph.add("Mul", graph.add("MatMul", query, split("key", [0, 2, 3, 1])), scale)
        scores = graph.add("Add", scores, bias) if bias else scores
        context = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), value)
        context = graph.add("Transpose", context, perm=[0, 2, 1, 3])
        return graph.add("Reshape", context, graph.integers(0, 0, self.hidden))

    def logits(self, graph, x):
        """BERT's pooler on the first token, then the classifier: [batch, length, hidden] -> [batch, labels]."""
        first = graph.add("Squeeze", graph.add("Gather", x, graph.integers(0), axis=1), graph.integers(1))
        return self.linear(graph, graph.add("Tanh", self.linear(graph, first, "pooler.dense")), "classifier")


def save(path, graph, inputs, output, shape, integers=TensorProto.INT64, **more):
    """Writes the graph whose value `output` becomes the output of that name; `inputs` are [batch, length]."""
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "bert",
            [helper.make_tensor_value_info(name, integers, ["batch", "length"]) for name in inputs],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET), *more.pop("domains", [])],
        ir_version=IR_VERSION,
    )
    onnx.save(model, path, **more)


def write(directory, path, inputs=INPUTS, integers=TensorProto.INT64, **more):
    """Writes the BERT in `directory` as the file `path`; `more` goes to onnx.save."""
    bert, graph = Bert(directory), Graph()
    given = {ours: next((name for name in inputs if name.lower() == ours), "") for ours in INPUTS}
    x = bert.plain(graph, given["input_ids"], given["attention_mask"], given["token_type_ids"])
    if bert.config["architectures"] == ["BertForSequenceClassification"]:
        output, x, shape = "logits", bert.logits(graph, x), ["batch", bert.weights["classifier.bias"].size]
    else:
        output, shape = "last_hidden_state", ["batch", "length", bert.hidden]
    graph.nodes.append(helper.make_node("Identity", [x], [output]))
    save(path, graph, inputs, output, shape, integers, **more)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--out", default="model.onnx")
    args = parser.parse_args()
    write(args.directory, args.out)
    print(f"{args.out}: {Path(args.out).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
