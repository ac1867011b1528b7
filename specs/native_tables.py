"""Write kvsm/core/native/tables.h: machines, words and kinds of events for the native body.

    PYTHONPATH=.:specs python specs/native_tables.py

A test checks that the file is up to date.
"""

from __future__ import annotations

from pathlib import Path

from kvsm.events import KINDS, REACHES, TRIGGERS, OffloadingEvent, Reach
from kvsm.ids import MOST_IN_RUNS, RUNS, SMALL
from kvsm.states import MACHINES, Machine, machines_digest
from kvsm.states.block import (
    BLOCK_WORDS,
    EVICTED_WORD,
    FIRST_INDEXED,
    FIRST_READABLE,
    IDLE,
    LAST_INDEXED,
    LAST_READABLE,
    PINNED_ONCE,
    BlockTrigger,
)
from kvsm.states.lease import LEASE_WORDS
from kvsm.states.request import REQUEST_WORDS
from kvsm.states.transfer import TRANSFER_WORDS
from kvsm.states.words import STATE_MASK, Codec

HEADER = Path(__file__).parents[1] / "kvsm" / "core" / "native" / "tables.h"

_TYPES = """\
#define SET_TO_ZERO INT32_MIN

/* A row of a table for one source: the ranges of the counters that it admits, and what is added to them. */
typedef struct {
    int32_t target, low[2], high[2], delta[2];
} Arc;

/* Which arcs may apply. */
typedef struct {
    int16_t first, count;
} Arcs;

typedef struct {
    int number, num_arcs, num_states, num_counters, shifts[2];
    int32_t limits[2];
    const Arc *arcs;
    const Arcs *dense; /* [trigger][state] */
} Machine;
"""


_CHANGES = """\
/* What each kind of event may change. A touch changes the eviction order alone. */
enum {
    NOTHING = 0,
    ITS_SLOTS = 1,
    ITS_BLOCKS = 2,
    ITS_TRANSFER = 4,
    ITS_TRANSFERS = 8,
    ITS_PINS = 16,
    EVERYTHING = 32
};
"""


def _changes(kind: type[OffloadingEvent]) -> list[str]:
    """Which of a ledger's arrays an event of this kind may change, and where."""
    fields, reaches, triggers = kind.__struct_fields__, REACHES[kind], TRIGGERS[kind]
    if Reach.CACHE in reaches or Reach.PROCESS in reaches:
        return ["EVERYTHING"]
    has_pins = Reach.PINS in reaches
    moves_blocks = any(
        isinstance(trigger, BlockTrigger) and trigger is not BlockTrigger.TOUCH for trigger in triggers
    )
    found = {
        "ITS_SLOTS": "slots" in fields and moves_blocks and not has_pins,
        "ITS_BLOCKS": "device_blocks" in fields,
        "ITS_TRANSFER": "transfer" in fields and Reach.TRANSFERS in reaches and bool(triggers),
        "ITS_TRANSFERS": "transfers" in fields and bool(triggers),
        "ITS_PINS": has_pins,
    }
    return [name for name, holds in found.items() if holds]


def _machine(number: int, machine: Machine, codec: Codec) -> list[str]:
    """One machine: its names as constants, and its table. The arcs are in the order of `all_edges`."""
    name = machine.name
    upper = name.upper()
    arcs: list[str] = []
    dense: list[str] = []
    for trigger in machine.triggers:
        cells = []
        for state in machine.states:
            found = machine.dense[trigger][state]
            cells.append(f"{{{len(arcs)}, {len(found)}}}")
            for arc in found:
                low = ", ".join(str(least) for least, _ in arc.ranges)
                high = ", ".join(str(most) for _, most in arc.ranges)
                delta = ", ".join("SET_TO_ZERO" if one is None else str(one) for one in arc.deltas)
                arcs.append(f"    {{{arc.target}, {{{low}}}, {{{high}}}, {{{delta}}}}},")
        dense.append(f"    {', '.join(cells)}, /* {trigger.name} */")
    shifts, limits = ", ".join(map(str, codec.shifts)), ", ".join(map(str, codec.limits))
    return [
        "",
        *(f"#define {upper}_{one.name} {one.value}" for one in (*machine.states, *machine.triggers)),
        "",
        f"static const Arc {name}_arcs[] = {{",
        *arcs,
        "};",
        f"static const Arcs {name}_dense[] = {{",
        *dense,
        "};",
        f"static const Machine {upper} = {{{number}, {len(arcs)}, {len(machine.states)}, "
        f"{len(machine.counters)}, {{{shifts}}}, {{{limits}}}, {name}_arcs, {name}_dense}};",
    ]


def _num_arcs(machine: Machine) -> int:
    return sum(len(arcs) for states in machine.dense for arcs in states)


def header() -> str:
    """The text of the file."""
    codecs = {one.machine.name: one for one in (BLOCK_WORDS, TRANSFER_WORDS, LEASE_WORDS, REQUEST_WORDS)}
    lines = [
        "/* Written by specs/native_tables.py from kvsm/states/ and kvsm/events.py. Do not edit. */",
        "",
        f'#define MACHINES_DIGEST "{machines_digest()}"',
        f'#define KIND_NAMES "{" ".join(kind.__name__ for kind in KINDS)}"',
        f"#define NUM_MACHINES {len(MACHINES)}",
        f"#define MOST_ARCS {max(_num_arcs(machine) for machine in MACHINES.values())}",
        f"#define SMALL {SMALL}",
        f"#define RUNS {RUNS}",
        f"#define MOST_IN_RUNS {MOST_IN_RUNS}",
        f"#define STATE_MASK {STATE_MASK}",
        f"#define FIRST_INDEXED {FIRST_INDEXED}",
        f"#define LAST_INDEXED {LAST_INDEXED}",
        f"#define FIRST_READABLE {FIRST_READABLE}",
        f"#define LAST_READABLE {LAST_READABLE}",
        f"#define IDLE {IDLE}",
        f"#define PINNED_ONCE {PINNED_ONCE}",
        f"#define EVICTED_WORD {EVICTED_WORD}",
        "",
        "enum {",
        *(f"    KIND_{kind.__name__}," for kind in KINDS),
        "    NUM_KINDS",
        "};",
        "",
        *_CHANGES.splitlines(),
        "static const unsigned char changes[NUM_KINDS] __attribute__((unused)) = {",
        *(f"    [KIND_{kind.__name__}] = {' | '.join(_changes(kind)) or 'NOTHING'}," for kind in KINDS),
        "};",
        "",
        *_TYPES.splitlines(),
    ]
    for number, (name, machine) in enumerate(MACHINES.items()):
        lines += _machine(number, machine, codecs[name])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    HEADER.write_text(header(), encoding="utf-8")
