"""How kvsm's plugin registers its names in vLLM's factories when these are imported.

Modules of a small package stand in for vLLM's factories, so vLLM is not needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsm.vllm import vllm_plugin as plugin

ONE, OTHER = "factories_of_a_test.one", "factories_of_a_test.other"
NAMES = ONE, OTHER


class Registered(list[str]):
    """Names of the modules in which the plugin registered."""

    def __call__(self, module: ModuleType) -> None:
        assert module.made == module.__name__
        self.append(module.__name__)


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registered]:
    """The plugin waits for two modules. Each fails to import while a file `fails` is beside it."""
    package = tmp_path / "factories_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in NAMES:
        (package / f"{name.rpartition('.')[2]}.py").write_text(
            "from pathlib import Path\n"
            "if Path(__file__).with_name('fails').exists():\n    raise RuntimeError('fails')\n"
            "made = __name__\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    found = Registered()
    monkeypatch.setattr(plugin, "_REGISTRARS", dict.fromkeys(NAMES, found))
    plugin._register_names()
    yield found
    forget_modules()


def forget_modules() -> None:
    for name in ("factories_of_a_test", *NAMES):
        sys.modules.pop(name, None)


def remove_finder() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, plugin._AfterImport)]


def is_waiting() -> bool:
    return any(isinstance(finder, plugin._AfterImport) for finder in sys.meta_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["search", "fail", "import"]), st.sampled_from(NAMES))))
def test_each_module_is_registered_once_at_its_first_import(
    registered: Registered, tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    """Neither a search for a module by anybody nor an import that fails uses the hook up."""
    forget_modules()
    registered.clear()
    remove_finder()
    plugin._register_names()
    fails = tmp_path / "factories_of_a_test" / "fails"
    imported: list[str] = []
    for step, name in steps:
        if step == "search":
            assert importlib.util.find_spec(name) is not None
        elif step == "fail" and name not in imported:
            fails.touch()
            with pytest.raises(RuntimeError, match="fails"):
                importlib.import_module(name)
            fails.unlink()
        else:
            module = importlib.import_module(name)
            assert "exec_module" not in vars(module.__loader__)
            imported += [name] * (name not in imported)
        assert registered == imported
        assert is_waiting() == (len(imported) < len(NAMES))


def test_a_finder_that_searches_through_all_finders_ends(registered: Registered) -> None:
    """Some import hooks do this. One of them before kvsm's and one behind it end, and kvsm registers."""
    sys.meta_path.insert(0, SearchesAll())
    sys.meta_path.insert(2, SearchesAll())
    assert importlib.util.find_spec(ONE) is not None
    for name in NAMES:
        importlib.import_module(name)
    assert {*registered} == {*NAMES}
    assert not is_waiting()


class SearchesAll:
    """A finder that returns what all finders together find."""

    def __init__(self) -> None:
        self._running = threading.local()

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if getattr(self._running, "name", None) == name:
            return None
        self._running.name = name
        try:
            return importlib.util.find_spec(name)
        finally:
            self._running.name = None


def test_an_import_works_if_the_finder_was_removed(registered: Registered) -> None:
    """For example by a test tool that restores `sys.meta_path`. A spec that was found before still works."""
    specs = [importlib.util.find_spec(name) for name in NAMES]
    remove_finder()
    for spec in specs:
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert registered == [*NAMES]
