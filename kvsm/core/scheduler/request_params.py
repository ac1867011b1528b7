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
`agent_hint`               advice about the session of the request (`AgentHint`)
=========================  ============================================================================

The prefill engine returns the four that begin with `remote_` (`HandOverParams.as_answer`). All names but
`remote_hand_over` are vLLM's, so a proxy that passes them on needs no support for kvsm.
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

MOST_TTL_S = 3600.0
"""The longest `ttl` of a hint (s)."""

_DEFAULT_TTL_S = 300.0
"""The `ttl` of a hint that names none (s)."""

_LOGGER = logging.getLogger("kvsm")


class AgentHint(NamedTuple):
    """What the client of an agent knows about the further use of a request's blocks.

    The names are those of vLLM's RFC (issue 52113), in this form:

        {"session_id": "worker-7", "cache_control": {"type": "ephemeral", "ttl": 300}}
        {"session_id": "worker-7", "context_management": {"edits": [{"type": "evict"}]}}

    session: its `session_id`; empty if it is invalid.
    ttl_s: how long the request's blocks should be kept (s). 0: not asked for.
    releases: whether the session gives up what is kept for it (the edit `evict`).
    moves: whether it asks for `offload` or `prefetch`, which kvsm does not do by a hint, and not for `evict`.
    wrong: why it cannot be used, for the client; empty if it can.
    """

    session: str = ""
    ttl_s: float = 0.0
    releases: bool = False
    moves: bool = False
    wrong: str = ""


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
    agent_hint: advice about its session; None: there is none.
    """

    offload: bool = True
    max_offload_tokens: int = maxsize
    max_load_tokens: int = maxsize
    remote_decode: bool = False
    remote_prefill: HandOverParams | None = None
    agent_hint: AgentHint | None = None


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
        _agent_hint(request, given.get("agent_hint")),
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


def _agent_hint(request: str, given: object) -> AgentHint | None:
    """Parse `agent_hint`. Unknown keys in it are ignored: later versions of the RFC may add some."""
    if given is None:
        return None
    hint = _checked_hint(given)
    if hint.wrong:
        _ignored(request, "agent_hint", given, f"usable ({hint.wrong})", "refused")
    return hint


def _checked_hint(given: object) -> AgentHint:
    if not isinstance(given, Mapping):
        return AgentHint(wrong="it must be an object")
    session = given.get("session_id")
    if not isinstance(session, str) or not _is_name(session):
        return AgentHint(wrong=f"session_id must be a name of 1 to {MOST_NAME} characters in UTF-8")
    control, management = given.get("cache_control"), given.get("context_management")
    if not isinstance(control, Mapping | None) or not isinstance(management, Mapping | None):
        return AgentHint(session, wrong="cache_control and context_management must be objects")
    ttl = 0.0 if control is None else control.get("ttl", _DEFAULT_TTL_S)
    if control is not None and control.get("type", "ephemeral") != "ephemeral":
        return AgentHint(session, wrong="cache_control.type must be ephemeral")
    # Written so that NaN is refused, too.
    if control is not None and not (type(ttl) in (int, float) and 0 < ttl <= MOST_TTL_S):
        return AgentHint(session, wrong=f"cache_control.ttl must be above 0 and at most {MOST_TTL_S:g} s")
    edits = [] if management is None else management.get("edits", [])
    if not isinstance(edits, list) or not all(isinstance(edit, Mapping) for edit in edits):
        return AgentHint(session, wrong="context_management.edits must be a list of objects")
    kinds = [edit.get("type") for edit in edits]
    if not all(kind in ("evict", "offload", "prefetch") for kind in kinds):
        return AgentHint(session, wrong="the type of an edit must be evict, offload or prefetch")
    releases = "evict" in kinds
    return AgentHint(session, float(ttl), releases, bool(kinds) and not releases)


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
