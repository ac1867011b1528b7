"""`kv_transfer_params` come from a client: none stops the engine, and each mistake is one line in the log."""

from __future__ import annotations

import logging
from sys import maxsize
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from kvsm.core.offloader.arguments import source_name
from kvsm.core.scheduler.request_params import (
    AgentHint,
    HandOverParams,
    RequestParams,
    read_request_params,
    wants_remote_decode,
)
from kvsm.tiers.hand_over.peer_messages import HandOverClaim, packed

NAMES = (
    "offload",
    "max_offload_tokens",
    "max_load_tokens",
    "do_remote_decode",
    "do_remote_prefill",
    "remote_engine_id",
    "remote_request_id",
    "remote_hand_over",
    "remote_num_tokens",
    "agent_hint",
)
json = st.sampled_from(
    [None, True, False, -1, 0, 3, 2**63, 2**70, 1e300, "", "x", "\x1b[2J", "\ud800", "x" * 999, [], [1], {}]
)


@settings(
    max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(given=json | st.dictionaries(st.sampled_from(NAMES), json))
def test_nothing_that_a_client_sends_is_an_error(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Read in the engine's step, where an exception would end the engine. Each line names its request."""
    caplog.clear()
    params = read_request_params("r", given)
    assert wants_remote_decode(given) == params.remote_decode
    assert maxsize >= params.max_load_tokens >= 0 <= params.max_offload_tokens <= maxsize
    if (found := params.remote_prefill) is not None:
        # The other engine can be asked, and the log can name it.
        packed(HandOverClaim(found.hand_over, b"", found.num_tokens, {}))
        assert source_name("import_blocks", f"engine {found.engine}")
    assert len(caplog.messages) <= len(NAMES)
    assert all(line.startswith("request r: ") and len(line) < 250 for line in caplog.messages)


@pytest.mark.parametrize(
    ("value", "is_true"),
    [(True, True), (1, True), ("yes", True), (False, False), (0, False), (None, False), ("", False)],
)
def test_a_flag_is_true_where_vllms_own_connectors_take_it_as_true(value: Any, is_true: bool) -> None:
    """A proxy that works with them works with kvsm."""
    assert read_request_params("r", {"do_remote_decode": value}).remote_decode is is_true


def test_the_answer_of_a_prefill_engine_is_what_a_decode_engine_reads() -> None:
    """Also after a proxy has sent it as JSON, with the keys that vLLM adds."""
    hand_over = HandOverParams("engine-1", "cmpl-1", "00ff", 512)
    answer = {**hand_over.as_answer(), "remote_prefill_cached_tokens": 16}
    assert read_request_params("r", answer) == RequestParams(remote_prefill=hand_over)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"remote_engine_id": 7}, "remote_engine_id is 7, not a name of 1 to 256 characters"),
        ({"remote_hand_over": "x" * 257}, "remote_hand_over is 'xxx"),
        (
            {"remote_hand_over": "\ud800"},
            r"remote_hand_over is '\ud800', not a name of 1 to 256 characters in",
        ),
        ({"remote_engine_id": "a\udfff"}, r"remote_engine_id is 'a\udfff', not a name"),
        ({"remote_num_tokens": 2**70}, "remote_num_tokens is 1180591620717411303424, not a number of tokens"),
        ({"remote_num_tokens": "9"}, "remote_num_tokens is '9', not a number of tokens"),
        ({"remote_num_tokens": -1}, "remote_num_tokens is -1, not a number of tokens"),
    ],
)
def test_a_hand_over_with_a_wrong_value_is_no_hand_over(
    change: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of it would be a claim that nobody gave out."""
    answer = HandOverParams("engine-1", "cmpl-1", "00ff", 512).as_answer()
    with caplog.at_level(logging.WARNING):
        assert read_request_params("r", {**answer, **change}).remote_prefill is None
    [line] = caplog.messages
    assert said in line
    assert line.endswith("; its prompt is computed here")


def test_parameters_of_another_connector_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    """In a MultiConnector the connector that transfers has keys of its own."""
    theirs = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[1]], "remote_port": 5}
    assert read_request_params("r", theirs) == RequestParams()
    assert not caplog.messages


def test_no_store_is_said_with_false_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert read_request_params("r", {"offload": False}) == RequestParams(offload=False)
    assert read_request_params("r", {"offload": 0}) == RequestParams()
    assert caplog.messages == ["request r: offload is 0, not true or false; ignored"]
    assert read_request_params("r", {"max_load_tokens": 5}).max_offload_tokens == maxsize


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"session_id": "s"}, AgentHint("s")),
        ({"session_id": "s", "priority": 9, "parent_session_id": "p"}, AgentHint("s")),
        ({"session_id": "s", "cache_control": {}}, AgentHint("s", 300.0)),
        ({"session_id": "s", "cache_control": {"type": "ephemeral", "ttl": 2.5}}, AgentHint("s", 2.5)),
        ({"session_id": "s", "context_management": {}}, AgentHint("s")),
        (
            {"session_id": "s", "context_management": {"edits": [{"type": "evict"}]}},
            AgentHint("s", 0.0, True),
        ),
        (
            {"session_id": "s", "context_management": {"edits": [{"type": "offload"}]}},
            AgentHint("s", moves=True),
        ),
        (
            {
                "session_id": "s",
                "cache_control": {"ttl": 9},
                "context_management": {"edits": [{"type": "prefetch"}, {"type": "evict"}]},
            },
            AgentHint("s", 9.0, True),
        ),
    ],
)
def test_a_hint_is_read_as_the_rfc_writes_it(
    given: dict[str, Any], wanted: AgentHint, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_request_params("r", {"agent_hint": given}).agent_hint == wanted
    assert not caplog.messages


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (7, "it must be an object"),
        ({}, "session_id must be a name of 1 to 256 characters in UTF-8"),
        ({"session_id": "x" * 257}, "session_id must be a name of 1 to 256 characters in UTF-8"),
        ({"session_id": "s", "cache_control": 5}, "cache_control and context_management must be objects"),
        (
            {"session_id": "s", "context_management": []},
            "cache_control and context_management must be objects",
        ),
        ({"session_id": "s", "cache_control": {"type": "durable"}}, "cache_control.type must be ephemeral"),
        *[
            (
                {"session_id": "s", "cache_control": {"ttl": ttl}},
                "cache_control.ttl must be above 0 and at most 3600 s",
            )
            for ttl in (0, -1, 3601, True, "60", None, float("nan"), float("inf"))
        ],
        (
            {"session_id": "s", "context_management": {"edits": [7]}},
            "context_management.edits must be a list of objects",
        ),
        (
            {"session_id": "s", "context_management": {"edits": [{"type": ["evict"]}]}},
            "the type of an edit must be evict, offload or prefetch",
        ),
    ],
)
def test_a_hint_that_is_wrong_says_what_to_change(
    given: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is told it, and the engine's log too."""
    hint = read_request_params("r", {"agent_hint": given}).agent_hint
    assert hint is not None
    assert (hint.wrong, hint.ttl_s, hint.releases) == (why, 0.0, False)
    assert len(caplog.messages) == 1
    assert f"usable ({why}); refused" in caplog.messages[0]
