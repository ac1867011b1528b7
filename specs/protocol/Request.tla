------------------------------- MODULE Request ------------------------------
\* The request protocol. Within these bounds: 2 requests, 1 slots, 1 workers; at most 2 holds, 2
\* transfers that are live or not told yet; failures, resets, losses, no restarts.
\*
\* A request asks what of its prompt is in slots of the host pool. A match pins these slots. A load
\* makes the pins readers of their slots, and the engine is told once how it ended. The request may be
\* preempted or finished at any time. RequestStep, TransferStep and BlockStep are the tables of a
\* request, a transfer and a block. A step that no row matches gives an ILLEGAL word, which S8 forbids.
\*
\* An action happens at once. After it, Forgetting resets what nothing can read any more, so that
\* states do not differ by it.
\*
\* Not modelled:
\* - Bytes, kernels, device blocks, and stores of several slots: they are in the offload protocol.
\* - Keys: a match may pin any block that can be read, and a request may wait for any live transfer.
\* - The order of a match: a load may leave out any of its pins. In kvsm it leaves out the last ones.
\* - Time: the bound of a wait may come at any moment.
\* - One event for all of a match, for a refused load, and for all that the engine is told: here each
\* takes several actions, and others may come between them.
\* - What else a request has: its cursors, and the device blocks that the engine gave it.
\*
\* Generated from kvsm's declaration and tables (specs/protocol/texts.py); do not edit.

EXTENDS Naturals, FiniteSets, TLC

CONSTANTS Requests, Slots, Holds, Transfers, Workers  \* Members are interchangeable.
CONSTANT None  \* No member of any of them.

Symmetry ==
    Permutations(Requests)
    \cup Permutations(Slots)
    \cup Permutations(Holds)
    \cup Permutations(Transfers)
    \cup Permutations(Workers)

RECURSIVE SumOver(_, _)
SumOver(f, set) ==
    IF set = {} THEN 0
    ELSE LET one == CHOOSE x \in set : TRUE IN f[one] + SumOver(f, set \ {one})
Sum(f) == SumOver(f, DOMAIN f)

-----------------------------------------------------------------------------
\* The request: its words, and the word after a trigger.
RequestWords == [
    state : {"NEW", "RUNNING", "MATCHED", "DEFERRED", "LOADING", "PREEMPTED", "FINISHED", "ILLEGAL"},
    loads : 0..1]
RequestIllegal == [state |-> "ILLEGAL", loads |-> 0]
RequestStep(trigger, word) ==
    CASE \* nothing on the host for it
         trigger = "MISS" /\ word.state \in {"NEW", "RUNNING", "PREEMPTED"}
             -> [word EXCEPT !.state = "RUNNING"]
      [] \* blocks are pinned for it
         trigger = "HIT" /\ word.state \in {"NEW", "RUNNING", "PREEMPTED"} /\ word.loads = 0
             -> [word EXCEPT !.state = "MATCHED"]
      [] \* what it needs is in flight
         trigger = "DEFER" /\ word.state \in {"NEW", "RUNNING", "PREEMPTED"}
             -> [word EXCEPT !.state = "DEFERRED"]
      [] \* asked again, or it could not be placed
         trigger = "UNMATCH" /\ word.state = "MATCHED"
             -> [word EXCEPT !.state = "NEW"]
      [] \* that transfer ended, or the bound was reached
         trigger = "WAKE" /\ word.state = "DEFERRED"
             -> [word EXCEPT !.state = "NEW"]
      [] \* its pins become readers
         trigger = "BEGIN_LOAD" /\ word.state = "MATCHED" /\ word.loads = 0
             -> [word EXCEPT !.state = "LOADING", !.loads = @ + 1]
      [] \* loaded, or told what to recompute
         trigger = "END_LOAD" /\ word.state = "LOADING" /\ word.loads = 1
             -> [word EXCEPT !.state = "RUNNING", !.loads = @ - 1]
      [] \* it was preempted meanwhile
         trigger = "END_LOAD" /\ word.state \in {"NEW", "RUNNING", "DEFERRED", "PREEMPTED"} /\ word.loads = 1
             -> [word EXCEPT !.loads = @ - 1]
      [] \* it does not run
         trigger = "PREEMPT" /\ word.state \in {"NEW", "PREEMPTED"}
             -> word
      [] \* its blocks are taken
         trigger = "PREEMPT" /\ word.state \in {"RUNNING", "MATCHED", "DEFERRED", "LOADING"}
             -> [word EXCEPT !.state = "PREEMPTED"]
      [] \* its load is in flight
         trigger = "FINISH" /\ word.state \in {"NEW", "RUNNING", "MATCHED", "DEFERRED", "LOADING", "PREEMPTED"} /\ word.loads = 1
             -> [word EXCEPT !.state = "FINISHED"]
      [] \* nothing of it is left
         trigger = "FINISH" /\ word.state \in {"NEW", "RUNNING", "MATCHED", "DEFERRED", "LOADING", "PREEMPTED"} /\ word.loads = 0
             -> [word EXCEPT !.state = "RELEASED"]
      [] \* its load ended
         trigger = "END_LOAD" /\ word.state = "FINISHED" /\ word.loads = 1
             -> [word EXCEPT !.state = "RELEASED", !.loads = @ - 1]
      [] \* its engine is gone
         trigger = "RESTART" /\ word.state \in {"NEW", "RUNNING", "MATCHED", "DEFERRED", "LOADING", "PREEMPTED", "FINISHED"}
             -> [word EXCEPT !.state = "RELEASED", !.loads = 0]
      [] OTHER -> RequestIllegal

-----------------------------------------------------------------------------
\* The transfer: its words, and the word after a trigger.
TransferWords == [
    state : {"PLANNED", "SUBMITTED", "COMPLETED", "FAILED", "CANCELLED", "ABANDONED", "DRAINED", "LOST", "ILLEGAL"},
    pending : 0..1,
    failed : 0..1]
TransferIllegal == [state |-> "ILLEGAL", pending |-> 0, failed |-> 0]
TransferStep(trigger, word) ==
    CASE \* the plan left for the workers
         trigger = "SUBMIT" /\ word.state = "PLANNED"
             -> [word EXCEPT !.state = "SUBMITTED"]
      [] \* the plan never left the scheduler
         trigger = "CANCEL" /\ word.state = "PLANNED"
             -> [word EXCEPT !.state = "CANCELLED"]
      [] \* the last, and none failed
         trigger = "REPORT_GOOD" /\ word.state = "SUBMITTED" /\ word.pending = 1 /\ word.failed = 0
             -> [word EXCEPT !.state = "COMPLETED", !.pending = @ - 1]
      [] \* the last, but one failed before
         trigger = "REPORT_GOOD" /\ word.state = "SUBMITTED" /\ word.pending = 1 /\ word.failed = 1
             -> [word EXCEPT !.state = "FAILED", !.pending = @ - 1]
      [] \* the last, and it failed
         trigger = "REPORT_BAD" /\ word.state = "SUBMITTED" /\ word.pending = 1 /\ word.failed = 0
             -> [word EXCEPT !.state = "FAILED", !.pending = @ - 1, !.failed = @ + 1]
      [] \* a reset
         trigger = "ABANDON" /\ word.state = "SUBMITTED"
             -> [word EXCEPT !.state = "ABANDONED"]
      [] \* the last worker let go
         trigger = "REPORT_GOOD" /\ word.state = "ABANDONED" /\ word.pending = 1
             -> [word EXCEPT !.state = "DRAINED", !.pending = @ - 1]
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
    pins : 0..2]
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
         trigger = "PIN" /\ word.state \in {"STORED", "LOADING"} /\ word.pins \in 0..1
             -> [word EXCEPT !.pins = @ + 1]
      [] \* the match was released
         trigger = "UNPIN" /\ word.state \in {"STORED", "LOADING"} /\ word.pins \in 1..2
             -> [word EXCEPT !.pins = @ - 1]
      [] \* used without a load: the device had it too
         trigger = "TOUCH" /\ word.state \in {"STORED", "LOADING"}
             -> word
      [] \* the pin becomes a reader
         trigger = "BEGIN_LOAD" /\ word.state \in {"STORED", "LOADING"} /\ word.copies \in 0..1 /\ word.pins \in 1..2
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
    \* Whether the ledger has a record of the request.
    known : [Requests -> BOOLEAN],
    \* The state of the request; NEW if there is no record of it.
    request : [Requests -> RequestWords],
    \* Whether the request has waited: its wait has a bound (WAITS), and the bound was reached (SPENT).
    patience : [Requests -> {"NONE", "WAITS", "SPENT"}],
    \* The transfer that the deferred request waits for.
    awaits : [Requests -> Transfers \cup {None}],
    \* The load of the request that is planned or in flight.
    load : [Requests -> Transfers \cup {None}],
    \* The direction of the transfer; NONE if it is not live.
    direction : [Transfers -> {"NONE", "STORE", "LOAD"}],
    \* The state of the transfer, until the engine was told of its end.
    transfer : [Transfers -> TransferWords],
    \* What the worker has reported of the transfer.
    report : [Transfers -> [Workers -> {"NONE", "GOOD", "BAD"}]],
    \* The request that the live load is for.
    load_request : [Transfers -> Requests \cup {None}],
    \* Whether the load is refused because its match was voided: it copies nothing, and ends at once.
    refused : [Transfers -> BOOLEAN],
    \* What the scheduler has noted about the load's end, to tell the engine; NONE if there is nothing.
    note : [Transfers -> {"NONE", "LOADED", "FAILED"}],
    \* Whether the engine waits to be told how the load ended.
    expects : [Transfers -> BOOLEAN],
    \* The state of the slot's block.
    block : [Slots -> BlockWords],
    \* The slot that is held; none if there is no such hold.
    hold_slot : [Holds -> Slots \cup {None}],
    \* The request whose match pins the slot; none if the hold is no pin.
    hold_request : [Holds -> Requests \cup {None}],
    \* The transfer that reads or writes the slot; none if the hold is a pin.
    hold_transfer : [Holds -> Transfers \cup {None}],
    \* Whether the pinned block was invalidated. The slot may hold another block by now.
    void : [Holds -> BOOLEAN]]

Init == now = [
    known |-> [i0 \in Requests |-> FALSE],
    request |-> [i0 \in Requests |-> [state |-> "NEW", loads |-> 0]],
    patience |-> [i0 \in Requests |-> "NONE"],
    awaits |-> [i0 \in Requests |-> None],
    load |-> [i0 \in Requests |-> None],
    direction |-> [i0 \in Transfers |-> "NONE"],
    transfer |-> [i0 \in Transfers |-> [state |-> "PLANNED", pending |-> 1, failed |-> 0]],
    report |-> [i0 \in Transfers |-> [i1 \in Workers |-> "NONE"]],
    load_request |-> [i0 \in Transfers |-> None],
    refused |-> [i0 \in Transfers |-> FALSE],
    note |-> [i0 \in Transfers |-> "NONE"],
    expects |-> [i0 \in Transfers |-> FALSE],
    block |-> [i0 \in Slots |-> [state |-> "FREE", copies |-> 0, pins |-> 0]],
    hold_slot |-> [i0 \in Holds |-> None],
    hold_request |-> [i0 \in Holds |-> None],
    hold_transfer |-> [i0 \in Holds |-> None],
    void |-> [i0 \in Holds |-> FALSE]]

-----------------------------------------------------------------------------
\* The ledger has no record of a released request; one with its name is new.
ForgetRequest(at) == [at EXCEPT !.request = [r \in Requests |->
    IF ~at.known[r] /\ at.request[r].state = "RELEASED"
    THEN [state |-> "NEW", loads |-> 0]
    ELSE at.request[r]]]

\* Only a deferred request waits for a transfer.
ForgetAwaits(at) == [at EXCEPT !.awaits = [r \in Requests |->
    IF at.request[r].state # "DEFERRED"
    THEN None
    ELSE at.awaits[r]]]

\* The transfer has ended, and the engine was told of it.
ForgetTransfer(at) == [at EXCEPT !.transfer = [t \in Transfers |->
    IF at.direction[t] = "NONE" /\ at.note[t] = "NONE" /\ at.transfer[t] # TransferIllegal
    THEN [state |-> "PLANNED", pending |-> 1, failed |-> 0]
    ELSE at.transfer[t]]]

\* The transfer has ended, and the engine was told of it.
ForgetReport(at) == [at EXCEPT !.report = [t \in Transfers |-> [w \in Workers |->
    IF at.direction[t] = "NONE" /\ at.note[t] = "NONE"
    THEN "NONE"
    ELSE at.report[t][w]]]]

\* A slot that was used and a slot that never was differ only in the name of their state.
ForgetBlock(at) == [at EXCEPT !.block = [s \in Slots |->
    IF at.block[s].state \in {"FREE", "EVICTED"}
    THEN [state |-> "FREE", copies |-> 0, pins |-> 0]
    ELSE at.block[s]]]

Forgetting(at) ==
    ForgetBlock(
    ForgetReport(
    ForgetTransfer(
    ForgetAwaits(
    ForgetRequest(at)))))

\* The core hears of a request.
Arrive(r) ==
    /\ ~now.known[r]
    /\ now.request[r].state = "NEW"
    /\ now' = Forgetting([now EXCEPT
        !.known[r] = TRUE])

\* The host has nothing for the request. After a preemption its load may still be in flight.
Miss(r) ==
    /\ now.known[r] \/ (~now.known[r] /\ now.request[r].state = "NEW")
    /\ RequestStep("MISS", now.request[r]) # RequestIllegal
    /\ now' = Forgetting([now EXCEPT
        !.known[r] = TRUE,
        !.request[r] = RequestStep("MISS", now.request[r])])

\* The request has a match: a block that can be read is pinned.
Hit(r, m, s) ==
    /\ now.known[r] \/ now.request[r].state = "NEW"
    /\ now.request[r].state \notin {"MATCHED", "DEFERRED"}
    /\ now.load[r] = None
    /\ now.hold_slot[m] = None
    /\ now.block[s].state \in {"STORED", "LOADING"}
    /\ now' = Forgetting([now EXCEPT
        !.known[r] = TRUE,
        !.request[r] = RequestStep("HIT", now.request[r]),
        !.block[s] = BlockStep("PIN", now.block[s]),
        !.hold_slot[m] = s,
        !.hold_request[m] = r])

\* The match has one more block.
HitMore(r, m, s) ==
    /\ now.known[r]
    /\ now.request[r].state = "MATCHED"
    /\ now.hold_slot[m] = None
    /\ now.block[s].state \in {"STORED", "LOADING"}
    /\ ~(\E m2 \in Holds : now.hold_request[m2] = r /\ ~now.void[m2] /\ now.hold_slot[m2] = s)
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("PIN", now.block[s]),
        !.hold_slot[m] = s,
        !.hold_request[m] = r])

\* The request waits for a transfer, holding nothing. It may be its own load, after a preemption.
Defer(r, t) ==
    /\ now.direction[t] # "NONE"
    /\ ~now.refused[t]
    /\ now.patience[r] # "SPENT"
    /\ \/ /\ now.known[r] \/ now.request[r].state = "NEW"
          /\ now.request[r].state \notin {"MATCHED", "DEFERRED"}
          /\ now.load[r] = None
       \/ now.load[r] = t /\ now.request[r].state \notin {"DEFERRED", "LOADING", "FINISHED"}
    /\ now' = Forgetting([now EXCEPT
        !.known[r] = TRUE,
        !.request[r] = RequestStep("DEFER", now.request[r]),
        !.awaits[r] = t,
        !.patience[r] = "WAITS"])

\* A tick: the bound of the request's wait has come. It wakes if it still waits.
RunOut(r) ==
    /\ now.patience[r] = "WAITS"
    /\ now' = Forgetting([now EXCEPT
        !.patience[r] = "SPENT",
        !.request[r] =
            IF now.request[r].state = "DEFERRED"
            THEN RequestStep("WAKE", now.request[r])
            ELSE now.request[r]])

\* The match is released without a load: the engine asks again, or cannot place the request.
Unmatch(r) ==
    /\ now.known[r]
    /\ now.request[r].state = "MATCHED"
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds :
                 now.hold_request[m2] = r /\ ~now.void[m2] /\ now.hold_slot[m2] = s
            THEN BlockStep("UNPIN", now.block[s])
            ELSE now.block[s]],
        !.hold_slot = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_slot[m]],
        !.void = [m \in Holds |-> IF now.hold_request[m] = r THEN FALSE ELSE now.void[m]],
        !.hold_request = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_request[m]],
        !.request[r] = RequestStep("UNMATCH", now.request[r])])

\* The engine accepts less than was matched: a pin is given back.
AcceptLess(r, m, s) ==
    /\ now.known[r]
    /\ now.request[r].state = "MATCHED"
    /\ now.hold_request[m] = r
    /\ ~now.void[m]
    /\ now.hold_slot[m] = s
    /\ \E m2 \in Holds : now.hold_request[m2] = r /\ m2 # m
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("UNPIN", now.block[s]),
        !.hold_slot[m] = None,
        !.hold_request[m] = None])

\* The engine takes the request's device blocks. Its match is released; its load goes on.
Preempt(r) ==
    /\ now.known[r]
    /\ now.request[r].state # "FINISHED"
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds :
                 now.hold_request[m2] = r /\ ~now.void[m2] /\ now.hold_slot[m2] = s
            THEN BlockStep("UNPIN", now.block[s])
            ELSE now.block[s]],
        !.hold_slot = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_slot[m]],
        !.void = [m \in Holds |-> IF now.hold_request[m] = r THEN FALSE ELSE now.void[m]],
        !.hold_request = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_request[m]],
        !.request[r] = RequestStep("PREEMPT", now.request[r]),
        !.patience[r] = "NONE"])

\* The request is over. It is released now, or when its load ends.
Finish(r) ==
    /\ now.known[r]
    /\ now.request[r].state # "FINISHED"
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds :
                 now.hold_request[m2] = r /\ ~now.void[m2] /\ now.hold_slot[m2] = s
            THEN BlockStep("UNPIN", now.block[s])
            ELSE now.block[s]],
        !.hold_slot = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_slot[m]],
        !.void = [m \in Holds |-> IF now.hold_request[m] = r THEN FALSE ELSE now.void[m]],
        !.hold_request = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_request[m]],
        !.known[r] = RequestStep("FINISH", now.request[r]).state # "RELEASED",
        !.request[r] = RequestStep("FINISH", now.request[r]),
        !.patience[r] = "NONE"])

\* A load is planned. The pins of the match become its readers.
BeginLoad(r, t) ==
    /\ now.known[r]
    /\ now.request[r].state = "MATCHED"
    /\ now.direction[t] = "NONE"
    /\ now.note[t] = "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ \A w \in Workers : now.report[t][w] = "NONE"
    /\ \A m \in Holds : now.hold_request[m] = r => ~now.void[m]
    /\ \E m \in Holds : now.hold_request[m] = r
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds :
                 now.hold_request[m2] = r /\ ~now.void[m2] /\ now.hold_slot[m2] = s
            THEN BlockStep("BEGIN_LOAD", now.block[s])
            ELSE now.block[s]],
        !.hold_transfer = [m \in Holds |-> IF now.hold_request[m] = r THEN t ELSE now.hold_transfer[m]],
        !.hold_request = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_request[m]],
        !.request[r] = RequestStep("BEGIN_LOAD", now.request[r]),
        !.load[r] = t,
        !.direction[t] = "LOAD",
        !.load_request[t] = r,
        !.expects[t] = TRUE])

\* The load is refused, because a block of the match is gone. It copies nothing, and is cancelled.
RefuseLoad(r, t) ==
    /\ now.known[r]
    /\ now.request[r].state = "MATCHED"
    /\ now.direction[t] = "NONE"
    /\ now.note[t] = "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ \A w \in Workers : now.report[t][w] = "NONE"
    /\ ~(\A m \in Holds : now.hold_request[m] = r => ~now.void[m])
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds :
                 now.hold_request[m2] = r /\ ~now.void[m2] /\ now.hold_slot[m2] = s
            THEN BlockStep("UNPIN", now.block[s])
            ELSE now.block[s]],
        !.hold_slot = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_slot[m]],
        !.void = [m \in Holds |-> IF now.hold_request[m] = r THEN FALSE ELSE now.void[m]],
        !.hold_request = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_request[m]],
        !.request[r] = RequestStep("BEGIN_LOAD", now.request[r]),
        !.load[r] = t,
        !.direction[t] = "LOAD",
        !.load_request[t] = r,
        !.expects[t] = TRUE,
        !.refused[t] = TRUE])

\* The load cannot be planned: there are too many transfers, or a device block is in use. The match is
\* released, and the engine is to be told that the load failed.
FailToLoad(r, t) ==
    /\ now.known[r]
    /\ now.request[r].state = "MATCHED"
    /\ now.direction[t] = "NONE"
    /\ now.note[t] = "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ \A w \in Workers : now.report[t][w] = "NONE"
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds :
                 now.hold_request[m2] = r /\ ~now.void[m2] /\ now.hold_slot[m2] = s
            THEN BlockStep("UNPIN", now.block[s])
            ELSE now.block[s]],
        !.hold_slot = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_slot[m]],
        !.void = [m \in Holds |-> IF now.hold_request[m] = r THEN FALSE ELSE now.void[m]],
        !.hold_request = [m \in Holds |-> IF now.hold_request[m] = r THEN None ELSE now.hold_request[m]],
        !.request[r] = RequestStep("UNMATCH", now.request[r]),
        !.note[t] = "FAILED",
        !.expects[t] = TRUE])

\* A store is planned, and gets a slot.
PlanStore(t, m, s) ==
    /\ now.direction[t] = "NONE"
    /\ now.note[t] = "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ \A w \in Workers : now.report[t][w] = "NONE"
    /\ now.hold_slot[m] = None
    /\ now.block[s].state \in {"FREE", "EVICTED"}
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("ALLOCATE", now.block[s]),
        !.hold_slot[m] = s,
        !.hold_transfer[m] = t,
        !.direction[t] = "STORE"])

\* The block in a slot is evicted.
Evict(s) ==
    /\ BlockStep("EVICT", now.block[s]) # BlockIllegal
    /\ now' = Forgetting([now EXCEPT
        !.block[s] = BlockStep("EVICT", now.block[s])])

\* A planned transfer leaves for the workers. A refused load does not.
Submit(t) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ ~now.refused[t]
    /\ \E w \in Workers : now.report[t][w] = "NONE"
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF /\ now.direction[t] = "STORE"
               /\ \E m2 \in Holds : now.hold_transfer[m2] = t /\ now.hold_slot[m2] = s
            THEN BlockStep("SUBMIT_STORE", now.block[s])
            ELSE now.block[s]],
        !.transfer[t] = TransferStep("SUBMIT", now.transfer[t])])

\* A worker reports its share of a transfer as good; other reports are still to come.
ReportGood(t, w) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ TransferStep("REPORT_GOOD", now.transfer[t]).state \in {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.report[t][w] = "GOOD",
        !.transfer[t] = TransferStep("REPORT_GOOD", now.transfer[t])])

\* The last worker reports its share as good, and the transfer ends. A failed load voids what it read.
EndGood(t, w) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ TransferStep("REPORT_GOOD", now.transfer[t]).state \notin {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds : now.hold_transfer[m2] = t /\ now.hold_slot[m2] = s
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
        !.void = [m \in Holds |->
            IF /\ now.direction[t] = "LOAD"
               /\ TransferStep("REPORT_GOOD", now.transfer[t]).state = "FAILED"
               /\ now.hold_request[m] # None
               /\ \E m2 \in Holds :
                    now.hold_transfer[m2] = t /\ now.hold_slot[m2] = now.hold_slot[m]
            THEN TRUE
            ELSE now.void[m]],
        !.known = [r \in Requests |->
            IF now.load[r] = t
            THEN RequestStep("END_LOAD", now.request[r]).state # "RELEASED"
            ELSE now.known[r]],
        !.request = [r \in Requests |->
            IF now.request[r].state = "DEFERRED" /\ now.awaits[r] = t
            THEN RequestStep("WAKE",
                   IF now.load[r] = t
                   THEN RequestStep("END_LOAD", now.request[r])
                   ELSE now.request[r])
            ELSE IF now.load[r] = t
                 THEN RequestStep("END_LOAD", now.request[r])
                 ELSE now.request[r]],
        !.load = [r \in Requests |-> IF now.load[r] = t THEN None ELSE now.load[r]],
        !.hold_slot = [m \in Holds |-> IF now.hold_transfer[m] = t THEN None ELSE now.hold_slot[m]],
        !.hold_transfer = [m \in Holds |-> IF now.hold_transfer[m] = t THEN None ELSE now.hold_transfer[m]],
        !.note[t] =
            IF now.direction[t] = "LOAD"
            THEN IF TransferStep("REPORT_GOOD", now.transfer[t]).state = "COMPLETED"
                 THEN "LOADED"
                 ELSE "FAILED"
            ELSE now.note[t],
        !.direction[t] = "NONE",
        !.load_request[t] = None,
        !.refused[t] = FALSE,
        !.report[t][w] = "GOOD",
        !.transfer[t] = TransferStep("REPORT_GOOD", now.transfer[t])])

\* A worker reports its share of a transfer as bad; other reports are still to come.
ReportBad(t, w) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ TransferStep("REPORT_BAD", now.transfer[t]).state \in {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.report[t][w] = "BAD",
        !.transfer[t] = TransferStep("REPORT_BAD", now.transfer[t])])

\* The last worker reports its share as bad, and the transfer ends. A failed load voids what it read.
EndBad(t, w) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now.report[t][w] = "NONE"
    /\ TransferStep("REPORT_BAD", now.transfer[t]).state \notin {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds : now.hold_transfer[m2] = t /\ now.hold_slot[m2] = s
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
        !.void = [m \in Holds |->
            IF /\ now.direction[t] = "LOAD"
               /\ TransferStep("REPORT_BAD", now.transfer[t]).state = "FAILED"
               /\ now.hold_request[m] # None
               /\ \E m2 \in Holds :
                    now.hold_transfer[m2] = t /\ now.hold_slot[m2] = now.hold_slot[m]
            THEN TRUE
            ELSE now.void[m]],
        !.known = [r \in Requests |->
            IF now.load[r] = t
            THEN RequestStep("END_LOAD", now.request[r]).state # "RELEASED"
            ELSE now.known[r]],
        !.request = [r \in Requests |->
            IF now.request[r].state = "DEFERRED" /\ now.awaits[r] = t
            THEN RequestStep("WAKE",
                   IF now.load[r] = t
                   THEN RequestStep("END_LOAD", now.request[r])
                   ELSE now.request[r])
            ELSE IF now.load[r] = t
                 THEN RequestStep("END_LOAD", now.request[r])
                 ELSE now.request[r]],
        !.load = [r \in Requests |-> IF now.load[r] = t THEN None ELSE now.load[r]],
        !.hold_slot = [m \in Holds |-> IF now.hold_transfer[m] = t THEN None ELSE now.hold_slot[m]],
        !.hold_transfer = [m \in Holds |-> IF now.hold_transfer[m] = t THEN None ELSE now.hold_transfer[m]],
        !.note[t] =
            IF now.direction[t] = "LOAD"
            THEN IF TransferStep("REPORT_BAD", now.transfer[t]).state = "COMPLETED"
                 THEN "LOADED"
                 ELSE "FAILED"
            ELSE now.note[t],
        !.direction[t] = "NONE",
        !.load_request[t] = None,
        !.refused[t] = FALSE,
        !.report[t][w] = "BAD",
        !.transfer[t] = TransferStep("REPORT_BAD", now.transfer[t])])

\* A plan that has not left is taken back, and a refused load ends.
Cancel(t) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state = "PLANNED"
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds : now.hold_transfer[m2] = t /\ now.hold_slot[m2] = s
            THEN IF now.direction[t] = "STORE"
                 THEN BlockStep("CANCEL", now.block[s])
                 ELSE BlockStep("END_COPY_BAD", now.block[s])
            ELSE now.block[s]],
        !.known = [r \in Requests |->
            IF now.load[r] = t
            THEN RequestStep("END_LOAD", now.request[r]).state # "RELEASED"
            ELSE now.known[r]],
        !.request = [r \in Requests |->
            IF now.request[r].state = "DEFERRED" /\ now.awaits[r] = t
            THEN RequestStep("WAKE",
                   IF now.load[r] = t
                   THEN RequestStep("END_LOAD", now.request[r])
                   ELSE now.request[r])
            ELSE IF now.load[r] = t
                 THEN RequestStep("END_LOAD", now.request[r])
                 ELSE now.request[r]],
        !.load = [r \in Requests |-> IF now.load[r] = t THEN None ELSE now.load[r]],
        !.hold_slot = [m \in Holds |-> IF now.hold_transfer[m] = t THEN None ELSE now.hold_slot[m]],
        !.hold_transfer = [m \in Holds |-> IF now.hold_transfer[m] = t THEN None ELSE now.hold_transfer[m]],
        !.note[t] =
            IF now.direction[t] = "LOAD"
            THEN IF FALSE THEN "LOADED" ELSE "FAILED"
            ELSE now.note[t],
        !.direction[t] = "NONE",
        !.load_request[t] = None,
        !.refused[t] = FALSE,
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
        !.void = [m \in Holds |-> IF now.hold_request[m] # None THEN TRUE ELSE now.void[m]]])

\* A worker will never report: the transfer is given up, and its slots are retired.
Lose(t) ==
    /\ now.direction[t] # "NONE"
    /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
    /\ now' = Forgetting([now EXCEPT
        !.block = [s \in Slots |->
            IF \E m2 \in Holds : now.hold_transfer[m2] = t /\ now.hold_slot[m2] = s
            THEN BlockStep("LOSE", now.block[s])
            ELSE now.block[s]],
        !.void = [m \in Holds |->
            IF /\ TRUE
               /\ now.hold_request[m] # None
               /\ \E m2 \in Holds :
                    now.hold_transfer[m2] = t /\ now.hold_slot[m2] = now.hold_slot[m]
            THEN TRUE
            ELSE now.void[m]],
        !.known = [r \in Requests |->
            IF now.load[r] = t
            THEN RequestStep("END_LOAD", now.request[r]).state # "RELEASED"
            ELSE now.known[r]],
        !.request = [r \in Requests |->
            IF now.request[r].state = "DEFERRED" /\ now.awaits[r] = t
            THEN RequestStep("WAKE",
                   IF now.load[r] = t
                   THEN RequestStep("END_LOAD", now.request[r])
                   ELSE now.request[r])
            ELSE IF now.load[r] = t
                 THEN RequestStep("END_LOAD", now.request[r])
                 ELSE now.request[r]],
        !.load = [r \in Requests |-> IF now.load[r] = t THEN None ELSE now.load[r]],
        !.hold_slot = [m \in Holds |-> IF now.hold_transfer[m] = t THEN None ELSE now.hold_slot[m]],
        !.hold_transfer = [m \in Holds |-> IF now.hold_transfer[m] = t THEN None ELSE now.hold_transfer[m]],
        !.note[t] =
            IF now.direction[t] = "LOAD"
            THEN IF FALSE THEN "LOADED" ELSE "FAILED"
            ELSE now.note[t],
        !.direction[t] = "NONE",
        !.load_request[t] = None,
        !.refused[t] = FALSE,
        !.transfer[t] = TransferStep("LOSE", now.transfer[t])])

\* The engine is told how a load ended: loaded, or failed with what to compute again.
Tell(t) ==
    /\ now.note[t] # "NONE"
    /\ now' = Forgetting([now EXCEPT
        !.note[t] = "NONE",
        !.expects[t] = FALSE])

-----------------------------------------------------------------------------
\* Everything that may happen.
Next ==
    \/ \E r \in Requests : Arrive(r)
    \/ \E r \in Requests : Miss(r)
    \/ \E r \in Requests, m \in Holds, s \in Slots : Hit(r, m, s)
    \/ \E r \in Requests, m \in Holds, s \in Slots : HitMore(r, m, s)
    \/ \E r \in Requests, t \in Transfers : Defer(r, t)
    \/ \E r \in Requests : RunOut(r)
    \/ \E r \in Requests : Unmatch(r)
    \/ \E r \in Requests, m \in Holds, s \in Slots : AcceptLess(r, m, s)
    \/ \E r \in Requests : Preempt(r)
    \/ \E r \in Requests : Finish(r)
    \/ \E r \in Requests, t \in Transfers : BeginLoad(r, t)
    \/ \E r \in Requests, t \in Transfers : RefuseLoad(r, t)
    \/ \E r \in Requests, t \in Transfers : FailToLoad(r, t)
    \/ \E t \in Transfers, m \in Holds, s \in Slots : PlanStore(t, m, s)
    \/ \E s \in Slots : Evict(s)
    \/ \E t \in Transfers : Submit(t)
    \/ \E t \in Transfers, w \in Workers : ReportGood(t, w)
    \/ \E t \in Transfers, w \in Workers : EndGood(t, w)
    \/ \E t \in Transfers, w \in Workers : ReportBad(t, w)
    \/ \E t \in Transfers, w \in Workers : EndBad(t, w)
    \/ \E t \in Transfers : Cancel(t)
    \/ Reset
    \/ \E t \in Transfers : Lose(t)
    \/ \E t \in Transfers : Tell(t)

\* The actions that bring things to their end.
Drain ==
    \/ \E r \in Requests : Finish(r)
    \/ \E t \in Transfers : Submit(t)
    \/ \E t \in Transfers, w \in Workers : ReportGood(t, w)
    \/ \E t \in Transfers, w \in Workers : EndGood(t, w)
    \/ \E t \in Transfers : Cancel(t)
    \/ \E t \in Transfers : Tell(t)

Spec == Init /\ [][Next]_now

\* The state of a slot fits each live transfer that reads or writes it.
S3 ==
    \A m \in Holds, t \in Transfers, s \in Slots :
      now.hold_transfer[m] = t /\ now.hold_slot[m] = s
      => IF now.direction[t] = "STORE"
         THEN \/ now.transfer[t].state = "PLANNED" /\ now.block[s].state = "ALLOCATED"
              \/ now.transfer[t].state = "SUBMITTED" /\ now.block[s].state = "STORING"
              \/ now.transfer[t].state = "ABANDONED" /\ now.block[s].state = "QUARANTINED"
         ELSE \/ now.block[s].state \in {"QUARANTINED", "RETIRED"}
              \/ now.transfer[t].state # "ABANDONED" /\ now.block[s].state = "LOADING"

\* The numbers of pins, readers and loads equal the numbers of their holders. Each pin belongs to a
\* matched request, and each load to a known one: a released request holds nothing.
S4 ==
    /\ \A r \in Requests :
         TRUE => now.request[r].loads = Cardinality({t \in Transfers : now.load[r] = t})
    /\ \A s \in Slots :
         \/ now.block[s].state \in {"FREE", "EVICTED", "RETIRED"}
         \/ now.block[s].copies
            = Cardinality({m \in Holds :
                /\ \E t \in Transfers :
                     /\ now.hold_transfer[m] = t
                     /\ ~ ( /\ now.direction[t] = "STORE"
                            /\ now.direction[t] # "NONE"
                            /\ now.transfer[t].state = "PLANNED" )
                /\ now.hold_slot[m] = s})
    /\ \A s \in Slots :
         TRUE
         => now.block[s].pins
            = Cardinality({m \in Holds :
                now.hold_request[m] # None /\ ~now.void[m] /\ now.hold_slot[m] = s})
    /\ \A m \in Holds, r \in Requests :
         now.hold_request[m] = r => (now.known[r] /\ now.request[r].state = "MATCHED")
    /\ \A r \in Requests, t \in Transfers :
         now.load[r] = t => (now.direction[t] = "LOAD" /\ now.load_request[t] = r /\ now.known[r])
    /\ \A t \in Transfers, r \in Requests :
         (now.direction[t] = "LOAD" /\ now.load_request[t] = r) => now.load[r] = t
    /\ \A t \in Transfers : now.direction[t] = "LOAD" => now.load_request[t] # None

\* A transfer waits once for each worker that has not reported.
S5 ==
    /\ \A t \in Transfers :
         \/ now.direction[t] = "NONE"
         \/ now.transfer[t].pending = Cardinality({w \in Workers : now.report[t][w] = "NONE"})
    /\ \A t \in Transfers :
         now.direction[t] # "NONE" /\ now.transfer[t].state \in {"PLANNED", "SUBMITTED"}
         => now.transfer[t].failed = Cardinality({w \in Workers : now.report[t][w] = "BAD"})

\* The engine hears that a load is loaded only if every worker has reported it as good. It hears of the
\* end of each load once, and of nothing else.
S6 ==
    /\ \A t \in Transfers :
         (now.note[t] = "LOADED")
         => now.transfer[t].state = "COMPLETED" /\ (\A w \in Workers : now.report[t][w] = "GOOD")
    /\ \A t \in Transfers : now.expects[t] = (now.direction[t] = "LOAD" \/ now.note[t] # "NONE")
    /\ \A t \in Transfers : ~(now.direction[t] # "NONE" /\ now.note[t] # "NONE")

\* A match pins something until its load begins. What it pins can be read, unless it was voided. What
\* its load reads stays in its slot.
S7 ==
    /\ \A r \in Requests :
         now.known[r] /\ now.request[r].state = "MATCHED"
         => \E m \in Holds : now.hold_request[m] = r
    /\ \A m \in Holds, s \in Slots :
         now.hold_request[m] # None /\ ~now.void[m] /\ now.hold_slot[m] = s
         => now.block[s].state \in {"STORED", "LOADING"}
    /\ \A m \in Holds, t \in Transfers, s \in Slots :
         now.hold_transfer[m] = t /\ now.direction[t] = "LOAD" /\ now.hold_slot[m] = s
         => now.block[s].state \in {"LOADING", "QUARANTINED", "RETIRED"}
    /\ \A t \in Transfers :
         (now.direction[t] = "LOAD" /\ ~now.refused[t]) => (\E m \in Holds : now.hold_transfer[m] = t)

\* Every step taken is in its machine's table.
S8 ==
    /\ \A r \in Requests : now.request[r] # RequestIllegal
    /\ \A t \in Transfers : now.transfer[t] # TransferIllegal
    /\ \A s \in Slots : now.block[s] # BlockIllegal

\* A request that waits will wake: it waits for a live transfer, and its wait has a bound.
S9 ==
    /\ \A r \in Requests :
         now.request[r].state = "DEFERRED" => (now.patience[r] = "WAITS" /\ now.awaits[r] # None)
    /\ \A r \in Requests, t \in Transfers :
         (now.request[r].state = "DEFERRED" /\ now.awaits[r] = t) => now.direction[t] # "NONE"

\* Everything is wound down.
Rest ==
    /\ \A t \in Transfers : now.direction[t] = "NONE"
    /\ \A t \in Transfers : now.note[t] = "NONE" /\ ~now.expects[t]
    /\ \A r \in Requests : ~now.known[r]
    /\ \A m \in Holds : now.hold_slot[m] = None

\* An upper bound on the draining actions left to take.
Rank ==
    Cardinality({r \in Requests : now.known[r] /\ now.request[r].state # "FINISHED"})
    + Cardinality({t \in Transfers : now.direction[t] # "NONE" /\ now.transfer[t].state = "PLANNED"})
    + Cardinality({t \in Transfers : now.direction[t] # "NONE"})
    + Sum([t \in Transfers |->
        Cardinality({w \in Workers : now.direction[t] # "NONE" /\ now.report[t][w] = "NONE"})])
    + Cardinality({t \in Transfers : now.direction[t] = "NONE" => now.note[t] # "NONE"})

\* Wherever the state is not at rest, an action can drain it, and each such action lowers the rank. So
\* winding down ends from every state, and ends at rest.
S9_CanDrain == Rest \/ ENABLED Drain
S9_NearerToRest == [][Drain => Rank' < Rank]_now

-----------------------------------------------------------------------------
\* What else holds in every state. With it the properties above can be proved by induction.

\* A request that the ledger has a record of is not released. Another one is released or new.
AReleasedRequestHasNoRecord ==
    \A r \in Requests :
      /\ now.known[r] => now.request[r].state # "RELEASED"
      /\ now.known[r] \/ now.request[r].state \in {"NEW", "RELEASED"}

\* A request that loads, or is over and not released, has a load. A matched one has none.
ALoadingRequestHasALoad ==
    \A r \in Requests :
      /\ now.request[r].state \in {"LOADING", "FINISHED"} => now.load[r] # None
      /\ (now.known[r] /\ now.request[r].state = "MATCHED") => now.load[r] = None

\* A hold on a slot is a match's or a transfer's. Only a match's can be void.
AHoldHasOneHolder ==
    \A m \in Holds :
      /\ now.hold_slot[m] = None \/ now.hold_request[m] # None \/ now.hold_transfer[m] # None
      /\ now.hold_request[m] = None \/ (now.hold_slot[m] # None /\ now.hold_transfer[m] = None)
      /\ now.hold_transfer[m] = None \/ now.hold_slot[m] # None
      /\ now.void[m] => now.hold_request[m] # None

\* The transfer of a hold is live, and no refused load.
TransfersThatHoldSlotsAreLive ==
    \A m \in Holds, t \in Transfers :
      now.hold_transfer[m] = t => (now.direction[t] # "NONE" /\ ~now.refused[t])

\* No other transfer touches the slot of a store.
AStoreHasItsSlotToItself ==
    \A m \in Holds, t \in Transfers, m2 \in Holds :
      /\ now.hold_transfer[m] = t
      /\ now.direction[t] = "STORE"
      /\ now.hold_slot[m] = now.hold_slot[m2]
      /\ now.hold_transfer[m2] # None
      => m = m2

\* Two holds of a transfer are on different slots. So are two pins of a match, unless one is void.
ASlotIsHeldOnce ==
    \A m \in Holds, m2 \in Holds :
      /\ /\ now.hold_request[m] # None
         /\ now.hold_request[m] = now.hold_request[m2]
         /\ now.hold_slot[m] = now.hold_slot[m2]
         /\ ~now.void[m]
         /\ ~now.void[m2]
         => m = m2
      /\ /\ now.hold_transfer[m] # None
         /\ now.hold_transfer[m] = now.hold_transfer[m2]
         /\ now.hold_slot[m] = now.hold_slot[m2]
         => m = m2

\* A live transfer is planned, submitted or abandoned.
ALiveTransferIsOnItsWay ==
    \A t \in Transfers :
      now.direction[t] = "NONE" \/ now.transfer[t].state \in {"PLANNED", "SUBMITTED", "ABANDONED"}

\* Some worker has not reported a transfer that is under way.
ATransferUnderWayWaitsForAWorker ==
    \A t \in Transfers :
      now.direction[t] # "NONE" /\ now.transfer[t].state \in {"SUBMITTED", "ABANDONED"}
      => \E w \in Workers : now.report[t][w] = "NONE"

\* A refused load has not left for the workers.
ARefusedLoadIsPlanned ==
    \A t \in Transfers :
      now.refused[t]
      => now.direction[t] = "LOAD" /\ now.direction[t] # "NONE" /\ now.transfer[t].state = "PLANNED"

\* It happens that a finished request loads. A request is over, and its load is in flight.
Sometimes_AFinishedRequestLoads ==
    \E r \in Requests : now.request[r].state = "FINISHED"

\* It happens that a request waits for its own load. A request was preempted under its load, and waits
\* for it.
Sometimes_ARequestWaitsForItsOwnLoad ==
    \E r \in Requests :
      now.request[r].state = "DEFERRED" /\ (\E t \in Transfers : now.load[r] = t /\ now.awaits[r] = t)

\* It happens that an end is told late. A load has ended, the engine does not know it yet, and no
\* request is known any more.
Sometimes_AnEndIsToldLate ==
    (\E t \in Transfers : now.note[t] # "NONE") /\ (\A r \in Requests : ~now.known[r])

\* It happens that a wait is spent. A request has waited as long as it may.
Sometimes_AWaitIsSpent ==
    \E r \in Requests : now.patience[r] = "SPENT"

\* It happens that a load is good. The engine is about to hear that a load is loaded.
Sometimes_ALoadIsGood ==
    \E t \in Transfers : now.note[t] = "LOADED"

\* It happens that a pin is beside a reader. A load reads a slot that a match pins.
Sometimes_APinIsBesideAReader ==
    \E m \in Holds :
      /\ now.hold_request[m] # None
      /\ \E m2 \in Holds :
           /\ now.hold_slot[m] = now.hold_slot[m2]
           /\ \E t \in Transfers : now.hold_transfer[m2] = t /\ now.direction[t] = "LOAD"

\* It happens that a match is void. A block that a match pins was voided.
Sometimes_AMatchIsVoid ==
    \E m \in Holds : now.hold_request[m] # None /\ now.void[m]

\* It happens that a slot is pinned again. A pinned block was voided, and another match pins the next
\* block in its slot.
Sometimes_ASlotIsPinnedAgain ==
    \E m \in Holds :
      /\ now.hold_request[m] # None
      /\ now.void[m]
      /\ \E m2 \in Holds :
           now.hold_request[m2] # None /\ ~now.void[m2] /\ now.hold_slot[m] = now.hold_slot[m2]

\* It happens that a load is abandoned. A reset came while a load was under way.
Sometimes_ALoadIsAbandoned ==
    \E t \in Transfers : now.direction[t] = "LOAD" /\ now.transfer[t].state = "ABANDONED"

=============================================================================
