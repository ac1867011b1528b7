"""Bits that flip in memory and on disk: each is found before its bytes reach a device, or changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from bit_flips import EQUAL, OUTCOMES, Flip, Left, flip_bits, table

from examples import TODAY, examples
from kvsm.copies.checksums import BlockChecksums
from kvsm.tiers.disk.bounce import BounceBuffer

HARMLESS = {
    "behind the headers of disk slots",
    "behind the payloads of disk slots",
    "superblocks of the disk",
}
"""Bytes that nobody reads, and bytes that are there twice."""

ALWAYS_FOUND = {
    "headers of disk slots",
    "payloads of disk slots",
    "record and last page of a pool",
    "era of the disk",
}
"""Each bit of these is read, and is there once."""


def check(counts: Counter[tuple[str, str]], flips: int) -> None:
    """All areas were reached, and each flip has an outcome that its area may have."""
    print(table(counts))
    assert counts.total() == flips
    assert {outcome for _, outcome in counts} <= set(OUTCOMES)
    for area in {area for area, _ in counts}:
        equal, of_area = counts[area, EQUAL], sum(n for (one, _), n in counts.items() if one == area)
        if area in HARMLESS:
            assert equal == of_area, area
        elif area in ALWAYS_FOUND:
            assert equal == 0, area
        elif of_area > 100:
            assert 0 < equal < of_area, f"{area}: some of its bits are read, and some are not"


def test_flipped_bits_are_found_before_their_bytes_reach_a_device() -> None:
    """Correct bytes (S15), and nothing is lost that is not told: bits of both tiers and of the log."""
    flips = examples(300, least=120)
    check(flip_bits(flips, seed=1, alone=0.15), flips)


@pytest.mark.slow
def test_other_flipped_bits_each_day() -> None:
    """The same at length."""
    check(flip_bits(3_000, seed=TODAY), 3_000)


@pytest.mark.parametrize(
    ("checker", "check", "passes", "area", "wrong"),
    [
        (BounceBuffer, "_is_payload", True, "payloads of disk slots", "reached the device"),
        (BlockChecksums, "unproved", np.zeros(1, np.bool_), "slots of the host pool", "reached the device"),
        (BlockChecksums, "wrong", "", "slots of the host pool", "were sealed on the disk"),
    ],
)
def test_without_a_check_the_flips_find_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch, checker: type, check: str, passes: Any, area: str, wrong: str
) -> None:
    """Otherwise the tests above could not fail."""
    left = Left()
    span = left.areas()[area][0]
    monkeypatch.setattr(checker, check, lambda *_: passes)
    with pytest.raises(AssertionError, match=f"wrong bytes {wrong}"):
        left.outcomes([Flip(area, span.file, 8 * span.first, span.unit)])
