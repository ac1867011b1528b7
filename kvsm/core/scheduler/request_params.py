"""A client's parameters of one request (`kv_transfer_params`), parsed here for every part of kvsm.

Clients send them, so no value in them may stop the engine. A value of the wrong type or range is ignored,
with a warning. `do_remote_decode` and `do_remote_prefill` count as true if Python does, as in vLLM's
connectors.

=========================  ============================================================================
key                        meaning
=========================  ============================================================================
`offload`                  false stores no block of this request
`max_offload_tokens`       most tokens of the request that are stored
`max_load_tokens`          most tokens of the request that are loaded
`do_remote_decode`         true stores all blocks: another engine will decode the request
`do_remote_prefill`        true: another engine has computed the prompt; the other keys say where its KV is
`remote_engine_id`         that engine's id
`remote_request_id`        that engine's name for the request, for messages
`remote_hand_over`         unguessable name of the hand-over
`remote_num_tokens`        how many tokens of the prompt it covers at most
=========================  ============================================================================

The prefill engine returns the last four (`HandOverParams.as_answer`). All names but `remote_hand_over` are
vLLM's, so a proxy that passes them on needs no support for kvsm.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from sys import maxsize
from typing import Any, NamedTuple

from kvsm.system.printable import printable

MOST_NAME = 256
"""Most characters of a name that one engine sends to another."""

TOKENS_END = 1 << 48
"""`remote_num_tokens` must be smaller. No prompt has so many tokens."""

_LOGGER = logging.getLogger("kvsm")


class HandOverParams(NamedTuple):
    """Where the blocks of a prompt that another engine has computed can be fetched.

    engine: id of that engine.
    request: its name for the request, for messages.
    hand_over: unguessable name of the hand-over.
    num_tokens: most tokens of the prompt that it covers.
    """

    engine: str
    request: str
    hand_over: str
    num_tokens: int

    def as_answer(self) -> dict[str, Any]:
        """Return the parameters that the prefill engine returns and the client sends to the decode engine."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine,
            "remote_request_id": self.request,
            "remote_hand_over": self.hand_over,
            "remote_num_tokens": self.num_tokens,
        }


class RequestParams(NamedTuple):
    """The parsed parameters of one request.

    offload: whether its blocks are stored.
    max_offload_tokens, max_load_tokens: most tokens of it that are stored, or loaded.
    remote_decode: whether another engine will decode it.
    remote_prefill: where another engine keeps its prompt's blocks; None: nowhere.
    """

    offload: bool = True
    max_offload_tokens: int = maxsize
    max_load_tokens: int = maxsize
    remote_decode: bool = False
    remote_prefill: HandOverParams | None = None


def read_request_params(request: str, given: object) -> RequestParams:
    """Parse the parameters of a request. Missing and invalid values get their default.

    request: its name, for warnings.
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
    """Parse the `remote_*` keys. None if one is invalid. None without
    `remote_hand_over`, too: then they are for another connector, as in a MultiConnector."""
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
    """Whether this is a string that can be sent to another engine and logged."""
    if not isinstance(value, str) or not 0 < len(value) <= MOST_NAME:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # A lone surrogate, which JSON can carry.
        return False
    return True


def _ignored(request: str, name: str, value: object, wanted: str, then: str = "ignored") -> None:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    _LOGGER.warning("request %s: %s is %s, not %s; %s", printable(request), name, shown, wanted, then)
