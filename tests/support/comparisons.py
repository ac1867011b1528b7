"""A comparison of engines, as `kvsm bench vllm` makes one."""

from __future__ import annotations

from kvsm.vllm.bench import PLAIN, Bench, Comparison, Contestant, Round
from kvsm.vllm.step_clock import StepTimes


def comparison() -> Comparison:
    """Return a comparison of two engines in three rounds."""

    def round_of(seconds: float, own: float) -> Round:
        return Round(
            seconds=seconds,
            prompt_tokens=1000,
            cached_tokens=500,
            times=StepTimes(steps=10, step_cpu_seconds=seconds, connector_cpu_seconds=own),
        )

    return Comparison(
        bench=Bench(requests=100, rounds=3),
        vllm="0.32.0",
        device="cpu",
        contestants=(
            Contestant(name=PLAIN, rounds=(round_of(10, 0), round_of(20, 0), round_of(40, 0))),
            Contestant(name="KvsmConnector", rounds=(round_of(5, 0.1), round_of(5, 0.1), round_of(80, 0.1))),
        ),
    )
