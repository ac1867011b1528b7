"""A real engine in its own process. It takes `kv_transfer_params` with each prompt, and returns those of each
answer. `python paired_engines.py FD` serves the other end of a pipe.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from engine_forks import begin

from kvsm.vllm.tiny_model import SETTINGS
from kvsm.vllm.trial import SHUTDOWN_S, connector_config, environment

START_S, ROUND_S = 900, 300


class Answer(NamedTuple):
    """The answer to a client. cached: tokens of the prompt that were not computed."""

    tokens: list[int]
    cached: int
    handed: dict[str, Any] | None


class PairedEngine:
    """The caller's handle of the engine. said: the file with the engine's output."""

    def __init__(self, connection: Connection, process: Any, said: Path) -> None:
        self._connection, self.process, self.said = connection, process, said

    def wait(self) -> None:
        """Return when the engine is ready."""
        assert self._receive(START_S) == "ready"

    def serve(
        self, prompts: Sequence[list[int]], max_tokens: int, handed: Sequence[dict[str, Any] | None]
    ) -> list[Answer]:
        """Serve these prompts together."""
        self._connection.send_bytes(json.dumps([list(prompts), max_tokens, list(handed)]).encode())
        return [Answer(*one) for one in self._receive(ROUND_S)]

    def kill(self) -> None:
        """kill -9, with all its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Shut down."""
        self._connection.close()
        assert self.process.wait(2 * SHUTDOWN_S) == 0, self.said.read_text()[-4000:]

    def _receive(self, seconds: float) -> Any:
        try:
            assert self._connection.poll(seconds), f"no answer: {self.said.read_text()[-4000:]}"
            return json.loads(self._connection.recv_bytes())
        except EOFError:
            raise AssertionError(f"the engine has ended: {self.said.read_text()[-4000:]}") from None


@contextmanager
def paired_engine(
    model: str, role: str, notes: Path, ranks: int, directory: Path, **options: Any
) -> Iterator[PairedEngine]:
    """Start an engine; it is not ready yet. It is killed at the end, if it has not ended.

    notes: a directory for its log and its output.
    """
    notes.mkdir()
    transfer = connector_config(
        cpu_bytes_to_use=ranks << 22,
        event_log=str(notes / "log"),
        hand_over_directory=str(directory),
        **options,
    )
    settings = {"tensor_parallel_size": ranks, "kv_transfer_config": transfer | {"kv_role": role}}
    ours, theirs = Pipe()
    with ours, (notes / "said").open("wb") as said:
        with theirs:
            process = begin(
                [__file__, str(theirs.fileno()), model, json.dumps(settings)],
                environment(in_process=False, ranks=ranks) | {"VLLM_LOGGING_LEVEL": "INFO"},
                [theirs.fileno()],
                stdout=said,
                stderr=said,
            )
        try:
            yield PairedEngine(ours, process, notes / "said")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """In the engine's process."""
    from vllm import LLM, SamplingParams

    connection, model, settings = Connection(int(sys.argv[1])), sys.argv[2], json.loads(sys.argv[3])
    engine = LLM(model, **{**SETTINGS, "disable_log_stats": False, "num_gpu_blocks_override": 40, **settings})
    connection.send_bytes(b'"ready"')
    with suppress(EOFError):
        while True:
            prompts, max_tokens, handed = json.loads(connection.recv_bytes())
            wishes = [
                SamplingParams(
                    temperature=0,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    extra_args=None if one is None else {"kv_transfer_params": one},
                )
                for one in handed
            ]
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = engine.generate(asked, wishes, use_tqdm=False)
            told = [
                (list(one.outputs[0].token_ids), one.num_cached_tokens, one.kv_transfer_params)
                for one in outputs
            ]
            connection.send_bytes(json.dumps(told).encode())
    engine.llm_engine.engine_core.shutdown(timeout=SHUTDOWN_S)


if __name__ == "__main__":
    main()
