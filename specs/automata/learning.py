"""Learns automata, and compares them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from aalpy import run_KV
from aalpy.oracles import WMethodEqOracle

from automata.connector import Connector, letters


class Difference(NamedTuple):
    """After `word` all have given the same answers, and now they differ in an answer or in an event."""

    word: tuple[str, ...]
    letter: str
    answers: tuple[str, ...]


class _WMethod(WMethodEqOracle):
    """Proves a hypothesis for all managers that have at most `extra` states more."""

    def __init__(self, alphabet: list[str], sul: Connector, extra: int) -> None:
        super().__init__(alphabet, sul, 0)
        self._extra = extra

    def find_cex(self, hypothesis: Any) -> tuple[str, ...] | None:
        self.m = hypothesis.size + self._extra
        found: tuple[str, ...] | None = super().find_cex(hypothesis)
        return found


def learn(make_manager: Callable[[], Any], keys: Sequence[str], most_loads: int, extra: int) -> Any:
    """The smallest automaton that answers as this manager, if the manager has at most `extra` states more."""
    alphabet, connector = letters(keys), Connector(make_manager, keys, most_loads)
    return run_KV(alphabet, connector, _WMethod(alphabet, connector, extra), "mealy", print_level=0)


def answer(output: str) -> str:
    """An output without its events."""
    return output.split(", ")[0]


def alike(automata: Sequence[Any], alphabet: Sequence[str]) -> dict[tuple[Any, ...], tuple[str, ...]]:
    """The combinations of states after words to which all give the same answers -> a shortest such word.

    Events may differ on the way: an event changes nothing in a manager.
    """
    start = tuple(one.initial_state for one in automata)
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
    """Each first difference, those after shorter words first."""
    for states, word in words.items():
        for letter in alphabet:
            answers = tuple(state.output_fun[letter] for state in states)
            if len(set(answers)) > 1:
                yield Difference(word, letter, answers)
