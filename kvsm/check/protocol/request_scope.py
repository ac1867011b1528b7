"""The bounds within which the protocol of the requests is explored."""

from __future__ import annotations

import msgspec
from msgspec.structs import asdict

from kvsm.errors import ConfigError


class RequestScope(msgspec.Struct, frozen=True):
    """The bounds of an exploration. What it proves holds within them.

    holds: pins of all matches, and slots under all transfers, at one time.
    transfers: transfers that are live, or whose end the engine has not been told, at one time.
    failures, resets, losses, restarts: whether they happen; if so, any number of times.
    """

    requests: int = 2
    slots: int = 1
    holds: int = 2
    transfers: int = 2
    workers: int = 1
    failures: bool = True
    resets: bool = True
    losses: bool = True
    restarts: bool = False

    def __post_init__(self) -> None:
        for name, bound in asdict(self).items():
            if type(bound) is int and bound < 1:
                raise ConfigError(f"{name} is {bound}; it must be at least 1")

    def __str__(self) -> str:
        happens = ((name, getattr(self, name)) for name in ("failures", "resets", "losses", "restarts"))
        return (
            f"{self.requests} requests, {self.slots} slots, {self.workers} workers; "
            f"at most {self.holds} holds, {self.transfers} transfers that are live or not told yet; "
            + ", ".join(name if whether else f"no {name}" for name, whether in happens)
        )


REQUEST_SCOPES = {
    "small": RequestScope(),
    "restarts": RequestScope(restarts=True),
    "workers": RequestScope(workers=2),
    "full": RequestScope(requests=3, slots=2, holds=3, transfers=3),
}
"""`small` and `restarts` take less than a second, `full` a minute."""

REQUEST_VERSIONS = {"requests, their matches and loads": False, "requests, and restarts": True}
"""What is proved for any size, and whether restarts happen."""

REQUEST_EXAMPLE_SCOPES = (
    RequestScope(requests=1, holds=1, transfers=1),
    RequestScope(),
    RequestScope(slots=2, workers=2),
    RequestScope(requests=3, slots=3, holds=3, transfers=3, workers=2),
)
"""Where an example for an open condition of the proof is looked for, the smallest first."""
