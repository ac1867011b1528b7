"""Walks both bodies in lockstep, in this process.

    python tests/support/native_lockstep.py FIRST COUNT    # plays these seeds

Each seed folds the events of a walk, right and wrong ones, with twin ledgers while the native state is
copied, and makes random calls of twin cores. Ends with an `AssertionError` at the first difference.
"""

from __future__ import annotations

import sys
from random import Random

import msgspec
from call_twins import CallMaker, TwinCores, drawn_config
from native_twins import Twins, is_refusal, saved, spoiled, walked, walked_in_arrays

from kvsm.check.worlds.core_options import draw_options
from kvsm.core.ledger.frozen import freeze


def fold(seed: int) -> None:
    """Fold a walk. Every fourth one has long batches."""
    random = Random(seed)
    if seed % 4 == 0:
        config, events = walked_in_arrays(seed)
    else:
        options = draw_options(random)
        config, events = options.config(), walked(options, seed, 40)
    twins = Twins(config)
    for event in events:
        wanted = saved(twins.native)
        copy = freeze(twins.native) if isinstance(wanted, bytes) else None  # otherwise no log has such values
        if random.random() < 0.3:
            wrong = twins.apply(spoiled(event, random))
            if wrong.error is not None and not is_refusal(wrong):
                return
        if twins.native.seq + 1 != event.seq:
            event = msgspec.structs.replace(event, seq=twins.native.seq + 1)
        twins.apply(event)
        while copy is not None and not copy.go_on():
            pass
        assert copy is None or b"".join(copy.pieces()) == wanted, event


def call(seed: int) -> None:
    """Make random calls."""
    random = Random(seed)
    config = drawn_config(random)
    twins = TwinCores(config, log=random.random() < 0.5, publisher=random.random() < 0.5)
    maker = CallMaker(config, random)
    for _ in range(50):
        name, arguments, named = maker.draw(twins.python)
        twins.call(name, *arguments, **named)


def main(first: int, count: int) -> None:
    """Play these seeds."""
    for seed in range(first, first + count):
        fold(seed)
        call(seed)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
