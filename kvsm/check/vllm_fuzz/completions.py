"""Each end of an asynchronous transfer is told once, and only of a transfer that began.

vLLM's `KVConnectorBase_V1` says: a connector that answers True to `request_finished` keeps the blocks of the
request "until the request_id is returned from get_finished()". Each rank returns it once, after it was told
that the request is finished. A load that vLLM has allotted blocks to is over when each rank has told it,
once. vLLM counts the ranks by the name of the request. If one rank tells an end twice, vLLM believes the
request's next transfer before all ranks have done it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from kvsm.errors import PropertyBroken
from kvsm.properties import Property


class Completions:
    """Hears of what began from the scheduler's side of a connector, and of what ended from each rank.

    connector: the scheduler's side. Its calls go through this object from now on.
    """

    def __init__(self, connector: Any, ranks: int) -> None:
        self._kept: dict[str, set[int]] = {}
        """A request whose blocks the connector keeps -> the ranks that have told that it was sent."""
        self._finished: list[set[str]] = [set() for _ in range(ranks)]
        """The requests that each rank was told are finished."""
        self._loads: Counter[str] = Counter()
        """Request -> how many asynchronous loads of it began."""
        self._ends: list[Counter[str]] = [Counter() for _ in range(ranks)]
        self._believed: Counter[str] = Counter()
        """Request -> how many loads vLLM believes to have ended."""
        self._answers_later: set[str] = set()
        """Requests whose last match is loaded asynchronously."""
        for name, heard in (
            ("get_num_new_matched_tokens", self._matched),
            ("update_state_after_alloc", self._allotted),
            ("request_finished", self._request_finished),
            ("request_finished_all_groups", self._request_finished),
            ("update_connector_output", self._believes),
        ):
            if hasattr(connector, name):
                setattr(connector, name, _heard(getattr(connector, name), heard))

    def told(self, rank: int, finished: Iterable[str], output: Any) -> None:
        """A rank ended a step with this `KVConnectorOutput`, or with None. Raises `PropertyBroken`.

        finished: the requests that it was told are finished, in this step.
        """
        self._finished[rank].update(finished)
        if output is None:
            return
        for name in output.finished_sending or ():
            if name not in self._kept:
                raise _broken(
                    f"rank {rank} tells that {name} was sent, and the connector does not keep its blocks"
                )
            if name not in self._finished[rank]:
                raise _broken(
                    f"rank {rank} tells that {name} was sent before it heard that {name} is finished"
                )
            if rank in self._kept[name]:
                raise _broken(f"rank {rank} tells twice that {name} was sent")
            self._kept[name].add(rank)
        for name in output.finished_recving or ():
            self._ends[rank][name] += 1
            if self._ends[rank][name] > self._loads[name]:
                raise _broken(
                    f"rank {rank} tells the end of {self._ends[rank][name]} loads of request {name}, and "
                    f"{self._loads[name]} began"
                )

    def check_at_rest(self) -> None:
        """Nothing that was promised is left to be told. Raises `PropertyBroken`."""
        ranks = len(self._ends)
        for name, told in self._kept.items():
            if len(told) < ranks:
                raise _broken(
                    f"the connector keeps the blocks of request {name}, and {len(told)} of {ranks} ranks "
                    "have told that it was sent",
                )

    def _matched(self, answer: Any, request: Any, *_: Any) -> None:
        tokens, later = answer
        (self._answers_later.add if tokens and later else self._answers_later.discard)(request.request_id)

    def _allotted(self, _: Any, request: Any, _blocks: Any, num_external_tokens: int) -> None:
        name = request.request_id
        if num_external_tokens and name in self._answers_later:
            self._answers_later.remove(name)
            self._loads[name] += 1

    def _request_finished(self, answer: Any, request: Any, *_: Any) -> None:
        if answer[0]:
            self._kept[request.request_id] = set()

    def _believes(self, _: Any, output: Any) -> None:
        for name in output.finished_recving or ():
            self._believed[name] += 1
            if self._believed[name] > self._loads[name]:
                raise _broken(
                    f"vLLM is told the end of {self._believed[name]} loads of request {name}, and "
                    f"{self._loads[name]} began"
                )


def _heard(call: Callable[..., Any], heard: Callable[..., None]) -> Callable[..., Any]:
    @wraps(call)
    def through(*arguments: Any, **named: Any) -> Any:
        answer = call(*arguments, **named)
        heard(answer, *arguments, **named)
        return answer

    return through


def _broken(message: str) -> PropertyBroken:
    return PropertyBroken(Property.ONE_RELEASE_PER_HOLD, message)
