"""Contracts of the request machine: one step of a request's life in offload."""

from __future__ import annotations

from contracts.steps import Step, taken
from kvsm.states import REQUEST, RequestState, RequestTrigger

_S, _T = RequestState, RequestTrigger


def sound(state: int, loads: int) -> bool:
    """Whether the state may have this number of loads: 0, 1 or either."""
    if state == _S.LOADING or state == _S.FINISHED:
        return loads == 1
    if state == _S.MATCHED or state == _S.RELEASED:
        return loads == 0
    return 0 <= loads <= 1


def alive(state: int) -> bool:
    return state != _S.FINISHED and state != _S.RELEASED


def step(state: RequestState, loads: int, trigger: RequestTrigger) -> Step:
    return taken(REQUEST, state, (loads,), trigger)


def a_step_keeps_it_sound(state: RequestState, loads: int, trigger: RequestTrigger) -> Step:
    """One release per hold (S4): a request has at most one load, and its state fits the number.

    pre: sound(state, loads)
    post: _ is None or sound(*_)
    """
    return step(state, loads, trigger)


def it_can_always_leave(state: RequestState, loads: int) -> tuple[Step, Step]:
    """Every call is legal (S8): finish (or abort) and preemption are legal at any time of its life. A
    finished request waits for its load; without a load it is forgotten at once.

    pre: sound(state, loads) and alive(state)
    post: _[0] == ((_S.FINISHED, 1) if loads else (_S.RELEASED, 0))
    post: _[1] is not None and alive(_[1][0]) and _[1][1] == loads
    """
    return step(state, loads, _T.FINISH), step(state, loads, _T.PREEMPT)


def a_load_finds_its_request(state: RequestState, loads: int) -> Step:
    """One release per hold (S4), every call is legal (S8): the end of a load is legal exactly while there
    is one, in every state.

    pre: sound(state, loads)
    post: (_ is not None) == (loads == 1)
    post: _ is None or _[1] == 0
    """
    return step(state, loads, _T.END_LOAD)


def it_is_forgotten_only_without_a_load(state: RequestState, loads: int, trigger: RequestTrigger) -> Step:
    """One release per hold (S4): a request is RELEASED only when it has finished and its load has ended, or
    with its process.

    pre: sound(state, loads)
    pre: trigger != _T.RESTART
    post: _ is None or _[0] != _S.RELEASED or left_nothing(state, loads, trigger)
    """
    return step(state, loads, trigger)


def left_nothing(state: int, loads: int, trigger: int) -> bool:
    if state == _S.FINISHED:
        return trigger == _T.END_LOAD
    return trigger == _T.FINISH and loads == 0


def a_load_needs_a_match(state: RequestState, loads: int, trigger: RequestTrigger) -> Step:
    """A match holds what it counts (S7): a load begins only from the pins of a match, and only while the
    request has no other load.

    pre: sound(state, loads)
    post: _ is None or _[1] <= loads or (state == _S.MATCHED and trigger == _T.BEGIN_LOAD and loads == 0)
    """
    return step(state, loads, trigger)


def released_is_the_end(trigger: RequestTrigger) -> Step:
    """Every call is legal (S8): no trigger applies to a request that was forgotten.

    post: _ is None
    """
    return step(_S.RELEASED, 0, trigger)
