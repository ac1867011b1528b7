"""A manager as a black box: the calls of vLLM's connector are letters, and the observed answers are text.

A letter is a call by the scheduler side of OffloadingConnector, of vLLM 0.33:

- `look up K`: a waiting request looks up the key K.
- `load K`: another request looks up K, and begins to load it after a hit.
- `store K`: a request offers K.
- `end step`: `on_schedule_end`. It is also called implicitly where vLLM calls it: between stores and the next
  lookups, and before a copy ends or the cache is reset.
- `store K good`, `store K bad`, `load K done`: the oldest such copy has ended.
- `reset`: all copies in flight are dropped. vLLM completes none of them.
- `old copies end`: all copies that resets have dropped have ended (`on_reset_flushed`).

A letter that vLLM could not call in the present state is answered by `NOT_ALLOWED`, without a call of the
manager. Neither is a load allowed while `most_loads` of its key are in flight: otherwise the automaton would
be infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aalpy import SUL
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key

NOT_ALLOWED = "not allowed"


def letters(keys: Iterable[str]) -> list[str]:
    """The alphabet for these keys."""
    forms = ("look up {}", "store {}", "store {} good", "store {} bad", "load {}", "load {} done")
    return [form.format(key) for key in keys for form in forms] + ["end step", "reset", "old copies end"]


class Connector(SUL):
    """The scheduler side of a connector, for aalpy: `step(letter)` returns the manager's observable output.

    make_manager: creates a new manager, for each word.
    """

    def __init__(self, make_manager: Callable[[], Any], keys: Sequence[str], most_loads: int) -> None:
        super().__init__()
        self._make, self._most_loads = make_manager, most_loads
        self._keys = {key: make_offload_key(key.encode(), 0) for key in keys}
        self._names = {key: name for name, key in self._keys.items()}

    def pre(self) -> None:
        """Begin a word with a new manager."""
        self.manager = self._make()
        self._requests = 0
        self._waiting = {name: self._arrive() for name in self._keys}
        self._stores: dict[str, Any] = {}
        self._loads: dict[str, list[Any]] = {name: [] for name in self._keys}
        self._dropped = 0
        self._stores_offered = False

    def post(self) -> None:
        """End a word."""
        self.manager.shutdown()

    def step(self, letter: str) -> str:
        """Make the call of the letter. Returns its answer and the KV events that it has caused."""
        answer = self._call(letter)
        if answer == NOT_ALLOWED:
            return answer
        return ", ".join([answer, *map(self._event_text, self.manager.take_events())])

    def _call(self, letter: str) -> str:
        match letter.split():
            case ["look", "up", name]:
                self._begin_lookups()
                return self._look_up(name, self._waiting[name])
            case ["load", name]:
                return self._load(name)
            case ["store", name]:
                return self._store(name)
            case ["store", name, end]:
                return self._end_store(name, good=end == "good")
            case ["load", name, "done"]:
                return self._end_load(name)
            case ["end", "step"]:
                self._end_step()
                return "ends"
            case ["reset"]:
                return self._reset()
        return self._old_copies_end()

    def _event_text(self, event: Any) -> str:
        what = "forget" if event.metadata_only else "removed" if event.removed else "stored"
        return f"event: {what} {' '.join(self._names[key] for key in event.keys)}"

    # Requests and steps.

    def _arrive(self) -> Any:
        self._requests += 1
        request = ReqContext(f"r{self._requests}")
        for place, key in enumerate(self._keys.values()):
            request.set_offload_key_position(key, 16 * (place + 1))
        self.manager.on_new_request(request)
        return request

    def _begin_lookups(self) -> None:
        if self._stores_offered:
            self._end_step()

    def _end_step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], ()))
        self._stores_offered = False

    # Copies.

    def _look_up(self, name: str, request: Any) -> str:
        answer: LookupResult = self.manager.lookup(self._keys[name], request)
        return {LookupResult.HIT: "hit", LookupResult.MISS: "miss", LookupResult.HIT_PENDING: "wait"}[answer]

    def _load(self, name: str) -> str:
        if len(self._loads[name]) == self._most_loads:
            return NOT_ALLOWED
        self._begin_lookups()
        request = self._arrive()
        answer = self._look_up(name, request)
        if answer != "hit":
            self.manager.on_request_finished(request)
            return answer
        self.manager.prepare_load([self._keys[name]], request)
        self._loads[name].append(request)
        return "loads"

    def _end_load(self, name: str) -> str:
        if not self._loads[name]:
            return NOT_ALLOWED
        self._end_step()
        request = self._loads[name].pop(0)
        self.manager.complete_load({self._keys[name]}, request)
        self.manager.on_request_finished(request)
        return "ends"

    def _store(self, name: str) -> str:
        self._stores_offered = True
        request = self._arrive()
        output = self.manager.prepare_store([self._keys[name]], request)
        if output is not None and output.keys_to_store:
            self._stores[name] = request
            return " ".join(["stores", *(f"and evicts {self._names[key]}" for key in output.evicted_keys)])
        self.manager.on_request_finished(request)
        return "no room" if output is None else "is there"

    def _end_store(self, name: str, good: bool) -> str:
        if name not in self._stores:
            return NOT_ALLOWED
        self._end_step()
        request = self._stores.pop(name)
        self.manager.complete_store({self._keys[name]}, request, **({} if good else {"success": False}))
        self.manager.on_request_finished(request)
        return "ends"

    # Resets.

    def _reset(self) -> str:
        self._end_step()
        self.manager.reset_cache()
        self._dropped += len(self._stores) + sum(map(len, self._loads.values()))
        self._stores.clear()
        for requests in self._loads.values():
            requests.clear()
        if not self._dropped:
            self.manager.on_reset_flushed()
        return "ends"

    def _old_copies_end(self) -> str:
        if not self._dropped:
            return NOT_ALLOWED
        self._end_step()
        self._dropped = 0
        self.manager.on_reset_flushed()
        return "ends"
