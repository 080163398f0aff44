"""The ONNX files of the served benchmark's rivals: ids in, mean-pooled normalized embedding out.

  plain.onnx         the operators of ONNX itself (opset 20): for OpenVINO, which finds its own fusions
  fused.onnx         the operators that ONNX Runtime's transformers optimizer would fuse a BERT into
                     (EmbedLayerNormalization, Attention, SkipLayerNormalization, BiasGelu), written directly
  int8.onnx          fused.onnx after onnxruntime.quantization.quantize_dynamic: weights per output channel
  plain_masked.onnx, fused_masked.onnx   the same with an attention mask; the others take texts without padding only
"""

import sys
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bert_onnx  # noqa: E402  (scripts/bert_onnx.py)

MICROSOFT = "com.microsoft"


class Graph(bert_onnx.Graph):
    def microsoft(self, op, *inputs, **attributes):
        return self.add(op, *inputs, domain=MICROSOFT, **attributes)


class Bert(bert_onnx.Bert):
    """Computes in `dtype`; what comes out is fp32."""

    def __init__(self, directory, dtype=np.float32):
        super().__init__(directory)
        self.dtype = dtype
        self.weights = {name: array.astype(dtype, copy=False) for name, array in self.weights.items()}

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
    inputs = ["input_ids", "attention_mask"] if masked else ["input_ids"]
    mask = "attention_mask" if masked else ""
    x = (bert.fused if fused else bert.plain)(graph, "input_ids", mask)
    if bert.dtype != np.float32:
        x = graph.add("Cast", x, to=TensorProto.FLOAT)
    graph.nodes.append(helper.make_node("Identity", [pool(graph, x, mask)], ["embedding"]))
    shape, domains = ["batch", bert.hidden], [helper.make_opsetid(MICROSOFT, 1)]
    bert_onnx.save(path, graph, inputs, "embedding", shape, TensorProto.INT32, domains=domains)


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
