"""A Ray cluster of several nodes loses one of them in the middle of its work (`ray_nodes.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import search_path

pytestmark = pytest.mark.slow


def run(call: str) -> None:
    """In a process of its own, in which no other cluster was before."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'kvsm[ray]'")
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "RAY_AUTH_MODE": "disabled",  # only this machine reaches it
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    program = f"import ray_nodes\nfrom pathlib import Path\nray_nodes.{call}"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_a_node_that_is_killed_is_made_up_for(tmp_path: Path) -> None:
    run(f"made_up_for(Path({str(tmp_path)!r}))")


def test_the_results_are_those_of_one_process_although_a_node_is_killed() -> None:
    run("same_results()")
