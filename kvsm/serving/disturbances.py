"""What goes wrong on purpose, and when: all of it follows from a seed."""

from __future__ import annotations

from random import Random

LONGEST_PATIENCE_STEPS = 1000


class Disturbances:
    """abort_rate: share of the requests whose client leaves, after up to `LONGEST_PATIENCE_STEPS` steps.
    preempt_rate: of the steps that preempt a running request without need. reset_every: steps from one reset
    of the whole cache to the next; 0: none. remote_decode: share of the requests that are for remote decode.
    """

    def __init__(
        self,
        seed: int,
        *,
        abort_rate: float = 0.0,
        preempt_rate: float = 0.0,
        reset_every: int = 0,
        remote_decode: float = 0.0,
    ) -> None:
        self._seed, self._abort_rate, self._preempt_rate = seed, abort_rate, preempt_rate
        self._reset_every, self._remote_decode = reset_every, remote_decode
        self._preempting = Random(f"preempts {seed}")

    def is_for_remote_decode(self, request: str) -> bool:
        return self._draw("remote decode", request, self._remote_decode) is not None

    def patience_steps(self, request: str) -> int | None:
        """Steps from its arrival to its abort. Short waits are as likely as long ones, by magnitude."""
        random = self._draw("aborts", request, self._abort_rate)
        return None if random is None else int(LONGEST_PATIENCE_STEPS ** random.random())

    def preempts(self, running: int) -> int | None:
        """Which of the running requests is preempted in this step."""
        if not running or self._preempting.random() >= self._preempt_rate:
            return None
        return int(self._preempting.random() * running)

    def resets(self, step: int) -> bool:
        return bool(self._reset_every and step and step % self._reset_every == 0)

    def _draw(self, what: str, request: str, rate: float) -> Random | None:
        """A source for this request, if it is one of those that are drawn: the order of calls is nothing."""
        if not rate:
            return None
        random = Random(f"{what} {self._seed} {request}")
        return random if random.random() < rate else None
