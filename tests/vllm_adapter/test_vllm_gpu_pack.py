"""`benchmarks/vllm_gpu_pack.py` packs what is needed, once."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

packages = st.sampled_from("abcdefg")
needs = st.dictionaries(packages, st.frozensets(packages, max_size=4), max_size=7)


@pytest.fixture(scope="module")
def pack() -> Iterator[Any]:
    """Import the script, which is outside the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield import_module("vllm_gpu_pack")


def write_wheel(directory: Path, name: str, requires: list[str], *others: str) -> Path:
    """Write a wheel with this metadata, and other empty files."""
    wheel = directory / f"{name}-1-py3-none-any.whl"
    about = f"{name}-1.dist-info"
    metadata = "\n".join([f"Name: {name}", *(f"Requires-Dist: {one}" for one in requires), "", "Text."])
    with ZipFile(wheel, "w") as opened:
        opened.writestr(f"{about}/METADATA", metadata)
        opened.writestr(f"{about}/RECORD", f"{about}/RECORD,,\n")
        for other in others:
            opened.writestr(other, "")
    return wheel


def names_of(wheels: list[Path]) -> list[str]:
    return [wheel.name.split("-")[0] for wheel in wheels]


def test_names_are_read_from_what_pip_prints(pack: Any) -> None:
    listing = "torch==2.11.0\nCuda_Bindings @ file:///here\n# a comment\n\nnumpy  # new\nruamel.yaml>=1; x\n"
    assert pack.names_in(listing) == {"torch", "cuda-bindings", "numpy", "ruamel-yaml"}


@given(needs=needs, present=st.frozensets(packages), data=st.data())
def test_the_pack_is_what_is_needed_and_absent(
    pack: Any, tmp_path_factory: pytest.TempPathFactory, needs: Any, present: Any, data: Any
) -> None:
    """Nothing is fetched twice, and what only a present package needs is not fetched."""
    directory = tmp_path_factory.mktemp("wheels")
    root = data.draw(packages.filter(lambda name: name not in present))
    reached, walk = set(), [root]
    while walk:
        for name in needs.get(walk.pop(), ()):
            if name not in present and name not in reached and name != root:
                reached.add(name)
                walk.append(name)

    def fetch(requirements: list[str]) -> list[Path]:
        return [write_wheel(directory, name, sorted(needs.get(name, ()))) for name in requirements]

    wheel = write_wheel(directory, root, sorted(needs.get(root, ())))
    found = names_of(pack.closure({wheel: ()}, set(present), fetch, pack.target_environment("3.12")))
    assert sorted(found) == sorted(reached)


def test_markers_are_those_of_the_target(pack: Any, tmp_path: Path) -> None:
    """An extra counts if it is wanted."""
    requires = [
        "old; python_version < '3.12'",
        "arm; platform_machine == 'aarch64'",
        "new>=2; python_version > '3.11'",
    ]
    wheel = write_wheel(tmp_path, "root", [*requires, "bindings; extra == 'cuda'", "plot; extra == 'bench'"])
    found = pack.needs_of(wheel, ("cuda",), pack.target_environment("3.12"))
    assert [str(one).partition(";")[0] for one in found] == ["new>=2", "bindings"]


def test_an_added_file_is_recorded(pack: Any, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "root", [], "root/__init__.py")
    pack.add_file(wheel, pack.OPERATIONS, b"text")
    with ZipFile(wheel) as opened:
        assert opened.read(pack.OPERATIONS) == b"text"
        rows = opened.read("root-1.dist-info/RECORD").decode().splitlines()
        assert "root/__init__.py" in opened.namelist()
    name, digest, size = rows[-1].split(",")
    assert (name, size) == (pack.OPERATIONS, "4")
    encoded = digest.removeprefix("sha256=")
    assert urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)) == hashlib.sha256(b"text").digest()
    with pytest.raises(FileExistsError, match=r"root-1-py3-none-any\.whl has vllm/_C_stable_libtorch\.py"):
        pack.add_file(wheel, pack.OPERATIONS, b"text")


def test_compiled_parts_are_found(pack: Any, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "root", [], "root/a.abi3.so", "root/libs/b.so.6", "root/so.py")
    assert pack.compiled_files(wheel) == ["root/a.abi3.so", "root/libs/b.so.6"]


def test_the_place_of_the_operations_is_where_the_module_registers_them(pack: Any) -> None:
    """`vllm_gpu_ops` registers under one module name, which is that of the file in the pack."""
    module = pack.OPERATIONS.removesuffix(".py").replace("/", ".")
    source = (ROOT / "benchmarks" / "vllm_gpu_ops.py").read_text(encoding="utf-8")
    assert f'if __name__ == "{module}":' in source
