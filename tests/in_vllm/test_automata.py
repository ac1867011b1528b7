"""specs/automata/README.md says what is learned of vLLM's manager, kvsm's, and the block machine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("aalpy", reason="aalpy is not installed: pip install 'kvsm[automata]'")

from automata.write import README, page

from kvsm.vllm.versions import TESTED, installed


@pytest.mark.skipif(not installed().startswith(TESTED[-1]), reason="the page is about the newest tested vLLM")
def test_the_learned_automata_are_those_of_the_page() -> None:
    """`PYTHONPATH=specs python -m automata.write` writes it. No difference may come or go unnoticed: a block
    that is handed out under a copy (S3), a hit that does not hold (S7), an event of its own (S10)."""
    assert README.read_text(encoding="utf-8") == page()
