"""Check each answer of any connector with a twin of the request (stored, so served, S19).

A twin has the tokens, salt and adapter of the request, and no history. It is asked right after the request,
with the same number of computed tokens, and gone before the step continues. What the connector can serve at
that moment depends only on the tokens, so both answers must be the same. The twin is also asked behind its
answer: if the connector can serve more from there, then the answer was not the longest. For each kind of KV
cache group, what is read at the later end is then on the host, too.

`None` (ask later) is not compared: only the request itself may have to wait for a copy of its own.

kvsm's connector is not asked like this: `longest_hits.py` compares its answers with its content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA
from vllm.v1.request import Request, RequestStatus

from kvsm.check.vllm_fuzz.host_probe import twin_of
from kvsm.check.vllm_fuzz.shape import BLOCK_TOKENS
from kvsm.check.worlds.check_counts import count_case
from kvsm.errors import PropertyBroken
from kvsm.properties import Property

Ask = Callable[[Request, int], "tuple[int | None, bool]"]


def parts_of(connector: Any) -> list[Any]:
    """The connector, or its children if it is a MultiConnector: the first child with a hit serves it."""
    return list(getattr(connector, "_connectors", None) or [connector])


def is_kvsm(part: Any) -> bool:
    """Whether this connector is kvsm's."""
    return hasattr(part, "_side")


class TwinAsks:
    """Checks the answers of one scheduler's connector, or of its children.

    scheduler: vLLM's scheduler.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._groups = len(scheduler.kv_cache_config.kv_cache_groups)
        self._twins = 0
        self._is_on = False
        for part in parts_of(scheduler.connector):
            if not is_kvsm(part):
                part.get_num_new_matched_tokens = self._watched(part, part.get_num_new_matched_tokens)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A `with` block around a call of the scheduler, in which answers are checked."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def _watched(self, part: Any, ask: Ask) -> Ask:
        def watched(request: Request, num_computed_tokens: int, *more: Any) -> tuple[int | None, bool]:
            answer = ask(request, num_computed_tokens, *more)
            if self._is_on and not more and answer[0] is not None:
                self._compare(part, ask, request, num_computed_tokens, answer[0])
            return answer

        return watched

    def _compare(self, part: Any, ask: Ask, request: Request, computed: int, answer: int) -> None:
        name = request.request_id
        twin = twin_of(f"twin{self._twins}", request)
        self._twins += 1
        part.on_new_request(twin)
        found, _ = ask(twin, computed)
        later = ask(twin, computed + found)[0] if found else 0
        self._end(part, twin)
        count_case(Property.STORED_SO_SERVED, "answers compared with those to a request without a history")
        if found is not None and found != answer:
            raise PropertyBroken(
                Property.STORED_SO_SERVED,
                f"request {name} is served {answer} tokens behind {computed}, and a new request with its "
                f"tokens is served {found}",
            )
        if later and (computed + answer) % BLOCK_TOKENS == 0:
            raise PropertyBroken(
                Property.STORED_SO_SERVED,
                f"request {name} is served {answer} tokens behind {computed}, and {later} more could be "
                "served behind these",
            )

    def _end(self, part: Any, twin: Request) -> None:
        """Abort the twin, as vLLM aborts a waiting request."""
        twin.status = RequestStatus.FINISHED_ABORTED
        if isinstance(part, SupportsHMA):
            part.request_finished_all_groups(twin, tuple([] for _ in range(self._groups)))
        else:
            part.request_finished(twin, [])
        self._scheduler.finished_req_ids.add(twin.request_id)
