"""Logs of workloads that `kvsm run` serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvsm.serving import RunOptions, WorkloadRun, load_workload

REQUESTS = 160


RUN: dict[str, Any] = {
    "requests": REQUESTS,
    "device_blocks": 120,
    "host_blocks": 200,
    "copies": "simulated",
    "workers": 1,
    "block_bytes": 8,
}


def served(directory: Path, **options: Any) -> Path:
    """Run a workload. Returns its log."""
    chosen = RunOptions(**{**RUN, **options}, log=str(directory))
    WorkloadRun(chosen, load_workload(chosen), str(directory)).serve()
    return directory
