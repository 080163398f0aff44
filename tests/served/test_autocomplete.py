"""`backend: "rust"` is enough, and whatever the user says is kept."""

import json
import shutil

import numpy as np
import pytest

import repository
from harness import as_bytes

TEXT = 'input [{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }]'
EMBEDDING = 'output [{ name: "EMBEDDING" data_type: TYPE_FP32 dims: [ 64 ] }]'
LOGITS = 'output [{ name: "LOGITS" data_type: TYPE_FP32 dims: [ 3 ] }]'

# name -> (checkpoint, parameters, text of config.pbtxt, words of the load error)
REFUSED = {
    "no_such_input": ("embed_mean", {}, 'input [{ name: "WORDS" data_type: TYPE_STRING dims: [ 1 ] }]', ["TEXT"]),
    "input_of_numbers": ("embed_mean", {}, 'input [{ name: "TEXT" data_type: TYPE_INT32 dims: [ 1 ] }]', ["TEXT"]),
    "input_of_two": ("embed_mean", {}, 'input [{ name: "TEXT" data_type: TYPE_STRING dims: [ 2 ] }]', ["TEXT"]),
    "no_such_output": (
        "embed_mean",
        {},
        'output [{ name: "LOGITS" data_type: TYPE_FP32 dims: [ 3 ] }]',
        ["LOGITS", "EMBEDDING"],
    ),
    "output_of_another_size": (
        "embed_mean",
        {},
        'output [{ name: "EMBEDDING" data_type: TYPE_FP32 dims: [ 65 ] }]',
        ["EMBEDDING", "64"],
    ),
    "output_of_another_type": (
        "embed_mean",
        {},
        'output [{ name: "EMBEDDING" data_type: TYPE_INT32 dims: [ 64 ] }]',
        ["EMBEDDING", "FP32"],
    ),
    "pair_not_declared": (
        "classify_pair_three",
        {"text_pair": "true"},
        TEXT,
        ["TEXT_PAIR"],
    ),
    "sequences_make_no_sense": ("embed_mean", {}, "sequence_batching { }", ["sequence_batching"]),
}


@pytest.fixture(scope="module")
def server(serve, new_repository):
    models = new_repository()
    models.add("bare", "embed_mean")
    models.add("nothing.rust", "classify_three", config=False)
    models.add("inputs_given", "embed_mean", text=TEXT)
    models.add("inputs_and_batching", "embed_mean", text=f"{TEXT}\nmax_batch_size: 4")
    models.add("batching_given", "embed_mean", text="max_batch_size: 4")
    models.add("outputs_given", "classify_three", text=LOGITS)
    models.add("one_instance", "embed_mean", text="instance_group [{ count: 1 kind: KIND_CPU }]")
    models.add("three_instances", "embed_mean", text="instance_group [{ count: 3 kind: KIND_CPU }]")
    models.add(
        "batcher_given", "embed_mean", text="dynamic_batching { max_queue_delay_microseconds: 1234 }\nmax_batch_size: 9"
    )
    models.add("batcher_alone", "embed_mean", text="dynamic_batching { max_queue_delay_microseconds: 1234 }")
    models.add("pair", "classify_pair_three", {"text_pair": "true"})
    models.add("second_version", "embed_mean")
    second = models.path / "second_version" / "3"
    shutil.copytree(repository.directory("embed_cls_normalize"), second)
    for name, (source, parameters, text, _) in REFUSED.items():
        models.add(name, source, parameters, text)
    return serve(models)


def test_the_backends_name_is_enough(server):
    config = server.config("bare")
    assert config["max_batch_size"] == 256
    assert [(i["name"], i["data_type"], i["dims"]) for i in config["input"]] == [("TEXT", "TYPE_STRING", [1])]
    outputs = {o["name"]: (o["data_type"], o["dims"]) for o in config["output"]}
    assert outputs == {"EMBEDDING": ("TYPE_FP32", [64]), "TOKEN_COUNT": ("TYPE_INT32", [1])}
    assert "dynamic_batching" in config
    (group,) = config["instance_group"]
    assert group["count"] == 12 and group["kind"] == "KIND_CPU"
    assert server.infer("bare", ["a", "b"])["EMBEDDING"].shape == (2, 64)


def test_not_even_a_config_is_needed(server, protocol):
    assert server.config("nothing.rust")["backend"] == "rust"
    assert server.infer("nothing.rust", ["a", "b"], protocol=protocol)["LOGITS"].shape == (2, 3)


def test_inputs_without_max_batch_size_turn_batching_off(server, protocol):
    config = server.config("inputs_given")
    assert config["max_batch_size"] == 0 and "dynamic_batching" not in config
    one = np.array([b"the cat sat"], dtype=object)
    answer = server.infer("inputs_given", {"TEXT": one}, protocol=protocol)
    assert answer["EMBEDDING"].shape == (64,) and answer["TOKEN_COUNT"].shape == (1,)
    batched = server.infer("bare", ["the cat sat"])["EMBEDDING"]
    np.testing.assert_allclose(answer["EMBEDDING"], batched[0], atol=1e-5)


def test_max_batch_size_of_the_user_is_kept(server):
    for model in ("inputs_and_batching", "batching_given"):
        assert server.config(model)["max_batch_size"] == 4
        assert server.infer(model, ["a"] * 4)["EMBEDDING"].shape == (4, 64)
    assert server.config("batcher_given")["max_batch_size"] == 9
    assert server.config("batcher_alone")["max_batch_size"] == 256
    for model in ("batcher_given", "batcher_alone"):
        assert server.config(model)["dynamic_batching"]["max_queue_delay_microseconds"] == 1234


def test_outputs_of_the_user_are_all_there_is(server):
    assert [o["name"] for o in server.config("outputs_given")["output"]] == ["LOGITS"]
    assert set(server.infer("outputs_given", ["a"])) == {"LOGITS"}


@pytest.mark.parametrize("model, count", [("one_instance", 1), ("three_instances", 3)])
def test_instances_of_the_user_are_kept(server, model, count):
    assert sum(group["count"] for group in server.config(model)["instance_group"]) == count


def test_text_pair_declares_a_second_input(server):
    assert [i["name"] for i in server.config("pair")["input"]] == ["TEXT", "TEXT_PAIR"]
    answer = server.infer("pair", {"TEXT": as_bytes("a"), "TEXT_PAIR": as_bytes("b")})
    assert answer["LOGITS"].shape == (1, 3)


def test_the_newest_version_is_served(server):
    assert server.metadata("second_version")["versions"] == ["3"]
    norm = np.linalg.norm(server.infer("second_version", ["hello"])["EMBEDDING"])
    assert norm == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_does_not_fit_is_refused_by_name(server, name):
    state, reason = server.index()[name]
    assert state == "UNAVAILABLE", "it was loaded"
    for word in REFUSED[name][3]:
        assert word in reason, reason


def test_without_auto_complete_a_full_config_works_and_one_without_inputs_is_refused(serve, new_repository):
    models = new_repository()
    group = "instance_group [{ count: 1 kind: KIND_CPU }]"
    models.add("full", "embed_mean", text=f"max_batch_size: 8\n{TEXT}\n{EMBEDDING}\n{group}\ndynamic_batching {{ }}")
    models.add("unbatched", "embed_mean", text=f"{TEXT}\n{EMBEDDING}")
    models.add("no_inputs", "embed_mean", text=f"max_batch_size: 8\n{EMBEDDING}")
    models.add("nothing", "embed_mean")
    server = serve(models, "--disable-auto-complete-config")
    assert server.infer("full", ["a", "b"])["EMBEDDING"].shape == (2, 64)
    one = server.infer("unbatched", {"TEXT": np.array([b"a"], dtype=object)})
    assert set(one) == {"EMBEDDING"} and one["EMBEDDING"].shape == (64,)
    for model in ("no_inputs", "nothing"):
        state, reason = server.index()[model]
        assert state == "UNAVAILABLE" and "TEXT" in reason, (model, state, reason)
    server.stop()


def test_a_config_given_with_the_load_request_works(serve, new_repository):
    models = new_repository()
    models.add("model", "embed_mean")
    server = serve(models, "--model-control-mode=explicit")
    config = {"backend": "rust", "max_batch_size": 3, "parameters": {"normalize": {"string_value": "true"}}}
    body = {"parameters": {"config": json.dumps(config)}}
    status, answer = server.request("POST", "/v2/repository/models/model/load", body)
    assert status == 200, answer
    assert server.config("model")["max_batch_size"] == 3
    norms = np.linalg.norm(server.infer("model", ["a", "b"])["EMBEDDING"], axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-5)
    server.stop()
