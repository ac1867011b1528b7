"""The request protocol is proved within small bounds, and wrong tables, guards and effects are refuted."""

from __future__ import annotations

import pytest

from kvsm.checker import explorer
from kvsm.checker.model import Verdict
from kvsm.checker.protocol.explore import explore
from kvsm.checker.protocol.plain import ProtocolModel
from kvsm.checker.protocol.request_scope import REQUEST_SCOPES, RequestScope
from kvsm.checker.protocol.requests import request_protocol

TINY = RequestScope(requests=1, holds=1, transfers=1)


@pytest.mark.parametrize(
    ("scope", "symmetry", "expected"),
    [
        (REQUEST_SCOPES["small"], True, (13742, 144845, 23)),
        (REQUEST_SCOPES["small"], False, (86320, 919512, 23)),
        (REQUEST_SCOPES["workers"], True, (48013, 541192, 27)),
    ],
)
def test_request_protocol_is_proved(
    scope: RequestScope, symmetry: bool, expected: tuple[int, int, int]
) -> None:
    """Every property holds, progress (S9) included. The counts change only with the protocol."""
    found = explore(request_protocol(scope), symmetry=symmetry)
    assert found.verdict is Verdict.PROVED
    assert (found.states, found.transitions, found.depth) == expected
    assert found.unreached == ()
    assert found.bounds == str(scope)


def test_plain_python_reaches_the_same_states() -> None:
    """The explorer of models on the plain evaluation shares only the declaration with numpy."""
    declared = request_protocol(TINY)
    plain = explorer.explore(ProtocolModel(declared))
    found = explore(declared, symmetry=False)
    assert (plain.verdict, plain.states, plain.transitions) == (
        found.verdict,
        found.states,
        found.transitions,
    )
