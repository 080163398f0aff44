"""What the Python-backend rivals share: reading texts, tokenizing, and sessions of ONNX Runtime and OpenVINO.

A rival is a model.py beside this file; served.py copies both into the model's version directory. Its parameters in
config.pbtxt: `engine` (onnx or openvino), `model` (a file of rival_onnx.py), `tokenizer` (tokenizer.json), `threads`,
`precision` (of OpenVINO).
"""

import json
import os
import sys

# The backend's stub takes no PYTHONPATH. This module is imported before any package.
sys.path.append(os.environ["RIVALS_PACKAGES"])

import numpy as np
import triton_python_backend_utils as pb_utils

MAX_LENGTH = 512


def parameters(args):
    """The model's parameters as a dict of strings."""
    return {key: value["string_value"] for key, value in json.loads(args["model_config"])["parameters"].items()}


class Tokenizer:
    """Hugging Face's fast tokenizer."""

    def __init__(self, path):
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_file(path)
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_LENGTH)

    def ids(self, text):
        return np.array([self.tokenizer.encode(text).ids], np.int32)

    def all_ids(self, texts):
        """One list of ids for each text."""
        if len(texts) == 1:  # encode_batch would start threads
            return [self.tokenizer.encode(texts[0]).ids]
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]


def pad(rows):
    """Lists of ids -> ids and mask, int32 [rows, length of the longest]."""
    length = max(map(len, rows))
    ids, mask = np.zeros((2, len(rows), length), np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
    return ids, mask


def texts_of(request):
    """The rows of TEXT, which is [rows, 1]."""
    tensor = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
    return [text.decode() for text in tensor[:, 0]]


def response(**outputs):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def load(said):
    """A function (ids [, mask]) -> embeddings, for the parameters of a model."""
    return {"onnx": _onnx, "openvino": _openvino}[said["engine"]](said["model"], int(said["threads"]), said)


def _onnx(path, threads, _):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return lambda *inputs: session.run(None, dict(zip(names, inputs)))[0]


def _openvino(path, threads, said):
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": said["precision"],
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        # Pinned, the instances of a model would all sit on the first core.
        "ENABLE_CPU_PINNING": False,
    }
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda *inputs: request.infer(list(inputs), share_inputs=True)[0]
