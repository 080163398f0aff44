"""A model with files that are missing, cut or hostile is refused by the file's name; the others serve on."""

import json
import struct

import numpy as np
import pytest

CASES = {}


def case(source, file, *words):
    """Registers a change to a copy of checkpoint `source`; the load error must name `file` and hold `words`."""

    def register(change):
        CASES[change.__name__] = (source, file, words, change)
        return change

    return register


def write(path, data):
    """Replaces the file (it may be a hard link)."""
    path.unlink(missing_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


def edit(path, **changes):
    """Changes keys of a JSON object; a value of None removes the key."""
    value = json.loads(path.read_text("utf-8"))
    value.update(changes)
    write(path, json.dumps({k: v for k, v in value.items() if v is not None}))


def tensors_of(path):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def edit_header(path, change):
    header, data = tensors_of(path)
    change(header)
    text = json.dumps(header).encode()
    write(path, struct.pack("<Q", len(text)) + text + data)


# --- model.safetensors ----------------------------------------------------------------------------------------------

WEIGHTS = "model.safetensors"
WORDS = "embeddings.word_embeddings.weight"


@case("embed_mean", WEIGHTS)
def no_weights(d):
    (d / WEIGHTS).unlink()


@case("embed_mean", WEIGHTS)
def empty_weights(d):
    write(d / WEIGHTS, b"")


@case("embed_mean", WEIGHTS)
def cut_weights(d):
    raw = (d / WEIGHTS).read_bytes()
    write(d / WEIGHTS, raw[: len(raw) // 2])


@case("embed_mean", WEIGHTS)
def weights_cut_in_the_header(d):
    write(d / WEIGHTS, (d / WEIGHTS).read_bytes()[:100])


@case("embed_mean", WEIGHTS)
def weights_of_text(d):
    write(d / WEIGHTS, "version https://git-lfs.github.com/spec/v1\n")


@case("embed_mean", WEIGHTS)
def header_of_all_the_memory_there_is(d):
    write(d / WEIGHTS, struct.pack("<Q", 2**63 - 1) + b"{}")


@case("embed_mean", WEIGHTS)
def header_of_a_terabyte(d):
    write(d / WEIGHTS, struct.pack("<Q", 2**40) + b"{" + b" " * 1000)


@case("embed_mean", WEIGHTS)
def header_of_brackets(d):
    text = b'{"a":' + b"[" * 200000
    write(d / WEIGHTS, struct.pack("<Q", len(text)) + text)


@case("embed_mean", WEIGHTS)
def offsets_behind_the_end(d):
    edit_header(d / WEIGHTS, lambda h: h[WORDS].update(data_offsets=[0, 2**50]))


@case("embed_mean", WEIGHTS)
def offsets_that_run_backwards(d):
    edit_header(d / WEIGHTS, lambda h: h[WORDS].update(data_offsets=h[WORDS]["data_offsets"][::-1]))


@case("embed_mean", WEIGHTS)
def shape_whose_product_overflows(d):
    edit_header(d / WEIGHTS, lambda h: h[WORDS].update(shape=[2**40, 2**40]))


@case("embed_mean", WEIGHTS)
def dtype_that_nobody_knows(d):
    edit_header(d / WEIGHTS, lambda h: h[WORDS].update(dtype="F13"))


@case("embed_mean", WEIGHTS, "I32")
def weights_of_integers(d):
    edit_header(d / WEIGHTS, lambda h: h[WORDS].update(dtype="I32"))


@case("embed_mean", WEIGHTS, "encoder.layer.1.output.dense.weight")
def missing_tensor(d):
    edit_header(d / WEIGHTS, lambda h: h.update({"x": h.pop("encoder.layer.1.output.dense.weight")}))


@case("embed_mean", WEIGHTS, "encoder.layer.0.attention.self.query.weight")
def tensor_of_another_shape(d):
    key = "encoder.layer.0.attention.self.query.weight"
    edit_header(d / WEIGHTS, lambda h: h[key].update(shape=[32, 128]))


@case("classify_three", WEIGHTS, "classifier")
def classifier_of_other_labels(d):
    edit(d / "config.json", id2label={str(i): f"L{i}" for i in range(5)}, label2id=None)


@case("embed_sharded", "model-00002-of-00003.safetensors")
def missing_shard(d):
    (d / "model-00002-of-00003.safetensors").unlink()


def shards_map_to(d, name):
    index = d / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] = dict.fromkeys(value["weight_map"], name)
    write(index, json.dumps(value))


@case("embed_sharded", "model.safetensors.index.json")
def shard_in_another_directory(d):
    outside = d.parent / "outside.safetensors"
    outside.write_bytes((d / "model-00001-of-00003.safetensors").read_bytes())
    shards_map_to(d, "../outside.safetensors")


@case("embed_sharded", "model.safetensors.index.json")
def shard_of_an_absolute_path(d):
    shards_map_to(d, str((d / "model-00001-of-00003.safetensors").resolve()))


@case("embed_sharded", "model.safetensors.index.json")
def index_of_no_json(d):
    write(d / "model.safetensors.index.json", "{")


# --- tokenizer.json -------------------------------------------------------------------------------------------------

TOKENIZER = "tokenizer.json"


@case("embed_mean", TOKENIZER)
def no_tokenizer(d):
    (d / TOKENIZER).unlink()


@case("embed_mean", TOKENIZER)
def empty_tokenizer(d):
    write(d / TOKENIZER, "")


@case("embed_mean", TOKENIZER)
def cut_tokenizer(d):
    write(d / TOKENIZER, (d / TOKENIZER).read_bytes()[:5000])


@case("embed_mean", TOKENIZER)
def tokenizer_of_an_empty_object(d):
    write(d / TOKENIZER, "{}")


@case("embed_mean", TOKENIZER)
def tokenizer_of_brackets(d):
    write(d / TOKENIZER, '{"model":' + "[" * 300000)


@case("embed_mean", TOKENIZER)
def tokenizer_of_no_utf8(d):
    write(d / TOKENIZER, b'{"version": "\xff"}')


@case("embed_mean", TOKENIZER)
def tokens_beyond_the_embeddings(d):
    tokenizer = json.loads((d / TOKENIZER).read_text("utf-8"))
    tokenizer["model"]["vocab"]["beyond"] = 10**6
    write(d / TOKENIZER, json.dumps(tokenizer))


# --- config.json and the files of sentence-transformers -------------------------------------------------------------

CONFIG = "config.json"


@case("embed_mean", CONFIG)
def no_config(d):
    (d / CONFIG).unlink()


@case("embed_mean", CONFIG)
def cut_config(d):
    write(d / CONFIG, (d / CONFIG).read_bytes()[:100])


@case("embed_mean", CONFIG)
def config_of_a_list(d):
    write(d / CONFIG, "[1, 2, 3]")


@case("embed_mean", CONFIG)
def config_of_brackets(d):
    write(d / CONFIG, "[" * 300000)


@case("embed_mean", CONFIG, "gpt2")
def model_type_of_another_family(d):
    edit(d / CONFIG, model_type="gpt2", architectures=["GPT2LMHeadModel"])


@case("embed_mean", CONFIG, "hidden_size")
def hidden_size_of_zero(d):
    edit(d / CONFIG, hidden_size=0)


@case("embed_mean", CONFIG, "num_attention_heads")
def heads_that_do_not_divide(d):
    edit(d / CONFIG, num_attention_heads=5)


@case("embed_mean", CONFIG, "num_attention_heads")
def heads_of_zero(d):
    edit(d / CONFIG, num_attention_heads=0)


@case("embed_mean", CONFIG, "hidden_size")
def hidden_size_of_a_string(d):
    edit(d / CONFIG, hidden_size="sixty-four")


@case("embed_mean", CONFIG, "num_hidden_layers")
def layers_below_zero(d):
    edit(d / CONFIG, num_hidden_layers=-2)


@case("embed_mean", "")
def layers_of_a_billion(d):
    edit(d / CONFIG, num_hidden_layers=10**9)


@case("embed_mean", "")
def vocabulary_of_a_billion(d):
    edit(d / CONFIG, vocab_size=10**9)


@case("embed_mean", CONFIG, "tanhshrink")
def activation_that_nobody_knows(d):
    edit(d / CONFIG, hidden_act="tanhshrink")


@case("embed_mean", CONFIG, "relative_key")
def positions_of_another_kind(d):
    edit(d / CONFIG, position_embedding_type="relative_key")


@case("embed_mean", "1_Pooling/config.json")
def no_pooling(d):
    (d / "1_Pooling" / "config.json").unlink()


@case("embed_mean", "1_Pooling/config.json")
def pooling_of_no_json(d):
    write(d / "1_Pooling" / "config.json", "mean")


@case("embed_mean", "modules.json")
def modules_of_no_json(d):
    write(d / "modules.json", "[{")


@case("embed_mean", "modules.json")
def module_in_another_directory(d):
    modules = json.loads((d / "modules.json").read_text())
    modules[1]["path"] = "../../../1_Pooling"
    write(d / "modules.json", json.dumps(modules))


@case("embed_dense", "modules.json", "Dense")
def module_that_is_not_served(d):
    pass


@case("embed_concat", "1_Pooling/config.json")
def two_poolings_at_once(d):
    pass


@case("embed_weighted_mean", "1_Pooling/config.json", "weightedmean")
def pooling_that_is_not_served(d):
    pass


@case("embed_prompt", "config_sentence_transformers.json", "query")
def prompt_that_would_be_left_out(d):
    pass


@case("embed_truncate_dim", "config_sentence_transformers.json", "truncate_dim")
def dimensions_that_would_be_left_in(d):
    pass


@pytest.fixture(scope="module")
def broken(serve, new_repository):
    models = new_repository()
    models.add("good", "embed_mean")
    for name, (source, _, _, change) in CASES.items():
        change(models.add(name, source))
    return serve(models)


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_refused_by_the_files_name(broken, name):
    _, file, words, _ = CASES[name]
    state, reason = broken.index()[name]
    assert state == "UNAVAILABLE", reason
    for word in (file, *words):
        assert word in reason, reason


def test_the_reasons_are_short_and_show_no_path(broken):
    """Paths are the operator's, but messages reach clients: names of files are enough."""
    for name, (state, reason) in broken.index().items():
        if state == "UNAVAILABLE":
            assert len(reason) < 1000, (name, len(reason))
            assert str(broken.log_file.parent.parent) not in reason, reason


def test_the_other_model_serves_on(broken, protocol):
    assert broken.ready("good")
    answer = broken.infer("good", ["still here"], protocol=protocol)["EMBEDDING"]
    assert answer.shape == (1, 64) and np.isfinite(answer).all()
    assert "panic" not in broken.log()
