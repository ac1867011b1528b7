"""Disturbances on purpose: aborts, preemptions, resets. All follow from the seed of a run."""

from __future__ import annotations

from random import Random

from kvsm.serving.run_options import RunOptions

LONGEST_PATIENCE_STEPS = 1000


class Disturbances:
    """Draws aborts, preemptions, resets and requests for remote decode, at the rates in `options`."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._preempting = Random(f"preempts {options.seed}")

    def is_for_remote_decode(self, request: str) -> bool:
        """Whether this request is prefilled for remote decode."""
        return self._draw("remote decode", request, self._options.remote_decode) is not None

    def patience_steps(self, request: str) -> int | None:
        """Return the number of steps until its client leaves; None if it stays.

        The logarithm is uniform: each order of magnitude up to `LONGEST_PATIENCE_STEPS` is equally likely.
        """
        random = self._draw("aborts", request, self._options.abort_rate)
        return None if random is None else int(LONGEST_PATIENCE_STEPS ** random.random())

    def preempts(self, running: int) -> int | None:
        """Return the index of the running request to preempt in this step; None: none is preempted."""
        if not running or self._preempting.random() >= self._options.preempt_rate:
            return None
        return int(self._preempting.random() * running)

    def resets(self, step: int) -> bool:
        """Whether the whole cache is reset in this step."""
        every = self._options.reset_every
        return bool(every and step and step % every == 0)

    def _draw(self, what: str, request: str, rate: float) -> Random | None:
        """Return a random source for this request with probability `rate`, else None.

        It depends on the seed and the request alone, not on the order of requests.
        """
        if not rate:
            return None
        random = Random(f"{what} {self._options.seed} {request}")
        return random if random.random() < rate else None
