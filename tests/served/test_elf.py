"""The two built libraries: they drop into any Triton of Ubuntu 22.04 or newer, and export what each must and no more."""

import os
import re
import subprocess

import pytest

import harness
import tritonserver

ENTRY_POINTS = {
    "TRITONBACKEND_Initialize",
    "TRITONBACKEND_Finalize",
    "TRITONBACKEND_GetBackendAttribute",
    "TRITONBACKEND_ModelInitialize",
    "TRITONBACKEND_ModelFinalize",
    "TRITONBACKEND_ModelInstanceInitialize",
    "TRITONBACKEND_ModelInstanceFinalize",
    "TRITONBACKEND_ModelInstanceExecute",
    "TRITONBACKEND_ModelInstanceReady",
}
BATCHER_ENTRY_POINTS = {
    "TRITONBACKEND_ModelBatcherInitialize",
    "TRITONBACKEND_ModelBatcherFinalize",
    "TRITONBACKEND_ModelBatchInitialize",
    "TRITONBACKEND_ModelBatchIncludeRequest",
    "TRITONBACKEND_ModelBatchFinalize",
}


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", params=[harness.LIBRARY, harness.BATCHER], ids=lambda path: path.name)
def library(request):
    assert request.param.is_file(), "run `make install`"
    return str(request.param)


def symbols(path, *flags):
    """Names of `nm -D`, without their versions."""
    return {line.split()[-1].split("@")[0] for line in output("nm", "-D", *flags, path).splitlines()}


def test_it_exports_the_entry_points_alone(library):
    wanted = BATCHER_ENTRY_POINTS if library == str(harness.BATCHER) else ENTRY_POINTS
    assert symbols(library, "--defined-only") == wanted


def test_the_batching_library_is_never_unmapped():
    """The server closes it while the scheduler's thread may be in it."""
    assert "NODELETE" in output("readelf", "-d", str(harness.BATCHER))


def test_it_needs_only_the_c_library(library):
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", library)))
    glibc = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}
    assert needed <= glibc | {"libgcc_s.so.1"}


def test_it_has_no_search_path_of_the_machine_that_built_it(library):
    assert not re.search(r"\((RPATH|RUNPATH)\)", output("readelf", "-d", library))


def test_it_needs_no_glibc_newer_than_2_34(library):
    found = re.findall(r"Name: (GLIBC_[0-9.]+|GCC_[0-9.]+)", output("readelf", "--version-info", "-W", library))
    assert found
    newest = max(tuple(map(int, name[6:].split("."))) for name in found if name.startswith("GLIBC_"))
    assert newest <= (2, 34), newest


def test_it_is_small_and_stripped(library):
    assert os.path.getsize(library) < (2**20 if library == str(harness.BATCHER) else 25 * 2**20)
    sections = output("readelf", "-S", "-W", library)
    assert ".symtab" not in sections and ".debug_info" not in sections


def test_its_stack_and_relocations_are_protected(library):
    headers = output("readelf", "-l", "-W", library)
    assert re.search(r"GNU_STACK .* RW ", headers), "the stack is executable"
    assert "GNU_RELRO" in headers


def server_symbols():
    binary = tritonserver.find()
    path = tritonserver.library_of(binary)
    if path is None:
        pytest.skip("libtritonserver was not found")
    return symbols(str(path), "--defined-only")


def test_every_symbol_that_it_takes_from_the_server_is_there(library):
    taken = {name for name in symbols(library, "--undefined-only") if name.startswith("TRITON")}
    assert "TRITONBACKEND_InputProperties" in taken
    assert taken <= server_symbols()


def test_every_function_of_include_is_exported_by_the_server():
    declared = set()
    for header in (harness.ROOT / "include").glob("*.h"):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(), flags=re.S)
        declared |= set(re.findall(r"\b(TRITON(?:SERVER|BACKEND)_\w+)\s*\(", text))
    declared -= ENTRY_POINTS
    assert len(declared) > 20
    assert declared <= server_symbols()
