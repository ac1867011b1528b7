------------------------------- MODULE Offload ------------------------------
\* The offload protocol. Within these bounds: 2 keys, 2 device blocks, 2 slots, 2 workers; at most 2
\* live transfers of several blocks, 2 copies, 1 matches, 2 device blocks with queued kernels;
\* failures, resets, losses, no crashes.
\*
\* Device blocks hold keys that the engine computed or loaded; slots of the host pool hold copies of
\* them. A transfer is a store or a load of one or several blocks, with one copy for each. Kernels and
\* copies run on each worker at its own pace, some time after they were queued. A copy starts, reads
\* and writes, and then its transfer is reported. Anything may happen in between. LeaseStep,
\* TransferStep and BlockStep are the tables of a lease, a transfer and a block. A step that no row
\* matches gives an ILLEGAL word, which S8 forbids.
\*
\* An action happens at once. After it, Forgetting resets what nothing can read any more, so that
\* states do not differ by it.
\*
\* Not modelled:
\* - Requests: a match holds one slot, and a device block does not say which request holds it.
\* - Chunks: a slot holds one device block.
\* - A second kernel for a block before the first one ran: a stream runs them in order.
\* - Names of transfers and workers that do not exist: the ledger refuses reports with such names.
\* - The device's own prefix cache, and data that a load of an older epoch left on the device.
\*
\* Generated from kvsm's declaration and tables (specs/protocol/texts.py); do not edit.

EXTENDS Naturals, FiniteSets, TLC

CONSTANTS DeviceBlocks, Slots, Transfers, Copies, Matches, Workers, Keies  \* Members are interchangeable.
CONSTANT None  \* No member of any of them.

Symmetry ==
    Permutations(DeviceBlocks)
    \cup Permutations(Slots)
    \cup Permutations(Transfers)
    \cup Permutations(Copies)
    \cup Permutations(Matches)
    \cup Permutations(Workers)
    \cup Permutations(Keies)

RECURSIVE SumOver(_, _)
SumOver(f, set) ==
    IF set = {} THEN 0
    ELSE LET one == CHOOSE x \in set : TRUE IN f[one] + SumOver(f, set \ {one})
Sum(f) == SumOver(f, DOMAIN f)

-----------------------------------------------------------------------------
\* The lease: its words, and the word after a trigger.
LeaseWords == [
    state : {"NONE", "READING", "WRITING", "RETIRED", "ILLEGAL"},
    readers : 0..2]
LeaseIllegal == [state |-> "ILLEGAL", readers |-> 0]
LeaseStep(trigger, word) ==
    CASE \* a store is planned
         trigger = "BEGIN_READ" /\ word.state \in {"NONE", "READING"} /\ word.readers \in 0..1
             -> [word EXCEPT !.state = "READING", !.readers = @ + 1]
      [] \* other stores still read it
         trigger = "END_READ" /\ word.state = "READING" /\ word.readers = 2
             -> [word EXCEPT !.state = "READING", !.readers = @ - 1]
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
      [] \* another device pool
         trigger = "RESTART" /\ word.state \in {"NONE", "READING", "WRITING", "RETIRED"}
             -> [word EXCEPT !.state = "NONE", !.readers = 0]
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
      [] \* it holds nothing
         trigger = "RESTART" /\ word.state \in {"FREE", "EVICTED"}
             -> word
      [] \* its store was only planned
         trigger = "RESTART" /\ word.state = "ALLOCATED"
             -> [word EXCEPT !.state = "EVICTED", !.copies = 0, !.pins = 0]
      [] \* its store may have written a part
         trigger = "RESTART" /\ word.state = "STORING"
             -> [word EXCEPT !.state = "EVICTED", !.copies = 0, !.pins = 0]
      [] \* a reader changes no byte
         trigger = "RESTART" /\ word.state \in {"STORED", "LOADING"}
             -> [word EXCEPT !.state = "STORED", !.copies = 0, !.pins = 0]
      [] \* it was void, and its copies are over
         trigger = "RESTART" /\ word.state = "QUARANTINED"
             -> [word EXCEPT !.state = "EVICTED", !.copies = 0, !.pins = 0]
      [] \* nobody lives that could still write it
         trigger = "RESTART" /\ word.state = "RETIRED"
             -> [word EXCEPT !.state = "EVICTED", !.copies = 0, !.pins = 0]
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
    key : [DeviceBlocks -> Keies \cup {None}],
    \* What the kernel queued on the worker for the device block does; NONE if none is queued.
    kernel : [DeviceBlocks -> [Workers -> {"NONE", "WRITES", "READS"}]],
    \* The key that its queued kernels write, or expect to read.
    kernel_key : [DeviceBlocks -> Keies \cup {None}],
    \* The key whose bytes are in the worker's shard of the device block; none for garbage.
    content : [DeviceBlocks -> [Workers -> Keies \cup {None}]],
    \* How copies hold the device block.
    lease : [DeviceBlocks -> LeaseWords],
    \* Whether a lost copy may still write the device block.
    stray_device : [DeviceBlocks -> BOOLEAN],
    \* The direction of the transfer; NONE if it is not live.
    direction : [Transfers -> {"NONE", "STORE", "LOAD"}],
    \* The state of the live transfer.
    transfer : [Transfers -> TransferWords],
    \* What the worker has reported of the transfer.
    report : [Transfers -> [Workers -> {"NONE", "GOOD", "BAD"}]],
    \* The live transfer that the copy belongs to; none if there is no such copy.
    copy_transfer : [Copies -> Transfers \cup {None}],
    \* The device block that the copy reads or writes.
    copy_device : [Copies -> DeviceBlocks \cup {None}],
    \* The slot that the copy reads or writes.
    copy_slot : [Copies -> Slots \cup {None}],
    \* How far the worker's share of the copy has come.
    instant : [Copies -> [Workers -> {"QUEUED", "STARTED", "READ", "WRITTEN"}]],
    \* The key whose bytes the worker's share of the copy has read and not yet written.
    in_flight : [Copies -> [Workers -> Keies \cup {None}]],
    \* The state of the slot's block.
    block : [Slots -> BlockWords],
    \* The key under which the index names the slot.
    slot_key : [Slots -> Keies \cup {None}],
    \* The key whose bytes are in the worker's shard of the slot; none for garbage.
    slot_content : [Slots -> [Workers -> Keies \cup {None}]],
    \* Whether the slot's block dates from before the last reset.
    old : [Slots -> BOOLEAN],
    \* Whether a lost copy may still write the slot.
    stray_slot : [Slots -> BOOLEAN],
    \* The slot that the match holds, until it is loaded or released; none if there is no such match.
    match_slot : [Matches -> Slots \cup {None}]]

Init == now = [
    key |-> [i0 \in DeviceBlocks |-> None],
    kernel |-> [i0 \in DeviceBlocks |-> [i1 \in Workers |-> "NONE"]],
    kernel_key |-> [i0 \in DeviceBlocks |-> None],
    content |-> [i0 \in DeviceBlocks |-> [i1 \in Workers |-> None]],
    lease |-> [i0 \in DeviceBlocks |-> [state |-> "NONE", readers |-> 0]],
    stray_device |-> [i0 \in DeviceBlocks |-> FALSE],
    direction |-> [i0 \in Transfers |-> "NONE"],
    transfer |-> [i0 \in Transfers |-> [state |-> "PLANNED", pending |-> 2, failed |-> 0]],
    report |-> [i0 \in Transfers |-> [i1 \in Workers |-> "NONE"]],
    copy_transfer |-> [i0 \in Copies |-> None],
    copy_device |-> [i0 \in Copies |-> None],
    copy_slot |-> [i0 \in Copies |-> None],
    instant |-> [i0 \in Copies |-> [i1 \in Workers |-> "QUEUED"]],
    in_flight |-> [i0 \in Copies |-> [i1 \in Workers |-> None]],
    block |-> [i0 \in Slots |-> [state |-> "FREE", copies |-> 0, pins |-> 0]],
    slot_key |-> [i0 \in Slots |-> None],
    slot_content |-> [i0 \in Slots |-> [i1 \in Workers |-> None]],
    old |-> [i0 \in Slots |-> FALSE],
    stray_slot |-> [i0 \in Slots |-> FALSE],
    match_slot |-> [i0 \in Matches |-> None]]

-----------------------------------------------------------------------------
\* The transfer has ended, and nothing asks about it.
ForgetTransfer(at) == [at EXCEPT !.transfer = [t \in Transfers |->
    IF at.direction[t] = "NONE" /\ at.transfer[t] # TransferIllegal
    THEN [state |-> "PLANNED", pending |-> 2, failed |-> 0]
    ELSE at.transfer[t]]]

\* The transfer has ended, and nothing asks about it.
ForgetReport(at) == [at EXCEPT !.report = [t \in Transfers |-> [w \in Workers |->
    IF at.direction[t] = "NONE"
    THEN "NONE"
    ELSE at.report[t][w]]]]

\* The transfer has ended, and nothing asks about it.
ForgetCopyDevice(at) == [at EXCEPT !.copy_device = [c \in Copies |->
    IF at.copy_transfer[c] = None
    THEN None
    ELSE at.copy_device[c]]]

\* The transfer has ended, and nothing asks about it.
ForgetCopySlot(at) == [at EXCEPT !.copy_slot = [c \in Copies |->
    IF at.copy_transfer[c] = None
    THEN None
    ELSE at.copy_slot[c]]]

\* The transfer has ended, and nothing asks about it.
ForgetInstant(at) == [at EXCEPT !.instant = [c \in Copies |-> [w \in Workers |->
    IF at.copy_transfer[c] = None
    THEN "QUEUED"
    ELSE at.instant[c][w]]]]

\* Bytes that were written are no longer in flight.
ForgetInFlight(at) == [at EXCEPT !.in_flight = [c \in Copies |-> [w \in Workers |->
    IF at.instant[c][w] # "READ"
    THEN None
    ELSE at.in_flight[c][w]]]]

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
             /\ ~ ( \E c \in Copies :
                      /\ \E t \in Transfers : at.copy_transfer[c] = t /\ at.direction[t] = "STORE"
                      /\ at.copy_device[c] = d
                      /\ at.instant[c][w] = "QUEUED" \/ at.instant[c][w] = "STARTED" )
          \/ \E c \in Copies :
               /\ \E t \in Transfers : at.copy_transfer[c] = t /\ at.direction[t] = "LOAD"
               /\ at.copy_device[c] = d
               /\ at.instant[c][w] # "WRITTEN"
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
       /\ ~ ( \E c \in Copies :
                /\ \E t \in Transfers : at.copy_transfer[c] = t /\ at.direction[t] = "LOAD"
                /\ at.copy_slot[c] = s
                /\ at.instant[c][w] = "QUEUED" \/ at.instant[c][w] = "STARTED" )
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
    ForgetCopySlot(
    ForgetCopyDevice(
    ForgetReport(
    ForgetTransfer(at))))))))))))

\* The engine takes a free device block and queues kernels that will write key k into it.
Compute(d, k) ==
    /\ now.key[d] = None
    /\ now.lease[d].state = "NONE"
    /\ \A w \in Workers : now.kernel[d][w] = "NONE"
    /\ TRUE
    /\ now' = Forgetting([now EXCEPT
        !.key[d] = k,
        !.kernel_key[d] = k,
        !.kernel[d] = [w \in Workers |-> "WRITES"]])

\* The engine queues kernels that read a device block.
Attend(d) ==
    /\ now.key[d] # None
    /\ now.lease[d].state # "WRITING"
    /\ \A w \in Workers : now.kernel[d][w] = "NONE"
    /\ TRUE
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
    /\ now.lease[d].state # "WRITING"
    /\ now' = Forgetting([now EXCEPT
        !.key[d] = None])

\* A request counts on the block in a slot and pins it.
Match(s, m) ==
    /\ now.match_slot[m] = None
    /\ now.block[s].state \in {"STORED", "LOADING"}
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("PIN", now.block[s]),
        !.match_slot[m] = s])

\* A match ends without a load.
Release(s, m) ==
    /\ now.match_slot[m] = s
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("UNPIN", now.block[s]),
        !.match_slot[m] = None])

\* A slot is wanted: an idle block is evicted.
Evict(s) ==
    /\ BlockStep("EVICT", now.block[s]) # BlockIllegal
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("EVICT", now.block[s])])

\* A store is planned. A computed device block whose key is not on the host gets a slot and is leased
\* for reading.
PlanStore(t, c, d, s) ==
    /\ now.direction[t] = "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ \A w \in Workers : now.report[t][w] = "NONE"
    /\ now.copy_transfer[c] = None
    /\ \A w \in Workers : now.instant[c][w] = "QUEUED"
    /\ now.key[d] # None
    /\ LeaseStep("BEGIN_READ", now.lease[d]) # LeaseIllegal
    /\ ~ ( \E s2 \in Slots :
             /\ now.block[s2].state \in {"ALLOCATED", "STORING", "STORED", "LOADING"}
             /\ now.slot_key[s2] = now.key[d] )
    /\ now.block[s].state \in {"FREE", "EVICTED"}
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("ALLOCATE", now.block[s]),
        !.slot_key[s] = now.key[d],
        !.old[s] = FALSE,
        !.lease[d] = LeaseStep("BEGIN_READ", now.lease[d]),
        !.copy_transfer[c] = t,
        !.copy_device[c] = d,
        !.copy_slot[c] = s,
        !.direction[t] = "STORE"])

\* A planned store gets one more block.
StoreMore(t, c, d, s) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ now.direction[t] = "STORE"
    /\ now.copy_transfer[c] = None
    /\ \A w \in Workers : now.instant[c][w] = "QUEUED"
    /\ now.key[d] # None
    /\ LeaseStep("BEGIN_READ", now.lease[d]) # LeaseIllegal
    /\ ~ ( \E s2 \in Slots :
             /\ now.block[s2].state \in {"ALLOCATED", "STORING", "STORED", "LOADING"}
             /\ now.slot_key[s2] = now.key[d] )
    /\ now.block[s].state \in {"FREE", "EVICTED"}
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("ALLOCATE", now.block[s]),
        !.slot_key[s] = now.key[d],
        !.old[s] = FALSE,
        !.lease[d] = LeaseStep("BEGIN_READ", now.lease[d]),
        !.copy_transfer[c] = t,
        !.copy_device[c] = d,
        !.copy_slot[c] = s])

\* A load is planned. A match becomes a reader of its slot, and a free device block is leased for
\* writing.
PlanLoad(t, c, d, s, m) ==
    /\ now.direction[t] = "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ \A w \in Workers : now.report[t][w] = "NONE"
    /\ now.copy_transfer[c] = None
    /\ \A w \in Workers : now.instant[c][w] = "QUEUED"
    /\ now.match_slot[m] = s
    /\ now.key[d] = None
    /\ LeaseStep("BEGIN_WRITE", now.lease[d]) # LeaseIllegal
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("BEGIN_LOAD", now.block[s]),
        !.key[d] = now.slot_key[s],
        !.lease[d] = LeaseStep("BEGIN_WRITE", now.lease[d]),
        !.match_slot[m] = None,
        !.copy_transfer[c] = t,
        !.copy_device[c] = d,
        !.copy_slot[c] = s,
        !.direction[t] = "LOAD"])

\* A planned load gets one more block.
LoadMore(t, c, d, s, m) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ now.direction[t] = "LOAD"
    /\ ~(\E c2 \in Copies : now.copy_transfer[c2] = t /\ now.copy_slot[c2] = s)
    /\ now.copy_transfer[c] = None
    /\ \A w \in Workers : now.instant[c][w] = "QUEUED"
    /\ now.match_slot[m] = s
    /\ now.key[d] = None
    /\ LeaseStep("BEGIN_WRITE", now.lease[d]) # LeaseIllegal
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("BEGIN_LOAD", now.block[s]),
        !.key[d] = now.slot_key[s],
        !.lease[d] = LeaseStep("BEGIN_WRITE", now.lease[d]),
        !.match_slot[m] = None,
        !.copy_transfer[c] = t,
        !.copy_device[c] = d,
        !.copy_slot[c] = s])

\* A planned transfer leaves for the workers, who queue its copies.
Submit(t) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF /\ now.direction[t] = "STORE"
               /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_slot[c] = s
            THEN BlockStep("SUBMIT_STORE", now.block[s])
            ELSE now.block[s]],
        !.transfer[t] = TransferStep("SUBMIT", now.transfer[t])])

\* A copy starts: a store after the kernels that write its device block, a load after all kernels that
\* use it.
Start(t, c, d, w) ==
    /\ now.copy_transfer[c] = t
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ now.copy_device[c] = d
    /\ now.instant[c][w] = "QUEUED"
    /\ IF now.direction[t] = "STORE" THEN now.kernel[d][w] # "WRITES" ELSE now.kernel[d][w] = "NONE"
    /\ now' = Forgetting([now EXCEPT
        !.instant[c][w] = "STARTED"])

\* A store's copy reads the device block.
ReadDevice(t, c, d, w) ==
    /\ now.copy_transfer[c] = t
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ now.copy_device[c] = d
    /\ now.direction[t] = "STORE"
    /\ now.instant[c][w] = "STARTED"
    /\ now' = Forgetting([now EXCEPT
        !.in_flight[c][w] = now.content[d][w],
        !.instant[c][w] = "READ"])

\* A load's copy reads the slot.
ReadSlot(t, c, s, w) ==
    /\ now.copy_transfer[c] = t
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ now.copy_slot[c] = s
    /\ now.direction[t] = "LOAD"
    /\ now.instant[c][w] = "STARTED"
    /\ now' = Forgetting([now EXCEPT
        !.in_flight[c][w] = now.slot_content[s][w],
        !.instant[c][w] = "READ"])

\* A store's copy writes the slot.
WriteSlot(t, c, s, w) ==
    /\ now.copy_transfer[c] = t
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ now.copy_slot[c] = s
    /\ now.direction[t] = "STORE"
    /\ now.instant[c][w] = "READ"
    /\ now' = Forgetting([now EXCEPT
        !.slot_content[s][w] = now.in_flight[c][w],
        !.instant[c][w] = "WRITTEN"])

\* A load's copy writes the device block.
WriteDevice(t, c, d, w) ==
    /\ now.copy_transfer[c] = t
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ now.copy_device[c] = d
    /\ now.direction[t] = "LOAD"
    /\ now.instant[c][w] = "READ"
    /\ now' = Forgetting([now EXCEPT
        !.content[d][w] = now.in_flight[c][w],
        !.instant[c][w] = "WRITTEN"])

\* A worker reports its share of a transfer as good; other reports are still to come.
ReportGood(t, w) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ \A c \in Copies : now.copy_transfer[c] = t => now.instant[c][w] = "WRITTEN"
    /\ TransferStep("REPORT_GOOD", now.transfer[t]).state \in {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.report[t][w] = "GOOD",
        !.transfer[t] = TransferStep("REPORT_GOOD", now.transfer[t])])

\* The last worker reports its share as good, and the transfer ends. A store's slots can be read if all
\* workers were good. A failed load's keys leave the index at once.
EndGood(t, w) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ \A c \in Copies : now.copy_transfer[c] = t => now.instant[c][w] = "WRITTEN"
    /\ TransferStep("REPORT_GOOD", now.transfer[t]).state \notin {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.match_slot = [m \in Matches |->
            IF /\ now.direction[t] = "LOAD"
               /\ TransferStep("REPORT_GOOD", now.transfer[t]).state = "FAILED"
               /\ \E c \in Copies :
                    now.copy_transfer[c] = t /\ now.copy_slot[c] = now.match_slot[m]
            THEN None
            ELSE now.match_slot[m]],
        !.block = [s \in Slots |->
            IF \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_slot[c] = s
            THEN IF /\ now.direction[t] = "LOAD"
                    /\ TransferStep("REPORT_GOOD", now.transfer[t]).state = "FAILED"
                 THEN BlockStep("INVALIDATE",
                        IF TransferStep("REPORT_GOOD", now.transfer[t]).state = "COMPLETED"
                        THEN BlockStep("END_COPY_GOOD", now.block[s])
                        ELSE BlockStep("END_COPY_BAD", now.block[s]))
                 ELSE IF TransferStep("REPORT_GOOD", now.transfer[t]).state = "COMPLETED"
                      THEN BlockStep("END_COPY_GOOD", now.block[s])
                      ELSE BlockStep("END_COPY_BAD", now.block[s])
            ELSE now.block[s]],
        !.key = [d \in DeviceBlocks |->
            IF /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
               /\ now.direction[t] = "LOAD"
               /\ TransferStep("REPORT_GOOD", now.transfer[t]).state # "COMPLETED"
            THEN None
            ELSE now.key[d]],
        !.lease = [d \in DeviceBlocks |->
            IF \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
            THEN IF now.direction[t] = "STORE"
                 THEN LeaseStep("END_READ", now.lease[d])
                 ELSE LeaseStep("END_WRITE", now.lease[d])
            ELSE now.lease[d]],
        !.direction[t] = "NONE",
        !.copy_transfer = [c \in Copies |-> IF now.copy_transfer[c] = t THEN None ELSE now.copy_transfer[c]],
        !.report[t][w] = "GOOD",
        !.transfer[t] = TransferStep("REPORT_GOOD", now.transfer[t])])

\* A worker reports its share of a transfer as bad; other reports are still to come.
ReportBad(t, w) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ TRUE
    /\ TransferStep("REPORT_BAD", now.transfer[t]).state \in {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.report[t][w] = "BAD",
        !.transfer[t] = TransferStep("REPORT_BAD", now.transfer[t])])

\* The last worker reports its share as bad, and the transfer ends. A store's slots can be read if all
\* workers were good. A failed load's keys leave the index at once.
EndBad(t, w) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ TRUE
    /\ TransferStep("REPORT_BAD", now.transfer[t]).state \notin {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.match_slot = [m \in Matches |->
            IF /\ now.direction[t] = "LOAD"
               /\ TransferStep("REPORT_BAD", now.transfer[t]).state = "FAILED"
               /\ \E c \in Copies :
                    now.copy_transfer[c] = t /\ now.copy_slot[c] = now.match_slot[m]
            THEN None
            ELSE now.match_slot[m]],
        !.block = [s \in Slots |->
            IF \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_slot[c] = s
            THEN IF /\ now.direction[t] = "LOAD"
                    /\ TransferStep("REPORT_BAD", now.transfer[t]).state = "FAILED"
                 THEN BlockStep("INVALIDATE",
                        IF TransferStep("REPORT_BAD", now.transfer[t]).state = "COMPLETED"
                        THEN BlockStep("END_COPY_GOOD", now.block[s])
                        ELSE BlockStep("END_COPY_BAD", now.block[s]))
                 ELSE IF TransferStep("REPORT_BAD", now.transfer[t]).state = "COMPLETED"
                      THEN BlockStep("END_COPY_GOOD", now.block[s])
                      ELSE BlockStep("END_COPY_BAD", now.block[s])
            ELSE now.block[s]],
        !.key = [d \in DeviceBlocks |->
            IF /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
               /\ now.direction[t] = "LOAD"
               /\ TransferStep("REPORT_BAD", now.transfer[t]).state # "COMPLETED"
            THEN None
            ELSE now.key[d]],
        !.lease = [d \in DeviceBlocks |->
            IF \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
            THEN IF now.direction[t] = "STORE"
                 THEN LeaseStep("END_READ", now.lease[d])
                 ELSE LeaseStep("END_WRITE", now.lease[d])
            ELSE now.lease[d]],
        !.direction[t] = "NONE",
        !.copy_transfer = [c \in Copies |-> IF now.copy_transfer[c] = t THEN None ELSE now.copy_transfer[c]],
        !.report[t][w] = "BAD",
        !.transfer[t] = TransferStep("REPORT_BAD", now.transfer[t])])

\* A plan is taken back before it left, so no byte was touched.
Cancel(t) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_slot[c] = s
            THEN IF now.direction[t] = "STORE"
                 THEN BlockStep("CANCEL", now.block[s])
                 ELSE BlockStep("END_COPY_BAD", now.block[s])
            ELSE now.block[s]],
        !.key = [d \in DeviceBlocks |->
            IF /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
               /\ now.direction[t] = "LOAD"
            THEN None
            ELSE now.key[d]],
        !.lease = [d \in DeviceBlocks |->
            IF \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
            THEN IF now.direction[t] = "STORE"
                 THEN LeaseStep("END_READ", now.lease[d])
                 ELSE LeaseStep("END_WRITE", now.lease[d])
            ELSE now.lease[d]],
        !.direction[t] = "NONE",
        !.copy_transfer = [c \in Copies |-> IF now.copy_transfer[c] = t THEN None ELSE now.copy_transfer[c]],
        !.transfer[t] = TransferStep("CANCEL", now.transfer[t])])

\* All blocks are voided, and transfers under way are abandoned. Plans were cancelled before.
Reset ==
    /\ \A t \in Transfers : ~(now.direction[t] # "NONE" /\ now.transfer[t].state = "PLANNED")
    /\ now' = Forgetting([now EXCEPT
        !.transfer = [t \in Transfers |->
            IF now.direction[t] # "NONE"
            THEN TransferStep("ABANDON", now.transfer[t])
            ELSE now.transfer[t]],
        !.block = [s \in Slots |-> BlockStep("INVALIDATE", now.block[s])],
        !.old = [s \in Slots |-> TRUE],
        !.match_slot = [m \in Matches |-> None]])

\* A worker will never report: the transfer is given up, and memory that it may still write is retired.
Lose(t) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.match_slot = [m \in Matches |->
            IF \E c \in Copies :
                 now.copy_transfer[c] = t /\ now.copy_slot[c] = now.match_slot[m]
            THEN None
            ELSE now.match_slot[m]],
        !.stray_slot = [s \in Slots |->
            IF /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_slot[c] = s
               /\ now.direction[t] = "STORE"
            THEN TRUE
            ELSE now.stray_slot[s]],
        !.block = [s \in Slots |->
            IF \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_slot[c] = s
            THEN BlockStep("LOSE", now.block[s])
            ELSE now.block[s]],
        !.key = [d \in DeviceBlocks |->
            IF /\ now.direction[t] # "STORE"
               /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
            THEN None
            ELSE now.key[d]],
        !.stray_device = [d \in DeviceBlocks |->
            IF /\ now.direction[t] # "STORE"
               /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
            THEN TRUE
            ELSE now.stray_device[d]],
        !.lease = [d \in DeviceBlocks |->
            IF \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
            THEN IF now.direction[t] = "STORE"
                 THEN LeaseStep("END_READ", now.lease[d])
                 ELSE LeaseStep("LOSE", now.lease[d])
            ELSE now.lease[d]],
        !.transfer[t] = TransferStep("LOSE", now.transfer[t]),
        !.direction[t] = "NONE",
        !.copy_transfer = [c \in Copies |-> IF now.copy_transfer[c] = t THEN None ELSE now.copy_transfer[c]]])

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
    \/ \E d \in DeviceBlocks, k \in Keies : Compute(d, k)
    \/ \E d \in DeviceBlocks : Attend(d)
    \/ \E d \in DeviceBlocks, w \in Workers : Run(d, w)
    \/ \E d \in DeviceBlocks : Free(d)
    \/ \E s \in Slots, m \in Matches : Match(s, m)
    \/ \E s \in Slots, m \in Matches : Release(s, m)
    \/ \E s \in Slots : Evict(s)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, s \in Slots : PlanStore(t, c, d, s)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, s \in Slots : StoreMore(t, c, d, s)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, s \in Slots, m \in Matches : PlanLoad(t, c, d, s, m)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, s \in Slots, m \in Matches : LoadMore(t, c, d, s, m)
    \/ \E t \in Transfers : Submit(t)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, w \in Workers : Start(t, c, d, w)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, w \in Workers : ReadDevice(t, c, d, w)
    \/ \E t \in Transfers, c \in Copies, s \in Slots, w \in Workers : ReadSlot(t, c, s, w)
    \/ \E t \in Transfers, c \in Copies, s \in Slots, w \in Workers : WriteSlot(t, c, s, w)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, w \in Workers : WriteDevice(t, c, d, w)
    \/ \E t \in Transfers, w \in Workers : ReportGood(t, w)
    \/ \E t \in Transfers, w \in Workers : EndGood(t, w)
    \/ \E t \in Transfers, w \in Workers : ReportBad(t, w)
    \/ \E t \in Transfers, w \in Workers : EndBad(t, w)
    \/ \E t \in Transfers : Cancel(t)
    \/ Reset
    \/ \E t \in Transfers : Lose(t)
    \/ \E s \in Slots, w \in Workers : StraySlotWrite(s, w)
    \/ \E d \in DeviceBlocks, w \in Workers : StrayDeviceWrite(d, w)

\* The actions that bring things to their end.
Drain ==
    \/ \E d \in DeviceBlocks, w \in Workers : Run(d, w)
    \/ \E d \in DeviceBlocks : Free(d)
    \/ \E s \in Slots, m \in Matches : Release(s, m)
    \/ \E t \in Transfers : Submit(t)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, w \in Workers : Start(t, c, d, w)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, w \in Workers : ReadDevice(t, c, d, w)
    \/ \E t \in Transfers, c \in Copies, s \in Slots, w \in Workers : ReadSlot(t, c, s, w)
    \/ \E t \in Transfers, c \in Copies, s \in Slots, w \in Workers : WriteSlot(t, c, s, w)
    \/ \E t \in Transfers, c \in Copies, d \in DeviceBlocks, w \in Workers : WriteDevice(t, c, d, w)
    \/ \E t \in Transfers, w \in Workers : ReportGood(t, w)
    \/ \E t \in Transfers, w \in Workers : EndGood(t, w)
    \/ \E t \in Transfers : Cancel(t)

Spec == Init /\ [][Next]_now

\* The index names at most one slot for a key.
S1 ==
    \A k \in Keies, s \in Slots, s2 \in Slots :
      /\ now.block[s].state \in {"ALLOCATED", "STORING", "STORED", "LOADING"}
      /\ now.slot_key[s] = k
      /\ now.block[s2].state \in {"ALLOCATED", "STORING", "STORED", "LOADING"}
      /\ now.slot_key[s2] = k
      => s = s2

\* A slot that can be read holds its key's bytes on every worker.
S2 ==
    \A s \in Slots, w \in Workers :
      now.block[s].state \in {"STORED", "LOADING"} => now.slot_content[s][w] = now.slot_key[s]

\* The state of a slot fits each live transfer that touches it.
S3 ==
    \A t \in Transfers, s \in Slots :
      (\E c \in Copies : now.copy_transfer[c] = t /\ now.copy_slot[c] = s)
      => IF now.direction[t] = "STORE"
         THEN \/ now.transfer[t].state = "PLANNED" /\ now.block[s].state = "ALLOCATED"
              \/ now.transfer[t].state = "SUBMITTED" /\ now.block[s].state = "STORING"
              \/ now.transfer[t].state = "ABANDONED" /\ now.block[s].state = "QUARANTINED"
         ELSE \/ now.block[s].state \in {"QUARANTINED", "RETIRED"}
              \/ now.transfer[t].state # "ABANDONED" /\ now.block[s].state = "LOADING"

\* The numbers of copies, pins and leases equal the numbers of their holders.
S4 ==
    /\ \A s \in Slots :
         \/ now.block[s].state \in {"FREE", "EVICTED", "RETIRED"}
         \/ now.block[s].copies
            = Cardinality({c \in Copies :
                /\ \E t \in Transfers :
                     /\ now.copy_transfer[c] = t
                     /\ ~ ( /\ now.direction[t] = "STORE"
                            /\ now.direction[t] # "NONE"
                            /\ now.transfer[t].state = "PLANNED" )
                /\ now.copy_slot[c] = s})
    /\ \A s \in Slots : TRUE => now.block[s].pins = Cardinality({m \in Matches : now.match_slot[m] = s})
    /\ \A d \in DeviceBlocks :
         TRUE
         => now.lease[d].readers
            = Cardinality({c \in Copies :
                /\ \E t \in Transfers : now.copy_transfer[c] = t /\ now.direction[t] = "STORE"
                /\ now.copy_device[c] = d})
    /\ \A c \in Copies, t \in Transfers, d \in DeviceBlocks :
         now.copy_transfer[c] = t /\ now.direction[t] = "LOAD" /\ now.copy_device[c] = d
         => now.lease[d].state = "WRITING"
    /\ \A d \in DeviceBlocks :
         (now.lease[d].state = "WRITING")
         => \E c \in Copies, t \in Transfers :
              now.copy_transfer[c] = t /\ now.direction[t] = "LOAD" /\ now.copy_device[c] = d

\* A transfer waits once for each worker that has not reported.
S5 ==
    /\ \A t \in Transfers :
         \/ now.direction[t] = "NONE"
         \/ now.transfer[t].pending = Cardinality({w \in Workers : now.report[t][w] = "NONE"})
    /\ \A t \in Transfers :
         now.direction[t] # "NONE" /\ now.transfer[t].state \in {"PLANNED", "SUBMITTED"}
         => now.transfer[t].failed = Cardinality({w \in Workers : now.report[t][w] = "BAD"})

\* A slot that a match holds can be read.
S7 ==
    \A m \in Matches, s \in Slots :
      now.match_slot[m] = s => now.block[s].state \in {"STORED", "LOADING"}

\* Every step taken is in its machine's table.
S8 ==
    /\ \A s \in Slots : now.block[s] # BlockIllegal
    /\ \A t \in Transfers : now.transfer[t] # TransferIllegal
    /\ \A d \in DeviceBlocks : now.lease[d] # LeaseIllegal

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
      now.key[d] # None /\ now.lease[d].state # "WRITING" /\ now.kernel[d][w] # "WRITES"
      => now.content[d][w] = now.key[d]

\* Everything is wound down.
Rest ==
    /\ \A d \in DeviceBlocks, w \in Workers : now.kernel[d][w] = "NONE"
    /\ \A t \in Transfers : now.direction[t] = "NONE"
    /\ \A m \in Matches : now.match_slot[m] = None
    /\ \A d \in DeviceBlocks : now.key[d] = None

\* An upper bound on the draining actions left to take.
Rank ==
    Cardinality({d \in DeviceBlocks : now.key[d] # None})
    + Sum([d \in DeviceBlocks |-> Cardinality({w \in Workers : now.kernel[d][w] # "NONE"})])
    + Cardinality({t \in Transfers : now.direction[t] # "NONE" /\ now.transfer[t].state = "PLANNED"})
    + Cardinality({t \in Transfers : now.direction[t] # "NONE"})
    + Sum([t \in Transfers |->
        Cardinality({w \in Workers : now.direction[t] # "NONE" /\ now.report[t][w] = "NONE"})])
    + Sum([c \in Copies |->
        Cardinality({w \in Workers : now.copy_transfer[c] # None /\ now.instant[c][w] = "QUEUED"})])
    + Sum([c \in Copies |->
        Cardinality({w \in Workers :
          now.copy_transfer[c] # None /\ (now.instant[c][w] = "QUEUED" \/ now.instant[c][w] = "STARTED")})])
    + Sum([c \in Copies |->
        Cardinality({w \in Workers :
          /\ now.copy_transfer[c] # None
          /\ now.instant[c][w] = "QUEUED" \/ now.instant[c][w] = "STARTED" \/ now.instant[c][w] = "READ"})])
    + Cardinality({m \in Matches : now.match_slot[m] # None})

\* Wherever the state is not at rest, an action can drain it, and each such action lowers the rank. So
\* winding down ends from every state, and ends at rest.
S9_CanDrain == Rest \/ ENABLED Drain
S9_NearerToRest == [][Drain => Rank' < Rank]_now

-----------------------------------------------------------------------------
\* What else holds in every state. With it the properties above can be proved by induction.

\* The transfer of a copy is live.
CopiesBelongToLiveTransfers ==
    \A c \in Copies, t \in Transfers : now.copy_transfer[c] = t => now.direction[t] # "NONE"

\* A copy is between a device block and a slot.
ACopyHasTwoEnds ==
    \A c \in Copies :
      now.copy_transfer[c] = None \/ (now.copy_device[c] # None /\ now.copy_slot[c] # None)

\* No other copy touches the slot of a store's copy.
AStoreHasItsSlotsToItself ==
    \A c \in Copies, t \in Transfers, c2 \in Copies :
      /\ now.copy_transfer[c] = t
      /\ now.direction[t] = "STORE"
      /\ now.copy_transfer[c2] # None
      /\ now.copy_slot[c2] = now.copy_slot[c]
      => c = c2

\* No other copy touches the device block of a load's copy.
ALoadHasItsDeviceBlocksToItself ==
    \A c \in Copies, t \in Transfers, c2 \in Copies :
      /\ now.copy_transfer[c] = t
      /\ now.direction[t] = "LOAD"
      /\ now.copy_transfer[c2] # None
      /\ now.copy_device[c2] = now.copy_device[c]
      => c = c2

\* Two copies of one transfer differ in their slots and in their device blocks.
ATransferTouchesABlockOnce ==
    \A c \in Copies, t \in Transfers, c2 \in Copies :
      /\ now.copy_transfer[c] = t
      /\ now.copy_transfer[c2] = t
      /\ now.copy_slot[c2] = now.copy_slot[c] \/ now.copy_device[c2] = now.copy_device[c]
      => c = c2

\* The device block of a store's copy is leased for reading.
AStoreHoldsALease ==
    \A c \in Copies, t \in Transfers, d \in DeviceBlocks :
      now.copy_transfer[c] = t /\ now.direction[t] = "STORE" /\ now.copy_device[c] = d
      => now.lease[d].state = "READING"

\* A slot that is being stored does not date from before the last reset.
WhatIsBeingStoredIsNew ==
    \A s \in Slots : now.block[s].state \in {"ALLOCATED", "STORING"} => ~now.old[s]

\* A live transfer is planned, submitted or abandoned.
ALiveTransferIsOnItsWay ==
    \A t \in Transfers :
      now.direction[t] = "NONE" \/ now.transfer[t].state \in {"PLANNED", "SUBMITTED", "ABANDONED"}

\* No worker has started a copy of a planned transfer.
NoCopyOfAPlanHasStarted ==
    \A c \in Copies, t \in Transfers, w \in Workers :
      now.copy_transfer[c] = t /\ now.direction[t] # "NONE" /\ now.transfer[t].state = "PLANNED"
      => now.instant[c][w] = "QUEUED"

\* No worker has reported a planned transfer.
NoWorkerReportsAPlan ==
    \A t \in Transfers, w \in Workers :
      (now.direction[t] # "NONE" /\ now.transfer[t].state = "PLANNED") => now.report[t][w] = "NONE"

\* Some worker has not reported a transfer that is under way.
ATransferUnderWayWaitsForAWorker ==
    \A t \in Transfers :
      now.direction[t] # "NONE" /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
      => \E w \in Workers : now.report[t][w] = "NONE"

\* A worker that reported a transfer as good has written all its copies.
WhatIsReportedGoodIsWritten ==
    \A c \in Copies, t \in Transfers, w \in Workers :
      (now.copy_transfer[c] = t /\ now.report[t][w] = "GOOD") => now.instant[c][w] = "WRITTEN"

\* A kernel that writes has a key: the key of its device block, unless this is free or being loaded.
AKernelWritesTheBlocksKey ==
    \A d \in DeviceBlocks, w \in Workers :
      (now.kernel[d][w] = "WRITES")
      => /\ now.kernel_key[d] # None
         /\ now.key[d] = None \/ now.lease[d].state = "WRITING" \/ now.key[d] = now.kernel_key[d]

\* Until a store has read, the device block holds the slot's key, or a queued kernel will write it.
AStoreFindsItsKey ==
    \A c \in Copies, t \in Transfers, d \in DeviceBlocks, s \in Slots, w \in Workers :
      /\ now.copy_transfer[c] = t
      /\ now.transfer[t].state # "ABANDONED"
      /\ now.copy_device[c] = d
      /\ now.copy_slot[c] = s
      /\ now.direction[t] = "STORE"
      /\ now.instant[c][w] = "QUEUED" \/ now.instant[c][w] = "STARTED"
      => IF now.kernel[d][w] = "WRITES"
         THEN now.kernel_key[d] = now.slot_key[s] /\ now.instant[c][w] = "QUEUED"
         ELSE now.content[d][w] = now.slot_key[s]

\* What a store has read is the slot's key.
AStoreCarriesItsKey ==
    \A c \in Copies, t \in Transfers, d \in DeviceBlocks, s \in Slots, w \in Workers :
      /\ now.copy_transfer[c] = t
      /\ now.transfer[t].state # "ABANDONED"
      /\ now.copy_device[c] = d
      /\ now.copy_slot[c] = s
      /\ now.direction[t] = "STORE"
      /\ now.instant[c][w] = "READ"
      => now.in_flight[c][w] = now.slot_key[s]

\* Where a store has written, the slot holds its key.
AStoreWritesItsKey ==
    \A c \in Copies, t \in Transfers, d \in DeviceBlocks, s \in Slots, w \in Workers :
      /\ now.copy_transfer[c] = t
      /\ now.transfer[t].state # "ABANDONED"
      /\ now.copy_device[c] = d
      /\ now.copy_slot[c] = s
      /\ now.direction[t] = "STORE"
      /\ now.instant[c][w] = "WRITTEN"
      => now.slot_content[s][w] = now.slot_key[s]

\* Until a load has read, the slot holds the device block's key.
ALoadFindsItsKey ==
    \A c \in Copies, t \in Transfers, d \in DeviceBlocks, s \in Slots, w \in Workers :
      /\ now.copy_transfer[c] = t
      /\ now.transfer[t].state # "ABANDONED"
      /\ now.copy_device[c] = d
      /\ now.copy_slot[c] = s
      /\ now.direction[t] = "LOAD"
      /\ now.instant[c][w] = "QUEUED" \/ now.instant[c][w] = "STARTED"
      => now.slot_content[s][w] = now.key[d]

\* What a load has read is the device block's key.
ALoadCarriesItsKey ==
    \A c \in Copies, t \in Transfers, d \in DeviceBlocks, s \in Slots, w \in Workers :
      /\ now.copy_transfer[c] = t
      /\ now.transfer[t].state # "ABANDONED"
      /\ now.copy_device[c] = d
      /\ now.copy_slot[c] = s
      /\ now.direction[t] = "LOAD"
      /\ now.instant[c][w] = "READ"
      => now.in_flight[c][w] = now.key[d]

\* Where a load has written, the device block holds its key.
ALoadWritesItsKey ==
    \A c \in Copies, t \in Transfers, d \in DeviceBlocks, s \in Slots, w \in Workers :
      /\ now.copy_transfer[c] = t
      /\ now.transfer[t].state # "ABANDONED"
      /\ now.copy_device[c] = d
      /\ now.copy_slot[c] = s
      /\ now.direction[t] = "LOAD"
      /\ now.instant[c][w] = "WRITTEN"
      => now.content[d][w] = now.key[d]

\* While a kernel is queued for its device block, a load has not started.
ALoadWaitsForKernels ==
    \A c \in Copies, t \in Transfers, d \in DeviceBlocks, w \in Workers :
      /\ now.copy_transfer[c] = t
      /\ now.direction[t] = "LOAD"
      /\ now.copy_device[c] = d
      /\ now.kernel[d][w] # "NONE"
      => now.instant[c][w] = "QUEUED"

\* A slot that a lost copy may write is retired.
ASlotWithAStrayWriterIsRetired ==
    \A s \in Slots : now.stray_slot[s] => now.block[s].state = "RETIRED"

\* No copy touches a slot that a lost copy may write.
NobodyReadsWhatAStrayCopyWrites ==
    \A s \in Slots, c \in Copies :
      (now.stray_slot[s] /\ now.copy_transfer[c] # None) => now.copy_slot[c] # s

\* A device block that a lost copy may write is retired.
ADeviceBlockWithAStrayWriterIsRetired ==
    \A d \in DeviceBlocks : now.stray_device[d] => now.lease[d].state = "RETIRED"

\* No request holds a retired device block.
ARetiredDeviceBlockIsFree ==
    \A d \in DeviceBlocks : now.lease[d].state = "RETIRED" => now.key[d] = None

\* It happens that a hit is loaded. A load has written on every worker.
Sometimes_AHitIsLoaded ==
    \E t \in Transfers :
      /\ now.direction[t] = "LOAD"
      /\ now.direction[t] # "NONE"
      /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
      /\ \A c \in Copies, w \in Workers : now.copy_transfer[c] = t => now.instant[c][w] = "WRITTEN"

\* It happens that a store is ahead of its kernel. A store was submitted before the kernel that writes
\* its block ran.
Sometimes_AStoreIsAheadOfItsKernel ==
    \E t \in Transfers :
      /\ now.direction[t] = "STORE"
      /\ now.direction[t] # "NONE"
      /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
      /\ \E c \in Copies, d \in DeviceBlocks, w \in Workers :
           now.copy_transfer[c] = t /\ now.copy_device[c] = d /\ now.kernel[d][w] = "WRITES"

\* It happens that a load is ahead of an old reader. A load was submitted before a kernel that reads
\* its block's former content ran.
Sometimes_ALoadIsAheadOfAnOldReader ==
    \E t \in Transfers :
      /\ now.direction[t] = "LOAD"
      /\ now.direction[t] # "NONE"
      /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
      /\ \E c \in Copies, d \in DeviceBlocks, w \in Workers :
           now.copy_transfer[c] = t /\ now.copy_device[c] = d /\ now.kernel[d][w] = "READS"

\* It happens that a freed block is stored. The engine has freed a block that a store still reads.
Sometimes_AFreedBlockIsStored ==
    \E t \in Transfers, d \in DeviceBlocks :
      /\ now.direction[t] = "STORE"
      /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_device[c] = d
      /\ now.key[d] = None

\* It happens that two loads read one slot. A slot has two readers.
Sometimes_TwoLoadsReadOneSlot ==
    \E s \in Slots : now.block[s].state = "LOADING" /\ now.block[s].copies = 2

\* It happens that two stores read one device block. A device block has two readers: a reset made the
\* first store's slot useless.
Sometimes_TwoStoresReadOneDeviceBlock ==
    \E d \in DeviceBlocks : now.lease[d].readers = 2

\* It happens that a store has two blocks. A store of two blocks is with the workers.
Sometimes_AStoreHasTwoBlocks ==
    \E t \in Transfers, c \in Copies, c2 \in Copies :
      /\ now.copy_transfer[c] = t
      /\ now.copy_transfer[c2] = t
      /\ c # c2
      /\ now.direction[t] # "NONE"
      /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
      /\ now.direction[t] = "STORE"

\* It happens that a load has two blocks. A load of two blocks is with the workers.
Sometimes_ALoadHasTwoBlocks ==
    \E t \in Transfers, c \in Copies, c2 \in Copies :
      /\ now.copy_transfer[c] = t
      /\ now.copy_transfer[c2] = t
      /\ c # c2
      /\ now.direction[t] # "NONE"
      /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
      /\ now.direction[t] = "LOAD"

\* It happens that a slot is quarantined under a copy. A reset has voided a slot that a copy touches.
Sometimes_ASlotIsQuarantinedUnderACopy ==
    \E t \in Transfers, s \in Slots :
      /\ now.direction[t] # "NONE"
      /\ now.transfer[t].state = "ABANDONED"
      /\ \E c \in Copies : now.copy_transfer[c] = t /\ now.copy_slot[c] = s
      /\ now.block[s].state = "QUARANTINED"

\* It happens that a load fails. A worker reported a load as bad.
Sometimes_ALoadFails ==
    \E t \in Transfers : now.direction[t] = "LOAD" /\ now.transfer[t].failed # 0

\* It happens that copies are lost. A store and a load were given up.
Sometimes_CopiesAreLost ==
    (\E s \in Slots : now.stray_slot[s]) /\ (\E d \in DeviceBlocks : now.stray_device[d])

=============================================================================
