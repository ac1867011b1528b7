-------------------------------- MODULE Offload -----------------------------
\* The offload protocol. Within these bounds: 2 keys, 2 device blocks, 2 slots, 2 workers; at most 2
\* live transfers, 1 matches, 2 device blocks with queued kernels; failures, resets, losses.
\*
\* Device blocks hold keys that the engine computed or loaded; slots of the host pool hold copies of
\* them. Kernels and copies run on each worker at its own pace, some time after they were queued. A
\* copy starts, reads, writes and is reported, and anything may happen in between. BlockStep,
\* TransferStep and LeaseStep are the tables of a slot's block, a transfer and a lease. A step that no
\* row matches gives an ILLEGAL word, which S8 forbids.
\*
\* An action happens at once. After it, Forgetting resets what nothing can read any more, so that
\* states do not differ by it.
\*
\* Not modelled:
\* - Requests: a match holds one slot, and a device block does not say which request holds it.
\* - Transfers of several blocks: each copies one block.
\* - A second kernel for a block before the first one ran: a stream runs them in order.
\* - Names of transfers and workers in reports: the ledger refuses late and doubled reports.
\* - The device's own prefix cache, and data that a load of an older epoch left on the device.
\*
\* Generated from kvsm's declaration and tables (specs/protocol/texts.py); do not edit.

EXTENDS Naturals, FiniteSets, TLC

CONSTANTS DeviceBlocks, Slots, Workers, Keys  \* Members are interchangeable.
CONSTANT None  \* No member of any of them.

Symmetry ==
    Permutations(DeviceBlocks)
    \cup Permutations(Slots)
    \cup Permutations(Workers)
    \cup Permutations(Keys)

RECURSIVE SumOver(_, _)
SumOver(f, set) ==
    IF set = {} THEN 0
    ELSE LET one == CHOOSE x \in set : TRUE IN f[one] + SumOver(f, set \ {one})
Sum(f) == SumOver(f, DOMAIN f)

-----------------------------------------------------------------------------
\* The lease: its words, and the word after a trigger.
LeaseWords == [
    state : {"NONE", "READING", "WRITING", "RETIRED", "ILLEGAL"},
    readers : 0..1]
LeaseIllegal == [state |-> "ILLEGAL", readers |-> 0]
LeaseStep(trigger, word) ==
    CASE \* a store is planned
         trigger = "BEGIN_READ" /\ word.state \in {"NONE", "READING"} /\ word.readers = 0
             -> [word EXCEPT !.state = "READING", !.readers = @ + 1]
      [] \* the last store ended
         trigger = "END_READ" /\ word.state = "READING" /\ word.readers = 1
             -> [word EXCEPT !.state = "NONE", !.readers = @ - 1]
      [] \* a load is planned
         trigger = "BEGIN_WRITE" /\ word.state = "NONE"
             -> [word EXCEPT !.state = "WRITING"]
      [] \* the load ended
         trigger = "END_WRITE" /\ word.state = "WRITING"
             -> [word EXCEPT !.state = "NONE"]
      [] \* a worker will never report: it may still write
         trigger = "LOSE" /\ word.state = "WRITING"
             -> [word EXCEPT !.state = "RETIRED"]
      [] OTHER -> LeaseIllegal

-----------------------------------------------------------------------------
\* The transfer: its words, and the word after a trigger.
TransferWords == [
    state : {"PLANNED", "SUBMITTED", "ABANDONED", "ILLEGAL"},
    pending : 0..2,
    failed : 0..2]
TransferIllegal == [state |-> "ILLEGAL", pending |-> 0, failed |-> 0]
TransferStep(trigger, word) ==
    CASE \* the plan left for the workers
         trigger = "SUBMIT" /\ word.state = "PLANNED"
             -> [word EXCEPT !.state = "SUBMITTED"]
      [] \* the plan never left the scheduler
         trigger = "CANCEL" /\ word.state = "PLANNED"
             -> [word EXCEPT !.state = "CANCELLED"]
      [] \* others to come
         trigger = "REPORT_GOOD" /\ word.state = "SUBMITTED" /\ word.pending = 2
             -> [word EXCEPT !.state = "SUBMITTED", !.pending = @ - 1]
      [] \* others to come
         trigger = "REPORT_BAD" /\ word.state = "SUBMITTED" /\ word.pending = 2 /\ word.failed \in 0..1
             -> [word EXCEPT !.state = "SUBMITTED", !.pending = @ - 1, !.failed = @ + 1]
      [] \* the last, and none failed
         trigger = "REPORT_GOOD" /\ word.state = "SUBMITTED" /\ word.pending = 1 /\ word.failed = 0
             -> [word EXCEPT !.state = "COMPLETED", !.pending = @ - 1]
      [] \* the last, but one failed before
         trigger = "REPORT_GOOD" /\ word.state = "SUBMITTED" /\ word.pending = 1 /\ word.failed \in 1..2
             -> [word EXCEPT !.state = "FAILED", !.pending = @ - 1]
      [] \* the last, and it failed
         trigger = "REPORT_BAD" /\ word.state = "SUBMITTED" /\ word.pending = 1 /\ word.failed \in 0..1
             -> [word EXCEPT !.state = "FAILED", !.pending = @ - 1, !.failed = @ + 1]
      [] \* a reset
         trigger = "ABANDON" /\ word.state = "SUBMITTED"
             -> [word EXCEPT !.state = "ABANDONED"]
      [] \* others to come
         trigger = "REPORT_GOOD" /\ word.state = "ABANDONED" /\ word.pending = 2
             -> [word EXCEPT !.state = "ABANDONED", !.pending = @ - 1]
      [] \* the last worker let go
         trigger = "REPORT_GOOD" /\ word.state = "ABANDONED" /\ word.pending = 1
             -> [word EXCEPT !.state = "DRAINED", !.pending = @ - 1]
      [] \* others to come
         trigger = "REPORT_BAD" /\ word.state = "ABANDONED" /\ word.pending = 2
             -> [word EXCEPT !.state = "ABANDONED", !.pending = @ - 1]
      [] \* the last worker let go
         trigger = "REPORT_BAD" /\ word.state = "ABANDONED" /\ word.pending = 1
             -> [word EXCEPT !.state = "DRAINED", !.pending = @ - 1]
      [] \* a second reset
         trigger = "ABANDON" /\ word.state = "ABANDONED"
             -> word
      [] \* a worker will never report
         trigger = "LOSE" /\ word.state \in {"SUBMITTED", "ABANDONED"}
             -> [word EXCEPT !.state = "LOST"]
      [] OTHER -> TransferIllegal

-----------------------------------------------------------------------------
\* The block: its words, and the word after a trigger.
BlockWords == [
    state : {"FREE", "ALLOCATED", "STORING", "STORED", "LOADING", "QUARANTINED", "RETIRED", "ILLEGAL"},
    copies : 0..2,
    pins : 0..1]
BlockIllegal == [state |-> "ILLEGAL", copies |-> 0, pins |-> 0]
BlockStep(trigger, word) ==
    CASE \* a store is planned
         trigger = "ALLOCATE" /\ word.state \in {"FREE", "EVICTED"}
             -> [word EXCEPT !.state = "ALLOCATED"]
      [] \* the plan left for the workers
         trigger = "SUBMIT_STORE" /\ word.state = "ALLOCATED" /\ word.copies \in 0..1
             -> [word EXCEPT !.state = "STORING", !.copies = @ + 1]
      [] \* the plan never left the scheduler
         trigger = "CANCEL" /\ word.state = "ALLOCATED"
             -> [word EXCEPT !.state = "EVICTED"]
      [] \* every worker stored its shard
         trigger = "END_COPY_GOOD" /\ word.state = "STORING" /\ word.copies = 1
             -> [word EXCEPT !.state = "STORED", !.copies = @ - 1]
      [] \* some worker failed
         trigger = "END_COPY_BAD" /\ word.state = "STORING" /\ word.copies = 1
             -> [word EXCEPT !.state = "EVICTED", !.copies = @ - 1]
      [] \* a match counts on it
         trigger = "PIN" /\ word.state \in {"STORED", "LOADING"} /\ word.pins = 0
             -> [word EXCEPT !.pins = @ + 1]
      [] \* the match was released
         trigger = "UNPIN" /\ word.state \in {"STORED", "LOADING"} /\ word.pins = 1
             -> [word EXCEPT !.pins = @ - 1]
      [] \* used without a load: the device had it too
         trigger = "TOUCH" /\ word.state \in {"STORED", "LOADING"}
             -> word
      [] \* the pin becomes a reader
         trigger = "BEGIN_LOAD" /\ word.state \in {"STORED", "LOADING"} /\ word.copies \in 0..1 /\ word.pins = 1
             -> [word EXCEPT !.state = "LOADING", !.copies = @ + 1, !.pins = @ - 1]
      [] \* its slot is wanted
         trigger = "EVICT" /\ word.state = "STORED" /\ word.pins = 0
             -> [word EXCEPT !.state = "EVICTED"]
      [] \* nothing readable to void
         trigger = "INVALIDATE" /\ word.state \in {"FREE", "EVICTED", "QUARANTINED", "RETIRED"}
             -> word
      [] \* no copy touches it
         trigger = "INVALIDATE" /\ word.state \in {"ALLOCATED", "STORED"}
             -> [word EXCEPT !.state = "EVICTED", !.pins = 0]
      [] \* a copy still touches it
         trigger = "INVALIDATE" /\ word.state \in {"STORING", "LOADING"}
             -> [word EXCEPT !.state = "QUARANTINED", !.pins = 0]
      [] \* a worker will never report
         trigger = "LOSE" /\ word.state \in {"STORING", "LOADING", "QUARANTINED"}
             -> [word EXCEPT !.state = "RETIRED", !.copies = 0, !.pins = 0]
      [] \* already given up
         trigger = "LOSE" /\ word.state = "RETIRED"
             -> word
      [] \* other loads still read it
         trigger = "END_COPY_GOOD" /\ word.state = "LOADING" /\ word.copies = 2
             -> [word EXCEPT !.state = "LOADING", !.copies = @ - 1]
      [] \* the last reader left
         trigger = "END_COPY_GOOD" /\ word.state = "LOADING" /\ word.copies = 1
             -> [word EXCEPT !.state = "STORED", !.copies = @ - 1]
      [] \* other copies go on
         trigger = "END_COPY_GOOD" /\ word.state = "QUARANTINED" /\ word.copies = 2
             -> [word EXCEPT !.state = "QUARANTINED", !.copies = @ - 1]
      [] \* the last copy ended
         trigger = "END_COPY_GOOD" /\ word.state = "QUARANTINED" /\ word.copies = 1
             -> [word EXCEPT !.state = "EVICTED", !.copies = @ - 1]
      [] \* another copy of a lost slot ended
         trigger = "END_COPY_GOOD" /\ word.state = "RETIRED"
             -> word
      [] \* other loads still read it
         trigger = "END_COPY_BAD" /\ word.state = "LOADING" /\ word.copies = 2
             -> [word EXCEPT !.state = "LOADING", !.copies = @ - 1]
      [] \* the last reader left
         trigger = "END_COPY_BAD" /\ word.state = "LOADING" /\ word.copies = 1
             -> [word EXCEPT !.state = "STORED", !.copies = @ - 1]
      [] \* other copies go on
         trigger = "END_COPY_BAD" /\ word.state = "QUARANTINED" /\ word.copies = 2
             -> [word EXCEPT !.state = "QUARANTINED", !.copies = @ - 1]
      [] \* the last copy ended
         trigger = "END_COPY_BAD" /\ word.state = "QUARANTINED" /\ word.copies = 1
             -> [word EXCEPT !.state = "EVICTED", !.copies = @ - 1]
      [] \* another copy of a lost slot ended
         trigger = "END_COPY_BAD" /\ word.state = "RETIRED"
             -> word
      [] OTHER -> BlockIllegal

-----------------------------------------------------------------------------
VARIABLE now  \* The state.

TypeOK == now \in [
    \* The key that the device block holds or will hold, by the engine's books; none if no request holds
    \* the block.
    key : [DeviceBlocks -> Keys \cup {None}],
    \* What the kernel queued on the worker for the device block does; NONE if none is queued.
    kernel : [DeviceBlocks -> [Workers -> {"NONE", "WRITES", "READS"}]],
    \* The key that its queued kernels write, or expect to read.
    kernel_key : [DeviceBlocks -> Keys \cup {None}],
    \* The key whose bytes are in the worker's shard of the device block; none for garbage.
    content : [DeviceBlocks -> [Workers -> Keys \cup {None}]],
    \* The copy's hold on the device block.
    lease : [DeviceBlocks -> LeaseWords],
    \* The direction of the device block's live transfer; NONE if it has none.
    direction : [DeviceBlocks -> {"NONE", "STORE", "LOAD"}],
    \* The slot that its live transfer reads or writes.
    transfer_slot : [DeviceBlocks -> Slots \cup {None}],
    \* The state of its live transfer.
    transfer : [DeviceBlocks -> TransferWords],
    \* How far the worker's copy has come.
    instant : [DeviceBlocks -> [Workers -> {"QUEUED", "STARTED", "READ", "WRITTEN", "REPORTED"}]],
    \* The key whose bytes the worker's copy has read and not yet written.
    in_flight : [DeviceBlocks -> [Workers -> Keys \cup {None}]],
    \* Whether a lost copy may still write the device block.
    stray_device : [DeviceBlocks -> BOOLEAN],
    \* The state of the slot's block.
    block : [Slots -> BlockWords],
    \* The key under which the index names the slot.
    slot_key : [Slots -> Keys \cup {None}],
    \* The key whose bytes are in the worker's shard of the slot; none for garbage.
    slot_content : [Slots -> [Workers -> Keys \cup {None}]],
    \* How many matches hold the slot and have not begun to load from it.
    matches : [Slots -> 0..1],
    \* Whether the slot's block dates from before the last reset.
    old : [Slots -> BOOLEAN],
    \* Whether a lost copy may still write the slot.
    stray_slot : [Slots -> BOOLEAN]]

Init == now = [
    key |-> [i0 \in DeviceBlocks |-> None],
    kernel |-> [i0 \in DeviceBlocks |-> [i1 \in Workers |-> "NONE"]],
    kernel_key |-> [i0 \in DeviceBlocks |-> None],
    content |-> [i0 \in DeviceBlocks |-> [i1 \in Workers |-> None]],
    lease |-> [i0 \in DeviceBlocks |-> [state |-> "NONE", readers |-> 0]],
    direction |-> [i0 \in DeviceBlocks |-> "NONE"],
    transfer_slot |-> [i0 \in DeviceBlocks |-> None],
    transfer |-> [i0 \in DeviceBlocks |-> [state |-> "PLANNED", pending |-> 2, failed |-> 0]],
    instant |-> [i0 \in DeviceBlocks |-> [i1 \in Workers |-> "QUEUED"]],
    in_flight |-> [i0 \in DeviceBlocks |-> [i1 \in Workers |-> None]],
    stray_device |-> [i0 \in DeviceBlocks |-> FALSE],
    block |-> [i0 \in Slots |-> [state |-> "FREE", copies |-> 0, pins |-> 0]],
    slot_key |-> [i0 \in Slots |-> None],
    slot_content |-> [i0 \in Slots |-> [i1 \in Workers |-> None]],
    matches |-> [i0 \in Slots |-> 0],
    old |-> [i0 \in Slots |-> FALSE],
    stray_slot |-> [i0 \in Slots |-> FALSE]]

-----------------------------------------------------------------------------
\* The transfer has ended, and nothing asks about it.
ForgetTransferSlot(at) == [at EXCEPT !.transfer_slot = [d \in DeviceBlocks |->
    IF at.direction[d] = "NONE"
    THEN None
    ELSE at.transfer_slot[d]]]

\* The transfer has ended, and nothing asks about it.
ForgetTransfer(at) == [at EXCEPT !.transfer = [d \in DeviceBlocks |->
    IF at.direction[d] = "NONE" /\ at.transfer[d] # TransferIllegal
    THEN [state |-> "PLANNED", pending |-> 2, failed |-> 0]
    ELSE at.transfer[d]]]

\* The transfer has ended, and nothing asks about it.
ForgetInstant(at) == [at EXCEPT !.instant = [d \in DeviceBlocks |-> [w \in Workers |->
    IF at.direction[d] = "NONE"
    THEN "QUEUED"
    ELSE at.instant[d][w]]]]

\* Bytes that were written are no longer in flight.
ForgetInFlight(at) == [at EXCEPT !.in_flight = [d \in DeviceBlocks |-> [w \in Workers |->
    IF at.instant[d][w] # "READ"
    THEN None
    ELSE at.in_flight[d][w]]]]

\* No kernel is queued that could read it.
ForgetKernelKey(at) == [at EXCEPT !.kernel_key = [d \in DeviceBlocks |->
    IF \A w \in Workers : at.kernel[d][w] = "NONE"
    THEN None
    ELSE at.kernel_key[d]]]

\* No kernel and no copy reads these bytes before they are overwritten.
ForgetContent(at) == [at EXCEPT !.content = [d \in DeviceBlocks |-> [w \in Workers |->
    IF /\ at.kernel[d][w] # "READS"
       /\ \/ at.kernel[d][w] = "WRITES"
          \/ /\ at.key[d] = None
             /\ ~ ( /\ at.direction[d] = "STORE"
                    /\ at.instant[d][w] = "QUEUED" \/ at.instant[d][w] = "STARTED" )
          \/ /\ at.direction[d] = "LOAD"
             /\ at.instant[d][w] = "QUEUED" \/ at.instant[d][w] = "STARTED" \/ at.instant[d][w] = "READ"
    THEN None
    ELSE at.content[d][w]]]]

\* A slot that was used and a slot that never was differ only in the name of their state.
ForgetBlock(at) == [at EXCEPT !.block = [s \in Slots |->
    IF at.block[s].state \in {"FREE", "EVICTED"}
    THEN [state |-> "FREE", copies |-> 0, pins |-> 0]
    ELSE at.block[s]]]

\* The index does not name the slot.
ForgetSlotKey(at) == [at EXCEPT !.slot_key = [s \in Slots |->
    IF at.block[s].state \notin {"ALLOCATED", "STORING", "STORED", "LOADING"}
    THEN None
    ELSE at.slot_key[s]]]

\* No match finds the slot and no copy reads it: its bytes are overwritten before they are read.
ForgetSlotContent(at) == [at EXCEPT !.slot_content = [s \in Slots |-> [w \in Workers |->
    IF /\ at.block[s].state \notin {"ALLOCATED", "STORING", "STORED", "LOADING"}
       /\ ~ ( \E d \in DeviceBlocks :
                /\ at.direction[d] = "LOAD"
                /\ at.transfer_slot[d] = s
                /\ at.instant[d][w] = "QUEUED" \/ at.instant[d][w] = "STARTED" )
    THEN None
    ELSE at.slot_content[s][w]]]]

\* The slot holds no block that could date from an epoch.
ForgetOld(at) == [at EXCEPT !.old = [s \in Slots |->
    IF at.block[s].state \in {"FREE", "EVICTED", "RETIRED"}
    THEN FALSE
    ELSE at.old[s]]]

Forgetting(at) ==
    ForgetOld(
    ForgetSlotContent(
    ForgetSlotKey(
    ForgetBlock(
    ForgetContent(
    ForgetKernelKey(
    ForgetInFlight(
    ForgetInstant(
    ForgetTransfer(
    ForgetTransferSlot(at))))))))))

\* The engine takes a free device block and queues kernels that will write key k into it.
Compute(d, k) ==
    /\ now.key[d] = None
    /\ now.lease[d].state = "NONE"
    /\ \A w \in Workers : now.kernel[d][w] = "NONE"
    /\ Cardinality({d2 \in DeviceBlocks : ~(\A w \in Workers : now.kernel[d2][w] = "NONE")}) < 2
    /\ now' = Forgetting([now EXCEPT
        !.key[d] = k,
        !.kernel_key[d] = k,
        !.kernel[d] = [w \in Workers |-> "WRITES"]])

\* The engine queues kernels that read a device block.
Attend(d) ==
    /\ now.key[d] # None
    /\ now.direction[d] # "LOAD"
    /\ \A w \in Workers : now.kernel[d][w] = "NONE"
    /\ Cardinality({d2 \in DeviceBlocks : ~(\A w \in Workers : now.kernel[d2][w] = "NONE")}) < 2
    /\ now' = Forgetting([now EXCEPT
        !.kernel_key[d] = now.key[d],
        !.kernel[d] = [w \in Workers |-> "READS"]])

\* A queued kernel runs on one worker.
Run(d, w) ==
    /\ now.kernel[d][w] # "NONE"
    /\ now' = Forgetting([now EXCEPT
        !.content[d][w] = IF now.kernel[d][w] = "WRITES" THEN now.kernel_key[d] ELSE now.content[d][w],
        !.kernel[d][w] = "NONE"])

\* The engine frees a device block. Kernels may still be queued, and a store may still read it.
Free(d) ==
    /\ now.key[d] # None
    /\ now.direction[d] # "LOAD"
    /\ now' = Forgetting([now EXCEPT
        !.key[d] = None])

\* A request counts on the block in a slot and pins it.
Match(s) ==
    /\ now.block[s].state \in {"STORED", "LOADING"}
    /\ Sum([s2 \in Slots |-> now.matches[s2]]) < 1
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("PIN", now.block[s]),
        !.matches[s] = now.matches[s] + 1])

\* A match ends without a load.
Release(s) ==
    /\ now.matches[s] # 0
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("UNPIN", now.block[s]),
        !.matches[s] = now.matches[s] - 1])

\* A slot is wanted: an idle block is evicted.
Evict(s) ==
    /\ BlockStep("EVICT", now.block[s]) # BlockIllegal
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("EVICT", now.block[s])])

\* A computed device block whose key is not on the host gets a slot and is leased for reading.
PlanStore(d, s) ==
    /\ now.key[d] # None
    /\ now.lease[d].state = "NONE"
    /\ ~ ( \E s2 \in Slots :
             /\ now.block[s2].state \in {"ALLOCATED", "STORING", "STORED", "LOADING"}
             /\ now.slot_key[s2] = now.key[d] )
    /\ now.block[s].state \in {"FREE", "EVICTED"}
    /\ Cardinality({d2 \in DeviceBlocks : now.direction[d2] # "NONE"}) < 2
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("ALLOCATE", now.block[s]),
        !.slot_key[s] = now.key[d],
        !.old[s] = FALSE,
        !.lease[d] = LeaseStep("BEGIN_READ", now.lease[d]),
        !.direction[d] = "STORE",
        !.transfer_slot[d] = s])

\* A match becomes a load: its pin becomes a reader, a free device block is leased for writing.
PlanLoad(d, s) ==
    /\ now.matches[s] # 0
    /\ now.key[d] = None
    /\ now.lease[d].state = "NONE"
    /\ Cardinality({d2 \in DeviceBlocks : now.direction[d2] # "NONE"}) < 2
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("BEGIN_LOAD", now.block[s]),
        !.matches[s] = now.matches[s] - 1,
        !.key[d] = now.slot_key[s],
        !.lease[d] = LeaseStep("BEGIN_WRITE", now.lease[d]),
        !.direction[d] = "LOAD",
        !.transfer_slot[d] = s])

\* A planned transfer leaves for the workers, who queue its copies.
Submit(d, s) ==
    /\ now.direction[d] # "NONE"
    /\ now.transfer[d].state = "PLANNED"
    /\ now.transfer_slot[d] = s
    /\ now' = Forgetting([now EXCEPT
        !.transfer[d] = TransferStep("SUBMIT", now.transfer[d]),
        !.block[s] =
            IF now.direction[d] = "STORE"
            THEN BlockStep("SUBMIT_STORE", now.block[s])
            ELSE now.block[s]])

\* A copy starts: a store after the kernels that write its device block, a load after all kernels that
\* use it.
Start(d, w) ==
    /\ now.direction[d] # "NONE"
    /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.instant[d][w] = "QUEUED"
    /\ IF now.direction[d] = "STORE" THEN now.kernel[d][w] # "WRITES" ELSE now.kernel[d][w] = "NONE"
    /\ now' = Forgetting([now EXCEPT
        !.instant[d][w] = "STARTED"])

\* A store's copy reads the device block.
ReadDevice(d, w) ==
    /\ now.direction[d] = "STORE"
    /\ now.instant[d][w] = "STARTED"
    /\ now' = Forgetting([now EXCEPT
        !.in_flight[d][w] = now.content[d][w],
        !.instant[d][w] = "READ"])

\* A load's copy reads the slot.
ReadSlot(d, s, w) ==
    /\ now.direction[d] = "LOAD"
    /\ now.transfer_slot[d] = s
    /\ now.instant[d][w] = "STARTED"
    /\ now' = Forgetting([now EXCEPT
        !.in_flight[d][w] = now.slot_content[s][w],
        !.instant[d][w] = "READ"])

\* A store's copy writes the slot.
WriteSlot(d, s, w) ==
    /\ now.direction[d] = "STORE"
    /\ now.transfer_slot[d] = s
    /\ now.instant[d][w] = "READ"
    /\ now' = Forgetting([now EXCEPT
        !.slot_content[s][w] = now.in_flight[d][w],
        !.instant[d][w] = "WRITTEN"])

\* A load's copy writes the device block.
WriteDevice(d, w) ==
    /\ now.direction[d] = "LOAD"
    /\ now.instant[d][w] = "READ"
    /\ now' = Forgetting([now EXCEPT
        !.content[d][w] = now.in_flight[d][w],
        !.instant[d][w] = "WRITTEN"])

\* A worker reports its copy as good; other reports are still to come.
ReportGood(d, w) ==
    /\ now.direction[d] # "NONE"
    /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.instant[d][w] = "WRITTEN"
    /\ TransferStep("REPORT_GOOD", now.transfer[d]).state \in {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.instant[d][w] = "REPORTED",
        !.transfer[d] = TransferStep("REPORT_GOOD", now.transfer[d])])

\* The last worker reports its copy as good, and the transfer ends. A store's slot can be read if all
\* copies were good. A failed load's key leaves the index at once.
EndGood(d, s, w) ==
    /\ now.direction[d] # "NONE"
    /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.instant[d][w] = "WRITTEN"
    /\ now.transfer_slot[d] = s
    /\ TransferStep("REPORT_GOOD", now.transfer[d]).state \notin {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.instant[d][w] = "REPORTED",
        !.transfer[d] = TransferStep("REPORT_GOOD", now.transfer[d]),
        !.block[s] =
            IF /\ now.direction[d] = "LOAD"
               /\ TransferStep("REPORT_GOOD", now.transfer[d]).state = "FAILED"
            THEN BlockStep("INVALIDATE",
                   IF TransferStep("REPORT_GOOD", now.transfer[d]).state = "COMPLETED"
                   THEN BlockStep("END_COPY_GOOD", now.block[s])
                   ELSE BlockStep("END_COPY_BAD", now.block[s]))
            ELSE IF TransferStep("REPORT_GOOD", now.transfer[d]).state = "COMPLETED"
                 THEN BlockStep("END_COPY_GOOD", now.block[s])
                 ELSE BlockStep("END_COPY_BAD", now.block[s]),
        !.matches[s] =
            IF /\ now.direction[d] = "LOAD"
               /\ TransferStep("REPORT_GOOD", now.transfer[d]).state = "FAILED"
            THEN 0
            ELSE now.matches[s],
        !.lease[d] =
            IF now.direction[d] = "STORE"
            THEN LeaseStep("END_READ", now.lease[d])
            ELSE LeaseStep("END_WRITE", now.lease[d]),
        !.key[d] =
            IF /\ now.direction[d] = "LOAD"
               /\ TransferStep("REPORT_GOOD", now.transfer[d]).state # "COMPLETED"
            THEN None
            ELSE now.key[d],
        !.direction[d] = "NONE"])

\* A worker reports its copy as bad; other reports are still to come.
ReportBad(d, w) ==
    /\ now.direction[d] # "NONE"
    /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.instant[d][w] = "STARTED" \/ now.instant[d][w] = "WRITTEN"
    /\ TransferStep("REPORT_BAD", now.transfer[d]).state \in {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.instant[d][w] = "REPORTED",
        !.transfer[d] = TransferStep("REPORT_BAD", now.transfer[d])])

\* The last worker reports its copy as bad, and the transfer ends. A store's slot can be read if all
\* copies were good. A failed load's key leaves the index at once.
EndBad(d, s, w) ==
    /\ now.direction[d] # "NONE"
    /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.instant[d][w] = "STARTED" \/ now.instant[d][w] = "WRITTEN"
    /\ now.transfer_slot[d] = s
    /\ TransferStep("REPORT_BAD", now.transfer[d]).state \notin {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.instant[d][w] = "REPORTED",
        !.transfer[d] = TransferStep("REPORT_BAD", now.transfer[d]),
        !.block[s] =
            IF /\ now.direction[d] = "LOAD"
               /\ TransferStep("REPORT_BAD", now.transfer[d]).state = "FAILED"
            THEN BlockStep("INVALIDATE",
                   IF TransferStep("REPORT_BAD", now.transfer[d]).state = "COMPLETED"
                   THEN BlockStep("END_COPY_GOOD", now.block[s])
                   ELSE BlockStep("END_COPY_BAD", now.block[s]))
            ELSE IF TransferStep("REPORT_BAD", now.transfer[d]).state = "COMPLETED"
                 THEN BlockStep("END_COPY_GOOD", now.block[s])
                 ELSE BlockStep("END_COPY_BAD", now.block[s]),
        !.matches[s] =
            IF /\ now.direction[d] = "LOAD"
               /\ TransferStep("REPORT_BAD", now.transfer[d]).state = "FAILED"
            THEN 0
            ELSE now.matches[s],
        !.lease[d] =
            IF now.direction[d] = "STORE"
            THEN LeaseStep("END_READ", now.lease[d])
            ELSE LeaseStep("END_WRITE", now.lease[d]),
        !.key[d] =
            IF /\ now.direction[d] = "LOAD"
               /\ TransferStep("REPORT_BAD", now.transfer[d]).state # "COMPLETED"
            THEN None
            ELSE now.key[d],
        !.direction[d] = "NONE"])

\* A plan is taken back before it left, so no byte was touched.
Cancel(d, s) ==
    /\ now.direction[d] # "NONE"
    /\ now.transfer[d].state = "PLANNED"
    /\ now.transfer_slot[d] = s
    /\ now' = Forgetting([now EXCEPT
        !.transfer[d] = TransferStep("CANCEL", now.transfer[d]),
        !.block[s] =
            IF now.direction[d] = "STORE"
            THEN BlockStep("CANCEL", now.block[s])
            ELSE BlockStep("END_COPY_BAD", now.block[s]),
        !.lease[d] =
            IF now.direction[d] = "STORE"
            THEN LeaseStep("END_READ", now.lease[d])
            ELSE LeaseStep("END_WRITE", now.lease[d]),
        !.key[d] = IF now.direction[d] = "LOAD" THEN None ELSE now.key[d],
        !.direction[d] = "NONE"])

\* All blocks are voided, and transfers under way are abandoned. Plans were cancelled before.
Reset ==
    /\ \A d \in DeviceBlocks : ~(now.direction[d] # "NONE" /\ now.transfer[d].state = "PLANNED")
    /\ now' = Forgetting([now EXCEPT
        !.transfer = [d \in DeviceBlocks |->
            IF now.direction[d] # "NONE"
            THEN TransferStep("ABANDON", now.transfer[d])
            ELSE now.transfer[d]],
        !.block = [s \in Slots |-> BlockStep("INVALIDATE", now.block[s])],
        !.matches = [s \in Slots |-> 0],
        !.old = [s \in Slots |-> TRUE]])

\* A worker will never report: the transfer is given up, and memory that it may still write is retired.
Lose(d, s) ==
    /\ now.direction[d] # "NONE"
    /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.transfer_slot[d] = s
    /\ now' = Forgetting([now EXCEPT
        !.transfer[d] = TransferStep("LOSE", now.transfer[d]),
        !.block[s] = BlockStep("LOSE", now.block[s]),
        !.matches[s] = 0,
        !.lease[d] =
            IF now.direction[d] = "STORE"
            THEN LeaseStep("END_READ", now.lease[d])
            ELSE LeaseStep("LOSE", now.lease[d]),
        !.key[d] = IF now.direction[d] = "STORE" THEN now.key[d] ELSE None,
        !.stray_slot[s] = IF now.direction[d] = "STORE" THEN TRUE ELSE now.stray_slot[s],
        !.stray_device[d] = IF now.direction[d] = "STORE" THEN now.stray_device[d] ELSE TRUE,
        !.direction[d] = "NONE"])

\* A copy that was given up still writes its slot.
StraySlotWrite(s, w) ==
    /\ now.stray_slot[s]
    /\ now' = Forgetting([now EXCEPT
        !.slot_content[s][w] = None])

\* A copy that was given up still writes its device block, after the kernels before it.
StrayDeviceWrite(d, w) ==
    /\ now.stray_device[d]
    /\ now.kernel[d][w] = "NONE"
    /\ now' = Forgetting([now EXCEPT
        !.content[d][w] = None])

-----------------------------------------------------------------------------
\* Everything that may happen.
Next ==
    \/ \E d \in DeviceBlocks, k \in Keys : Compute(d, k)
    \/ \E d \in DeviceBlocks : Attend(d)
    \/ \E d \in DeviceBlocks, w \in Workers : Run(d, w)
    \/ \E d \in DeviceBlocks : Free(d)
    \/ \E s \in Slots : Match(s)
    \/ \E s \in Slots : Release(s)
    \/ \E s \in Slots : Evict(s)
    \/ \E d \in DeviceBlocks, s \in Slots : PlanStore(d, s)
    \/ \E d \in DeviceBlocks, s \in Slots : PlanLoad(d, s)
    \/ \E d \in DeviceBlocks, s \in Slots : Submit(d, s)
    \/ \E d \in DeviceBlocks, w \in Workers : Start(d, w)
    \/ \E d \in DeviceBlocks, w \in Workers : ReadDevice(d, w)
    \/ \E d \in DeviceBlocks, s \in Slots, w \in Workers : ReadSlot(d, s, w)
    \/ \E d \in DeviceBlocks, s \in Slots, w \in Workers : WriteSlot(d, s, w)
    \/ \E d \in DeviceBlocks, w \in Workers : WriteDevice(d, w)
    \/ \E d \in DeviceBlocks, w \in Workers : ReportGood(d, w)
    \/ \E d \in DeviceBlocks, s \in Slots, w \in Workers : EndGood(d, s, w)
    \/ \E d \in DeviceBlocks, w \in Workers : ReportBad(d, w)
    \/ \E d \in DeviceBlocks, s \in Slots, w \in Workers : EndBad(d, s, w)
    \/ \E d \in DeviceBlocks, s \in Slots : Cancel(d, s)
    \/ Reset
    \/ \E d \in DeviceBlocks, s \in Slots : Lose(d, s)
    \/ \E s \in Slots, w \in Workers : StraySlotWrite(s, w)
    \/ \E d \in DeviceBlocks, w \in Workers : StrayDeviceWrite(d, w)

\* The actions that bring things to their end.
Drain ==
    \/ \E d \in DeviceBlocks, w \in Workers : Run(d, w)
    \/ \E d \in DeviceBlocks : Free(d)
    \/ \E s \in Slots : Release(s)
    \/ \E d \in DeviceBlocks, s \in Slots : Submit(d, s)
    \/ \E d \in DeviceBlocks, w \in Workers : Start(d, w)
    \/ \E d \in DeviceBlocks, w \in Workers : ReadDevice(d, w)
    \/ \E d \in DeviceBlocks, s \in Slots, w \in Workers : ReadSlot(d, s, w)
    \/ \E d \in DeviceBlocks, s \in Slots, w \in Workers : WriteSlot(d, s, w)
    \/ \E d \in DeviceBlocks, w \in Workers : WriteDevice(d, w)
    \/ \E d \in DeviceBlocks, w \in Workers : ReportGood(d, w)
    \/ \E d \in DeviceBlocks, s \in Slots, w \in Workers : EndGood(d, s, w)
    \/ \E d \in DeviceBlocks, w \in Workers : ReportBad(d, w)
    \/ \E d \in DeviceBlocks, s \in Slots, w \in Workers : EndBad(d, s, w)
    \/ \E d \in DeviceBlocks, s \in Slots : Cancel(d, s)

Spec == Init /\ [][Next]_now

\* The index names at most one slot for a key.
S1 ==
    \A k \in Keys :
      Cardinality({s \in Slots :
        now.block[s].state \in {"ALLOCATED", "STORING", "STORED", "LOADING"} /\ now.slot_key[s] = k})
      < 2

\* A slot that can be read holds its key's bytes on every worker.
S2 ==
    \A s \in Slots, w \in Workers :
      now.block[s].state \in {"STORED", "LOADING"} => now.slot_content[s][w] = now.slot_key[s]

\* The state of a slot fits the live copy that touches it.
S3 ==
    \A d \in DeviceBlocks, s \in Slots :
      now.direction[d] # "NONE" /\ now.transfer_slot[d] = s
      => IF now.direction[d] = "STORE"
         THEN \/ now.transfer[d].state = "PLANNED" /\ now.block[s].state = "ALLOCATED"
              \/ now.transfer[d].state = "SUBMITTED" /\ now.block[s].state = "STORING"
              \/ now.transfer[d].state = "ABANDONED" /\ now.block[s].state = "QUARANTINED"
         ELSE \/ now.block[s].state \in {"QUARANTINED", "RETIRED"}
              \/ now.transfer[d].state # "ABANDONED" /\ now.block[s].state = "LOADING"

\* The numbers of copies, pins and leases equal the numbers of their holders.
S4 ==
    /\ \A s \in Slots :
         /\ \/ now.block[s].state \in {"FREE", "EVICTED", "RETIRED"}
            \/ now.block[s].copies
               = Cardinality({d \in DeviceBlocks :
                   /\ now.direction[d] # "NONE"
                   /\ now.transfer_slot[d] = s
                   /\ ~ ( /\ now.direction[d] = "STORE"
                          /\ now.direction[d] # "NONE"
                          /\ now.transfer[d].state = "PLANNED" )})
         /\ now.block[s].pins = now.matches[s]
    /\ \A d \in DeviceBlocks :
         /\ (now.lease[d].state = "READING") = (now.direction[d] = "STORE")
         /\ (now.lease[d].state = "WRITING") = (now.direction[d] = "LOAD")

\* A transfer waits once for each worker that has not reported.
S5 ==
    \A d \in DeviceBlocks :
      now.direction[d] # "NONE" /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
      => now.transfer[d].pending = Cardinality({w \in Workers : now.instant[d][w] # "REPORTED"})

\* A slot that a match holds can be read.
S7 ==
    \A s \in Slots : now.matches[s] = 0 \/ now.block[s].state \in {"STORED", "LOADING"}

\* Every step taken is in its machine's table.
S8 ==
    /\ \A s \in Slots : now.block[s] # BlockIllegal
    /\ \A d \in DeviceBlocks : now.transfer[d] # TransferIllegal /\ now.lease[d] # LeaseIllegal

\* A queued kernel finds the bytes that it was queued for.
S12 ==
    \A d \in DeviceBlocks, w \in Workers :
      now.kernel[d][w] = "READS" => now.content[d][w] = now.kernel_key[d]

\* No slot that can be read dates from before the last reset.
S14 ==
    \A s \in Slots : now.block[s].state \in {"STORED", "LOADING"} => ~now.old[s]

\* A device block that counts as computed or loaded holds its key's bytes on every worker.
S15 ==
    \A d \in DeviceBlocks, w \in Workers :
      now.key[d] # None /\ now.direction[d] # "LOAD" /\ now.kernel[d][w] # "WRITES"
      => now.content[d][w] = now.key[d]

\* Everything is wound down.
Rest ==
    /\ \A d \in DeviceBlocks :
         /\ now.key[d] = None
         /\ now.direction[d] = "NONE"
         /\ \A w \in Workers : now.kernel[d][w] = "NONE"
    /\ \A s \in Slots : now.matches[s] = 0

\* An upper bound on the draining actions left to take.
Rank ==
    Sum([d \in DeviceBlocks |->
      (IF now.key[d] # None THEN 1 ELSE 0)
      + Cardinality({w \in Workers : now.kernel[d][w] # "NONE"})
      + (IF now.direction[d] # "NONE" /\ now.transfer[d].state = "PLANNED" THEN 1 ELSE 0)
      + (IF now.direction[d] # "NONE" THEN 1 ELSE 0)
      + Cardinality({w \in Workers : now.direction[d] # "NONE" /\ now.instant[d][w] = "QUEUED"})
      + Cardinality({w \in Workers :
          now.direction[d] # "NONE" /\ (now.instant[d][w] = "QUEUED" \/ now.instant[d][w] = "STARTED")})
      + Cardinality({w \in Workers :
          /\ now.direction[d] # "NONE"
          /\ \/ now.instant[d][w] = "QUEUED"
             \/ now.instant[d][w] = "STARTED"
             \/ now.instant[d][w] = "READ"})
      + Cardinality({w \in Workers : now.direction[d] # "NONE" /\ now.instant[d][w] # "REPORTED"})])
    + Sum([s \in Slots |-> now.matches[s]])

\* Wherever the state is not at rest, an action can drain it, and each such action lowers the rank. So
\* winding down ends from every state, and ends at rest.
S9 == Rest \/ ENABLED Drain
S9_NearerToRest == [][Drain => Rank' < Rank]_now

\* It happens that a hit is loaded. A load has written on every worker.
Sometimes_AHitIsLoaded ==
    \E d \in DeviceBlocks :
      /\ now.direction[d] = "LOAD"
      /\ \A w \in Workers : now.instant[d][w] = "WRITTEN" \/ now.instant[d][w] = "REPORTED"

\* It happens that a store is ahead of its kernel. A store was submitted before the kernel that writes
\* its block ran.
Sometimes_AStoreIsAheadOfItsKernel ==
    \E d \in DeviceBlocks :
      /\ now.direction[d] = "STORE"
      /\ now.direction[d] # "NONE"
      /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
      /\ \E w \in Workers : now.kernel[d][w] = "WRITES"

\* It happens that a load is ahead of an old reader. A load was submitted before a kernel that reads
\* its block's former content ran.
Sometimes_ALoadIsAheadOfAnOldReader ==
    \E d \in DeviceBlocks :
      /\ now.direction[d] = "LOAD"
      /\ now.direction[d] # "NONE"
      /\ now.transfer[d].state \in {"SUBMITTED", "ABANDONED"}
      /\ \E w \in Workers : now.kernel[d][w] = "READS"

\* It happens that a freed block is stored. The engine has freed a block that a store still reads.
Sometimes_AFreedBlockIsStored ==
    \E d \in DeviceBlocks : now.direction[d] = "STORE" /\ now.key[d] = None

\* It happens that two loads read one slot. A slot has two readers.
Sometimes_TwoLoadsReadOneSlot ==
    \E s \in Slots : now.block[s].state = "LOADING" /\ now.block[s].copies = 2

\* It happens that a slot is quarantined under a copy. A reset has voided a slot that a copy touches.
Sometimes_ASlotIsQuarantinedUnderACopy ==
    \E d \in DeviceBlocks, s \in Slots :
      /\ now.direction[d] # "NONE"
      /\ now.transfer[d].state = "ABANDONED"
      /\ now.transfer_slot[d] = s
      /\ now.block[s].state = "QUARANTINED"

\* It happens that a load fails. A worker reported a load as bad.
Sometimes_ALoadFails ==
    \E d \in DeviceBlocks : now.direction[d] = "LOAD" /\ now.transfer[d].failed # 0

\* It happens that copies are lost. A store and a load were given up.
Sometimes_CopiesAreLost ==
    (\E s \in Slots : now.stray_slot[s]) /\ (\E d \in DeviceBlocks : now.stray_device[d])

=============================================================================
