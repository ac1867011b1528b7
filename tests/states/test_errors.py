"""What kvsm raises."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kvsm import errors
from kvsm.core.log.reader import LogGap
from kvsm.cuda_io.driver import CudaError
from kvsm.properties import Property
from kvsm.vllm.trial import TrialFailed

EXAMPLES = [
    errors.KvsmError("some reason"),
    errors.IllegalTransition("block", [3, 4], "STORING(copies=1, pins=0)", "EVICT", 17),
    errors.InvalidEvent(17, "transfer 3 is not live"),
    errors.WrongArgument("report", "worker", "is a str; it must be an int"),
    errors.ConfigError("host_blocks is 0; it must be from 1 to 8"),
    errors.LogDamaged("00.kvlog", 64, 17, "its checksum does not hold"),
    LogGap(Path("kvlog"), 17, 20),
    errors.TraceError("trace.jsonl", 3, "it is no JSON"),
    CudaError("cuMemcpyBatchAsync", "CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    TrialFailed("vLLM ended with exit code 1:", "its last lines"),
    errors.PropertyBroken(Property.NO_REUSE_IN_FLIGHT, "a block is free under a copy"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_error_is_the_same_in_another_process(error: errors.KvsmError) -> None:
    """A pool of processes that cannot unpickle a worker's error never returns."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_with_facts_of_its_own_is_an_example() -> None:
    def kinds(kind: type[errors.KvsmError]) -> set[type[errors.KvsmError]]:
        return {kind}.union(*map(kinds, kind.__subclasses__()))

    own = {kind for kind in kinds(errors.KvsmError) if "__init__" in vars(kind)}
    assert own <= {type(error) for error in EXAMPLES}
