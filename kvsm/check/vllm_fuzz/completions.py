"""Check that each end of an asynchronous transfer is reported once, and only for a transfer that has begun.

vLLM's `KVConnectorBase_V1` says: a connector that answers True to `request_finished` keeps the blocks of the
request "until the request_id is returned from get_finished()". Each rank must return it once, after the rank
was informed that the request is finished. A load for which vLLM has allocated blocks ends when each rank has
reported it, once. vLLM counts reports by the name of the request. So if a rank reports an end twice, vLLM
takes the request's next transfer as ended before all ranks have carried it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS
from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property


class Completions:
    """Tracks transfers: their begin from calls of a connector's scheduler side, their ends from each rank.

    connector: the scheduler side. Its methods are wrapped from now on.
    """

    def __init__(self, connector: Any, ranks: int) -> None:
        self._kept: dict[str, set[int]] = {}
        """Request whose blocks the connector keeps -> the ranks that have reported it as sent."""
        self._finished: list[set[str]] = [set() for _ in range(ranks)]
        """[rank]: the requests that the rank was informed are finished."""
        self._loads: Counter[str] = Counter()
        """Request -> the number of its asynchronous loads that have begun."""
        self._ends: list[Counter[str]] = [Counter() for _ in range(ranks)]
        """[rank]: request -> the number of its loads that the rank has reported as ended."""
        self._vllm_ends: Counter[str] = Counter()
        """Request -> the number of its loads that vLLM has reported as ended on all ranks."""
        self._has_matched = False
        """Whether a request has matched tokens. Of a connector that never does, nothing is stale."""
        self._served: dict[str, Any] = {}
        """Requests that have got device blocks since the last reset of all caches, by name."""
        self._before_reset: set[bytes] = set()
        """The hashes of the blocks of all requests that had got device blocks before such a reset."""
        self._may_be_stale: set[str] = set()
        """Requests whose last match could have begun with a block from before such a reset."""
        self._uncounted = 0
        """Cases of stale data that are counted as soon as a request matches tokens."""
        self._answers_later: set[str] = set()
        """Requests whose last match is loaded asynchronously."""
        for name, observe in (
            ("get_num_new_matched_tokens", self._matched),
            ("update_state_after_alloc", self._allocated),
            ("request_finished", self._request_finished),
            ("request_finished_all_groups", self._request_finished),
            ("update_connector_output", self._ended_for_vllm),
        ):
            if hasattr(connector, name):
                setattr(connector, name, _observed(getattr(connector, name), observe))

    def rank_reported(self, rank: int, finished: Iterable[str], output: Any) -> None:
        """Check what a rank reports with a step. Raises `PropertyBroken`.

        finished: the requests that the rank was informed are finished, with this step.
        output: the `KVConnectorOutput` of the rank, or None.
        """
        self._finished[rank].update(finished)
        if output is None:
            return
        ends = len(output.finished_sending or ()) + len(output.finished_recving or ())
        count_case(Property.ONE_RELEASE_PER_HOLD, "ends of transfers that ranks reported", ends)
        for name in output.finished_sending or ():
            if name not in self._kept:
                raise _broken(
                    f"rank {rank} reports that {name} was sent, and the connector does not keep its blocks"
                )
            if name not in self._finished[rank]:
                raise _broken(
                    f"rank {rank} reports that {name} was sent before it was informed of the end of {name}"
                )
            if rank in self._kept[name]:
                raise _broken(f"rank {rank} reports twice that {name} was sent")
            self._kept[name].add(rank)
        for name in output.finished_recving or ():
            self._ends[rank][name] += 1
            if self._ends[rank][name] > self._loads[name]:
                raise _broken(
                    f"rank {rank} reports the end of {self._ends[rank][name]} loads of request {name}, and "
                    f"{self._loads[name]} began"
                )

    def all_were_reset(self) -> None:
        """Record that all caches were reset, those of the connector too."""
        self._before_reset.update(hash for one in self._served.values() for hash in one.block_hashes)
        self._served.clear()

    def check_at_rest(self) -> None:
        """Check at rest that no promised report is missing. Raises `PropertyBroken`."""
        ranks = len(self._ends)
        for name, reported in self._kept.items():
            if len(reported) < ranks:
                raise _broken(
                    f"the connector keeps the blocks of request {name}, and {len(reported)} of {ranks} ranks "
                    "have reported that it was sent",
                )

    def _matched(self, answer: Any, request: Any, num_computed_tokens: int) -> None:
        tokens, later = answer
        self._has_matched = self._has_matched or bool(tokens)
        # The block behind the device's: a match begins with it, and always leaves a token to compute.
        block = num_computed_tokens // BLOCK_TOKENS
        may_match = (block + 1) * BLOCK_TOKENS < request.num_tokens
        is_old = may_match and request.block_hashes[block] in self._before_reset
        (self._may_be_stale.add if is_old else self._may_be_stale.discard)(request.request_id)
        self._count_stale()
        (self._answers_later.add if tokens and later else self._answers_later.discard)(request.request_id)

    def _allocated(self, _: Any, request: Any, _blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        self._served[name] = request
        if name in self._may_be_stale:
            self._may_be_stale.remove(name)
            self._uncounted += 1
            self._count_stale()
        count_case(Property.CORRECT_BYTES, "tokens that requests got from the connector", num_external_tokens)
        if num_external_tokens and name in self._answers_later:
            self._answers_later.remove(name)
            self._loads[name] += 1

    def _count_stale(self) -> None:
        if self._has_matched:
            case = "requests that continue a prompt from before a reset of all caches"
            count_case(Property.NO_STALE_DATA, case, self._uncounted)
            self._uncounted = 0

    def _request_finished(self, answer: Any, request: Any, *_: Any) -> None:
        if answer[0]:
            self._kept[request.request_id] = set()

    def _ended_for_vllm(self, _: Any, output: Any) -> None:
        for name in output.finished_recving or ():
            self._vllm_ends[name] += 1
            if self._vllm_ends[name] > self._loads[name]:
                raise _broken(
                    f"vLLM takes {self._vllm_ends[name]} loads of request {name} as ended, and "
                    f"{self._loads[name]} began"
                )


def _observed(call: Callable[..., Any], observe: Callable[..., None]) -> Callable[..., Any]:
    """Wrap `call`: `observe` gets its answer and its arguments."""

    @wraps(call)
    def observed_call(*arguments: Any, **named: Any) -> Any:
        answer = call(*arguments, **named)
        observe(answer, *arguments, **named)
        return answer

    return observed_call


def _broken(message: str) -> PropertyBroken:
    return PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
