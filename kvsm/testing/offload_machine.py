"""Test offload under every order of steps, copies, reports, aborts, preemptions and resets.

    class MyPolicyMachine(OffloadMachine):
        policy = MyPolicy

    TestMyPolicy = MyPolicyMachine.TestCase

A small engine (`kvsm.check.worlds.small_engine`) drives the real scheduler and core, or your replacements. It
models the KV of each token, so it can check what a step reads, what a copy moved and when, and what the host
holds. It shares no code with the ledger. Checked:

- in every step, by the engine: no reuse in flight (S3), one release per hold (S4), no stale data (S14),
  correct bytes (S15), full offload (S16), one token left (S18);
- after every rule: readable slots hold the bytes of their keys on every worker (S2, S15); the ledger is sound
  (`assert_sound`); an engine without requests is told that transfers are in flight (S17);
- a late, repeated or unknown report changes nothing (S5); an impossible call is refused and changes nothing
  (S8);
- a ledger restored from a snapshot follows the same events like the live one, and its policy chooses the same
  blocks (S10);
- at the end no transfer and no hold is left (S4, S9), and the log folds to the live state (S10).

Not checked: copy engines (see `CopyEngineMachine`), and speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from hypothesis import Phase, target
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, consumes, multiple
from hypothesis.strategies import SearchStrategy

from kvsm.check.worlds.check_counts import count_case
from kvsm.check.worlds.small_request import SmallRequest
from kvsm.core.ledger.snapshot import restore, snapshot
from kvsm.core.offloader import Offloader, expect_misuse
from kvsm.core.plan import WorkerReport
from kvsm.core.policies import EvictionPolicy
from kvsm.core.scheduler import CheckedScheduler, OffloadScheduler, SchedulerConfig
from kvsm.core.scheduler.groups import group_suffix
from kvsm.errors import InvalidEvent, PropertyBroken
from kvsm.ids import to_list
from kvsm.properties import Property
from kvsm.testing.assertions import assert_at_rest, assert_replays, assert_sound, differences
from kvsm.testing.block_history import Block, BlockHistory
from kvsm.testing.machine_base import PropertyMachine, initialize, rule
from kvsm.testing.offload_cases import count_ledger, count_log
from kvsm.testing.pool import BlockPool, WatchedPool
from kvsm.testing.recording import event_lines, remember
from kvsm.testing.restored import RestoredCopy
from kvsm.testing.strategies import BLOCK_TOKENS, GROUPS, Arrival, Configuration, arrivals, configurations
from kvsm.testing.traced_engine import TracedEngine
from kvsm.testing.under_test import POLICY

MOST_REQUESTS = 4
"""Most unfinished requests at once."""

STEPS_TO_REST = 100
"""After this many steps of the engine, no request and no transfer may be left."""

_OF_A_POLICY = (
    "__len__",
    "__contains__",
    "admitted",
    "busy",
    "idle",
    "touched",
    "removed",
    "evicted",
    "admits",
    "choose",
    "recall",
    "recalled",
    "refused",
    "snapshot",
    "restore",
)
_OF_A_POOL = (
    "touch",
    "free_blocks",
    "key_of",
    "cached_block",
    "free_queue",
    "get_new_blocks",
    "cache_full_blocks",
    "reset_prefix_cache",
)
_OF_A_CONNECTOR = (
    "bind_gpu_block_pool",
    "add_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "reset_cache",
    "has_pending_work",
)
"""The methods of a policy, a pool and a connector that the core or the small engine calls."""

Share = tuple[int, int]
"""The part of a transfer that one worker copies: (transfer, worker)."""

_ACCEPTED = st.sampled_from([None, None, None, 4, 8, 0])
_MOSTLY = st.sampled_from([True, True, True, True, False])


class OffloadMachine(PropertyMachine):
    """Tests the offload core with your eviction policy, connector or block pool.

    Needs: one of these three, from a subclass.

    - `policy = MyPolicy`, a class at the top level of its module, with the methods of
      `kvsm.core.policies.eviction_policy`. It decides by its calls alone: it may not read a clock.
    - `make_scheduler(offloader, config)` returns your connector: any object with the methods of
      `OffloadScheduler`. It needs no memory and no workers: the small engine has both. If
      `self.configuration.references` is true, it gets the engine's pool by `bind_gpu_block_pool`: a fake pool
      with `touch`, `free_blocks`, `key_of`, `cached_block` and `free_queue`.
    - `make_pool(blocks)` returns your pool (`kvsm.testing.BlockPool`). Blocks are numbers; it has no bytes.

    `configurations` says which engines are tried.

    Attributes in `make_*`: `self.configuration`; `self.engine`, the small engine; `self.core`, its core.
    """

    policy: str | type[EvictionPolicy] = "lru"
    """The eviction policy: a name, `package.module:Class`, or a class at the top level of its module."""

    configurations: SearchStrategy[Configuration] = configurations()
    """The engines to try; for example `configurations(workers=2, store=StoreMode.LAZY)`."""

    requests: Bundle[SmallRequest] = Bundle("requests")
    copies: Bundle[Share] = Bundle("copies")
    """Copies submitted to the workers; some are done."""
    reports: Bundle[WorkerReport] = Bundle("reports")
    """Reports of the workers; some were delivered to the scheduler."""

    # For subclasses to override.

    def make_scheduler(self, offloader: Offloader, config: SchedulerConfig) -> Any:
        """Make your connector: any object with the methods of `OffloadScheduler`."""
        return CheckedScheduler(offloader, config)

    def make_pool(self, blocks: int) -> BlockPool | None:  # noqa: ARG002
        """Make your pool of `blocks` device blocks; None: the small engine uses its own."""
        return None

    # Rules.

    @initialize(
        target=requests,
        configuration=st.runner().flatmap(lambda machine: machine.configurations),
        first=arrivals(),
    )
    def open(self, configuration: Configuration, first: Arrival) -> MultipleResults[SmallRequest]:
        """Make the engine, and let a first request arrive."""
        self.configuration = configuration
        if isinstance(self.policy, str):
            self.engine = engine = self._make_engine(configuration)
        else:
            self.under_test.is_about(POLICY, self.policy)
            with self.under_test.repeatable():
                self.engine = engine = self._make_engine(configuration)
            self.under_test.watch(engine.core.ledger.policy, POLICY, _OF_A_POLICY, self.policy)
        self.core = engine.core
        expect_misuse(self.core)
        remember(engine.log)
        self._restored = RestoredCopy(self.core.ledger, engine.log)
        self.started = True
        self._chunk, self._peak, self._sound_at = configuration.blocks_per_chunk, 0, 0
        self._put_in_the_users_parts()
        if configuration.references:
            engine.scheduler.bind_gpu_block_pool(engine.pool)
        return self._arrive(first)

    def _put_in_the_users_parts(self) -> None:
        engine, watch = self.engine, self.under_test.watch
        pool = self.make_pool(len(engine.device))
        if pool is not None:
            watch(pool, "block pool", _OF_A_POOL, self.make_pool)
            engine.pool = WatchedPool(pool, len(engine.device))
        scheduler = self.make_scheduler(engine.core, engine.config)
        if type(self).make_scheduler is not OffloadMachine.make_scheduler:
            watch(scheduler, "connector", _OF_A_CONNECTOR, self.make_scheduler)
        engine.scheduler = cast(OffloadScheduler, scheduler)

    @rule(target=requests, arrival=arrivals())
    def arrive(self, arrival: Arrival) -> MultipleResults[SmallRequest]:
        """Let a request arrive."""
        return self._arrive(arrival)

    @rule(target=requests, before=requests, further=st.integers(1, 5))
    def take_another_turn(self, before: SmallRequest, further: int) -> MultipleResults[SmallRequest]:
        """Continue a conversation: the prompt is all tokens of an earlier request, and `further` more."""
        said = before.all_token_ids[: 4 * BLOCK_TOKENS]
        return self._ask([*said, *range(50, 50 + further)], further)

    def _arrive(self, arrival: Arrival) -> MultipleResults[SmallRequest]:
        return self._ask(arrival.tokens(), arrival.outputs, arrival.parameters, arrival.skip_reading)

    def _ask(self, tokens: list[int], *wishes: Any) -> MultipleResults[SmallRequest]:
        engine = self.engine
        if len(engine.waiting) + len(engine.running) >= MOST_REQUESTS:
            return multiple()
        return multiple(engine.arrive(SmallRequest(f"r{len(engine.requests) + 1}", tokens, *wishes)))

    @rule(target=copies, accept=_ACCEPTED, admit=_MOSTLY, times=st.sampled_from([1, 1, 3]))
    def step(self, accept: int | None, admit: bool, times: int) -> MultipleResults[Share]:
        """Run steps of the engine.

        accept: most matched tokens that the engine accepts; None: all.
        admit: whether waiting requests are admitted.
        times: number of steps.
        """
        shares: list[Share] = []
        for _ in range(times):
            plan = self.engine.step(accept=accept, admit=admit)
            self._peak = max(self._peak, len(self.engine.copies))
            self.check()
            shares += [
                (job.transfer, worker)
                for job in (*plan.loads, *plan.stores)
                for worker in range(self.configuration.workers)
            ]
        return multiple(*shares)

    @rule()
    def let_all_end(self) -> None:
        """Run until no request and no transfer is left. Often the host pool is full then: a good start."""
        engine = self.engine
        for _ in range(STEPS_TO_REST):
            engine.carry_out_all()
            self.hand_on()
            self.check()
            if not engine.unfinished() and not engine.scheduler.has_pending_work():
                self._restored = RestoredCopy(self.core.ledger, engine.log)
                return
            engine.step()
            self.check()
        waiting, running = [request.request_id for request in engine.waiting], list(engine.running)
        message = f"after {STEPS_TO_REST} steps requests {waiting} wait, {running} run, and transfers"
        raise PropertyBroken(
            Property.PROGRESS, f"{message} {sorted(self.core.ledger.transfers)} are under way"
        )

    @rule(target=reports, copy=consumes(copies), good=_MOSTLY)
    def carry_out(self, copy: Share, good: bool) -> MultipleResults[WorkerReport]:
        """Let a worker copy its part, well or badly, and report. The report is not delivered yet."""
        transfer, worker = copy
        before = len(self.engine.reports)
        self.engine.carry_out(transfer, worker, good=good)
        return multiple(*self.engine.reports[before:])

    @rule()
    def carry_out_all(self) -> None:
        """Let all workers carry out all remaining copies."""
        self.engine.carry_out_all()

    @rule()
    def hand_on(self) -> None:
        """Deliver all reports to the scheduler."""
        self.engine.hand_on()

    @rule(report=reports)
    def report_again(self, report: WorkerReport) -> None:
        """Repeat a report. It must change nothing."""
        self.engine.reports.append(report)
        self.engine.hand_on()

    @rule(request=requests, aborted=st.booleans())
    def finish(self, request: SmallRequest, aborted: bool) -> None:
        """Finish a request. This is legal at any time, also if it has finished already."""
        self.engine.finish(request, aborted=aborted)

    @rule(place=st.integers(0, MOST_REQUESTS - 1))
    def preempt(self, place: int) -> None:
        """Preempt a running request. place: its index among the running requests."""
        running = list(self.engine.running.values())
        if place < len(running):
            self.engine.preempt(running[place])

    @rule(really=st.sampled_from([False, False, False, True]))
    def reset(self, really: bool) -> None:
        """Reset the cache, now and then. After it no key may match."""
        if really:
            self.engine.reset()
            if self.core.ledger.index:
                raise PropertyBroken(
                    Property.NO_STALE_DATA, f"{len(self.core.ledger.index)} keys match after a reset"
                )

    @rule(block=st.sampled_from([-1, 10_000]))
    def call_wrongly(self, block: int) -> None:
        """Report a transfer that never existed, and offer a device block that does not exist."""
        before, engine = snapshot(self.core.ledger), self.engine
        results = engine.scheduler.update_connector_output([WorkerReport(10_000, block, True)])
        self._must_be_unchanged(before, Property.STALE_REPORTS, "a report from nowhere")
        count_case(Property.STALE_REPORTS, "reports of unknown transfers")
        engine.take_results(results)
        before = snapshot(self.core.ledger)
        try:
            self.core.prepare_store("nobody", [b"nothing"], [block] * self._chunk)
        except InvalidEvent:
            self._must_be_unchanged(before, Property.LEGAL_CALLS, f"an offer of device block {block}")
            count_case(Property.LEGAL_CALLS, "impossible offers that must be refused")
            return
        raise PropertyBroken(Property.LEGAL_CALLS, f"device block {block} is not there, and was stored")

    # What must hold.

    def check(self) -> None:
        """Check what must hold after every rule."""
        ledger = self.core.ledger
        # Only an event changes a ledger; copies change the bytes without one.
        if ledger.seq != self._sound_at:
            assert_sound(ledger)
            self._restored.check()
            count_ledger(ledger)
            self._sound_at = ledger.seq
        self._check_told_of_pending_work()
        contents = self._contents()
        for key, slot in ledger.index.items():
            if not ledger.readable(slot):
                continue
            count_case(Property.PUBLISH_AFTER_COMMIT, "readable slots compared with their keys")
            for part, cells in enumerate(contents[key]):
                for worker, held in enumerate(self.engine.host[slot * self._chunk + part]):
                    if held != cells:
                        message = f"slot {slot} can be read, and holds other bytes on worker {worker}"
                        message += f" than key {key.hex()[:12]} has"
                        raise PropertyBroken(
                            Property.PUBLISH_AFTER_COMMIT,
                            message + self.engine.history.blame(Block("slot", slot)),
                        )

    def _contents(self) -> dict[bytes, list[list[bytes]]]:
        """Key -> the expected cells of each device block of its chunk, for all requests that ever arrived."""
        contents = {}
        for request in self.engine.requests.values():
            for index, group in enumerate(self.engine.groups):
                size, tokens = group.block_tokens, group.block_tokens * self._chunk
                for place in range(len(request.cells) // tokens):
                    cells = request.cells_of(place, tokens)
                    parts = [cells[first : first + size] for first in range(0, tokens, size)]
                    contents[cells[-1] + group_suffix(index)] = parts
        return contents

    def _check_told_of_pending_work(self) -> None:
        live, engine = self.core.ledger.transfers, self.engine
        if live and not engine.unfinished():
            count_case(Property.LAST_STEP, "engines with copies and without requests")
        if live and not engine.unfinished() and not engine.scheduler.has_pending_work():
            message = f"transfers {sorted(live)} are under way, and the engine is told that none is"
            raise PropertyBroken(Property.LAST_STEP, message)

    def _must_be_unchanged(self, before: bytes, property: Property, call: str) -> None:
        """Check that the ledger still equals the snapshot `before`, except for its last event and step."""
        differs = differences(restore(before), self.core.ledger)
        if changed := [text for text in differs if not text.startswith(("seq ", "step "))]:
            raise PropertyBroken(property, f"{call} changed the state: was {'; '.join(changed)}")

    # The end.

    def wind_down(self) -> None:
        """Bring everything to rest, and check that nothing is left."""
        if Phase.target in type(self).TestCase.settings.phases:
            target(float(self._peak), label="peak of copies in flight")
        engine, ledger = self.engine, self.core.ledger
        self.let_all_end()
        assert_at_rest(ledger)
        count_log(engine.log)
        # A device block that a lost copy may still write is never released.
        kept = set(to_list(ledger.leases.view.nonzero()[0]))
        held = [
            block for block, holders in enumerate(engine.pool.references) if holders and block not in kept
        ]
        if held or engine.sending:
            raise PropertyBroken(
                Property.ONE_RELEASE_PER_HOLD,
                f"at rest device blocks {held} are held, and {[*engine.sending]} wait",
            )
        assert_replays(engine.log, ledger)
        engine.notes.check(self.core.config, engine.log)
        if isinstance(engine.pool, WatchedPool):
            engine.pool.try_reset()

    def trace(self) -> Iterable[str]:
        """The events so far."""
        return event_lines(self.engine.log)

    def _make_engine(self, chosen: Configuration) -> TracedEngine:
        groups = GROUPS[chosen.groups]
        return TracedEngine(
            BlockHistory(self.under_test),
            groups,
            chosen.device_blocks + 8 * (len(groups) - 1),
            chosen.host_blocks,
            chosen.workers,
            references=chosen.references,
            prefix_cache=chosen.prefix_cache,
            asynchronous=chosen.asynchronous,
            drafts=chosen.drafts,
            chunk_tokens=12,
            store=chosen.store,
            last_step=chosen.last_step,
            lazy_target_blocks=6,
            core={
                "policy": policy_name(self.policy),
                "blocks_per_chunk": chosen.blocks_per_chunk,
                "store_threshold": chosen.store_threshold,
                "defer_ticks": chosen.defer_ticks,
                "transfer_ticks": chosen.transfer_ticks,
                "max_live_transfers": 8,
            },
        )


def policy_name(policy: str | type[EvictionPolicy]) -> str:
    """The name of a policy for `OffloadConfig.policy`: a log must name the policy that its fold needs."""
    return policy if isinstance(policy, str) else f"{policy.__module__}:{policy.__qualname__}"
