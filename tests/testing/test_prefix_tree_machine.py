"""`PrefixTreeMachine` passes a correct tree, and finds each planted fault, with the right property."""

from __future__ import annotations

from typing import Any

import prefix_trees as trees
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvsm.properties import Property
from kvsm.testing import PrefixTreeMachine, PropertyBroken


def machine_for(tree: type[Any]) -> type[PrefixTreeMachine]:
    class Tree(PrefixTreeMachine):
        def make_tree(self, device_slots: int, host_slots: int) -> Any:
            return tree(device_slots, host_slots)

    return Tree


def run(tree: type[Any], examples: int) -> None:
    machine = machine_for(tree)
    chosen = settings(
        machine.TestCase.settings,
        max_examples=examples,
        stateful_step_count=20,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    run_state_machine_as_test(machine, settings=chosen)


def test_tree_that_is_right_passes() -> None:
    run(trees.SmallTree, examples=25)


FAULTS = {
    trees.EvictsWhatIsLocked: Property.MATCH_HOLDS,
    trees.LeaksDoubles: Property.CONSERVATION,
    trees.FreesDoublesTwice: Property.ONE_RELEASE_PER_HOLD,
    trees.NeverUnlocksLoads: Property.ONE_RELEASE_PER_HOLD,
    trees.LoadsTooLate: Property.CORRECT_BYTES,
    trees.BacksUpTheNextBlock: Property.CORRECT_BYTES,
    trees.KeepsTheHostAtReset: Property.NO_STALE_DATA,
    trees.CountsWhatIsLocked: Property.CONSERVATION,
    trees.TellsNoLoad: Property.EVENTS_ARE_STATE,
    trees.MatchesTooMuch: Property.PUBLISH_AFTER_COMMIT,
    trees.MatchesTooLittle: Property.STORED_SO_SERVED,
    trees.FindsNoLongPrompt: Property.STORED_SO_SERVED,
    trees.ForgetsCopies: Property.PROGRESS,
    trees.Raises: Property.LEGAL_CALLS,
}

SEEN_ALSO_AS = {
    trees.FreesDoublesTwice: {Property.MATCH_HOLDS},
    trees.MatchesTooMuch: {Property.CORRECT_BYTES, Property.EVENTS_ARE_STATE},
}
"""What is freed twice is also given away while it is locked. A block that was evicted may be matched to
another one's slot, and is then on the device without an event. Which comes first depends on the examples, and
they depend on the version of Hypothesis and on the modules that are loaded."""


@pytest.mark.parametrize("tree", FAULTS, ids=lambda tree: tree.__name__)
def test_fault_is_found_by_its_property(tree: type[Any]) -> None:
    with pytest.raises(PropertyBroken) as found:
        run(tree, examples=300)
    assert found.value.property in {FAULTS[tree]} | SEEN_ALSO_AS.get(tree, set()), found.value


def test_tree_without_a_method_is_refused_by_name() -> None:
    class Half(trees.SmallTree):
        match = None  # type: ignore[assignment]

    with pytest.raises(PropertyBroken, match=r"your tree is .* which has no match\(\)"):
        run(Half, examples=1)
