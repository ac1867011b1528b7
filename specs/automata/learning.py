"""Learn automata, and compare them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from aalpy import run_KV
from aalpy.oracles import WMethodEqOracle

from automata.connector import Connector, letters


class Difference(NamedTuple):
    """A first difference: all automata give the same answers to `word`, and different outputs to `letter`."""

    word: tuple[str, ...]
    letter: str
    answers: tuple[str, ...]


class _WMethod(WMethodEqOracle):
    """An oracle that proves a hypothesis for all managers with at most `extra` more states."""

    def __init__(self, alphabet: list[str], sul: Connector, extra: int) -> None:
        super().__init__(alphabet, sul, 0)
        self._extra = extra

    def find_cex(self, hypothesis: Any) -> tuple[str, ...] | None:
        self.m = hypothesis.size + self._extra
        found: tuple[str, ...] | None = super().find_cex(hypothesis)
        return found


def learn(make_manager: Callable[[], Any], keys: Sequence[str], most_loads: int, extra: int) -> Any:
    """The smallest automaton that equals this manager, if the manager has at most `extra` more states."""
    alphabet, connector = letters(keys), Connector(make_manager, keys, most_loads)
    return run_KV(alphabet, connector, _WMethod(alphabet, connector, extra), "mealy", print_level=0)


def answer(output: str) -> str:
    """The answer in an output, without its events."""
    return output.split(", ")[0]


def alike(automata: Sequence[Any], alphabet: Sequence[str]) -> dict[tuple[Any, ...], tuple[str, ...]]:
    """Combination of states -> a shortest word that leads there and to which all automata give the same
    answers.

    Their events may differ, because an event does not change the state of a manager.
    """
    start = tuple(automaton.initial_state for automaton in automata)
    words: dict[tuple[Any, ...], tuple[str, ...]] = {start: ()}
    waiting = deque([start])
    while waiting:
        states = waiting.popleft()
        for letter in alphabet:
            after = tuple(state.transitions[letter] for state in states)
            if len({answer(state.output_fun[letter]) for state in states}) == 1 and after not in words:
                words[after] = (*words[states], letter)
                waiting.append(after)
    return words


def differences(
    words: Mapping[tuple[Any, ...], tuple[str, ...]], alphabet: Sequence[str]
) -> Iterator[Difference]:
    """All first differences, sorted by the length of their words."""
    for states, word in words.items():
        for letter in alphabet:
            answers = tuple(state.output_fun[letter] for state in states)
            if len(set(answers)) > 1:
                yield Difference(word, letter, answers)
