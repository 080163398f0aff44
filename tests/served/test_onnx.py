"""engine=onnx: a user's model.onnx in ONNX Runtime, for any task of ours."""

import json
import os
import shutil

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

import repository
from harness import LIBRARY, concurrently, cosine, until
from reference import reference

import bert_onnx  # noqa: E402  (scripts, on the path of repository)

CHECKPOINTS = ("*.safetensors", "*.safetensors.index.json", "vocab.txt")
TOLERANCE = 1e-4


def add(models, name, source, parameters=None, text="", write=bert_onnx.write, keep=False, **more):
    """A model of the checkpoint `source` with a model.onnx, and without its weights unless `keep`."""
    directory = repository.directory(source)
    version = models.add(name, source, parameters, text)
    if not keep:
        for pattern in CHECKPOINTS:
            for entry in version.glob(pattern):
                entry.unlink()
    write(directory, version / "model.onnx", **more)
    return version


class Small:
    """Graphs of a few nodes with the inputs of a BERT, for what a real one does not show."""

    def __init__(self, output, shape, node=None, inputs=bert_onnx.INPUTS):
        self.output, self.shape, self.node, self.inputs = output, shape, node, inputs

    def __call__(self, _, path):
        graph = bert_onnx.Graph()
        x = self.node(graph)
        graph.nodes.append(helper.make_node("Identity", [x], [self.output]))
        bert_onnx.save(path, graph, self.inputs, self.output, self.shape)


def padded_length(graph):
    """[batch, 3]: of each row how long it and its padding are, in the run that it was in."""
    length = graph.add("Cast", graph.add("Shape", "input_ids", start=1, end=2), to=TensorProto.FLOAT)
    shape = graph.add("Concat", graph.add("Shape", "input_ids", start=0, end=1), graph.integers(3), axis=0)
    return graph.add("Expand", length, shape)


def not_a_number(graph):
    """[batch, 3]: a number for short texts, as that of the first pass, which every model must have."""
    return graph.add("Sqrt", graph.add("Sub", graph.constant("ten", np.float32([10])), padded_length(graph)))


def pooled(directory, path):
    """What sentence-transformers exports: pooled and normalized inside."""
    bert, graph = bert_onnx.Bert(directory), bert_onnx.Graph()
    x = bert.plain(graph, *bert_onnx.INPUTS)
    weights = graph.add("Unsqueeze", graph.add("Cast", "attention_mask", to=TensorProto.FLOAT), graph.integers(2))
    total = graph.add("ReduceSum", graph.add("Mul", x, weights), graph.integers(1), keepdims=0)
    mean = graph.add("Div", total, graph.add("ReduceSum", weights, graph.integers(1), keepdims=0))
    unit = graph.add("LpNormalization", mean, axis=-1, p=2)
    graph.nodes.append(helper.make_node("Identity", [unit], ["sentence_embedding"]))
    bert_onnx.save(path, graph, bert_onnx.INPUTS, "sentence_embedding", ["batch", bert.hidden])


def external(location):
    """The weights in a file beside model.onnx, which the graph then names `location`."""

    def write(directory, path):
        where = dict(save_as_external_data=True, location="weights.bin")
        bert_onnx.write(directory, path, **where)
        if location != "weights.bin":
            model = onnx.load(path, load_external_data=False)
            for tensor in model.graph.initializer:
                for entry in tensor.external_data:
                    if entry.key == "location":
                        entry.value = location
            path.write_bytes(model.SerializeToString())

    return write


def garbage(_, path):
    path.write_bytes(os.urandom(4096))


def cut_off(directory, path):
    bert_onnx.write(directory, path)
    path.write_bytes(path.read_bytes()[:-1000])


def fixed(directory, path):
    bert_onnx.write(directory, path)
    model = onnx.load(path)
    for tensor in model.graph.input:
        tensor.type.tensor_type.shape.dim[1].dim_value = 128
    onnx.save(model, path)


LABELS = ["batch", 3]
# name -> (checkpoint, how model.onnx is written, parameters, the rest of config.pbtxt, words of the load error)
REFUSED = {
    "garbage": ("classify_three", garbage, {}, "", ["model.onnx", "not a valid ONNX file"]),
    "cut_off": ("classify_three", cut_off, {}, "", ["model.onnx"]),
    "absolute": ("classify_three", external("/etc/hostname"), {}, "", ["model.onnx", "out of the model's directory"]),
    "parent": ("classify_three", external("../../x/weights.bin"), {}, "", ["model.onnx", "out of the model's directory"]),
    "link": ("classify_three", external("link.bin"), {}, "", ["model.onnx", "out of the model's directory"]),
    "missing": ("classify_three", external("missing.bin"), {}, "", ["model.onnx", "'missing.bin'"]),
    "positions": (
        "classify_three",
        Small("logits", LABELS, padded_length, ("input_ids", "position_ids")),
        {},
        "",
        ["model.onnx", "'position_ids'", "input_ids"],
    ),
    "labels": ("classify_three", Small("logits", ["batch", 2], padded_length), {}, "", ["'logits'", "[batch, 3]"]),
    "wrong_output": ("embed_mean", Small("pooler_output", ["batch", 64], padded_length), {}, "", ["last_hidden_state"]),
    "fixed_shape": ("classify_three", fixed, {}, "", ["'input_ids'", "dynamic axes"]),
    "dtype": ("classify_three", bert_onnx.write, {"dtype": "fp32"}, "", ["'dtype'", "onnx"]),
    "device": ("classify_three", bert_onnx.write, {"device": "0"}, "", ["'device'", "onnx"]),
}


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    for source in ("embed_mean", "embed_cls", "embed_max_normalize", "classify_three", "classify_multi_label"):
        add(models, source, source)
    add(models, "pair", "classify_pair_three", {"text_pair": "true"})
    add(models, "minilm", "minilm")
    narrow = ("INPUT_IDS", "Attention_Mask")
    add(models, "narrow", "embed_mean", inputs=narrow, integers=TensorProto.INT32)
    add(models, "unmasked", "embed_mean", inputs=("input_ids", "token_type_ids"))
    add(models, "sentence_embedding", "minilm", write=pooled)
    add(models, "beside", "classify_three", {"engine": "onnx"}, keep=True)
    add(models, "native", "classify_three", {"dtype": "fp32"}, keep=True)
    add(models, "one_thread", "classify_three", {"intra_op_thread_count": "1"})
    add(models, "external", "classify_three", write=external("weights.bin"))
    add(models, "lengths", "classify_three", write=Small("logits", LABELS, padded_length))
    add(models, "nan", "classify_three", write=Small("logits", LABELS, not_a_number))
    ids = "max_batch_size: 64\ninput [" + ", ".join(
        f'{{ name: "{name}" data_type: TYPE_INT32 dims: [ -1 ] }}' for name in ("INPUT_IDS", "ATTENTION_MASK")
    )
    (add(models, "ids", "classify_three", text=ids + "]") / "tokenizer.json").unlink()
    for name, (source, write, parameters, text, _) in REFUSED.items():
        version = add(models, name, source, parameters, text, write=write)
        if name == "link":
            (version / "link.bin").symlink_to("/etc/hostname")
    return serve(models)


def line_of(server, name):
    """What the log says of a model when it is loaded."""
    return next(line for line in server.log().splitlines() if f"model '{name}': " in line and "passes" in line)


@pytest.mark.parametrize("name", ["embed_mean", "embed_cls", "embed_max_normalize", "minilm"])
def test_embeddings_are_those_of_the_reference(server, name, protocol):
    expected = reference(name)
    rows = expected.rows[:60]
    vectors = server.infer(name, expected.inputs(rows), ["EMBEDDING"], protocol=protocol)["EMBEDDING"]
    assert cosine(vectors, expected.array("embeddings")[:60]).min() > 0.99999
    np.testing.assert_allclose(vectors, expected.array("embeddings")[:60], atol=1e-3)


@pytest.mark.parametrize("name, source", [("classify_three", None), ("classify_multi_label", None), ("pair", "classify_pair_three")])
def test_logits_and_probabilities_are_those_of_the_reference(server, name, source, protocol):
    expected = reference(source or name)
    answer = server.infer(name, expected.inputs(), ["LOGITS", "PROBABILITIES", "LABEL"], protocol=protocol)
    np.testing.assert_allclose(answer["LOGITS"], expected.array("logits"), atol=TOLERANCE)
    np.testing.assert_allclose(answer["PROBABILITIES"], expected.array("probabilities"), atol=TOLERANCE)
    assert [label.decode() for label in answer["LABEL"][:, 0]] == expected.said["best"]


def test_a_model_onnx_alone_is_for_onnx_runtime_and_a_checkpoint_beside_it_for_us(server):
    assert "ONNX Runtime on the CPU, output 'logits' of model.onnx" in line_of(server, "classify_three")
    assert "ONNX Runtime" in line_of(server, "beside")
    assert "ONNX Runtime" not in line_of(server, "native")
    expected = reference("classify_three")
    for name in ("beside", "native", "one_thread", "external"):
        logits = server.infer(name, expected.inputs(), ["LOGITS"])["LOGITS"]
        np.testing.assert_allclose(logits, expected.array("logits"), atol=TOLERANCE, err_msg=name)


def test_the_library_is_the_one_beside_the_backend_and_keeps_no_records(server):
    """Later builds write what they report to their maker into the user's cache directory."""
    loaded = [path for path in server.mapped_files() if "onnxruntime" in path]
    assert loaded == [str((LIBRARY.parent / "libonnxruntime.so").resolve())]


@pytest.mark.parametrize("name", ["narrow", "unmasked"])
def test_inputs_of_other_types_and_names_or_none_work(server, name):
    expected = reference("embed_mean")
    vectors = server.infer(name, expected.inputs(), ["EMBEDDING"])["EMBEDDING"]
    np.testing.assert_allclose(vectors, expected.array("embeddings"), atol=1e-3)


def test_an_output_that_is_pooled_inside_is_taken_as_it_is(server):
    assert "output 'sentence_embedding'" in line_of(server, "sentence_embedding")
    expected = reference("minilm")
    vectors = server.infer("sentence_embedding", expected.inputs(expected.rows[:20]), ["EMBEDDING"])["EMBEDDING"]
    assert cosine(vectors, expected.array("embeddings")[:20]).min() > 0.99999


def test_rows_are_padded_within_a_group_of_like_length_only(server):
    words = ["word"] * 100
    texts = [" ".join(words[:count]) for count in [3, 100, 4, 3, 90, 5, 40, 41, 3, 2] + [6] * 20]
    answer = server.infer("lengths", texts, ["LOGITS", "TOKEN_COUNT"])
    lengths, padded = answer["TOKEN_COUNT"][:, 0], answer["LOGITS"][:, 0]
    assert (padded >= lengths).all()
    assert padded[0] <= 10 and padded[1] == lengths[1], "a short row was padded to a long one"
    assert padded.sum() <= 1.25 * lengths.sum(), (padded, lengths)
    assert len(set(padded)) < len(set(lengths)), "each length ran alone"


def test_requests_of_one_batch_get_their_own_rows(server):
    expected = reference("classify_three")
    rows = expected.rows[:24]
    answers = concurrently(lambda row: server.infer("classify_three", [row["text"]], ["LOGITS"])["LOGITS"], rows)
    np.testing.assert_allclose(np.concatenate(answers), expected.array("logits")[:24], atol=TOLERANCE)


def test_ids_are_checked_and_answered_as_texts_are(server, common):
    tokens = json.loads((repository.ROOT / "tests" / "reference" / "tokens.json").read_text("ascii"))["tokenizers"]
    said = tokens["embed_mean"]  # the same vocabulary
    by_name = dict(zip(said["names"], said["rows"]))
    expected = reference("classify_three")
    rows = [(i, by_name[row["name"]]["ids"]) for i, row in enumerate(expected.rows) if row["name"] in by_name]
    rows = [(i, ids) for i, ids in rows if len(ids) == expected.said["token_counts"][i]][:30]
    longest = max(len(ids) for _, ids in rows)
    ids, mask = np.full((2, len(rows), longest), 0, np.int32)
    for at, (_, own) in enumerate(rows):
        ids[at, : len(own)], mask[at, : len(own)] = own, 1
    logits = server.infer("ids", {"INPUT_IDS": ids, "ATTENTION_MASK": mask}, ["LOGITS"])["LOGITS"]
    np.testing.assert_allclose(logits, expected.array("logits")[[i for i, _ in rows]], atol=TOLERANCE)
    ids[3, 0] = 1 << 20
    with pytest.raises(InferenceServerException, match="row 3: id 1048576 is out of range"):
        server.infer("ids", {"INPUT_IDS": ids, "ATTENTION_MASK": mask})


def test_what_is_not_a_number_is_an_error_and_harms_nobody(server):
    assert server.index()["nan"] == ("READY", "")
    with pytest.raises(InferenceServerException, match="not finite") as error:
        server.infer("nan", ["a text of more than ten words, which is more than this graph can bear"])
    assert error.value.status() == "500"
    assert np.isfinite(server.infer("classify_three", ["anything"])["LOGITS"]).all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_the_others_serve(server, name):
    state, reason = server.index()[name]
    assert state == "UNAVAILABLE"
    assert all(word in reason for word in REFUSED[name][4]), reason
    assert "/etc/" not in reason and str(server.log_file.parent) not in reason


def test_without_the_library_only_onnx_models_fail(serve, new_repository, tmp_path):
    shutil.copytree(LIBRARY.parent.parent, tmp_path / "backends")
    (tmp_path / "backends" / "rust" / "libonnxruntime.so").unlink()
    models = new_repository()
    add(models, "onnx", "classify_three")
    models.add("native", "classify_three")
    server = serve(models, backends=tmp_path / "backends")
    state, reason = server.index()["onnx"]
    assert state == "UNAVAILABLE" and "libonnxruntime.so" in reason and "make install" in reason
    assert server.infer("native", ["still here"])["LOGITS"].shape == (1, 3)


def test_models_come_and_go_and_leave_nothing(serve, new_repository):
    models = new_repository()
    add(models, "onnx", "classify_three")
    server = serve(models, "--model-control-mode=explicit")

    def cycle():
        assert server.request("POST", "/v2/repository/models/onnx/load", {})[0] == 200
        assert np.isfinite(server.infer("onnx", ["a text"])["LOGITS"]).all()
        assert server.request("POST", "/v2/repository/models/onnx/unload", {})[0] == 200
        assert not server.ready("onnx")

    def counts():
        process = f"/proc/{server.process.pid}"
        return len(os.listdir(f"{process}/task")), len(os.listdir(f"{process}/fd"))

    for _ in range(5):
        cycle()
    before, memory = counts(), server.memory()
    for _ in range(20):
        cycle()
    # An unloaded model's threads end a little later.
    assert until(lambda: counts()[0] <= before[0] and counts()[1] <= before[1] + 1, seconds=10), (before, counts())
    assert server.memory() - memory < 10
    assert server.stop() == 0
