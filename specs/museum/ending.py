"""The ends of transfers and of requests: bugs in what they notify, and when."""

from __future__ import annotations

from kvsm.properties import Property
from museum.exhibit import Edit, Exhibit

ENDING = (
    Exhibit(
        id="B20",
        source="vllm#49635",
        title="a store outlives the record that its end needs",
        story="The finish of a request deleted its record. Its last store was still in flight, and looked the"
        " record up when it ended.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                "kvsm.core.ledger.transfers:close",
                "if transfer.direction is LOAD:",
                """
                for name, _ in transfer.owners:
                    requests.named(ledger, seq, name)
                if transfer.direction is LOAD:
                """,
            ),
        ),
        stop="has not arrived, or was released",
    ),
    Exhibit(
        id="B21",
        source="vllm#42611",
        title="no request is left, and the last transfers never end",
        story="An engine steps only while it has requests. The last request finished with its stores in"
        " flight. Nothing stepped again, so the reports were never taken, and the blocks stayed held.",
        breaks=Property.LAST_STEP,
        edits=(
            Edit(
                "kvsm.core.scheduler.scheduler:OffloadScheduler.has_pending_work",
                "return bool(transfers or self.state.ended_loads or self.device_blocks.has_sent())",
                "return bool(self.state.tracked)",
            ),
        ),
    ),
    Exhibit(
        id="B26",
        source="vllm#57453",
        title="a removal takes the payload of a later store",
        story="A batch of KV events held the removal of a key and then a store of the same key. The removal"
        " deleted what was known of the key's blocks. The stored event left without tokens, so routers"
        " could not index it.",
        breaks=Property.EVENTS_ARE_STATE,
        edits=(
            Edit(
                "kvsm.core.kv_events:Publisher.take_kv_events",
                """
                for change in changes:
                    if isinstance(change, RemovedKeys):
                """,
                """
                gone: set[bytes] = set()
                for change in changes:
                    if isinstance(change, RemovedKeys):
                        gone.update(change.keys)
                """,
            ),
            Edit(
                "kvsm.core.kv_events:Publisher.take_kv_events",
                "taken += _stored_events(change, self.medium)",
                """
                kept = [None if key in gone else one for key, one in zip(change.keys, change.described)]
                taken += _stored_events(change._replace(described=kept), self.medium)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B28",
        source="dynamo#15079",
        title="a transfer that ended in an error is marked complete",
        story="A transfer ended in an error and was marked complete like any other. The request read a cache"
        " that had never been filled, and the client got a wrong answer with status 200.",
        breaks=Property.FAILURE_IS_NOT_SUCCESS,
        edits=(
            Edit(
                "kvsm.core.offloader.offloader:Offloader.report_all",
                "ended = self.report(*report.arguments()).ended",
                "ended = self.report(report.transfer, report.worker, True, report.error).ended",
            ),
        ),
    ),
    Exhibit(
        id="B30",
        source="dynamo PR 6681",
        title="abort and stop finish a request twice",
        story="A request reached its stop condition in the same step in which its client aborted it. Both"
        " paths finished the request, and the second one found its books already closed.",
        breaks=Property.LEGAL_CALLS,
        edits=(
            Edit(
                "kvsm.core.offloader.offloader:Offloader.finish",
                """
                if entry is not None and entry.word & STATE_MASK != FINISHED:
                    self.emit(ev.RequestFinished, request, aborted, hand_over)
                """,
                "self.emit(ev.RequestFinished, request, aborted, hand_over)",
            ),
        ),
        stop="has not arrived, or was released",
    ),
    Exhibit(
        id="B34",
        source="LMCache#4967",
        title="time makes an unfinished object readable",
        story="A write lease expired by the clock. From then on the object counted as written, and readers"
        " found unfinished bytes.",
        breaks=Property.PUBLISH_AFTER_COMMIT,
        edits=(
            Edit(
                "kvsm.core.offloader.transferring:lose",
                """
                core.emit(ev.TransferLost, transfer)
                return _ended(core, entry)
                """,
                "return [report(core, transfer, one, True).ended for one in range(core.config.workers)][-1]",
            ),
        ),
    ),
    Exhibit(
        id="B38",
        source="FlexKV 098aee6",
        title="a node is ready before its data is there",
        story="A node of the prefix tree was marked ready when its copy was queued. A match before the end of"
        " the copy loaded the previous content of the slot.",
        breaks=Property.PUBLISH_AFTER_COMMIT,
        edits=(
            Edit(
                "kvsm.core.ledger.transfers:transfers_submitted",
                "ledger.blocks.advance(transfer.slots, block_machine.SUBMIT_STORE, seq)",
                """
                ledger.blocks.advance(transfer.slots, block_machine.SUBMIT_STORE, seq)
                end_copies(ledger, transfer, good=True, seq=seq)
                """,
            ),
        ),
    ),
    Exhibit(
        id="B39",
        source="Mooncake#3030",
        title="the late end of a first put completes the second one",
        story="A put of a key was given up, and the key was put again. The end of the first put arrived late."
        " Because it named only the key, it completed the second put while the bytes were still on their"
        " way.",
        breaks=Property.STALE_REPORTS,
        edits=(
            Edit(
                "kvsm.core.offloader.transferring:submit",
                "if transfers:",
                """
                if transfers:
                    live = core.ledger.transfers
                    sent = {one: live[one].keys for one in transfers if one in live}
                    core._sent = {**getattr(core, "_sent", {}), **sent}
                """,
            ),
            Edit(
                "kvsm.core.offloader.transferring:_report",
                "reason = _why_reject(core, transfer, worker, direction)",
                """
                keys, live = getattr(core, "_sent", {}).get(transfer), core.ledger.transfers
                if keys and transfer not in live:
                    transfer = next((one.id for one in live.values() if one.keys == keys), transfer)
                reason = _why_reject(core, transfer, worker, direction)
                """,
            ),
        ),
    ),
)
