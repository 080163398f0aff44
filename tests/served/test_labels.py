"""Triton's classification extension: class_count, with the labels of labels.txt."""

import numpy as np
import pytest

from reference import reference

LABELS = ["contradiction", "entailment", "neutral"]


def classes(rows):
    """b"0.5:1:name" -> (0.5, 1, "name")."""
    parts = [value.decode().split(":", 2) for value in np.ravel(rows)]
    return [(float(part[0]), int(part[1]), part[2] if len(part) > 2 else None) for part in parts]


@pytest.fixture(scope="module")
def models(new_repository):
    models = new_repository()
    models.add("plain", "classify_three", {"dtype": "fp32"})
    models.add("many", "classify_multi_label")
    own = 'output [{ name: "LOGITS" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "mine.txt" }]'
    models.add("own", "classify_three", text=own)
    (models.path / "own" / "mine.txt").write_text("no\nyes\nperhaps\n")
    models.add("kept", "classify_three")
    (models.path / "kept" / "labels.txt").write_text("x\ny\nz\n")
    return models


@pytest.fixture(scope="module")
def server(serve, models):
    return serve(models)


@pytest.mark.parametrize("output", ["LOGITS", "PROBABILITIES"])
def test_the_best_classes_come_with_their_labels(server, protocol, output):
    question = ["The cat sat on the mat."]
    raw = server.infer("plain", question, [output])[output][0]
    best = np.argsort(-raw)
    for count in (1, 2, 3):
        answer = server.infer("plain", question, [output], protocol=protocol, class_count=count)[output]
        assert answer.shape == (1, count)
        got = classes(answer)
        assert [index for _, index, _ in got] == best[:count].tolist()
        assert [label for _, _, label in got] == [LABELS[i] for i in best[:count]]
        np.testing.assert_allclose([value for value, _, _ in got], raw[best[:count]], atol=1e-5)


def test_every_row_of_a_request_gets_its_classes(server, protocol):
    rows = reference("classify_three").inputs()["TEXT"][:20]
    logits = server.infer("plain", rows, ["LOGITS"])["LOGITS"]
    answer = server.infer("plain", rows, ["LOGITS"], protocol=protocol, class_count=1)["LOGITS"]
    assert answer.shape == (20, 1)
    assert [index for _, index, _ in classes(answer)] == logits.argmax(axis=1).tolist()


def test_labels_that_are_not_ascii(server):
    answer = server.infer("many", ["hello"], ["PROBABILITIES"], class_count=4)["PROBABILITIES"]
    assert {label for _, _, label in classes(answer)} == {"toxic", "spam", "off topic", "sök & ✓"}


def test_the_users_label_file_is_used(server):
    answer = server.infer("own", ["hello"], ["LOGITS"], class_count=3)["LOGITS"]
    assert {label for _, _, label in classes(answer)} == {"no", "yes", "perhaps"}


def test_a_labels_txt_of_the_user_is_used_and_not_overwritten(server, models):
    answer = server.infer("kept", ["hello"], ["LOGITS"], class_count=3)["LOGITS"]
    assert {label for _, _, label in classes(answer)} == {"x", "y", "z"}
    assert (models.path / "kept" / "labels.txt").read_text() == "x\ny\nz\n"
    assert server.infer("kept", ["hello"], ["LABEL"])["LABEL"].item().decode() in LABELS


def test_labels_txt_is_written_beside_config_pbtxt(server, models):
    assert (models.path / "plain" / "labels.txt").read_text().split("\n")[:3] == LABELS
    assert not list(models.path.glob("*/labels.txt.*")), "a partial file was left"
