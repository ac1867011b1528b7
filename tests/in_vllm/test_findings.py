"""What docs/findings.md tells of the checks at the end of a run, and of sliding windows, is true."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec

from kvsm.check.vllm_fuzz.shape import EngineShape
from kvsm.check.vllm_fuzz.vllm_world import VllmWorld
from kvsm.check.walks.reduce import rerun
from kvsm.check.worlds.world import Action

SETTLE: Action = ("settle",)
SCHEDULE: Action = ("schedule",)
DELIVER: Action = ("deliver",)
RESET: Action = ("reset", 0, 1)

UNTOLD: tuple[Action, ...] = (
    ("arrive", 0, 0, 5, 1, 0),
    *[SETTLE] * 3,
    ("arrive", 0, 0, 1, 5, 0),
    SETTLE,
    RESET,
)
GIVEN_BACK: tuple[Action, ...] = (
    ("arrive", 0, 37, 3, 6, 0),
    ("arrive", 0, 0, 4, 2, 0),
    SETTLE,
    ("arrive", 0, 0, 1, 4, 0),
    *[SETTLE] * 2,
    RESET,
    *[SETTLE] * 3,
)
WRONG_BYTES: tuple[Action, ...] = (
    ("arrive", 1, 22, 2, 5, 0),
    SETTLE,
    ("arrive", 1, 10, 2, 5, 0),
    ("arrive", 1, 1, 5, 8, 0),
    SCHEDULE,
    ("arrive", 1, 20, 1, 8, 0),
    ("arrive", 0, 11, 1, 2, 0),
    *[DELIVER, SCHEDULE] * 2,
    DELIVER,
    ("arrive", 0, 6, 3, 8, 1),
    SCHEDULE,
    ("arrive", 1, 40, 1, 1, 0),
    DELIVER,
    SETTLE,
    *[SCHEDULE, DELIVER],
    SCHEDULE,
    RESET,
    *[DELIVER, SCHEDULE] * 3,
    DELIVER,
    *[SETTLE] * 2,
)
WINDOWS = EngineShape(windows=True, device_blocks=26, host_blocks=160)


@pytest.mark.parametrize(
    ("actions", "shape", "says"),
    [
        (UNTOLD, EngineShape(kv_events=True, host_blocks=160), "the events say that the host has block 0"),
        (
            GIVEN_BACK,
            msgspec.structs.replace(WINDOWS, step_tokens=64, most_running=2),
            "nothing orders the two",
        ),
        (WRONG_BYTES, WINDOWS, "does not hold token 7 of request r6"),
    ],
    ids=["untold", "given-back", "wrong-bytes"],
)
def test_what_is_told_of_resets_is_true(actions: tuple[Action, ...], shape: EngineShape, says: str) -> None:
    """Both tested versions of vLLM have these. KvsmConnector passes the same steps."""

    def outcome(connector: str) -> str:
        case = msgspec.structs.replace(shape, connector=connector)
        return str(rerun(lambda: VllmWorld(case), actions, to_rest=True).finding)

    assert says in outcome("OffloadingConnector")
    assert outcome("KvsmConnector") == "None"
