"""How far a reader believes the head of a log: whose code it runs, and how much memory it takes.

A log is data, and anybody may have written it. Its head names an eviction policy, which may be code of
another package, and the sizes of the pools, which become memory before the first event is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvsm.errors import ConfigError, KvsmError, LogError
from kvsm.events import OffloadConfig
from kvsm.policies import refuse_foreign

MAX_SLOTS = 1 << 22
"""Host slots, and device blocks, that a log may claim unless its reader allows more."""


class Trust(NamedTuple):
    """What a reader allows a log to claim.

    allow_policies: policies of other packages, `package.module:Class`, whose code may be run.
    max_slots: the largest pool, in host slots or device blocks.
    """

    allow_policies: Collection[str] = ()
    max_slots: int = MAX_SLOTS

    def check(self, config: OffloadConfig, log: str | os.PathLike[str]) -> None:
        """Raises `LogError` if the log claims more. Call it before anything is made from `config`."""
        try:
            refuse_foreign(config.policy, self.allow_policies)
        except ConfigError as error:
            raise LogError(f"{os.fspath(log)}: {error}") from error
        for name in ("host_blocks", "device_blocks"):
            claimed = getattr(config, name)
            if claimed > self.max_slots:
                raise LogError(
                    f"{os.fspath(log)}: its head says {name}={claimed}, and each takes memory; the limit is "
                    f"{self.max_slots}. If you trust the log, read it with --max-slots {claimed}"
                )

    @contextmanager
    def guarded(self, log: str | os.PathLike[str]) -> Iterator[None]:
        """Around reading: an allowed policy that fails, or calls `sys.exit`, becomes a `LogError`.

        Without an allowed policy every other error is a bug of kvsm, and stays what it is.
        """
        try:
            yield
        except KvsmError:
            raise
        except (Exception, SystemExit) as error:
            if not self.allow_policies:
                raise
            raise LogError(
                f"{os.fspath(log)}: cannot be read with the policy that was allowed: "
                f"{type(error).__name__}: {error}"
            ) from error
