"""Inputs and outputs in shared memory of the client, at offsets of any kind."""

import uuid

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from harness import as_bytes
from reference import text


@pytest.fixture
def region(common, protocol):
    """region(bytes) -> (name, handle) of a registered region; all gone after the test."""
    client, made = common.client(protocol), []

    def make(size):
        name = f"served-{uuid.uuid4().hex[:12]}"
        handle = shm.create_shared_memory_region(name, f"/{name}", size)
        made.append((name, handle))
        client.register_system_shared_memory(name, f"/{name}", size)
        return name, handle

    yield make
    for name, handle in made:
        client.unregister_system_shared_memory(name)
        shm.destroy_shared_memory_region(handle)


def ask(common, protocol, model, shape, source, output, target):
    """Infers from `source` = (region, size, offset) to `target`, the same for `output`."""
    module = tritonclient.http if protocol == "http" else tritonclient.grpc
    tensor = module.InferInput("TEXT", list(shape), "BYTES")
    tensor.set_shared_memory(source[0], source[1], offset=source[2])
    wanted = module.InferRequestedOutput(output)
    wanted.set_shared_memory(target[0], target[1], offset=target[2])
    return common.client(protocol).infer(model, [tensor], outputs=[wanted])


@pytest.mark.parametrize("in_offset, out_offset", [(0, 0), (1, 4), (13, 3), (4097, 61)])
def test_texts_and_embeddings_in_shared_memory(common, protocol, region, in_offset, out_offset):
    texts = as_bytes([text("plain"), "", text("emoji_zwj"), text("nul_inside")])
    raw = serialize_byte_tensor(texts).item()
    size = 4 * 64 * 4
    source, source_handle = region(in_offset + len(raw) + 5)
    target, target_handle = region(out_offset + size + 7)
    shm.set_shared_memory_region(source_handle, [np.frombuffer(raw, np.uint8)], offset=in_offset)
    shm.set_shared_memory_region(target_handle, [np.full(out_offset + size + 7, 0xAA, np.uint8)])
    ask(common, protocol, "embed_mean", (4, 1), (source, len(raw), in_offset), "EMBEDDING", (target, size, out_offset))
    memory = shm.get_contents_as_numpy(target_handle, np.uint8, [out_offset + size + 7])
    got = np.frombuffer(memory[out_offset : out_offset + size].tobytes(), np.float32).reshape(4, 64)
    np.testing.assert_array_equal(got, common.infer("embed_mean", texts, ["EMBEDDING"])["EMBEDDING"])
    assert (memory[:out_offset] == 0xAA).all() and (memory[out_offset + size :] == 0xAA).all()


def test_labels_in_shared_memory(common, protocol, region):
    """A BYTES output: its size is known only afterwards."""
    texts = as_bytes([text("plain"), text("question")])
    raw = serialize_byte_tensor(texts).item()
    source, source_handle = region(len(raw))
    target, target_handle = region(256)
    shm.set_shared_memory_region(source_handle, [np.frombuffer(raw, np.uint8)])
    ask(common, protocol, "classify_three", (2, 1), (source, len(raw), 0), "LABEL", (target, 255, 1))
    wanted = common.infer("classify_three", texts, ["LABEL"])["LABEL"]
    memory = shm.get_contents_as_numpy(target_handle, np.uint8, [256]).tobytes()
    assert memory[1:].startswith(serialize_byte_tensor(wanted).item())


def test_an_output_region_that_is_too_small_fails_that_request_alone(common, protocol, region):
    raw = serialize_byte_tensor(as_bytes("hello")).item()
    source, source_handle = region(len(raw))
    target, _ = region(100)
    shm.set_shared_memory_region(source_handle, [np.frombuffer(raw, np.uint8)])
    with pytest.raises(InferenceServerException):
        ask(common, protocol, "embed_mean", (1, 1), (source, len(raw), 0), "EMBEDDING", (target, 100, 0))
    assert common.infer("embed_mean", ["hello"], protocol=protocol)["EMBEDDING"].shape == (1, 64)
