"""The copy kernel: compiled for devices, and its source run on the host, thread after thread."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Bytes, Pairs, block_major, copied_one_by_one, copies, memory_of, moved
from places import SUPPORT

from examples import examples
from kvsm.copies.layout import MemoryLayout, MemoryRows
from kvsm.cuda_io import kernel
from kvsm.cuda_io.kernel import (
    KERNEL_NAME,
    KERNEL_TYPES,
    LANES,
    PART_BYTES,
    THREADS,
    KernelParameters,
    compile_copy_kernel,
    grid,
    guessed_thread_blocks,
    kernel_pairs,
    kernel_parts,
    load_nvrtc,
    most_thread_blocks,
    vector_bytes,
)
from kvsm.errors import ConfigError
from kvsm.events import Direction

SOURCE = Path(kernel.__file__).with_name("copy.cu")
SHIM = SUPPORT / "fake_cuda" / "shim.h"

ON_HOST = f"""
#include "{SHIM}"
#include "{SOURCE}"

extern "C" void run(
    unsigned int blocks, unsigned int threads, const Pair* pairs, unsigned long long num_pairs,
    const Part* parts, unsigned long long num_parts, unsigned char* host, unsigned long long host_stride,
    int to_host, int vector_bytes)
{{
    launch(blocks, threads, kvsm_copy, pairs, num_pairs, parts, num_parts, host, host_stride, to_host,
        vector_bytes);
}}
"""

Run = Callable[[tuple[int, int], KernelParameters], int]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs the kernel on the host. Returns how often a vector was not aligned."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(ON_HOST)
    library = folder / "kernel.so"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Werror", "-shared", "-fPIC"]
    flags += ["-Wl,-Bsymbolic"]  # the fake driver, if it is loaded, has the same names
    subprocess.run([compiler, *flags, folder / "kernel.cpp", "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.argtypes = [ctypes.c_uint, ctypes.c_uint, *KERNEL_TYPES]
    misaligned = ctypes.c_ulonglong.in_dll(loaded, "misaligned")

    def run(size: tuple[int, int], parameters: KernelParameters) -> int:
        misaligned.value = 0
        loaded.run(*size, *parameters)
        return misaligned.value

    return run


def copied(
    run: Run, layout: MemoryLayout, direction: Direction, pairs: Pairs, size: tuple[int, int]
) -> Bytes:
    """What memory holds after the kernel ran in it."""
    before = memory_of(layout)
    room = np.zeros(len(before) + 2 * PART_BYTES + 16, np.uint8)
    start = PART_BYTES + -room.ctypes.data % 16  # so that the alignment is the layout's own
    memory = room[start : start + len(before)]
    memory[:] = before
    layout = moved(layout, memory.ctypes.data)
    parts = kernel_parts(layout)
    table = kernel_pairs(*np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
    parameters = KernelParameters(
        pairs=table.ctypes.data,
        num_pairs=len(table),
        parts=parts.ctypes.data,
        num_parts=len(parts),
        host=layout.host.address,
        host_stride=layout.host.stride,
        to_host=int(direction is Direction.STORE),
        vector_bytes=vector_bytes(layout),
    )
    assert run(size, parameters) == 0
    assert not room[:start].any()
    assert not room[start + len(before) :].any()
    return memory


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16, 48])
def test_kernel_copies_what_a_plain_loop_copies(run: Run, unit: int) -> None:
    """Correct bytes (S15): all bytes of all pairs and no others, with each vector width; every vector is
    aligned, because a device refuses others."""

    @settings(max_examples=examples(60))
    @given(copies(unit), st.sampled_from([(1, 32), (1, 64), (3, 96)]))
    def check(copy: tuple[MemoryLayout, Direction, Pairs], size: tuple[int, int]) -> None:
        assert np.array_equal(copied(run, *copy, size), copied_one_by_one(memory_of(copy[0]), *copy))

    check()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    "sizes", [(PART_BYTES + 1, 3), (3 * PART_BYTES, PART_BYTES - 16), (1, 2 * PART_BYTES + 24), (4088, 12)]
)
def test_rows_longer_than_a_part_are_copied_whole(run: Run, direction: Direction, sizes: Any) -> None:
    """Correct bytes (S15): also if a row ends in the middle of a part, a round of reads or a vector."""
    starts = [sum(16 + 8 * size for size in sizes[:place]) for place in range(len(sizes))]
    tensors = [MemoryRows(start, size + 1, 6, size) for start, size in zip(starts, sizes)]
    layout = block_major(tensors, starts[-1] + 8 * sizes[-1] + 16, 5)
    pairs = [(5, 0), (0, 3), (3, 4), (1, 1)]
    size = grid(len(pairs) * len(kernel_parts(layout)), guessed_thread_blocks(132)[direction])
    expected = copied_one_by_one(memory_of(layout), layout, direction, pairs)
    assert np.array_equal(copied(run, layout, direction, pairs, size), expected)


def test_block_ids_reach_beyond_31_bits() -> None:
    table = kernel_pairs((2**32 - 1, 0), (1, 2**31))
    assert table.dtype == np.uint32
    assert table.tolist() == [[2**32 - 1, 1], [0, 2**31]]
    assert table.flags.c_contiguous


ALIGNED = block_major([MemoryRows(layer << 20, 4096 + 256, 9, 4096) for layer in range(3)], 3 << 20, 9)


@pytest.mark.parametrize(("odd", "expected"), [(0, 16), (32, 16), (8, 8), (4, 4), (12, 4), (2, 1), (1, 1)])
@pytest.mark.parametrize("place", ["device address", "device stride", "row", "host address", "host stride"])
def test_vector_is_the_widest_that_divides_all(place: str, odd: int, expected: int) -> None:
    *tensors, last = ALIGNED.tensors
    host = ALIGNED.host
    if place == "device address":
        last = last._replace(address=last.address + odd)
    elif place == "device stride":
        last = last._replace(stride=last.stride + odd)
    elif place == "row":
        last = last._replace(row_bytes=last.row_bytes + odd)
    elif place == "host address":
        host = host._replace(address=host.address + odd)
    else:
        host = host._replace(stride=host.stride + odd)
    assert vector_bytes(MemoryLayout((*tensors, last), host, ALIGNED.offsets)) == expected


@given(st.sampled_from(Direction), st.integers(0, 5000), st.integers(1, 64), st.integers(1, 3 * PART_BYTES))
def test_grid_has_a_warp_for_each_part_up_to_its_share_of_the_device(
    direction: Direction, num_pairs: int, num_tensors: int, row_bytes: int
) -> None:
    rows = [MemoryRows(place * (4 * PART_BYTES), 1 << 20, 10, row_bytes) for place in range(num_tensors)]
    layout = block_major(rows, 0, 10)
    units, share = num_pairs * len(kernel_parts(layout)), guessed_thread_blocks(132)[direction]
    blocks, threads = grid(units, share)
    warps = threads // LANES
    assert threads == THREADS
    assert 1 <= blocks <= share
    assert blocks == share or blocks * warps >= units
    assert blocks == 1 or (blocks - 1) * warps < units


def test_grid_has_a_thread_block_on_the_smallest_device() -> None:
    assert set(guessed_thread_blocks(1).values()) == {1}
    assert most_thread_blocks(1) == 1
    assert grid(0, 1) == (1, THREADS)


@given(st.integers(1, 1000))
def test_copies_take_few_multiprocessors_from_compute(multiprocessors: int) -> None:
    """At most a twentieth for both directions, measured or not, unless that is less than one each."""
    guessed, most = guessed_thread_blocks(multiprocessors), most_thread_blocks(multiprocessors)
    assert max(guessed.values()) <= most
    assert 2 * most <= max(2, multiprocessors / 20)


def test_thousands_of_small_fragments_need_few_bytes_of_table() -> None:
    """4096 blocks of 32 layers: a pair for each block, not a descriptor for each of 131,072 fragments."""
    layout = block_major([MemoryRows(layer << 30, 4096, 8192, 4096) for layer in range(32)], 0, 8192)
    blocks = np.arange(0, 8192, 2)
    assert kernel_pairs(blocks, blocks[::-1]).nbytes == 4096 * 8
    assert kernel_parts(layout).nbytes == 32 * 32


@pytest.fixture(scope="session")
def nvrtc() -> Any:
    try:
        return load_nvrtc()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_kernel_is_machine_code_for_a_known_device(capability: tuple[int, int]) -> None:
    image = compile_copy_kernel(capability)
    assert image.startswith(b"\x7fELF")
    assert KERNEL_NAME.encode() in image
    assert compile_copy_kernel(capability) is image


@pytest.mark.usefixtures("nvrtc")
def test_kernel_is_intermediate_code_for_a_later_device() -> None:
    """A driver finishes it. It must end with a zero byte, because the driver reads it as a C string."""
    image = compile_copy_kernel((99, 0))
    assert f".entry {KERNEL_NAME}(".encode() in image
    assert image.endswith(b"\0")


@pytest.mark.usefixtures("nvrtc")
def test_device_older_than_the_compiler_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the device has 3.5; install the NVRTC of an earlier CUDA"):
        compile_copy_kernel((3, 5))


OUTSIDE = """
import site, sys
found = {path!r}
site.getsitepackages = lambda *_: []
site.ENABLE_USER_SITE = False
sys.path += [found] * (found not in sys.path)
from kvsm.cuda_io.kernel import compile_copy_kernel
print(compile_copy_kernel((9, 0))[1:4].decode())
"""


def test_nvrtc_is_found_outside_of_site_packages() -> None:
    """As `pip install --target` and PYTHONPATH leave it. cuda-bindings alone does not find it there."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    places = [path for path in sys.path if list(Path(path).glob("nvidia/*/lib/libnvrtc.so.1[23]"))]
    if not places:
        pytest.skip("needs NVRTC as a Python package")
    program = OUTSIDE.format(path=places[0])
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "ELF\n"


def test_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match=r"install it with pip install 'kvsm\[cuda\]', or force another"):
        compile_copy_kernel.__wrapped__((8, 0))


@pytest.mark.usefixtures("nvrtc")
def test_source_that_does_not_compile_is_told_with_its_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "copy.cu").write_text("\nthis is no kernel")
    monkeypatch.setattr(kernel, "__file__", str(tmp_path / "kernel.py"))
    with pytest.raises(
        ConfigError, match=r"NVRTC refuses copy.cu with --gpu-architecture=sm_80: copy.cu\(2\)"
    ):
        compile_copy_kernel.__wrapped__((8, 0))


def compiled_with_report(nvrtc: Any, capability: int) -> tuple[str, str]:
    """(intermediate code, the assembler's report on registers and spills)."""
    _, program = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"copy.cu", 0, None, None)
    options = [f"--gpu-architecture=sm_{capability}".encode(), b"--ptxas-options=-v"]
    assert nvrtc.nvrtcCompileProgram(program, 2, options) == (nvrtc.nvrtcResult.NVRTC_SUCCESS,)
    log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
    nvrtc.nvrtcGetProgramLog(program, log)
    code = b" " * nvrtc.nvrtcGetPTXSize(program)[1]
    nvrtc.nvrtcGetPTX(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code.decode(), log.decode()


@pytest.mark.parametrize("capability", [80, 90])
def test_kernel_keeps_its_vectors_in_registers_and_fits_a_multiprocessor(nvrtc: Any, capability: int) -> None:
    """A multiprocessor has 65,536 registers. A thread block that needs more is not launched."""
    _, report = compiled_with_report(nvrtc, capability)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None
    assert int(registers[1]) * THREADS <= 65536


def test_the_pair_of_the_next_unit_is_read_before_a_unit_is_copied(nvrtc: Any) -> None:
    """The pair is read across the bus too. Read after the copy, each unit would take twice as long."""
    code, _ = compiled_with_report(nvrtc, 90)
    pair = "ld.global.v2.u32"
    assert code.count(pair) == code[: code.index(".cs.")].count(pair) == 2


def test_each_thread_reads_eight_vectors_before_it_writes_one(nvrtc: Any) -> None:
    """A read across the bus takes a microsecond. One after another, reads would be most of the copy."""
    code, _ = compiled_with_report(nvrtc, 90)
    moves = "".join(found[0] for found in re.findall(r"(ld|st)\.global\.cs", code))
    assert moves == ("l" * 8 + "s" * 8) * 4
