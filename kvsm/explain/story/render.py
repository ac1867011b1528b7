"""Render events and ids as text: one line for each event, with large batches abbreviated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvsm.events import Offer, OffloadingEvent, Owners, Parents
from kvsm.explain.story.times import moment
from kvsm.ids import IdArray, Ids, MalformedIds, render_key, to_list

MOST_RANGES = 4
"""Most ranges of ids in one line."""

MOST_NAMES = 4
"""Most requests named in one line."""


def render(event: OffloadingEvent) -> str:
    """Render an event as one line: its kind and its fields, without its number, step and time."""
    values = [(name, getattr(event, name)) for name in event.__struct_fields__[3:]]
    fields = [FIELDS[name](value) for name, value in values if value is not None]
    return " ".join(filter(None, [event.kind, *fields]))


def dated(event: int, step: int, wall_ns: int, began_ns: int, text: str) -> str:
    """Prefix a text about an event with the event's time (`moment`), number and step.

    wall_ns, began_ns: Unix time of the event and of the first event of the log (ns).
    """
    return f"{moment(wall_ns, began_ns)} event {event} step {step}: {text}"


def render_ids(noun: str, ids: Ids | IdArray | Sequence[int]) -> str:
    """`slot 7`, `slots 3..40 (38)`, `slots 1, 3..5, 9 (5)`, `no slots`, `malformed slots`."""
    try:
        numbers = list(ids) if not isinstance(ids, bytes) else to_list(ids)
    except MalformedIds:
        return f"malformed {noun}s"
    if len(numbers) < 2:
        return f"{noun} {numbers[0]}" if numbers else f"no {noun}s"
    ranges: list[str] = []
    start = last = int(numbers[0])
    for number in [*numbers[1:], None]:
        if number == last + 1:
            last += 1
            continue
        ranges.append(str(start) if start == last else f"{start}..{last}")
        if number is None:
            break
        start = last = int(number)
    shown = ", ".join(ranges[:MOST_RANGES]) + (", ..." if len(ranges) > MOST_RANGES else "")
    return f"{noun}s {shown} ({len(numbers)})"


def render_keys(keys: Sequence[bytes]) -> str:
    """`key 00ab`, `keys 3fa90c11d2e4..0001 to 17cd0b9e22f0..0001 (38)`."""
    if len(keys) < 2:
        return f"key {render_key(keys[0])}" if keys else "no keys"
    return f"keys {render_key(keys[0])} to {render_key(keys[-1])} ({len(keys)})"


def render_owners(owners: Owners) -> str:
    """`request r1`, `requests r1, r2`; `no request` if there is no owner."""
    return render_requests(list(dict.fromkeys(name for name, _ in owners)))


def render_requests(names: Sequence[str]) -> str:
    """`request r1`, `requests r1, r2`; `no request` if there is none."""
    if len(names) < 2:
        return f"request {names[0]}" if names else "no request"
    return f"requests {_some_of(names)}"


def render_offers(offers: Sequence[Offer]) -> str:
    """`request r1 settled 3, 2 of 4, 2 blocks`: one number for each KV cache group."""
    texts = [
        f"{name} settled {_numbers(settled)} of {_numbers(offered)} blocks"
        for name, settled, offered in offers
    ]
    return f"request{'s' if len(texts) > 1 else ''} {_some_of(texts, '; ')}"


def _numbers(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def _some_of(names: Sequence[str], between: str = ", ") -> str:
    if len(names) <= MOST_NAMES:
        return between.join(names)
    return f"{between.join(names[:MOST_NAMES])}{between}... ({len(names)})"


def render_parents(parents: Parents) -> str:
    """`behind slots 3..5 (3)`: the slots of the parent blocks; empty if no parent is on the host."""
    slots = [slot for _, slot in parents if slot is not None]
    return f"behind {render_ids('slot', tuple(slots))}" if slots else ""


FIELDS: dict[str, Callable[[Any], str]] = {
    "request": lambda name: f"request {name}",
    "owners": render_owners,
    "offers": render_offers,
    "slots": lambda ids: render_ids("slot", ids),
    "moved": lambda ids: f"moved {render_ids('slot', ids)}" if ids else "",
    "device_blocks": lambda ids: render_ids("device block", ids),
    "parts": lambda parts: render_ids("part", parts) if parts else "",
    "transfer": lambda id: f"transfer {id}",
    "transfers": lambda ids: render_ids("transfer", ids),
    "keys": render_keys,
    "missed": lambda key: f"missed key {render_key(key)}",
    "asked": lambda blocks: f"asked {blocks}",
    "on_device": lambda blocks: f"on device {blocks}",
    "on_host": lambda blocks: f"on host {blocks}",
    "parents": render_parents,
    "source": lambda source: f"from {source}" if source else "",
    "target": lambda target: f"to {target}" if target else "",
    "error": lambda text: f"({text})" if text else "",
    "queued_us": lambda us: "" if us is None else f"queued {us:,} us",
    "copied_us": lambda us: "" if us is None else f"copied {us:,} us",
    "start_us": lambda us: f"start {us:,} us",
    "block_ns": lambda ns: f"block {ns:,} ns",
    "token_ns": lambda ns: f"token {ns:,} ns",
    "blocks": lambda blocks: f"{blocks} blocks",
    "blocks_ahead": lambda blocks: f"behind {blocks} blocks of other loads",
    "tokens": lambda tokens: f"{tokens} tokens",
    "load_us": lambda us: f"load {us:,} us",
    "compute_us": lambda us: f"compute {us:,} us",
    "declined": lambda declined: "declined" if declined else "loaded nevertheless",
    "worker": lambda worker: f"worker {worker}",
    "good": lambda good: "good" if good else "failed",
    "aborted": lambda aborted: "aborted" if aborted else "",
    "resumed": lambda resumed: "resumed" if resumed else "",
    "session": lambda name: f"session {name}" if name else "",
    "lease": lambda name: f"lease {name}" if name else "",
    "outcome": lambda outcome: f"hint {outcome}",
    "leased": lambda blocks: f"leased {blocks}",
    "ttl_ms": lambda ms: f"for {ms / 1000:g} s" if ms else "",
    "why": lambda why: f"({why})" if why else "",
    "hand_over": lambda end: f"hand-over {end}" if end else "",
    "voided": lambda voided: "voided" if voided else "",
    "reason": lambda reason: f"({reason})",
    "until": lambda tick: f"until {tick}",
    "tick": lambda tick: f"tick {tick}",
    "epoch": lambda epoch: f"epoch {epoch}",
    "config": lambda config: (
        f"{config.host_blocks} host blocks, {config.device_blocks} device blocks, "
        f"{config.workers} workers, policy {config.policy}"
    ),
    "machines": lambda digest: f"machines {digest}",
    "schema": lambda version: f"schema {version}",
    "kept": lambda kept: f"{len(kept.ids)} pools that outlive this process",
    "weights": lambda version: f"weights {version}" if version else "",
    "cold": lambda reasons: f"(cold start: {'; '.join(reasons)})" if reasons else "",
    "life": lambda life: f"life {life}",
    "ended": lambda how: f"(before it: {how or 'the log was closed'})",
}
"""The text for each field of an event, the same for all kinds; empty if the value needs no text."""
