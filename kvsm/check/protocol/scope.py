"""The bounds within which the protocol is explored."""

from __future__ import annotations

import msgspec
from msgspec import structs
from msgspec.structs import asdict

from kvsm.errors import ConfigError


class ProtocolScope(msgspec.Struct, frozen=True):
    """The bounds of an exploration. What it proves holds within them.

    live_transfers: transfers that are planned or under way at one time.
    copies: copies of all live transfers at one time. Each copies one block.
    several: whether a transfer may have several blocks.
    matches: matches that hold a slot at one time.
    queued: device blocks that have kernels queued at one time.
    failures, resets, losses, crashes: whether they happen; if so, any number of times.
    """

    keys: int = 2
    device_blocks: int = 2
    slots: int = 2
    workers: int = 1
    live_transfers: int = 2
    copies: int = 2
    matches: int = 1
    queued: int = 2
    several: bool = True
    failures: bool = True
    resets: bool = True
    losses: bool = True
    crashes: bool = False

    def __post_init__(self) -> None:
        for name, bound in asdict(self).items():
            if type(bound) is int and bound < 1:
                raise ConfigError(f"{name} is {bound}; it must be at least 1")

    def __str__(self) -> str:
        happens = ((name, getattr(self, name)) for name in ("failures", "resets", "losses", "crashes"))
        blocks = "several blocks" if self.several else "one block"
        return (
            f"{self.keys} keys, {self.device_blocks} device blocks, {self.slots} slots, "
            f"{self.workers} workers; at most {self.live_transfers} live transfers of {blocks}, "
            f"{self.copies} copies, {self.matches} matches, {self.queued} device blocks with queued kernels; "
            + ", ".join(name if whether else f"no {name}" for name, whether in happens)
        )


_SMALL = ProtocolScope()
SCOPES = {
    "small": _SMALL,
    "one-block": structs.replace(_SMALL, several=False),
    "three-blocks": structs.replace(_SMALL, keys=3, device_blocks=3, slots=3, copies=3, queued=1),
    "crashes": structs.replace(_SMALL, crashes=True),
    "workers": structs.replace(_SMALL, workers=2),
    "full": structs.replace(_SMALL, keys=3, device_blocks=3, workers=2, queued=1),
}
"""`small`, `one-block` and `crashes` take about a second, `three-blocks` and `workers` half a minute, `full`
two minutes."""

VERSIONS: dict[str, dict[str, bool]] = {
    "transfers of one block": {"several": False},
    "transfers of several blocks": {"several": True},
    "several blocks, and crashes": {"several": True, "crashes": True},
}
"""What is proved for any size, by the switches of its scope."""

EXAMPLE_SCOPES = (
    ProtocolScope(keys=1, device_blocks=1, slots=1, live_transfers=1, copies=1, queued=1),
    ProtocolScope(),
    ProtocolScope(workers=2),
    ProtocolScope(matches=2),
    ProtocolScope(
        keys=3, device_blocks=3, slots=3, workers=2, live_transfers=3, copies=3, matches=2, queued=3
    ),
)
"""Where an example for an open condition is looked for, the smallest first. None of them bounds kernels."""
