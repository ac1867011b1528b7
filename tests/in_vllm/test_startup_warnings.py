"""What kvsm warns of when an engine starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvsm.vllm import startup_checks
from kvsm.vllm.startup_checks import warn_of_immediate_kill


@pytest.mark.parametrize(
    ("timeout", "in_own_process", "given", "told"),
    [
        (0, True, {"event_log": "logs"}, ["event log"]),
        (0, True, {"pool_dir": "pools"}, ["event log"]),
        (
            0,
            True,
            {"event_log": "logs", "disk_write": "back"},
            ["event log", "do not reach"],
        ),
        (0, True, {"disk_write": "back"}, ["do not reach"]),
        (0, True, {"disk_write": "through"}, []),
        (0, True, {}, []),
        (0, False, {"event_log": "logs"}, []),
        (30, True, {"event_log": "logs"}, []),
    ],
)
def test_a_stop_that_is_a_kill_is_warned_of(
    timeout: int, in_own_process: bool, given: dict[str, Any], told: list[str]
) -> None:
    """If something is lost by it."""
    transfer = SimpleNamespace(kv_connector_extra_config=given)
    config = SimpleNamespace(shutdown_timeout=timeout, kv_transfer_config=transfer)
    lines: list[str] = []

    def note(text: str, *values: object) -> None:
        lines.append(text % values)

    parent = object() if in_own_process else None
    with (
        patch.object(startup_checks, "parent_process", lambda: parent),
        patch.object(startup_checks.log, "warning", note),
    ):
        warn_of_immediate_kill(config)
    assert len(lines) == bool(told)
    for part in [*told, "--shutdown-timeout 30"] if told else []:
        assert part in lines[0]
