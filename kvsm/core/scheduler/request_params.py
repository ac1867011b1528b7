"""What a client may say of one request: `kv_transfer_params`, read in one place for every part of kvsm.

A client sends them, so nothing in them may stop the engine. A value that is no such thing is ignored, with
one line in the log. A flag is true where vLLM's own connectors take it as true.

=========================  ============================================================================
key                        meaning
=========================  ============================================================================
`offload`                  false stores no block of this request
`max_offload_tokens`       most tokens of the request that are stored
`max_load_tokens`          most tokens of the request that are loaded
`do_remote_decode`         true stores all blocks: another engine will decode the request
`do_remote_prefill`        true: another engine has computed the prompt, and the other keys say where it is
`remote_engine_id`         that engine's id
`remote_request_id`        that engine's name for the request, for people
`remote_hand_over`         the hand-over, by a name that nobody can guess
`remote_num_tokens`        how many tokens of the prompt it covers at most
=========================  ============================================================================

The last four are what the prefill engine answers (`HandOverParams.as_answer`). All names but
`remote_hand_over` are vLLM's, so a proxy that passes them on needs to know nothing of kvsm.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from sys import maxsize
from typing import Any, NamedTuple

from kvsm.system.printable import printable

MOST_NAME = 256
"""Characters of a name that crosses from one engine to another."""

TOKENS_END = 1 << 48
"""More tokens than any prompt has."""

_LOGGER = logging.getLogger("kvsm")


class HandOverParams(NamedTuple):
    """Where the blocks of a prompt are that another engine has computed."""

    engine: str
    request: str
    hand_over: str
    num_tokens: int

    def as_answer(self) -> dict[str, Any]:
        """What the prefill engine answers to its client, who sends it to the decode engine."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_request_id": self.request,
            "remote_hand_over": self.hand_over,
            "remote_num_tokens": self.num_tokens,
        }


class RequestParams(NamedTuple):
    """What a client said of one request.

    offload: whether its blocks are stored.
    remote_decode: whether another engine will decode it.
    remote_prefill: where another engine keeps its prompt's blocks; None if it said nothing of the kind.
    """

    offload: bool = True
    max_offload_tokens: int = maxsize
    max_load_tokens: int = maxsize
    remote_decode: bool = False
    remote_prefill: HandOverParams | None = None


def read_request_params(request: str, given: object) -> RequestParams:
    """The parameters of a request; what it does not say, or says in a wrong way, is the default.

    request: its name, for the log.
    given: its `kv_transfer_params`.
    """
    if given is None:
        return RequestParams()
    if not isinstance(given, Mapping):
        _ignored(request, "kv_transfer_params", given, "a JSON object")
        return RequestParams()
    offload = given.get("offload", True)
    if offload is not None and type(offload) is not bool:
        _ignored(request, "offload", offload, "true or false")
        offload = True
    return RequestParams(
        offload is not False,
        _tokens(request, given, "max_offload_tokens"),
        _tokens(request, given, "max_load_tokens"),
        wants_remote_decode(given),
        _hand_over(request, given) if given.get("do_remote_prefill") else None,
    )


def wants_remote_decode(given: object) -> bool:
    """Whether these `kv_transfer_params` say that another engine will decode the request."""
    return isinstance(given, Mapping) and bool(given.get("do_remote_decode"))


def _tokens(request: str, given: Mapping[str, Any], name: str) -> int:
    value = given.get(name)
    if value is None:
        return maxsize
    if type(value) is int and value >= 0:
        return min(value, maxsize)
    _ignored(request, name, value, "a number of tokens")
    return maxsize


def _hand_over(request: str, given: Mapping[str, Any]) -> HandOverParams | None:
    """Parameters of another connector, as in a MultiConnector, have no `remote_hand_over`."""
    if given.get("remote_hand_over") is None:
        return None
    names = ("remote_engine_id", "remote_request_id", "remote_hand_over")
    for name in names:
        value = given.get(name)
        if not _is_name(value):
            wanted = f"a name of 1 to {MOST_NAME} characters in UTF-8"
            _ignored(request, name, value, wanted, "its prompt is computed here")
            return None
    tokens = given.get("remote_num_tokens")
    if type(tokens) is not int or not 0 <= tokens < TOKENS_END:
        _ignored(request, "remote_num_tokens", tokens, "a number of tokens", "its prompt is computed here")
        return None
    engine, other, hand_over = (given[name] for name in names)
    return HandOverParams(engine, other, hand_over, tokens)


def _is_name(value: object) -> bool:
    """Whether it can be sent to another engine, and written to the log."""
    if not isinstance(value, str) or not 0 < len(value) <= MOST_NAME:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # A lone surrogate, which JSON can carry.
        return False
    return True


def _ignored(request: str, name: str, value: object, wanted: str, then: str = "ignored") -> None:
    # What a client meant cannot be known, and the engine must not stop for it.
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    _LOGGER.warning("request %s: %s is %s, not %s; %s", printable(request), name, shown, wanted, then)
