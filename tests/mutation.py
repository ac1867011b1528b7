"""How the tests run under `mutmut` (see specs/mutation.md): the quick ones first, and a failure is enough.

Some thousand mutants are run, each until its first failing test, so a test that runs one example stands
before a property that runs hundreds. A property stops at its first failing example, which nobody shrinks
because nobody reads it, and runs few: a mutant that only the hundredth example would find counts as
survived, so the score is a floor. `[tool.mutmut]` in pyproject.toml loads this plugin.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

EXAMPLES = 10


def pytest_configure() -> None:
    """One profile for all tests: the same examples for each mutant, and none kept."""
    settings.register_profile(
        "mutation",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=EXAMPLES,
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("mutation")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Examples before properties; mutmut names a mutant's tests in no order, so they are put in one."""
    items.sort(key=lambda item: (is_property(item), item.nodeid))
    for item in filter(is_property, items):
        test = getattr(item, "function", item.obj)
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > EXAMPLES:
            test._hypothesis_internal_use_settings = settings(own, max_examples=EXAMPLES)


def is_property(item: pytest.Item) -> bool:
    return is_hypothesis_test(item.obj)
