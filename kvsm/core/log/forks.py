"""How often this process and its parents have forked. What a fork has copied finds another number there."""

from __future__ import annotations

import os

times = 0


def _note_fork() -> None:
    global times
    times += 1


os.register_at_fork(after_in_child=_note_fork)
