-- The request protocol. Within these bounds: 2 requests, 1 slots, 1 workers; at most 2 holds, 2
-- transfers that are live or not told yet; failures, resets, losses, no restarts.
--
-- The same protocol as in Request.tla beside it, which is easier to read. Murphi's undefined value
-- stands for None. Not modelled:
-- - Bytes, kernels, device blocks, and stores of several slots: they are in the offload protocol.
-- - Keys: a match may pin any block that can be read, and a request may wait for any live transfer.
-- - The order of a match: a load may leave out any of its pins. In kvsm it leaves out the last ones.
-- - Time: the bound of a wait may come at any moment.
-- - One event for all of a match, for a refused load, and for all that the engine is told: here each
-- takes several actions, and others may come between them.
-- - What else a request has: its cursors, and the device blocks that the engine gave it.
--
-- Generated from kvsm's declaration and tables (specs/protocol/texts.py); do not edit.

type
  Count: 0..255;
  Request: scalarset(2);
  Slot: scalarset(1);
  Hold: scalarset(2);
  Transfer: scalarset(2);
  Worker: scalarset(1);
  RequestState: enum {
    REQUEST_NEW, REQUEST_RUNNING, REQUEST_MATCHED, REQUEST_DEFERRED, REQUEST_LOADING, REQUEST_PREEMPTED,
    REQUEST_FINISHED, REQUEST_RELEASED, REQUEST_ILLEGAL
  };
  RequestTrigger: enum {
    REQUEST_ON_MISS, REQUEST_ON_HIT, REQUEST_ON_UNMATCH, REQUEST_ON_DEFER, REQUEST_ON_WAKE,
    REQUEST_ON_BEGIN_LOAD, REQUEST_ON_END_LOAD, REQUEST_ON_PREEMPT, REQUEST_ON_FINISH,
    REQUEST_ON_RESTART
  };
  RequestWord: record state: RequestState; loads: 0..1; end;
  Patience: enum {
    PATIENCE_NONE, PATIENCE_WAITS, PATIENCE_SPENT
  };
  Direction: enum {
    DIRECTION_NONE, DIRECTION_STORE, DIRECTION_LOAD
  };
  TransferState: enum {
    TRANSFER_PLANNED, TRANSFER_SUBMITTED, TRANSFER_COMPLETED, TRANSFER_FAILED, TRANSFER_CANCELLED,
    TRANSFER_ABANDONED, TRANSFER_DRAINED, TRANSFER_LOST, TRANSFER_ILLEGAL
  };
  TransferTrigger: enum {
    TRANSFER_ON_SUBMIT, TRANSFER_ON_CANCEL, TRANSFER_ON_REPORT_GOOD, TRANSFER_ON_REPORT_BAD,
    TRANSFER_ON_ABANDON, TRANSFER_ON_LOSE
  };
  TransferWord: record state: TransferState; pending: 0..1; failed: 0..1; end;
  Report: enum {
    REPORT_NONE, REPORT_GOOD, REPORT_BAD
  };
  Note: enum {
    NOTE_NONE, NOTE_LOADED, NOTE_FAILED
  };
  BlockState: enum {
    BLOCK_FREE, BLOCK_ALLOCATED, BLOCK_STORING, BLOCK_STORED, BLOCK_LOADING, BLOCK_EVICTED,
    BLOCK_QUARANTINED, BLOCK_RETIRED, BLOCK_ILLEGAL
  };
  BlockTrigger: enum {
    BLOCK_ON_ALLOCATE, BLOCK_ON_SUBMIT_STORE, BLOCK_ON_CANCEL, BLOCK_ON_PIN, BLOCK_ON_UNPIN,
    BLOCK_ON_BEGIN_LOAD, BLOCK_ON_END_COPY_GOOD, BLOCK_ON_END_COPY_BAD, BLOCK_ON_EVICT,
    BLOCK_ON_INVALIDATE, BLOCK_ON_LOSE, BLOCK_ON_TOUCH, BLOCK_ON_RESTART
  };
  BlockWord: record state: BlockState; copies: 0..2; pins: 0..2; end;

var
  -- Whether the ledger has a record of the request.
  known: array [Request] of boolean;
  -- The state of the request; NEW if there is no record of it.
  request: array [Request] of RequestWord;
  -- Whether the request has waited: its wait has a bound (WAITS), and the bound was reached (SPENT).
  patience: array [Request] of Patience;
  -- The transfer that the deferred request waits for.
  awaits: array [Request] of Transfer;
  -- The load of the request that is planned or in flight.
  load: array [Request] of Transfer;
  -- The direction of the transfer; NONE if it is not live.
  direction: array [Transfer] of Direction;
  -- The state of the transfer, until the engine was told of its end.
  transfer: array [Transfer] of TransferWord;
  -- What the worker has reported of the transfer.
  report: array [Transfer] of array [Worker] of Report;
  -- The request that the live load is for.
  load_request: array [Transfer] of Request;
  -- Whether the load is refused because its match was voided: it copies nothing, and ends at once.
  refused: array [Transfer] of boolean;
  -- What the scheduler has noted about the load's end, to tell the engine; NONE if there is nothing.
  note: array [Transfer] of Note;
  -- Whether the engine waits to be told how the load ended.
  expects: array [Transfer] of boolean;
  -- The state of the slot's block.
  block: array [Slot] of BlockWord;
  -- The slot that is held; none if there is no such hold.
  hold_slot: array [Hold] of Slot;
  -- The request whose match pins the slot; none if the hold is no pin.
  hold_request: array [Hold] of Request;
  -- The transfer that reads or writes the slot; none if the hold is a pin.
  hold_transfer: array [Hold] of Transfer;
  -- Whether the pinned block was invalidated. The slot may hold another block by now.
  void: array [Hold] of boolean;

-- The row of the request's table that matches; 0 if none does.
function request_row(trigger: RequestTrigger; word: RequestWord): Count;
begin
  -- nothing on the host for it
  if trigger = REQUEST_ON_MISS
     & (word.state = REQUEST_NEW | word.state = REQUEST_RUNNING | word.state = REQUEST_PREEMPTED) then
    return 1;
  end;
  -- blocks are pinned for it
  if trigger = REQUEST_ON_HIT
     & (word.state = REQUEST_NEW | word.state = REQUEST_RUNNING | word.state = REQUEST_PREEMPTED)
     & word.loads = 0 then
    return 2;
  end;
  -- what it needs is in flight
  if trigger = REQUEST_ON_DEFER
     & (word.state = REQUEST_NEW | word.state = REQUEST_RUNNING | word.state = REQUEST_PREEMPTED) then
    return 3;
  end;
  -- asked again, or it could not be placed
  if trigger = REQUEST_ON_UNMATCH
     & (word.state = REQUEST_MATCHED) then
    return 4;
  end;
  -- that transfer ended, or the bound was reached
  if trigger = REQUEST_ON_WAKE
     & (word.state = REQUEST_DEFERRED) then
    return 5;
  end;
  -- its pins become readers
  if trigger = REQUEST_ON_BEGIN_LOAD
     & (word.state = REQUEST_MATCHED)
     & word.loads = 0 then
    return 6;
  end;
  -- loaded, or told what to recompute
  if trigger = REQUEST_ON_END_LOAD
     & (word.state = REQUEST_LOADING)
     & word.loads = 1 then
    return 7;
  end;
  -- it was preempted meanwhile
  if trigger = REQUEST_ON_END_LOAD
     & (word.state = REQUEST_NEW | word.state = REQUEST_RUNNING | word.state = REQUEST_DEFERRED | word.state = REQUEST_PREEMPTED)
     & word.loads = 1 then
    return 8;
  end;
  -- it does not run
  if trigger = REQUEST_ON_PREEMPT
     & (word.state = REQUEST_NEW | word.state = REQUEST_PREEMPTED) then
    return 9;
  end;
  -- its blocks are taken
  if trigger = REQUEST_ON_PREEMPT
     & (word.state = REQUEST_RUNNING | word.state = REQUEST_MATCHED | word.state = REQUEST_DEFERRED | word.state = REQUEST_LOADING) then
    return 10;
  end;
  -- its load is in flight
  if trigger = REQUEST_ON_FINISH
     & (word.state = REQUEST_NEW | word.state = REQUEST_RUNNING | word.state = REQUEST_MATCHED | word.state = REQUEST_DEFERRED | word.state = REQUEST_LOADING | word.state = REQUEST_PREEMPTED)
     & word.loads = 1 then
    return 11;
  end;
  -- nothing of it is left
  if trigger = REQUEST_ON_FINISH
     & (word.state = REQUEST_NEW | word.state = REQUEST_RUNNING | word.state = REQUEST_MATCHED | word.state = REQUEST_DEFERRED | word.state = REQUEST_LOADING | word.state = REQUEST_PREEMPTED)
     & word.loads = 0 then
    return 12;
  end;
  -- its load ended
  if trigger = REQUEST_ON_END_LOAD
     & (word.state = REQUEST_FINISHED)
     & word.loads = 1 then
    return 13;
  end;
  -- its engine is gone
  if trigger = REQUEST_ON_RESTART
     & (word.state = REQUEST_NEW | word.state = REQUEST_RUNNING | word.state = REQUEST_MATCHED | word.state = REQUEST_DEFERRED | word.state = REQUEST_LOADING | word.state = REQUEST_PREEMPTED | word.state = REQUEST_FINISHED) then
    return 14;
  end;
  return 0;
end;

procedure request_step(trigger: RequestTrigger; var word: RequestWord);
begin
  switch request_row(trigger, word)
    case 1: word.state := REQUEST_RUNNING;
    case 2: word.state := REQUEST_MATCHED;
    case 3: word.state := REQUEST_DEFERRED;
    case 4: word.state := REQUEST_NEW;
    case 5: word.state := REQUEST_NEW;
    case 6: word.state := REQUEST_LOADING; word.loads := word.loads + 1;
    case 7: word.state := REQUEST_RUNNING; word.loads := word.loads - 1;
    case 8: word.loads := word.loads - 1;
    case 9:
    case 10: word.state := REQUEST_PREEMPTED;
    case 11: word.state := REQUEST_FINISHED;
    case 12: word.state := REQUEST_RELEASED;
    case 13: word.state := REQUEST_RELEASED; word.loads := word.loads - 1;
    case 14: word.state := REQUEST_RELEASED; word.loads := 0;
    else word.state := REQUEST_ILLEGAL; word.loads := 0;
  end;
end;

function request_after(trigger: RequestTrigger; word: RequestWord): RequestState;
var after: RequestWord;
begin
  after := word;
  request_step(trigger, after);
  return after.state;
end;

-- The row of the transfer's table that matches; 0 if none does.
function transfer_row(trigger: TransferTrigger; word: TransferWord): Count;
begin
  -- the plan left for the workers
  if trigger = TRANSFER_ON_SUBMIT
     & (word.state = TRANSFER_PLANNED) then
    return 1;
  end;
  -- the plan never left the scheduler
  if trigger = TRANSFER_ON_CANCEL
     & (word.state = TRANSFER_PLANNED) then
    return 2;
  end;
  -- the last, and none failed
  if trigger = TRANSFER_ON_REPORT_GOOD
     & (word.state = TRANSFER_SUBMITTED)
     & word.pending = 1
     & word.failed = 0 then
    return 3;
  end;
  -- the last, but one failed before
  if trigger = TRANSFER_ON_REPORT_GOOD
     & (word.state = TRANSFER_SUBMITTED)
     & word.pending = 1
     & word.failed = 1 then
    return 4;
  end;
  -- the last, and it failed
  if trigger = TRANSFER_ON_REPORT_BAD
     & (word.state = TRANSFER_SUBMITTED)
     & word.pending = 1
     & word.failed = 0 then
    return 5;
  end;
  -- a reset
  if trigger = TRANSFER_ON_ABANDON
     & (word.state = TRANSFER_SUBMITTED) then
    return 6;
  end;
  -- the last worker let go
  if trigger = TRANSFER_ON_REPORT_GOOD
     & (word.state = TRANSFER_ABANDONED)
     & word.pending = 1 then
    return 7;
  end;
  -- the last worker let go
  if trigger = TRANSFER_ON_REPORT_BAD
     & (word.state = TRANSFER_ABANDONED)
     & word.pending = 1 then
    return 8;
  end;
  -- a second reset
  if trigger = TRANSFER_ON_ABANDON
     & (word.state = TRANSFER_ABANDONED) then
    return 9;
  end;
  -- a worker will never report
  if trigger = TRANSFER_ON_LOSE
     & (word.state = TRANSFER_SUBMITTED | word.state = TRANSFER_ABANDONED) then
    return 10;
  end;
  return 0;
end;

procedure transfer_step(trigger: TransferTrigger; var word: TransferWord);
begin
  switch transfer_row(trigger, word)
    case 1: word.state := TRANSFER_SUBMITTED;
    case 2: word.state := TRANSFER_CANCELLED;
    case 3: word.state := TRANSFER_COMPLETED; word.pending := word.pending - 1;
    case 4: word.state := TRANSFER_FAILED; word.pending := word.pending - 1;
    case 5: word.state := TRANSFER_FAILED; word.pending := word.pending - 1; word.failed := word.failed + 1;
    case 6: word.state := TRANSFER_ABANDONED;
    case 7: word.state := TRANSFER_DRAINED; word.pending := word.pending - 1;
    case 8: word.state := TRANSFER_DRAINED; word.pending := word.pending - 1;
    case 9:
    case 10: word.state := TRANSFER_LOST;
    else word.state := TRANSFER_ILLEGAL; word.pending := 0; word.failed := 0;
  end;
end;

function transfer_after(trigger: TransferTrigger; word: TransferWord): TransferState;
var after: TransferWord;
begin
  after := word;
  transfer_step(trigger, after);
  return after.state;
end;

-- The row of the block's table that matches; 0 if none does.
function block_row(trigger: BlockTrigger; word: BlockWord): Count;
begin
  -- a store is planned
  if trigger = BLOCK_ON_ALLOCATE
     & (word.state = BLOCK_FREE | word.state = BLOCK_EVICTED) then
    return 1;
  end;
  -- the plan left for the workers
  if trigger = BLOCK_ON_SUBMIT_STORE
     & (word.state = BLOCK_ALLOCATED)
     & 0 <= word.copies & word.copies <= 1 then
    return 2;
  end;
  -- the plan never left the scheduler
  if trigger = BLOCK_ON_CANCEL
     & (word.state = BLOCK_ALLOCATED) then
    return 3;
  end;
  -- every worker stored its shard
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_STORING)
     & word.copies = 1 then
    return 4;
  end;
  -- some worker failed
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_STORING)
     & word.copies = 1 then
    return 5;
  end;
  -- a match counts on it
  if trigger = BLOCK_ON_PIN
     & (word.state = BLOCK_STORED | word.state = BLOCK_LOADING)
     & 0 <= word.pins & word.pins <= 1 then
    return 6;
  end;
  -- the match was released
  if trigger = BLOCK_ON_UNPIN
     & (word.state = BLOCK_STORED | word.state = BLOCK_LOADING)
     & 1 <= word.pins & word.pins <= 2 then
    return 7;
  end;
  -- used without a load: the device had it too
  if trigger = BLOCK_ON_TOUCH
     & (word.state = BLOCK_STORED | word.state = BLOCK_LOADING) then
    return 8;
  end;
  -- the pin becomes a reader
  if trigger = BLOCK_ON_BEGIN_LOAD
     & (word.state = BLOCK_STORED | word.state = BLOCK_LOADING)
     & 0 <= word.copies & word.copies <= 1
     & 1 <= word.pins & word.pins <= 2 then
    return 9;
  end;
  -- its slot is wanted
  if trigger = BLOCK_ON_EVICT
     & (word.state = BLOCK_STORED)
     & word.pins = 0 then
    return 10;
  end;
  -- nothing readable to void
  if trigger = BLOCK_ON_INVALIDATE
     & (word.state = BLOCK_FREE | word.state = BLOCK_EVICTED | word.state = BLOCK_QUARANTINED | word.state = BLOCK_RETIRED) then
    return 11;
  end;
  -- no copy touches it
  if trigger = BLOCK_ON_INVALIDATE
     & (word.state = BLOCK_ALLOCATED | word.state = BLOCK_STORED) then
    return 12;
  end;
  -- a copy still touches it
  if trigger = BLOCK_ON_INVALIDATE
     & (word.state = BLOCK_STORING | word.state = BLOCK_LOADING) then
    return 13;
  end;
  -- a worker will never report
  if trigger = BLOCK_ON_LOSE
     & (word.state = BLOCK_STORING | word.state = BLOCK_LOADING | word.state = BLOCK_QUARANTINED) then
    return 14;
  end;
  -- already given up
  if trigger = BLOCK_ON_LOSE
     & (word.state = BLOCK_RETIRED) then
    return 15;
  end;
  -- it holds nothing
  if trigger = BLOCK_ON_RESTART
     & (word.state = BLOCK_FREE | word.state = BLOCK_EVICTED) then
    return 16;
  end;
  -- its store was only planned
  if trigger = BLOCK_ON_RESTART
     & (word.state = BLOCK_ALLOCATED) then
    return 17;
  end;
  -- its store may have written a part
  if trigger = BLOCK_ON_RESTART
     & (word.state = BLOCK_STORING) then
    return 18;
  end;
  -- a reader changes no byte
  if trigger = BLOCK_ON_RESTART
     & (word.state = BLOCK_STORED | word.state = BLOCK_LOADING) then
    return 19;
  end;
  -- it was void, and its copies are over
  if trigger = BLOCK_ON_RESTART
     & (word.state = BLOCK_QUARANTINED) then
    return 20;
  end;
  -- nobody lives that could still write it
  if trigger = BLOCK_ON_RESTART
     & (word.state = BLOCK_RETIRED) then
    return 21;
  end;
  -- other loads still read it
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_LOADING)
     & word.copies = 2 then
    return 22;
  end;
  -- the last reader left
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_LOADING)
     & word.copies = 1 then
    return 23;
  end;
  -- other copies go on
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_QUARANTINED)
     & word.copies = 2 then
    return 24;
  end;
  -- the last copy ended
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_QUARANTINED)
     & word.copies = 1 then
    return 25;
  end;
  -- another copy of a lost slot ended
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_RETIRED) then
    return 26;
  end;
  -- other loads still read it
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_LOADING)
     & word.copies = 2 then
    return 27;
  end;
  -- the last reader left
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_LOADING)
     & word.copies = 1 then
    return 28;
  end;
  -- other copies go on
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_QUARANTINED)
     & word.copies = 2 then
    return 29;
  end;
  -- the last copy ended
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_QUARANTINED)
     & word.copies = 1 then
    return 30;
  end;
  -- another copy of a lost slot ended
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_RETIRED) then
    return 31;
  end;
  return 0;
end;

procedure block_step(trigger: BlockTrigger; var word: BlockWord);
begin
  switch block_row(trigger, word)
    case 1: word.state := BLOCK_ALLOCATED;
    case 2: word.state := BLOCK_STORING; word.copies := word.copies + 1;
    case 3: word.state := BLOCK_EVICTED;
    case 4: word.state := BLOCK_STORED; word.copies := word.copies - 1;
    case 5: word.state := BLOCK_EVICTED; word.copies := word.copies - 1;
    case 6: word.pins := word.pins + 1;
    case 7: word.pins := word.pins - 1;
    case 8:
    case 9: word.state := BLOCK_LOADING; word.copies := word.copies + 1; word.pins := word.pins - 1;
    case 10: word.state := BLOCK_EVICTED;
    case 11:
    case 12: word.state := BLOCK_EVICTED; word.pins := 0;
    case 13: word.state := BLOCK_QUARANTINED; word.pins := 0;
    case 14: word.state := BLOCK_RETIRED; word.copies := 0; word.pins := 0;
    case 15:
    case 16:
    case 17: word.state := BLOCK_EVICTED; word.copies := 0; word.pins := 0;
    case 18: word.state := BLOCK_EVICTED; word.copies := 0; word.pins := 0;
    case 19: word.state := BLOCK_STORED; word.copies := 0; word.pins := 0;
    case 20: word.state := BLOCK_EVICTED; word.copies := 0; word.pins := 0;
    case 21: word.state := BLOCK_EVICTED; word.copies := 0; word.pins := 0;
    case 22: word.state := BLOCK_LOADING; word.copies := word.copies - 1;
    case 23: word.state := BLOCK_STORED; word.copies := word.copies - 1;
    case 24: word.state := BLOCK_QUARANTINED; word.copies := word.copies - 1;
    case 25: word.state := BLOCK_EVICTED; word.copies := word.copies - 1;
    case 26:
    case 27: word.state := BLOCK_LOADING; word.copies := word.copies - 1;
    case 28: word.state := BLOCK_STORED; word.copies := word.copies - 1;
    case 29: word.state := BLOCK_QUARANTINED; word.copies := word.copies - 1;
    case 30: word.state := BLOCK_EVICTED; word.copies := word.copies - 1;
    case 31:
    else word.state := BLOCK_ILLEGAL; word.copies := 0; word.pins := 0;
  end;
end;

function block_after(trigger: BlockTrigger; word: BlockWord): BlockState;
var after: BlockWord;
begin
  after := word;
  block_step(trigger, after);
  return after.state;
end;

function total_1(r: Request): Count;
var total: Count;
begin
  total := 0;
  for t: Transfer do
    if !isundefined(load[r]) & load[r] = t then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_2(s: Slot): Count;
var total: Count;
begin
  total := 0;
  for m: Hold do
    if exists t: Transfer do
         (!isundefined(hold_transfer[m]) & hold_transfer[m] = t)
         & (
             ! (
                 direction[t] = DIRECTION_STORE
                 & direction[t] != DIRECTION_NONE
                 & transfer[t].state = TRANSFER_PLANNED
               )
           )
       end
       & (!isundefined(hold_slot[m]) & hold_slot[m] = s) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_3(s: Slot): Count;
var total: Count;
begin
  total := 0;
  for m: Hold do
    if !(isundefined(hold_request[m])) & !void[m] & (!isundefined(hold_slot[m]) & hold_slot[m] = s) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_4(t: Transfer): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if report[t][w] = REPORT_NONE then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_5(t: Transfer): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if report[t][w] = REPORT_BAD then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_6(): Count;
var total: Count;
begin
  total := 0;
  for r: Request do
    if known[r] & !(request[r].state = REQUEST_FINISHED) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_7(): Count;
var total: Count;
begin
  total := 0;
  for t: Transfer do
    if direction[t] != DIRECTION_NONE & transfer[t].state = TRANSFER_PLANNED then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_8(): Count;
var total: Count;
begin
  total := 0;
  for t: Transfer do
    if direction[t] != DIRECTION_NONE then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_11(t: Transfer): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if direction[t] != DIRECTION_NONE & report[t][w] = REPORT_NONE then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_9(): Count;
var total: Count;
begin
  total := 0;
  for t: Transfer do
    total := total + (
      total_11(t)
    );
  end;
  return total;
end;

function total_10(): Count;
var total: Count;
begin
  total := 0;
  for t: Transfer do
    if (direction[t] = DIRECTION_NONE) -> (note[t] != NOTE_NONE) then
      total := total + 1;
    end;
  end;
  return total;
end;

-- An upper bound on the draining actions left to take.
function rank(): Count;
begin
  return total_6() + total_7() + total_8() + total_9() + total_10();
end;

procedure forget();
begin
  -- The ledger has no record of a released request; one with its name is new.
  for r: Request do
    if !known[r] & request[r].state = REQUEST_RELEASED then
      request[r].state := REQUEST_NEW;
      request[r].loads := 0;
    end;
  end;
  -- Only a deferred request waits for a transfer.
  for r: Request do
    if !(request[r].state = REQUEST_DEFERRED) then
      undefine awaits[r];
    end;
  end;
  -- The transfer has ended, and the engine was told of it.
  for t: Transfer do
    if direction[t] = DIRECTION_NONE & note[t] = NOTE_NONE & transfer[t].state != TRANSFER_ILLEGAL then
      transfer[t].state := TRANSFER_PLANNED;
      transfer[t].pending := 1;
      transfer[t].failed := 0;
    end;
  end;
  -- The transfer has ended, and the engine was told of it.
  for t: Transfer do
    for w: Worker do
      if direction[t] = DIRECTION_NONE & note[t] = NOTE_NONE then
        report[t][w] := REPORT_NONE;
      end;
    end;
  end;
  -- A slot that was used and a slot that never was differ only in the name of their state.
  for s: Slot do
    if block[s].state = BLOCK_FREE | block[s].state = BLOCK_EVICTED then
      block[s].state := BLOCK_FREE;
      block[s].copies := 0;
      block[s].pins := 0;
    end;
  end;
end;

startstate "empty"
begin
  for i0: Request do
    known[i0] := false;
  end;
  for i0: Request do
    request[i0].state := REQUEST_NEW;
    request[i0].loads := 0;
  end;
  for i0: Request do
    patience[i0] := PATIENCE_NONE;
  end;
  for i0: Request do
    undefine awaits[i0];
  end;
  for i0: Request do
    undefine load[i0];
  end;
  for i0: Transfer do
    direction[i0] := DIRECTION_NONE;
  end;
  for i0: Transfer do
    transfer[i0].state := TRANSFER_PLANNED;
    transfer[i0].pending := 1;
    transfer[i0].failed := 0;
  end;
  for i0: Transfer do
    for i1: Worker do
      report[i0][i1] := REPORT_NONE;
    end;
  end;
  for i0: Transfer do
    undefine load_request[i0];
  end;
  for i0: Transfer do
    refused[i0] := false;
  end;
  for i0: Transfer do
    note[i0] := NOTE_NONE;
  end;
  for i0: Transfer do
    expects[i0] := false;
  end;
  for i0: Slot do
    block[i0].state := BLOCK_FREE;
    block[i0].copies := 0;
    block[i0].pins := 0;
  end;
  for i0: Hold do
    undefine hold_slot[i0];
  end;
  for i0: Hold do
    undefine hold_request[i0];
  end;
  for i0: Hold do
    undefine hold_transfer[i0];
  end;
  for i0: Hold do
    void[i0] := false;
  end;
end;

-- The core hears of a request.
ruleset r: Request do
  rule "arrive"
    !known[r] & request[r].state = REQUEST_NEW
  ==>
  begin
    known[r] := true;
    forget();
  end;
end;

-- The host has nothing for the request. After a preemption its load may still be in flight.
ruleset r: Request do
  rule "miss"
    (known[r] | (!known[r] & request[r].state = REQUEST_NEW))
    & request_after(REQUEST_ON_MISS, request[r]) != REQUEST_ILLEGAL
  ==>
  begin
    known[r] := true;
    request_step(REQUEST_ON_MISS, request[r]);
    forget();
  end;
end;

-- The request has a match: a block that can be read is pinned.
ruleset r: Request; m: Hold; s: Slot do
  rule "hit"
    (known[r] | request[r].state = REQUEST_NEW)
    & (!(request[r].state = REQUEST_MATCHED | request[r].state = REQUEST_DEFERRED))
    & isundefined(load[r])
    & isundefined(hold_slot[m])
    & (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING)
  ==>
  begin
    known[r] := true;
    request_step(REQUEST_ON_HIT, request[r]);
    block_step(BLOCK_ON_PIN, block[s]);
    hold_slot[m] := s;
    hold_request[m] := r;
    forget();
  end;
end;

-- The match has one more block.
ruleset r: Request; m: Hold; s: Slot do
  rule "hit_more"
    known[r]
    & request[r].state = REQUEST_MATCHED
    & isundefined(hold_slot[m])
    & (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING)
    & (
        ! exists m2: Hold do
            (!isundefined(hold_request[m2]) & hold_request[m2] = r)
            & !void[m2]
            & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
          end
      )
  ==>
  begin
    block_step(BLOCK_ON_PIN, block[s]);
    hold_slot[m] := s;
    hold_request[m] := r;
    forget();
  end;
end;

-- The request waits for a transfer, holding nothing. It may be its own load, after a preemption.
ruleset r: Request; t: Transfer do
  rule "defer"
    direction[t] != DIRECTION_NONE
    & !refused[t]
    & patience[r] != PATIENCE_SPENT
    & (
        (
          (known[r] | request[r].state = REQUEST_NEW)
          & (!(request[r].state = REQUEST_MATCHED | request[r].state = REQUEST_DEFERRED))
          & isundefined(load[r])
        )
        | (
            (!isundefined(load[r]) & load[r] = t)
            & (
                ! (
                    request[r].state = REQUEST_DEFERRED
                    | request[r].state = REQUEST_LOADING
                    | request[r].state = REQUEST_FINISHED
                  )
              )
          )
      )
  ==>
  begin
    known[r] := true;
    request_step(REQUEST_ON_DEFER, request[r]);
    awaits[r] := t;
    patience[r] := PATIENCE_WAITS;
    forget();
  end;
end;

-- A tick: the bound of the request's wait has come. It wakes if it still waits.
ruleset r: Request do
  rule "run_out"
    patience[r] = PATIENCE_WAITS
  ==>
  begin
    patience[r] := PATIENCE_SPENT;
    if request[r].state = REQUEST_DEFERRED then
      request_step(REQUEST_ON_WAKE, request[r]);
    end;
    forget();
  end;
end;

-- The match is released without a load: the engine asks again, or cannot place the request.
ruleset r: Request do
  rule "unmatch"
    known[r] & request[r].state = REQUEST_MATCHED
  ==>
  begin
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_request[m2]) & hold_request[m2] = r)
           & !void[m2]
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        block_step(BLOCK_ON_UNPIN, block[s]);
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        void[m] := false;
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_request[m];
      end;
    end;
    request_step(REQUEST_ON_UNMATCH, request[r]);
    forget();
  end;
end;

-- The engine accepts less than was matched: a pin is given back.
ruleset r: Request; m: Hold; s: Slot do
  rule "accept_less"
    known[r]
    & request[r].state = REQUEST_MATCHED
    & (!isundefined(hold_request[m]) & hold_request[m] = r)
    & !void[m]
    & (!isundefined(hold_slot[m]) & hold_slot[m] = s)
    & exists m2: Hold do (!isundefined(hold_request[m2]) & hold_request[m2] = r) & !(m2 = m) end
  ==>
  begin
    block_step(BLOCK_ON_UNPIN, block[s]);
    undefine hold_slot[m];
    undefine hold_request[m];
    forget();
  end;
end;

-- The engine takes the request's device blocks. Its match is released; its load goes on.
ruleset r: Request do
  rule "preempt"
    known[r] & !(request[r].state = REQUEST_FINISHED)
  ==>
  begin
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_request[m2]) & hold_request[m2] = r)
           & !void[m2]
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        block_step(BLOCK_ON_UNPIN, block[s]);
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        void[m] := false;
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_request[m];
      end;
    end;
    request_step(REQUEST_ON_PREEMPT, request[r]);
    patience[r] := PATIENCE_NONE;
    forget();
  end;
end;

-- The request is over. It is released now, or when its load ends.
ruleset r: Request do
  rule "finish"
    known[r] & !(request[r].state = REQUEST_FINISHED)
  ==>
  var before: Count;
  begin
    before := rank();
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_request[m2]) & hold_request[m2] = r)
           & !void[m2]
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        block_step(BLOCK_ON_UNPIN, block[s]);
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        void[m] := false;
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_request[m];
      end;
    end;
    known[r] := !(request_after(REQUEST_ON_FINISH, request[r]) = REQUEST_RELEASED);
    request_step(REQUEST_ON_FINISH, request[r]);
    patience[r] := PATIENCE_NONE;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A load is planned. The pins of the match become its readers.
ruleset r: Request; t: Transfer do
  rule "begin_load"
    known[r]
    & request[r].state = REQUEST_MATCHED
    & direction[t] = DIRECTION_NONE
    & note[t] = NOTE_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & forall w: Worker do report[t][w] = REPORT_NONE end
    & forall m: Hold do (!isundefined(hold_request[m]) & hold_request[m] = r) -> (!void[m]) end
    & exists m: Hold do !isundefined(hold_request[m]) & hold_request[m] = r end
  ==>
  begin
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_request[m2]) & hold_request[m2] = r)
           & !void[m2]
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        block_step(BLOCK_ON_BEGIN_LOAD, block[s]);
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        hold_transfer[m] := t;
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_request[m];
      end;
    end;
    request_step(REQUEST_ON_BEGIN_LOAD, request[r]);
    load[r] := t;
    direction[t] := DIRECTION_LOAD;
    load_request[t] := r;
    expects[t] := true;
    forget();
  end;
end;

-- The load is refused, because a block of the match is gone. It copies nothing, and is cancelled.
ruleset r: Request; t: Transfer do
  rule "refuse_load"
    known[r]
    & request[r].state = REQUEST_MATCHED
    & direction[t] = DIRECTION_NONE
    & note[t] = NOTE_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & forall w: Worker do report[t][w] = REPORT_NONE end
    & (!forall m: Hold do (!isundefined(hold_request[m]) & hold_request[m] = r) -> (!void[m]) end)
  ==>
  begin
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_request[m2]) & hold_request[m2] = r)
           & !void[m2]
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        block_step(BLOCK_ON_UNPIN, block[s]);
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        void[m] := false;
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_request[m];
      end;
    end;
    request_step(REQUEST_ON_BEGIN_LOAD, request[r]);
    load[r] := t;
    direction[t] := DIRECTION_LOAD;
    load_request[t] := r;
    expects[t] := true;
    refused[t] := true;
    forget();
  end;
end;

-- The load cannot be planned: there are too many transfers, or a device block is in use. The match is
-- released, and the engine is to be told that the load failed.
ruleset r: Request; t: Transfer do
  rule "fail_to_load"
    known[r]
    & request[r].state = REQUEST_MATCHED
    & direction[t] = DIRECTION_NONE
    & note[t] = NOTE_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & forall w: Worker do report[t][w] = REPORT_NONE end
  ==>
  begin
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_request[m2]) & hold_request[m2] = r)
           & !void[m2]
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        block_step(BLOCK_ON_UNPIN, block[s]);
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        void[m] := false;
      end;
    end;
    for m: Hold do
      if !isundefined(hold_request[m]) & hold_request[m] = r then
        undefine hold_request[m];
      end;
    end;
    request_step(REQUEST_ON_UNMATCH, request[r]);
    note[t] := NOTE_FAILED;
    expects[t] := true;
    forget();
  end;
end;

-- A store is planned, and gets a slot.
ruleset t: Transfer; m: Hold; s: Slot do
  rule "plan_store"
    direction[t] = DIRECTION_NONE
    & note[t] = NOTE_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & forall w: Worker do report[t][w] = REPORT_NONE end
    & isundefined(hold_slot[m])
    & (block[s].state = BLOCK_FREE | block[s].state = BLOCK_EVICTED)
  ==>
  begin
    block_step(BLOCK_ON_ALLOCATE, block[s]);
    hold_slot[m] := s;
    hold_transfer[m] := t;
    direction[t] := DIRECTION_STORE;
    forget();
  end;
end;

-- The block in a slot is evicted.
ruleset s: Slot do
  rule "evict"
    block_after(BLOCK_ON_EVICT, block[s]) != BLOCK_ILLEGAL
  ==>
  begin
    block_step(BLOCK_ON_EVICT, block[s]);
    forget();
  end;
end;

-- A planned transfer leaves for the workers. A refused load does not.
ruleset t: Transfer do
  rule "submit"
    direction[t] != DIRECTION_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & !refused[t]
    & exists w: Worker do report[t][w] = REPORT_NONE end
  ==>
  var before: Count;
  begin
    before := rank();
    for s: Slot do
      if direction[t] = DIRECTION_STORE
         & exists m2: Hold do
             (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
             & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
           end then
        block_step(BLOCK_ON_SUBMIT_STORE, block[s]);
      end;
    end;
    transfer_step(TRANSFER_ON_SUBMIT, transfer[t]);
    forget();
    assert rank() < before "S9";
  end;
end;

-- A worker reports its share of a transfer as good; other reports are still to come.
ruleset t: Transfer; w: Worker do
  rule "report_good"
    direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (
        transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_SUBMITTED
        | transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_ABANDONED
      )
  ==>
  var before: Count;
  begin
    before := rank();
    report[t][w] := REPORT_GOOD;
    transfer_step(TRANSFER_ON_REPORT_GOOD, transfer[t]);
    forget();
    assert rank() < before "S9";
  end;
end;

-- The last worker reports its share as good, and the transfer ends. A failed load voids what it read.
ruleset t: Transfer; w: Worker do
  rule "end_good"
    direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (
        ! (
            transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_SUBMITTED
            | transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_ABANDONED
          )
      )
  ==>
  var before: Count;
  begin
    before := rank();
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        if direction[t] = DIRECTION_LOAD
           & transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_FAILED then
          if transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_COMPLETED then
            block_step(BLOCK_ON_END_COPY_GOOD, block[s]);
          else
            block_step(BLOCK_ON_END_COPY_BAD, block[s]);
          end;
          block_step(BLOCK_ON_INVALIDATE, block[s]);
        else
          if transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_COMPLETED then
            block_step(BLOCK_ON_END_COPY_GOOD, block[s]);
          else
            block_step(BLOCK_ON_END_COPY_BAD, block[s]);
          end;
        end;
      end;
    end;
    for m: Hold do
      if direction[t] = DIRECTION_LOAD
         & transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_FAILED
         & !(isundefined(hold_request[m]))
         & exists m2: Hold do
             (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
             & (
                 isundefined(hold_slot[m2]) ? isundefined(hold_slot[m]) : (!isundefined(hold_slot[m]) & hold_slot[m2] = hold_slot[m])
               )
           end then
        void[m] := true;
      end;
    end;
    for r: Request do
      if !isundefined(load[r]) & load[r] = t then
        known[r] := !(request_after(REQUEST_ON_END_LOAD, request[r]) = REQUEST_RELEASED);
      end;
    end;
    for r: Request do
      if request[r].state = REQUEST_DEFERRED & (!isundefined(awaits[r]) & awaits[r] = t) then
        if !isundefined(load[r]) & load[r] = t then
          request_step(REQUEST_ON_END_LOAD, request[r]);
        end;
        request_step(REQUEST_ON_WAKE, request[r]);
      else
        if !isundefined(load[r]) & load[r] = t then
          request_step(REQUEST_ON_END_LOAD, request[r]);
        end;
      end;
    end;
    for r: Request do
      if !isundefined(load[r]) & load[r] = t then
        undefine load[r];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_transfer[m]) & hold_transfer[m] = t then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_transfer[m]) & hold_transfer[m] = t then
        undefine hold_transfer[m];
      end;
    end;
    if direction[t] = DIRECTION_LOAD then
      if transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_COMPLETED then
        note[t] := NOTE_LOADED;
      else
        note[t] := NOTE_FAILED;
      end;
    end;
    direction[t] := DIRECTION_NONE;
    undefine load_request[t];
    refused[t] := false;
    report[t][w] := REPORT_GOOD;
    transfer_step(TRANSFER_ON_REPORT_GOOD, transfer[t]);
    forget();
    assert rank() < before "S9";
  end;
end;

-- A worker reports its share of a transfer as bad; other reports are still to come.
ruleset t: Transfer; w: Worker do
  rule "report_bad"
    direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (
        transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_SUBMITTED
        | transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_ABANDONED
      )
  ==>
  begin
    report[t][w] := REPORT_BAD;
    transfer_step(TRANSFER_ON_REPORT_BAD, transfer[t]);
    forget();
  end;
end;

-- The last worker reports its share as bad, and the transfer ends. A failed load voids what it read.
ruleset t: Transfer; w: Worker do
  rule "end_bad"
    direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (
        ! (
            transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_SUBMITTED
            | transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_ABANDONED
          )
      )
  ==>
  begin
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        if direction[t] = DIRECTION_LOAD
           & transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_FAILED then
          if transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_COMPLETED then
            block_step(BLOCK_ON_END_COPY_GOOD, block[s]);
          else
            block_step(BLOCK_ON_END_COPY_BAD, block[s]);
          end;
          block_step(BLOCK_ON_INVALIDATE, block[s]);
        else
          if transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_COMPLETED then
            block_step(BLOCK_ON_END_COPY_GOOD, block[s]);
          else
            block_step(BLOCK_ON_END_COPY_BAD, block[s]);
          end;
        end;
      end;
    end;
    for m: Hold do
      if direction[t] = DIRECTION_LOAD
         & transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_FAILED
         & !(isundefined(hold_request[m]))
         & exists m2: Hold do
             (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
             & (
                 isundefined(hold_slot[m2]) ? isundefined(hold_slot[m]) : (!isundefined(hold_slot[m]) & hold_slot[m2] = hold_slot[m])
               )
           end then
        void[m] := true;
      end;
    end;
    for r: Request do
      if !isundefined(load[r]) & load[r] = t then
        known[r] := !(request_after(REQUEST_ON_END_LOAD, request[r]) = REQUEST_RELEASED);
      end;
    end;
    for r: Request do
      if request[r].state = REQUEST_DEFERRED & (!isundefined(awaits[r]) & awaits[r] = t) then
        if !isundefined(load[r]) & load[r] = t then
          request_step(REQUEST_ON_END_LOAD, request[r]);
        end;
        request_step(REQUEST_ON_WAKE, request[r]);
      else
        if !isundefined(load[r]) & load[r] = t then
          request_step(REQUEST_ON_END_LOAD, request[r]);
        end;
      end;
    end;
    for r: Request do
      if !isundefined(load[r]) & load[r] = t then
        undefine load[r];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_transfer[m]) & hold_transfer[m] = t then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_transfer[m]) & hold_transfer[m] = t then
        undefine hold_transfer[m];
      end;
    end;
    if direction[t] = DIRECTION_LOAD then
      if transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_COMPLETED then
        note[t] := NOTE_LOADED;
      else
        note[t] := NOTE_FAILED;
      end;
    end;
    direction[t] := DIRECTION_NONE;
    undefine load_request[t];
    refused[t] := false;
    report[t][w] := REPORT_BAD;
    transfer_step(TRANSFER_ON_REPORT_BAD, transfer[t]);
    forget();
  end;
end;

-- A plan that has not left is taken back, and a refused load ends.
ruleset t: Transfer do
  rule "cancel"
    direction[t] != DIRECTION_NONE & transfer[t].state = TRANSFER_PLANNED
  ==>
  var before: Count;
  begin
    before := rank();
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        if direction[t] = DIRECTION_STORE then
          block_step(BLOCK_ON_CANCEL, block[s]);
        else
          block_step(BLOCK_ON_END_COPY_BAD, block[s]);
        end;
      end;
    end;
    for r: Request do
      if !isundefined(load[r]) & load[r] = t then
        known[r] := !(request_after(REQUEST_ON_END_LOAD, request[r]) = REQUEST_RELEASED);
      end;
    end;
    for r: Request do
      if request[r].state = REQUEST_DEFERRED & (!isundefined(awaits[r]) & awaits[r] = t) then
        if !isundefined(load[r]) & load[r] = t then
          request_step(REQUEST_ON_END_LOAD, request[r]);
        end;
        request_step(REQUEST_ON_WAKE, request[r]);
      else
        if !isundefined(load[r]) & load[r] = t then
          request_step(REQUEST_ON_END_LOAD, request[r]);
        end;
      end;
    end;
    for r: Request do
      if !isundefined(load[r]) & load[r] = t then
        undefine load[r];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_transfer[m]) & hold_transfer[m] = t then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_transfer[m]) & hold_transfer[m] = t then
        undefine hold_transfer[m];
      end;
    end;
    if direction[t] = DIRECTION_LOAD then
      if false then
        note[t] := NOTE_LOADED;
      else
        note[t] := NOTE_FAILED;
      end;
    end;
    direction[t] := DIRECTION_NONE;
    undefine load_request[t];
    refused[t] := false;
    transfer_step(TRANSFER_ON_CANCEL, transfer[t]);
    forget();
    assert rank() < before "S9";
  end;
end;

-- All blocks are voided, and transfers under way are abandoned. Plans were cancelled before.
rule "reset"
  forall t: Transfer do !(direction[t] != DIRECTION_NONE & transfer[t].state = TRANSFER_PLANNED) end
==>
begin
  for t: Transfer do
    if direction[t] != DIRECTION_NONE then
      transfer_step(TRANSFER_ON_ABANDON, transfer[t]);
    end;
  end;
  for s: Slot do
    block_step(BLOCK_ON_INVALIDATE, block[s]);
  end;
  for m: Hold do
    if !(isundefined(hold_request[m])) then
      void[m] := true;
    end;
  end;
  forget();
end;

-- A worker will never report: the transfer is given up, and its slots are retired.
ruleset t: Transfer do
  rule "lose"
    direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
  ==>
  begin
    for s: Slot do
      if exists m2: Hold do
           (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
           & (!isundefined(hold_slot[m2]) & hold_slot[m2] = s)
         end then
        block_step(BLOCK_ON_LOSE, block[s]);
      end;
    end;
    for m: Hold do
      if true
         & !(isundefined(hold_request[m]))
         & exists m2: Hold do
             (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
             & (
                 isundefined(hold_slot[m2]) ? isundefined(hold_slot[m]) : (!isundefined(hold_slot[m]) & hold_slot[m2] = hold_slot[m])
               )
           end then
        void[m] := true;
      end;
    end;
    for r: Request do
      if !isundefined(load[r]) & load[r] = t then
        known[r] := !(request_after(REQUEST_ON_END_LOAD, request[r]) = REQUEST_RELEASED);
      end;
    end;
    for r: Request do
      if request[r].state = REQUEST_DEFERRED & (!isundefined(awaits[r]) & awaits[r] = t) then
        if !isundefined(load[r]) & load[r] = t then
          request_step(REQUEST_ON_END_LOAD, request[r]);
        end;
        request_step(REQUEST_ON_WAKE, request[r]);
      else
        if !isundefined(load[r]) & load[r] = t then
          request_step(REQUEST_ON_END_LOAD, request[r]);
        end;
      end;
    end;
    for r: Request do
      if !isundefined(load[r]) & load[r] = t then
        undefine load[r];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_transfer[m]) & hold_transfer[m] = t then
        undefine hold_slot[m];
      end;
    end;
    for m: Hold do
      if !isundefined(hold_transfer[m]) & hold_transfer[m] = t then
        undefine hold_transfer[m];
      end;
    end;
    if direction[t] = DIRECTION_LOAD then
      if false then
        note[t] := NOTE_LOADED;
      else
        note[t] := NOTE_FAILED;
      end;
    end;
    direction[t] := DIRECTION_NONE;
    undefine load_request[t];
    refused[t] := false;
    transfer_step(TRANSFER_ON_LOSE, transfer[t]);
    forget();
  end;
end;

-- The engine is told how a load ended: loaded, or failed with what to compute again.
ruleset t: Transfer do
  rule "tell"
    note[t] != NOTE_NONE
  ==>
  var before: Count;
  begin
    before := rank();
    note[t] := NOTE_NONE;
    expects[t] := false;
    forget();
    assert rank() < before "S9";
  end;
end;

-- The state of a slot fits each live transfer that reads or writes it.
invariant "S3"
  forall m: Hold do
    forall t: Transfer do
      forall s: Slot do
        (
          (!isundefined(hold_transfer[m]) & hold_transfer[m] = t)
          & (!isundefined(hold_slot[m]) & hold_slot[m] = s)
        )
        -> (
             direction[t] = DIRECTION_STORE
             ? (
                 (transfer[t].state = TRANSFER_PLANNED & block[s].state = BLOCK_ALLOCATED)
                 | (transfer[t].state = TRANSFER_SUBMITTED & block[s].state = BLOCK_STORING)
                 | (transfer[t].state = TRANSFER_ABANDONED & block[s].state = BLOCK_QUARANTINED)
               )
             : (
                 (block[s].state = BLOCK_QUARANTINED | block[s].state = BLOCK_RETIRED)
                 | (!(transfer[t].state = TRANSFER_ABANDONED) & block[s].state = BLOCK_LOADING)
               )
           )
      end
    end
  end
;

-- The numbers of pins, readers and loads equal the numbers of their holders. Each pin belongs to a
-- matched request, and each load to a known one: a released request holds nothing.
invariant "S4"
  forall r: Request do true -> (request[r].loads = total_1(r)) end
  & forall s: Slot do
      (
        block[s].state = BLOCK_FREE
        | block[s].state = BLOCK_EVICTED
        | block[s].state = BLOCK_RETIRED
      )
      | block[s].copies = total_2(s)
    end
  & forall s: Slot do true -> (block[s].pins = total_3(s)) end
  & forall m: Hold do
      forall r: Request do
        (!isundefined(hold_request[m]) & hold_request[m] = r)
        -> (known[r] & request[r].state = REQUEST_MATCHED)
      end
    end
  & forall r: Request do
      forall t: Transfer do
        (!isundefined(load[r]) & load[r] = t)
        -> (
             direction[t] = DIRECTION_LOAD
             & (!isundefined(load_request[t]) & load_request[t] = r)
             & known[r]
           )
      end
    end
  & forall t: Transfer do
      forall r: Request do
        (direction[t] = DIRECTION_LOAD & (!isundefined(load_request[t]) & load_request[t] = r))
        -> (!isundefined(load[r]) & load[r] = t)
      end
    end
  & forall t: Transfer do (direction[t] = DIRECTION_LOAD) -> (!(isundefined(load_request[t]))) end
;

-- A transfer waits once for each worker that has not reported.
invariant "S5"
  forall t: Transfer do direction[t] = DIRECTION_NONE | transfer[t].pending = total_4(t) end
  & forall t: Transfer do
      (
        direction[t] != DIRECTION_NONE
        & (transfer[t].state = TRANSFER_PLANNED | transfer[t].state = TRANSFER_SUBMITTED)
      )
      -> transfer[t].failed = total_5(t)
    end
;

-- The engine hears that a load is loaded only if every worker has reported it as good. It hears of the
-- end of each load once, and of nothing else.
invariant "S6"
  forall t: Transfer do
    note[t] = NOTE_LOADED
    -> (
         transfer[t].state = TRANSFER_COMPLETED
         & forall w: Worker do report[t][w] = REPORT_GOOD end
       )
  end
  & forall t: Transfer do expects[t] = (direction[t] = DIRECTION_LOAD | note[t] != NOTE_NONE) end
  & forall t: Transfer do !(direction[t] != DIRECTION_NONE & note[t] != NOTE_NONE) end
;

-- A match pins something until its load begins. What it pins can be read, unless it was voided. What
-- its load reads stays in its slot.
invariant "S7"
  forall r: Request do
    (known[r] & request[r].state = REQUEST_MATCHED)
    -> exists m: Hold do !isundefined(hold_request[m]) & hold_request[m] = r end
  end
  & forall m: Hold do
      forall s: Slot do
        (
          !(isundefined(hold_request[m]))
          & !void[m]
          & (!isundefined(hold_slot[m]) & hold_slot[m] = s)
        )
        -> (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING)
      end
    end
  & forall m: Hold do
      forall t: Transfer do
        forall s: Slot do
          (
            (!isundefined(hold_transfer[m]) & hold_transfer[m] = t)
            & direction[t] = DIRECTION_LOAD
            & (!isundefined(hold_slot[m]) & hold_slot[m] = s)
          )
          -> (
               block[s].state = BLOCK_LOADING
               | block[s].state = BLOCK_QUARANTINED
               | block[s].state = BLOCK_RETIRED
             )
        end
      end
    end
  & forall t: Transfer do
      (direction[t] = DIRECTION_LOAD & !refused[t])
      -> exists m: Hold do !isundefined(hold_transfer[m]) & hold_transfer[m] = t end
    end
;

-- Every step taken is in its machine's table.
invariant "S8"
  forall r: Request do request[r].state != REQUEST_ILLEGAL end
  & forall t: Transfer do transfer[t].state != TRANSFER_ILLEGAL end
  & forall s: Slot do block[s].state != BLOCK_ILLEGAL end
;

-- A request that waits will wake: it waits for a live transfer, and its wait has a bound.
invariant "S9"
  forall r: Request do
    request[r].state = REQUEST_DEFERRED
    -> (patience[r] = PATIENCE_WAITS & !(isundefined(awaits[r])))
  end
  & forall r: Request do
      forall t: Transfer do
        (request[r].state = REQUEST_DEFERRED & (!isundefined(awaits[r]) & awaits[r] = t))
        -> direction[t] != DIRECTION_NONE
      end
    end
;

-- A request that the ledger has a record of is not released. Another one is released or new.
invariant "AReleasedRequestHasNoRecord"
  forall r: Request do
    (known[r] -> (!(request[r].state = REQUEST_RELEASED)))
    & (known[r] | (request[r].state = REQUEST_NEW | request[r].state = REQUEST_RELEASED))
  end
;

-- A request that loads, or is over and not released, has a load. A matched one has none.
invariant "ALoadingRequestHasALoad"
  forall r: Request do
    (
      (request[r].state = REQUEST_LOADING | request[r].state = REQUEST_FINISHED)
      -> !(isundefined(load[r]))
    )
    & ((known[r] & request[r].state = REQUEST_MATCHED) -> (isundefined(load[r])))
  end
;

-- A hold on a slot is a match's or a transfer's. Only a match's can be void.
invariant "AHoldHasOneHolder"
  forall m: Hold do
    (isundefined(hold_slot[m]) | !(isundefined(hold_request[m])) | !(isundefined(hold_transfer[m])))
    & (isundefined(hold_request[m]) | (!(isundefined(hold_slot[m])) & isundefined(hold_transfer[m])))
    & (isundefined(hold_transfer[m]) | !(isundefined(hold_slot[m])))
    & (void[m] -> (!(isundefined(hold_request[m]))))
  end
;

-- The transfer of a hold is live, and no refused load.
invariant "TransfersThatHoldSlotsAreLive"
  forall m: Hold do
    forall t: Transfer do
      (!isundefined(hold_transfer[m]) & hold_transfer[m] = t)
      -> (direction[t] != DIRECTION_NONE & !refused[t])
    end
  end
;

-- No other transfer touches the slot of a store.
invariant "AStoreHasItsSlotToItself"
  forall m: Hold do
    forall t: Transfer do
      forall m2: Hold do
        (
          (!isundefined(hold_transfer[m]) & hold_transfer[m] = t)
          & direction[t] = DIRECTION_STORE
          & (
              isundefined(hold_slot[m]) ? isundefined(hold_slot[m2]) : (!isundefined(hold_slot[m2]) & hold_slot[m] = hold_slot[m2])
            )
          & !(isundefined(hold_transfer[m2]))
        )
        -> m = m2
      end
    end
  end
;

-- Two holds of a transfer are on different slots. So are two pins of a match, unless one is void.
invariant "ASlotIsHeldOnce"
  forall m: Hold do
    forall m2: Hold do
      (
        (
          !(isundefined(hold_request[m]))
          & (
              isundefined(hold_request[m]) ? isundefined(hold_request[m2]) : (!isundefined(hold_request[m2]) & hold_request[m] = hold_request[m2])
            )
          & (
              isundefined(hold_slot[m]) ? isundefined(hold_slot[m2]) : (!isundefined(hold_slot[m2]) & hold_slot[m] = hold_slot[m2])
            )
          & !void[m]
          & !void[m2]
        )
        -> m = m2
      )
      & (
          (
            !(isundefined(hold_transfer[m]))
            & (
                isundefined(hold_transfer[m]) ? isundefined(hold_transfer[m2]) : (!isundefined(hold_transfer[m2]) & hold_transfer[m] = hold_transfer[m2])
              )
            & (
                isundefined(hold_slot[m]) ? isundefined(hold_slot[m2]) : (!isundefined(hold_slot[m2]) & hold_slot[m] = hold_slot[m2])
              )
          )
          -> m = m2
        )
    end
  end
;

-- A live transfer is planned, submitted or abandoned.
invariant "ALiveTransferIsOnItsWay"
  forall t: Transfer do
    direction[t] = DIRECTION_NONE
    | (
        transfer[t].state = TRANSFER_PLANNED
        | transfer[t].state = TRANSFER_SUBMITTED
        | transfer[t].state = TRANSFER_ABANDONED
      )
  end
;

-- Some worker has not reported a transfer that is under way.
invariant "ATransferUnderWayWaitsForAWorker"
  forall t: Transfer do
    (
      direction[t] != DIRECTION_NONE
      & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    )
    -> exists w: Worker do report[t][w] = REPORT_NONE end
  end
;

-- A refused load has not left for the workers.
invariant "ARefusedLoadIsPlanned"
  forall t: Transfer do
    refused[t]
    -> (
         direction[t] = DIRECTION_LOAD
         & direction[t] != DIRECTION_NONE
         & transfer[t].state = TRANSFER_PLANNED
       )
  end
;

-- A request is over, and its load is in flight.
cover "a finished request loads"
  exists r: Request do request[r].state = REQUEST_FINISHED end
;

-- A request was preempted under its load, and waits for it.
cover "a request waits for its own load"
  exists r: Request do
    request[r].state = REQUEST_DEFERRED
    & exists t: Transfer do
        (!isundefined(load[r]) & load[r] = t) & (!isundefined(awaits[r]) & awaits[r] = t)
      end
  end
;

-- A load has ended, the engine does not know it yet, and no request is known any more.
cover "an end is told late"
  exists t: Transfer do note[t] != NOTE_NONE end & forall r: Request do !known[r] end
;

-- A request has waited as long as it may.
cover "a wait is spent"
  exists r: Request do patience[r] = PATIENCE_SPENT end
;

-- The engine is about to hear that a load is loaded.
cover "a load is good"
  exists t: Transfer do note[t] = NOTE_LOADED end
;

-- A load reads a slot that a match pins.
cover "a pin is beside a reader"
  exists m: Hold do
    !(isundefined(hold_request[m]))
    & exists m2: Hold do
        (
          isundefined(hold_slot[m]) ? isundefined(hold_slot[m2]) : (!isundefined(hold_slot[m2]) & hold_slot[m] = hold_slot[m2])
        )
        & exists t: Transfer do
            (!isundefined(hold_transfer[m2]) & hold_transfer[m2] = t)
            & direction[t] = DIRECTION_LOAD
          end
      end
  end
;

-- A block that a match pins was voided.
cover "a match is void"
  exists m: Hold do !(isundefined(hold_request[m])) & void[m] end
;

-- A pinned block was voided, and another match pins the next block in its slot.
cover "a slot is pinned again"
  exists m: Hold do
    !(isundefined(hold_request[m]))
    & void[m]
    & exists m2: Hold do
        !(isundefined(hold_request[m2]))
        & !void[m2]
        & (
            isundefined(hold_slot[m]) ? isundefined(hold_slot[m2]) : (!isundefined(hold_slot[m2]) & hold_slot[m] = hold_slot[m2])
          )
      end
  end
;

-- A reset came while a load was under way.
cover "a load is abandoned"
  exists t: Transfer do direction[t] = DIRECTION_LOAD & transfer[t].state = TRANSFER_ABANDONED end
;

-- From every state, rest can be reached.
liveness "S9"
  forall t: Transfer do direction[t] = DIRECTION_NONE end
  & forall t: Transfer do note[t] = NOTE_NONE & !expects[t] end
  & forall r: Request do !known[r] end
  & forall m: Hold do isundefined(hold_slot[m]) end
;
