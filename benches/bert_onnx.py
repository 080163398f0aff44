"""Writes a Hugging Face BERT directory as ONNX, without PyTorch: ids in, mean-pooled normalized embedding out.

For the rivals of the served benchmark:
  plain.onnx         the operators of ONNX itself (opset 20): for OpenVINO, which finds its own fusions
  fused.onnx         the operators that ONNX Runtime's transformers optimizer would fuse a BERT into
                     (EmbedLayerNormalization, Attention, SkipLayerNormalization, BiasGelu), written directly
  int8.onnx          fused.onnx after onnxruntime.quantization.quantize_dynamic: weights per output channel
  plain_masked.onnx, fused_masked.onnx   the same with an attention mask; the others take texts without padding only
"""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 20
MICROSOFT = "com.microsoft"


def read_safetensors(path):
    """name -> array of an F32 safetensors file."""
    data = Path(path).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    out = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            out[name] = np.frombuffer(data[start + begin : start + end], np.float32).reshape(entry["shape"])
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

    def microsoft(self, op, *inputs, **attributes):
        return self.add(op, *inputs, domain=MICROSOFT, **attributes)


class Bert:
    """The encoder of `directory` as nodes of a graph."""

    def __init__(self, directory):
        directory = Path(directory)
        self.config = json.loads((directory / "config.json").read_text("utf-8"))
        self.weights = read_safetensors(directory / "model.safetensors")
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

    def positions(self, graph):
        """The table of positions, with the row of segment 0 added: no segment ids are needed."""
        segment = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self.constant(graph, "positions", self.weights["embeddings.position_embeddings.weight"] + segment)

    def layers(self):
        return [f"encoder.layer.{i}" for i in range(self.config["num_hidden_layers"])]

    def qkv(self, layer, part):
        parts = [self.weights[f"{layer}.attention.self.{which}.{part}"] for which in ("query", "key", "value")]
        return np.concatenate([p.T for p in parts], 1) if part == "weight" else np.concatenate(parts)

    def fused(self, graph, ids, mask):
        """[batch, length] int32 -> [batch, length, hidden] in ONNX Runtime's operators; mask "" or int32."""
        tables = [self.words(graph), self.positions(graph)]
        inputs = [ids, "", *tables, "", *self.norm(graph, "embeddings")]
        x = graph.microsoft("EmbedLayerNormalization", *inputs, outputs=2, epsilon=self.eps)
        for layer in self.layers():
            weight = self.constant(graph, f"{layer}.qkv.weight", self.qkv(layer, "weight"))
            bias = self.constant(graph, f"{layer}.qkv.bias", self.qkv(layer, "bias"))
            inputs = [x, weight, bias, mask] if mask else [x, weight, bias]
            attended = graph.microsoft("Attention", *inputs, num_heads=self.heads)
            x = self.skip_norm(graph, attended, x, f"{layer}.attention.output")
            up = f"{layer}.intermediate.dense"
            inner = graph.microsoft("BiasGelu", self.matmul(graph, x, up), self.constant(graph, f"{up}.bias"))
            x = self.skip_norm(graph, inner, x, f"{layer}.output")
        return x

    def skip_norm(self, graph, x, residual, name):
        projected = self.matmul(graph, x, f"{name}.dense")
        bias = self.constant(graph, f"{name}.dense.bias")
        inputs = [projected, residual, *self.norm(graph, name), bias]
        return graph.microsoft("SkipLayerNormalization", *inputs, epsilon=self.eps)

    def plain(self, graph, ids, mask):
        """[batch, length] int32 -> [batch, length, hidden] in the operators of ONNX; mask "" or int32."""
        words = graph.add("Gather", self.words(graph), ids)
        length = graph.add("Shape", ids, start=1, end=2)
        positions = graph.add("Slice", self.positions(graph), graph.integers(0), length, graph.integers(0))
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


def pool(graph, x, mask):
    """Mean over the tokens, then length 1: [batch, length, hidden] -> [batch, hidden]."""
    if mask:
        weights = graph.add("Unsqueeze", graph.add("Cast", mask, to=TensorProto.FLOAT), graph.integers(2))
        total = graph.add("ReduceSum", graph.add("Mul", x, weights), graph.integers(1), keepdims=0)
        x = graph.add("Div", total, graph.add("ReduceSum", weights, graph.integers(1), keepdims=0))
    else:
        x = graph.add("ReduceMean", x, graph.integers(1), keepdims=0)
    return graph.add("LpNormalization", x, axis=-1, p=2)


def save(path, bert, fused, masked=False):
    graph = Graph()
    names = ["input_ids", "attention_mask"] if masked else ["input_ids"]
    mask = "attention_mask" if masked else ""
    x = (bert.fused if fused else bert.plain)(graph, "input_ids", mask)
    pooled = pool(graph, x, mask)
    graph.nodes.append(helper.make_node("Identity", [pooled], ["embedding"]))
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "bert",
            [helper.make_tensor_value_info(name, TensorProto.INT32, ["batch", "length"]) for name in names],
            [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["batch", bert.hidden])],
            graph.initializers,
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
        ir_version=9,
    )
    onnx.save(model, path)


def quantize(source, target):
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        source,
        target,
        op_types_to_quantize=["MatMul", "Attention"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        extra_options={"DefaultTensorType": TensorProto.FLOAT},
    )


def write(directory, out):
    """Writes the five files of the BERT in `directory` into `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    bert = Bert(directory)
    for name, fused in (("plain", False), ("fused", True)):
        save(out / f"{name}.onnx", bert, fused)
        save(out / f"{name}_masked.onnx", bert, fused, masked=True)
    quantize(out / "fused.onnx", out / "int8.onnx")
