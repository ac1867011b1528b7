"""The README keeps its word."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from museum import EXHIBITS
from museum.alone import ALONE
from museum.found import FOUND
from places import ROOT

import kvsm
from kvsm.vllm.versions import TESTED

README = (ROOT / "README.md").read_text(encoding="utf-8")
FINDINGS = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
COUNTS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen")
OFFLOADING_CONNECTORS = ("[OffloadingConnector]", "TieringOffloadingManager", "`fs` and `obj` tiers")
"""How the findings name OffloadingConnector, and what belongs to it."""
PEERS = ("SimpleCPUOffloadConnector", "OffloadingConnector")


def rows_of_findings() -> list[list[str]]:
    """The cells of each row of the table at the top of docs/findings.md: connector, effect, versions."""
    table = FINDINGS.split("| --- | --- | --- |\n")[1].split("\n\n")[0]
    return [row.strip("|").split(" | ") for row in table.splitlines()]


def test_it_is_read_in_two_minutes() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_front_page_has_both_figures_of_the_museum(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert f"find **{len(ALONE)} of {len(EXHIBITS)}**" in text
    assert f"**{len(FOUND)} of {len(EXHIBITS)}** are found" in text


def test_it_counts_the_exhibits_right() -> None:
    text, steps = " ".join(README.split()), max(one.steps for one in FOUND.values())
    assert f"are found, each in at most {steps} steps" in text
    assert f"{sum(one.source.startswith('vllm') for one in EXHIBITS.values())} of them vLLM's" in text


def test_it_counts_the_findings_right() -> None:
    """In all, and of each connector in the newest tested version."""
    rows = rows_of_findings()
    assert f"{COUNTS[len(rows) - 10].capitalize()} in {' and '.join(TESTED)} so far" in README
    row = re.search(r"^\| defects found here.*$", README, re.MULTILINE)
    assert row is not None
    newest = [connector for connector, _, versions in rows if TESTED[-1] in versions]
    simple = sum("SimpleCPUOffloadConnector" in one for one in newest)
    offloading = sum(any(name in one for name in OFFLOADING_CONNECTORS) for one in newest)
    assert re.findall(r"\[(\d+)\]", row[0]) == [str(simple), str(offloading)]


def test_it_quotes_the_ratios_that_were_measured() -> None:
    """Its own, and those of both connectors of vLLM beside it."""
    measured = (ROOT / "benchmarks" / "results" / "vllm_cpu.md").read_text(encoding="utf-8")

    def ratio(engine: str) -> str:
        return measured.split(f"| {engine} | ")[1].split(" | ")[1].split()[0]

    text = " ".join(README.split())
    assert f"**{ratio('KvsmConnector')} times**" in text
    for peer in PEERS:
        assert re.search(rf"{peer}[a-z ]* {re.escape(ratio(peer))}", text), peer


def test_every_public_name_can_be_imported() -> None:
    assert [name for name in kvsm.__all__ if getattr(kvsm, name, None) is None] == []


@pytest.mark.parametrize(
    "module", ["kvsm", "kvsm.explain.story", "kvsm.cli", "kvsm.core.ledger.invariants", "kvsm.core.log"]
)
def test_core_and_replay_import_without_torch(module: str) -> None:
    """Torch is needed only for tensors; an on-call engineer has none."""
    script = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", script], check=True)
