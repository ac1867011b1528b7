-- The offload protocol. Within these bounds: 2 keys, 2 device blocks, 2 slots, 2 workers; at most 2
-- live transfers of several blocks, 2 copies, 1 matches, 2 device blocks with queued kernels;
-- failures, resets, losses, no crashes.
--
-- The same protocol as in Offload.tla beside it, which is easier to read. Murphi's undefined value
-- stands for None. Not modelled:
-- - Requests: a match holds one slot, and a device block does not say which request holds it.
-- - Chunks: a slot holds one device block.
-- - A second kernel for a block before the first one ran: a stream runs them in order.
-- - Names of transfers and workers that do not exist: the ledger refuses reports with such names.
-- - The device's own prefix cache, and data that a load of an older epoch left on the device.
--
-- Generated from kvsm's declaration and tables (specs/protocol/texts.py); do not edit.

type
  Count: 0..255;
  DeviceBlock: scalarset(2);
  Slot: scalarset(2);
  Transfer: scalarset(2);
  Copy: scalarset(2);
  Match: scalarset(1);
  Worker: scalarset(2);
  Key: scalarset(2);
  Kernel: enum {
    KERNEL_NONE, KERNEL_WRITES, KERNEL_READS
  };
  LeaseState: enum {
    LEASE_NONE, LEASE_READING, LEASE_WRITING, LEASE_RETIRED, LEASE_ILLEGAL
  };
  LeaseTrigger: enum {
    LEASE_ON_BEGIN_READ, LEASE_ON_END_READ, LEASE_ON_BEGIN_WRITE, LEASE_ON_END_WRITE, LEASE_ON_LOSE,
    LEASE_ON_RESTART
  };
  LeaseWord: record state: LeaseState; readers: 0..2; end;
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
  TransferWord: record state: TransferState; pending: 0..2; failed: 0..2; end;
  Report: enum {
    REPORT_NONE, REPORT_GOOD, REPORT_BAD
  };
  Instant: enum {
    INSTANT_QUEUED, INSTANT_STARTED, INSTANT_READ, INSTANT_WRITTEN
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
  BlockWord: record state: BlockState; copies: 0..2; pins: 0..1; end;

var
  -- The key that the device block holds or will hold, by the engine's books; none if no request holds
  -- the block.
  key: array [DeviceBlock] of Key;
  -- What the kernel queued on the worker for the device block does; NONE if none is queued.
  kernel: array [DeviceBlock] of array [Worker] of Kernel;
  -- The key that its queued kernels write, or expect to read.
  kernel_key: array [DeviceBlock] of Key;
  -- The key whose bytes are in the worker's shard of the device block; none for garbage.
  content: array [DeviceBlock] of array [Worker] of Key;
  -- How copies hold the device block.
  lease: array [DeviceBlock] of LeaseWord;
  -- Whether a lost copy may still write the device block.
  stray_device: array [DeviceBlock] of boolean;
  -- The direction of the transfer; NONE if it is not live.
  direction: array [Transfer] of Direction;
  -- The state of the live transfer.
  transfer: array [Transfer] of TransferWord;
  -- What the worker has reported of the transfer.
  report: array [Transfer] of array [Worker] of Report;
  -- The live transfer that the copy belongs to; none if there is no such copy.
  copy_transfer: array [Copy] of Transfer;
  -- The device block that the copy reads or writes.
  copy_device: array [Copy] of DeviceBlock;
  -- The slot that the copy reads or writes.
  copy_slot: array [Copy] of Slot;
  -- How far the worker's share of the copy has come.
  instant: array [Copy] of array [Worker] of Instant;
  -- The key whose bytes the worker's share of the copy has read and not yet written.
  in_flight: array [Copy] of array [Worker] of Key;
  -- The state of the slot's block.
  block: array [Slot] of BlockWord;
  -- The key under which the index names the slot.
  slot_key: array [Slot] of Key;
  -- The key whose bytes are in the worker's shard of the slot; none for garbage.
  slot_content: array [Slot] of array [Worker] of Key;
  -- Whether the slot's block dates from before the last reset.
  old: array [Slot] of boolean;
  -- Whether a lost copy may still write the slot.
  stray_slot: array [Slot] of boolean;
  -- The slot that the match holds, until it is loaded or released; none if there is no such match.
  match_slot: array [Match] of Slot;

-- The row of the lease's table that matches; 0 if none does.
function lease_row(trigger: LeaseTrigger; word: LeaseWord): Count;
begin
  -- a store is planned
  if trigger = LEASE_ON_BEGIN_READ
     & (word.state = LEASE_NONE | word.state = LEASE_READING)
     & 0 <= word.readers & word.readers <= 1 then
    return 1;
  end;
  -- other stores still read it
  if trigger = LEASE_ON_END_READ
     & (word.state = LEASE_READING)
     & word.readers = 2 then
    return 2;
  end;
  -- the last store ended
  if trigger = LEASE_ON_END_READ
     & (word.state = LEASE_READING)
     & word.readers = 1 then
    return 3;
  end;
  -- a load is planned
  if trigger = LEASE_ON_BEGIN_WRITE
     & (word.state = LEASE_NONE) then
    return 4;
  end;
  -- the load ended
  if trigger = LEASE_ON_END_WRITE
     & (word.state = LEASE_WRITING) then
    return 5;
  end;
  -- a worker will never report: it may still write
  if trigger = LEASE_ON_LOSE
     & (word.state = LEASE_WRITING) then
    return 6;
  end;
  -- another device pool
  if trigger = LEASE_ON_RESTART
     & (word.state = LEASE_NONE | word.state = LEASE_READING | word.state = LEASE_WRITING | word.state = LEASE_RETIRED) then
    return 7;
  end;
  return 0;
end;

procedure lease_step(trigger: LeaseTrigger; var word: LeaseWord);
begin
  switch lease_row(trigger, word)
    case 1: word.state := LEASE_READING; word.readers := word.readers + 1;
    case 2: word.state := LEASE_READING; word.readers := word.readers - 1;
    case 3: word.state := LEASE_NONE; word.readers := word.readers - 1;
    case 4: word.state := LEASE_WRITING;
    case 5: word.state := LEASE_NONE;
    case 6: word.state := LEASE_RETIRED;
    case 7: word.state := LEASE_NONE; word.readers := 0;
    else word.state := LEASE_ILLEGAL; word.readers := 0;
  end;
end;

function lease_after(trigger: LeaseTrigger; word: LeaseWord): LeaseState;
var after: LeaseWord;
begin
  after := word;
  lease_step(trigger, after);
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
  -- others to come
  if trigger = TRANSFER_ON_REPORT_GOOD
     & (word.state = TRANSFER_SUBMITTED)
     & word.pending = 2 then
    return 3;
  end;
  -- others to come
  if trigger = TRANSFER_ON_REPORT_BAD
     & (word.state = TRANSFER_SUBMITTED)
     & word.pending = 2
     & 0 <= word.failed & word.failed <= 1 then
    return 4;
  end;
  -- the last, and none failed
  if trigger = TRANSFER_ON_REPORT_GOOD
     & (word.state = TRANSFER_SUBMITTED)
     & word.pending = 1
     & word.failed = 0 then
    return 5;
  end;
  -- the last, but one failed before
  if trigger = TRANSFER_ON_REPORT_GOOD
     & (word.state = TRANSFER_SUBMITTED)
     & word.pending = 1
     & 1 <= word.failed & word.failed <= 2 then
    return 6;
  end;
  -- the last, and it failed
  if trigger = TRANSFER_ON_REPORT_BAD
     & (word.state = TRANSFER_SUBMITTED)
     & word.pending = 1
     & 0 <= word.failed & word.failed <= 1 then
    return 7;
  end;
  -- a reset
  if trigger = TRANSFER_ON_ABANDON
     & (word.state = TRANSFER_SUBMITTED) then
    return 8;
  end;
  -- others to come
  if trigger = TRANSFER_ON_REPORT_GOOD
     & (word.state = TRANSFER_ABANDONED)
     & word.pending = 2 then
    return 9;
  end;
  -- the last worker let go
  if trigger = TRANSFER_ON_REPORT_GOOD
     & (word.state = TRANSFER_ABANDONED)
     & word.pending = 1 then
    return 10;
  end;
  -- others to come
  if trigger = TRANSFER_ON_REPORT_BAD
     & (word.state = TRANSFER_ABANDONED)
     & word.pending = 2 then
    return 11;
  end;
  -- the last worker let go
  if trigger = TRANSFER_ON_REPORT_BAD
     & (word.state = TRANSFER_ABANDONED)
     & word.pending = 1 then
    return 12;
  end;
  -- a second reset
  if trigger = TRANSFER_ON_ABANDON
     & (word.state = TRANSFER_ABANDONED) then
    return 13;
  end;
  -- a worker will never report
  if trigger = TRANSFER_ON_LOSE
     & (word.state = TRANSFER_SUBMITTED | word.state = TRANSFER_ABANDONED) then
    return 14;
  end;
  return 0;
end;

procedure transfer_step(trigger: TransferTrigger; var word: TransferWord);
begin
  switch transfer_row(trigger, word)
    case 1: word.state := TRANSFER_SUBMITTED;
    case 2: word.state := TRANSFER_CANCELLED;
    case 3: word.state := TRANSFER_SUBMITTED; word.pending := word.pending - 1;
    case 4: word.state := TRANSFER_SUBMITTED; word.pending := word.pending - 1; word.failed := word.failed + 1;
    case 5: word.state := TRANSFER_COMPLETED; word.pending := word.pending - 1;
    case 6: word.state := TRANSFER_FAILED; word.pending := word.pending - 1;
    case 7: word.state := TRANSFER_FAILED; word.pending := word.pending - 1; word.failed := word.failed + 1;
    case 8: word.state := TRANSFER_ABANDONED;
    case 9: word.state := TRANSFER_ABANDONED; word.pending := word.pending - 1;
    case 10: word.state := TRANSFER_DRAINED; word.pending := word.pending - 1;
    case 11: word.state := TRANSFER_ABANDONED; word.pending := word.pending - 1;
    case 12: word.state := TRANSFER_DRAINED; word.pending := word.pending - 1;
    case 13:
    case 14: word.state := TRANSFER_LOST;
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
     & word.pins = 0 then
    return 6;
  end;
  -- the match was released
  if trigger = BLOCK_ON_UNPIN
     & (word.state = BLOCK_STORED | word.state = BLOCK_LOADING)
     & word.pins = 1 then
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
     & word.pins = 1 then
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

function total_1(s: Slot): Count;
var total: Count;
begin
  total := 0;
  for c: Copy do
    if exists t: Transfer do
         (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
         & (
             ! (
                 direction[t] = DIRECTION_STORE
                 & direction[t] != DIRECTION_NONE
                 & transfer[t].state = TRANSFER_PLANNED
               )
           )
       end
       & (!isundefined(copy_slot[c]) & copy_slot[c] = s) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_2(s: Slot): Count;
var total: Count;
begin
  total := 0;
  for m: Match do
    if !isundefined(match_slot[m]) & match_slot[m] = s then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_3(d: DeviceBlock): Count;
var total: Count;
begin
  total := 0;
  for c: Copy do
    if exists t: Transfer do
         (!isundefined(copy_transfer[c]) & copy_transfer[c] = t) & direction[t] = DIRECTION_STORE
       end
       & (!isundefined(copy_device[c]) & copy_device[c] = d) then
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
  for d: DeviceBlock do
    if !(isundefined(key[d])) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_15(d: DeviceBlock): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if kernel[d][w] != KERNEL_NONE then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_7(): Count;
var total: Count;
begin
  total := 0;
  for d: DeviceBlock do
    total := total + (
      total_15(d)
    );
  end;
  return total;
end;

function total_8(): Count;
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

function total_9(): Count;
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

function total_16(t: Transfer): Count;
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

function total_10(): Count;
var total: Count;
begin
  total := 0;
  for t: Transfer do
    total := total + (
      total_16(t)
    );
  end;
  return total;
end;

function total_17(c: Copy): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if !(isundefined(copy_transfer[c])) & instant[c][w] = INSTANT_QUEUED then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_11(): Count;
var total: Count;
begin
  total := 0;
  for c: Copy do
    total := total + (
      total_17(c)
    );
  end;
  return total;
end;

function total_18(c: Copy): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if !(isundefined(copy_transfer[c]))
       & (instant[c][w] = INSTANT_QUEUED | instant[c][w] = INSTANT_STARTED) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_12(): Count;
var total: Count;
begin
  total := 0;
  for c: Copy do
    total := total + (
      total_18(c)
    );
  end;
  return total;
end;

function total_19(c: Copy): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if !(isundefined(copy_transfer[c]))
       & (instant[c][w] = INSTANT_QUEUED | instant[c][w] = INSTANT_STARTED | instant[c][w] = INSTANT_READ) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_13(): Count;
var total: Count;
begin
  total := 0;
  for c: Copy do
    total := total + (
      total_19(c)
    );
  end;
  return total;
end;

function total_14(): Count;
var total: Count;
begin
  total := 0;
  for m: Match do
    if !(isundefined(match_slot[m])) then
      total := total + 1;
    end;
  end;
  return total;
end;

-- An upper bound on the draining actions left to take.
function rank(): Count;
begin
  return total_6() + total_7() + total_8() + total_9() + total_10() + total_11() + total_12() + total_13() + total_14();
end;

procedure forget();
begin
  -- The transfer has ended, and nothing asks about it.
  for t: Transfer do
    if direction[t] = DIRECTION_NONE & transfer[t].state != TRANSFER_ILLEGAL then
      transfer[t].state := TRANSFER_PLANNED;
      transfer[t].pending := 2;
      transfer[t].failed := 0;
    end;
  end;
  -- The transfer has ended, and nothing asks about it.
  for t: Transfer do
    for w: Worker do
      if direction[t] = DIRECTION_NONE then
        report[t][w] := REPORT_NONE;
      end;
    end;
  end;
  -- The transfer has ended, and nothing asks about it.
  for c: Copy do
    if isundefined(copy_transfer[c]) then
      undefine copy_device[c];
    end;
  end;
  -- The transfer has ended, and nothing asks about it.
  for c: Copy do
    if isundefined(copy_transfer[c]) then
      undefine copy_slot[c];
    end;
  end;
  -- The transfer has ended, and nothing asks about it.
  for c: Copy do
    for w: Worker do
      if isundefined(copy_transfer[c]) then
        instant[c][w] := INSTANT_QUEUED;
      end;
    end;
  end;
  -- Bytes that were written are no longer in flight.
  for c: Copy do
    for w: Worker do
      if instant[c][w] != INSTANT_READ then
        undefine in_flight[c][w];
      end;
    end;
  end;
  -- No kernel is queued that could read it.
  for d: DeviceBlock do
    if forall w: Worker do kernel[d][w] = KERNEL_NONE end then
      undefine kernel_key[d];
    end;
  end;
  -- No kernel and no copy reads these bytes before they are overwritten.
  for d: DeviceBlock do
    for w: Worker do
      if kernel[d][w] != KERNEL_READS
         & (
             kernel[d][w] = KERNEL_WRITES
             | (
                 isundefined(key[d])
                 & (
                     ! exists c: Copy do
                         exists t: Transfer do
                           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
                           & direction[t] = DIRECTION_STORE
                         end
                         & (!isundefined(copy_device[c]) & copy_device[c] = d)
                         & (instant[c][w] = INSTANT_QUEUED | instant[c][w] = INSTANT_STARTED)
                       end
                   )
               )
             | exists c: Copy do
                 exists t: Transfer do
                   (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
                   & direction[t] = DIRECTION_LOAD
                 end
                 & (!isundefined(copy_device[c]) & copy_device[c] = d)
                 & instant[c][w] != INSTANT_WRITTEN
               end
           ) then
        undefine content[d][w];
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
  -- The index does not name the slot.
  for s: Slot do
    if ! (
           block[s].state = BLOCK_ALLOCATED
           | block[s].state = BLOCK_STORING
           | block[s].state = BLOCK_STORED
           | block[s].state = BLOCK_LOADING
         ) then
      undefine slot_key[s];
    end;
  end;
  -- No match finds the slot and no copy reads it: its bytes are overwritten before they are read.
  for s: Slot do
    for w: Worker do
      if (
           ! (
               block[s].state = BLOCK_ALLOCATED
               | block[s].state = BLOCK_STORING
               | block[s].state = BLOCK_STORED
               | block[s].state = BLOCK_LOADING
             )
         )
         & (
             ! exists c: Copy do
                 exists t: Transfer do
                   (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
                   & direction[t] = DIRECTION_LOAD
                 end
                 & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
                 & (instant[c][w] = INSTANT_QUEUED | instant[c][w] = INSTANT_STARTED)
               end
           ) then
        undefine slot_content[s][w];
      end;
    end;
  end;
  -- The slot holds no block that could date from an epoch.
  for s: Slot do
    if block[s].state = BLOCK_FREE | block[s].state = BLOCK_EVICTED | block[s].state = BLOCK_RETIRED then
      old[s] := false;
    end;
  end;
end;

startstate "empty"
begin
  for i0: DeviceBlock do
    undefine key[i0];
  end;
  for i0: DeviceBlock do
    for i1: Worker do
      kernel[i0][i1] := KERNEL_NONE;
    end;
  end;
  for i0: DeviceBlock do
    undefine kernel_key[i0];
  end;
  for i0: DeviceBlock do
    for i1: Worker do
      undefine content[i0][i1];
    end;
  end;
  for i0: DeviceBlock do
    lease[i0].state := LEASE_NONE;
    lease[i0].readers := 0;
  end;
  for i0: DeviceBlock do
    stray_device[i0] := false;
  end;
  for i0: Transfer do
    direction[i0] := DIRECTION_NONE;
  end;
  for i0: Transfer do
    transfer[i0].state := TRANSFER_PLANNED;
    transfer[i0].pending := 2;
    transfer[i0].failed := 0;
  end;
  for i0: Transfer do
    for i1: Worker do
      report[i0][i1] := REPORT_NONE;
    end;
  end;
  for i0: Copy do
    undefine copy_transfer[i0];
  end;
  for i0: Copy do
    undefine copy_device[i0];
  end;
  for i0: Copy do
    undefine copy_slot[i0];
  end;
  for i0: Copy do
    for i1: Worker do
      instant[i0][i1] := INSTANT_QUEUED;
    end;
  end;
  for i0: Copy do
    for i1: Worker do
      undefine in_flight[i0][i1];
    end;
  end;
  for i0: Slot do
    block[i0].state := BLOCK_FREE;
    block[i0].copies := 0;
    block[i0].pins := 0;
  end;
  for i0: Slot do
    undefine slot_key[i0];
  end;
  for i0: Slot do
    for i1: Worker do
      undefine slot_content[i0][i1];
    end;
  end;
  for i0: Slot do
    old[i0] := false;
  end;
  for i0: Slot do
    stray_slot[i0] := false;
  end;
  for i0: Match do
    undefine match_slot[i0];
  end;
end;

-- The engine takes a free device block and queues kernels that will write key k into it.
ruleset d: DeviceBlock; k: Key do
  rule "compute"
    isundefined(key[d])
    & lease[d].state = LEASE_NONE
    & forall w: Worker do kernel[d][w] = KERNEL_NONE end
    & true
  ==>
  begin
    key[d] := k;
    kernel_key[d] := k;
    for w: Worker do
      kernel[d][w] := KERNEL_WRITES;
    end;
    forget();
  end;
end;

-- The engine queues kernels that read a device block.
ruleset d: DeviceBlock do
  rule "attend"
    !(isundefined(key[d]))
    & !(lease[d].state = LEASE_WRITING)
    & forall w: Worker do kernel[d][w] = KERNEL_NONE end
    & true
  ==>
  begin
    if isundefined(key[d]) then
      undefine kernel_key[d];
    else
      kernel_key[d] := key[d];
    end;
    for w: Worker do
      kernel[d][w] := KERNEL_READS;
    end;
    forget();
  end;
end;

-- A queued kernel runs on one worker.
ruleset d: DeviceBlock; w: Worker do
  rule "run"
    kernel[d][w] != KERNEL_NONE
  ==>
  var before: Count;
  begin
    before := rank();
    if kernel[d][w] = KERNEL_WRITES then
      if isundefined(kernel_key[d]) then
        undefine content[d][w];
      else
        content[d][w] := kernel_key[d];
      end;
    end;
    kernel[d][w] := KERNEL_NONE;
    forget();
    assert rank() < before "S9";
  end;
end;

-- The engine frees a device block. Kernels may still be queued, and a store may still read it.
ruleset d: DeviceBlock do
  rule "free"
    !(isundefined(key[d])) & !(lease[d].state = LEASE_WRITING)
  ==>
  var before: Count;
  begin
    before := rank();
    undefine key[d];
    forget();
    assert rank() < before "S9";
  end;
end;

-- A request counts on the block in a slot and pins it.
ruleset s: Slot; m: Match do
  rule "match"
    isundefined(match_slot[m]) & (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING)
  ==>
  begin
    block_step(BLOCK_ON_PIN, block[s]);
    match_slot[m] := s;
    forget();
  end;
end;

-- A match ends without a load.
ruleset s: Slot; m: Match do
  rule "release"
    !isundefined(match_slot[m]) & match_slot[m] = s
  ==>
  var before: Count;
  begin
    before := rank();
    block_step(BLOCK_ON_UNPIN, block[s]);
    undefine match_slot[m];
    forget();
    assert rank() < before "S9";
  end;
end;

-- A slot is wanted: an idle block is evicted.
ruleset s: Slot do
  rule "evict"
    block_after(BLOCK_ON_EVICT, block[s]) != BLOCK_ILLEGAL
  ==>
  begin
    block_step(BLOCK_ON_EVICT, block[s]);
    forget();
  end;
end;

-- A store is planned. A computed device block whose key is not on the host gets a slot and is leased
-- for reading.
ruleset t: Transfer; c: Copy; d: DeviceBlock; s: Slot do
  rule "plan_store"
    direction[t] = DIRECTION_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & forall w: Worker do report[t][w] = REPORT_NONE end
    & isundefined(copy_transfer[c])
    & forall w: Worker do instant[c][w] = INSTANT_QUEUED end
    & !(isundefined(key[d]))
    & lease_after(LEASE_ON_BEGIN_READ, lease[d]) != LEASE_ILLEGAL
    & (
        ! exists s2: Slot do
            (
              block[s2].state = BLOCK_ALLOCATED
              | block[s2].state = BLOCK_STORING
              | block[s2].state = BLOCK_STORED
              | block[s2].state = BLOCK_LOADING
            )
            & (
                isundefined(slot_key[s2]) ? isundefined(key[d]) : (!isundefined(key[d]) & slot_key[s2] = key[d])
              )
          end
      )
    & (block[s].state = BLOCK_FREE | block[s].state = BLOCK_EVICTED)
  ==>
  begin
    block_step(BLOCK_ON_ALLOCATE, block[s]);
    if isundefined(key[d]) then
      undefine slot_key[s];
    else
      slot_key[s] := key[d];
    end;
    old[s] := false;
    lease_step(LEASE_ON_BEGIN_READ, lease[d]);
    copy_transfer[c] := t;
    copy_device[c] := d;
    copy_slot[c] := s;
    direction[t] := DIRECTION_STORE;
    forget();
  end;
end;

-- A planned store gets one more block.
ruleset t: Transfer; c: Copy; d: DeviceBlock; s: Slot do
  rule "store_more"
    direction[t] != DIRECTION_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & direction[t] = DIRECTION_STORE
    & isundefined(copy_transfer[c])
    & forall w: Worker do instant[c][w] = INSTANT_QUEUED end
    & !(isundefined(key[d]))
    & lease_after(LEASE_ON_BEGIN_READ, lease[d]) != LEASE_ILLEGAL
    & (
        ! exists s2: Slot do
            (
              block[s2].state = BLOCK_ALLOCATED
              | block[s2].state = BLOCK_STORING
              | block[s2].state = BLOCK_STORED
              | block[s2].state = BLOCK_LOADING
            )
            & (
                isundefined(slot_key[s2]) ? isundefined(key[d]) : (!isundefined(key[d]) & slot_key[s2] = key[d])
              )
          end
      )
    & (block[s].state = BLOCK_FREE | block[s].state = BLOCK_EVICTED)
  ==>
  begin
    block_step(BLOCK_ON_ALLOCATE, block[s]);
    if isundefined(key[d]) then
      undefine slot_key[s];
    else
      slot_key[s] := key[d];
    end;
    old[s] := false;
    lease_step(LEASE_ON_BEGIN_READ, lease[d]);
    copy_transfer[c] := t;
    copy_device[c] := d;
    copy_slot[c] := s;
    forget();
  end;
end;

-- A load is planned. A match becomes a reader of its slot, and a free device block is leased for
-- writing.
ruleset t: Transfer; c: Copy; d: DeviceBlock; s: Slot; m: Match do
  rule "plan_load"
    direction[t] = DIRECTION_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & forall w: Worker do report[t][w] = REPORT_NONE end
    & isundefined(copy_transfer[c])
    & forall w: Worker do instant[c][w] = INSTANT_QUEUED end
    & (!isundefined(match_slot[m]) & match_slot[m] = s)
    & isundefined(key[d])
    & lease_after(LEASE_ON_BEGIN_WRITE, lease[d]) != LEASE_ILLEGAL
  ==>
  begin
    block_step(BLOCK_ON_BEGIN_LOAD, block[s]);
    if isundefined(slot_key[s]) then
      undefine key[d];
    else
      key[d] := slot_key[s];
    end;
    lease_step(LEASE_ON_BEGIN_WRITE, lease[d]);
    undefine match_slot[m];
    copy_transfer[c] := t;
    copy_device[c] := d;
    copy_slot[c] := s;
    direction[t] := DIRECTION_LOAD;
    forget();
  end;
end;

-- A planned load gets one more block.
ruleset t: Transfer; c: Copy; d: DeviceBlock; s: Slot; m: Match do
  rule "load_more"
    direction[t] != DIRECTION_NONE
    & transfer[t].state = TRANSFER_PLANNED
    & direction[t] = DIRECTION_LOAD
    & (
        ! exists c2: Copy do
            (!isundefined(copy_transfer[c2]) & copy_transfer[c2] = t)
            & (!isundefined(copy_slot[c2]) & copy_slot[c2] = s)
          end
      )
    & isundefined(copy_transfer[c])
    & forall w: Worker do instant[c][w] = INSTANT_QUEUED end
    & (!isundefined(match_slot[m]) & match_slot[m] = s)
    & isundefined(key[d])
    & lease_after(LEASE_ON_BEGIN_WRITE, lease[d]) != LEASE_ILLEGAL
  ==>
  begin
    block_step(BLOCK_ON_BEGIN_LOAD, block[s]);
    if isundefined(slot_key[s]) then
      undefine key[d];
    else
      key[d] := slot_key[s];
    end;
    lease_step(LEASE_ON_BEGIN_WRITE, lease[d]);
    undefine match_slot[m];
    copy_transfer[c] := t;
    copy_device[c] := d;
    copy_slot[c] := s;
    forget();
  end;
end;

-- A planned transfer leaves for the workers, who queue its copies.
ruleset t: Transfer do
  rule "submit"
    direction[t] != DIRECTION_NONE & transfer[t].state = TRANSFER_PLANNED
  ==>
  var before: Count;
  begin
    before := rank();
    for s: Slot do
      if direction[t] = DIRECTION_STORE
         & exists c: Copy do
             (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
             & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
           end then
        block_step(BLOCK_ON_SUBMIT_STORE, block[s]);
      end;
    end;
    transfer_step(TRANSFER_ON_SUBMIT, transfer[t]);
    forget();
    assert rank() < before "S9";
  end;
end;

-- A copy starts: a store after the kernels that write its device block, a load after all kernels that
-- use it.
ruleset t: Transfer; c: Copy; d: DeviceBlock; w: Worker do
  rule "start"
    (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
    & direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (!isundefined(copy_device[c]) & copy_device[c] = d)
    & instant[c][w] = INSTANT_QUEUED
    & (
        direction[t] = DIRECTION_STORE
        ? kernel[d][w] != KERNEL_WRITES
        : kernel[d][w] = KERNEL_NONE
      )
  ==>
  var before: Count;
  begin
    before := rank();
    instant[c][w] := INSTANT_STARTED;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A store's copy reads the device block.
ruleset t: Transfer; c: Copy; d: DeviceBlock; w: Worker do
  rule "read_device"
    (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
    & direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (!isundefined(copy_device[c]) & copy_device[c] = d)
    & direction[t] = DIRECTION_STORE
    & instant[c][w] = INSTANT_STARTED
  ==>
  var before: Count;
  begin
    before := rank();
    if isundefined(content[d][w]) then
      undefine in_flight[c][w];
    else
      in_flight[c][w] := content[d][w];
    end;
    instant[c][w] := INSTANT_READ;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A load's copy reads the slot.
ruleset t: Transfer; c: Copy; s: Slot; w: Worker do
  rule "read_slot"
    (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
    & direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
    & direction[t] = DIRECTION_LOAD
    & instant[c][w] = INSTANT_STARTED
  ==>
  var before: Count;
  begin
    before := rank();
    if isundefined(slot_content[s][w]) then
      undefine in_flight[c][w];
    else
      in_flight[c][w] := slot_content[s][w];
    end;
    instant[c][w] := INSTANT_READ;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A store's copy writes the slot.
ruleset t: Transfer; c: Copy; s: Slot; w: Worker do
  rule "write_slot"
    (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
    & direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
    & direction[t] = DIRECTION_STORE
    & instant[c][w] = INSTANT_READ
  ==>
  var before: Count;
  begin
    before := rank();
    if isundefined(in_flight[c][w]) then
      undefine slot_content[s][w];
    else
      slot_content[s][w] := in_flight[c][w];
    end;
    instant[c][w] := INSTANT_WRITTEN;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A load's copy writes the device block.
ruleset t: Transfer; c: Copy; d: DeviceBlock; w: Worker do
  rule "write_device"
    (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
    & direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & (!isundefined(copy_device[c]) & copy_device[c] = d)
    & direction[t] = DIRECTION_LOAD
    & instant[c][w] = INSTANT_READ
  ==>
  var before: Count;
  begin
    before := rank();
    if isundefined(in_flight[c][w]) then
      undefine content[d][w];
    else
      content[d][w] := in_flight[c][w];
    end;
    instant[c][w] := INSTANT_WRITTEN;
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
    & forall c: Copy do
        (!isundefined(copy_transfer[c]) & copy_transfer[c] = t) -> (instant[c][w] = INSTANT_WRITTEN)
      end
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

-- The last worker reports its share as good, and the transfer ends. A store's slots can be read if all
-- workers were good. A failed load's keys leave the index at once.
ruleset t: Transfer; w: Worker do
  rule "end_good"
    direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & forall c: Copy do
        (!isundefined(copy_transfer[c]) & copy_transfer[c] = t) -> (instant[c][w] = INSTANT_WRITTEN)
      end
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
    for m: Match do
      if direction[t] = DIRECTION_LOAD
         & transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_FAILED
         & exists c: Copy do
             (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
             & (
                 isundefined(copy_slot[c]) ? isundefined(match_slot[m]) : (!isundefined(match_slot[m]) & copy_slot[c] = match_slot[m])
               )
           end then
        undefine match_slot[m];
      end;
    end;
    for s: Slot do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
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
    for d: DeviceBlock do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_device[c]) & copy_device[c] = d)
         end
         & direction[t] = DIRECTION_LOAD
         & !(transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[t]) = TRANSFER_COMPLETED) then
        undefine key[d];
      end;
    end;
    for d: DeviceBlock do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_device[c]) & copy_device[c] = d)
         end then
        if direction[t] = DIRECTION_STORE then
          lease_step(LEASE_ON_END_READ, lease[d]);
        else
          lease_step(LEASE_ON_END_WRITE, lease[d]);
        end;
      end;
    end;
    direction[t] := DIRECTION_NONE;
    for c: Copy do
      if !isundefined(copy_transfer[c]) & copy_transfer[c] = t then
        undefine copy_transfer[c];
      end;
    end;
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
    & true
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

-- The last worker reports its share as bad, and the transfer ends. A store's slots can be read if all
-- workers were good. A failed load's keys leave the index at once.
ruleset t: Transfer; w: Worker do
  rule "end_bad"
    direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & report[t][w] = REPORT_NONE
    & true
    & (
        ! (
            transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_SUBMITTED
            | transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_ABANDONED
          )
      )
  ==>
  begin
    for m: Match do
      if direction[t] = DIRECTION_LOAD
         & transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_FAILED
         & exists c: Copy do
             (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
             & (
                 isundefined(copy_slot[c]) ? isundefined(match_slot[m]) : (!isundefined(match_slot[m]) & copy_slot[c] = match_slot[m])
               )
           end then
        undefine match_slot[m];
      end;
    end;
    for s: Slot do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
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
    for d: DeviceBlock do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_device[c]) & copy_device[c] = d)
         end
         & direction[t] = DIRECTION_LOAD
         & !(transfer_after(TRANSFER_ON_REPORT_BAD, transfer[t]) = TRANSFER_COMPLETED) then
        undefine key[d];
      end;
    end;
    for d: DeviceBlock do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_device[c]) & copy_device[c] = d)
         end then
        if direction[t] = DIRECTION_STORE then
          lease_step(LEASE_ON_END_READ, lease[d]);
        else
          lease_step(LEASE_ON_END_WRITE, lease[d]);
        end;
      end;
    end;
    direction[t] := DIRECTION_NONE;
    for c: Copy do
      if !isundefined(copy_transfer[c]) & copy_transfer[c] = t then
        undefine copy_transfer[c];
      end;
    end;
    report[t][w] := REPORT_BAD;
    transfer_step(TRANSFER_ON_REPORT_BAD, transfer[t]);
    forget();
  end;
end;

-- A plan is taken back before it left, so no byte was touched.
ruleset t: Transfer do
  rule "cancel"
    direction[t] != DIRECTION_NONE & transfer[t].state = TRANSFER_PLANNED
  ==>
  var before: Count;
  begin
    before := rank();
    for s: Slot do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
         end then
        if direction[t] = DIRECTION_STORE then
          block_step(BLOCK_ON_CANCEL, block[s]);
        else
          block_step(BLOCK_ON_END_COPY_BAD, block[s]);
        end;
      end;
    end;
    for d: DeviceBlock do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_device[c]) & copy_device[c] = d)
         end
         & direction[t] = DIRECTION_LOAD then
        undefine key[d];
      end;
    end;
    for d: DeviceBlock do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_device[c]) & copy_device[c] = d)
         end then
        if direction[t] = DIRECTION_STORE then
          lease_step(LEASE_ON_END_READ, lease[d]);
        else
          lease_step(LEASE_ON_END_WRITE, lease[d]);
        end;
      end;
    end;
    direction[t] := DIRECTION_NONE;
    for c: Copy do
      if !isundefined(copy_transfer[c]) & copy_transfer[c] = t then
        undefine copy_transfer[c];
      end;
    end;
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
  for s: Slot do
    old[s] := true;
  end;
  for m: Match do
    undefine match_slot[m];
  end;
  forget();
end;

-- A worker will never report: the transfer is given up, and memory that it may still write is retired.
ruleset t: Transfer do
  rule "lose"
    direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
  ==>
  begin
    for m: Match do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (
               isundefined(copy_slot[c]) ? isundefined(match_slot[m]) : (!isundefined(match_slot[m]) & copy_slot[c] = match_slot[m])
             )
         end then
        undefine match_slot[m];
      end;
    end;
    for s: Slot do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
         end
         & direction[t] = DIRECTION_STORE then
        stray_slot[s] := true;
      end;
    end;
    for s: Slot do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
         end then
        block_step(BLOCK_ON_LOSE, block[s]);
      end;
    end;
    for d: DeviceBlock do
      if direction[t] != DIRECTION_STORE
         & exists c: Copy do
             (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
             & (!isundefined(copy_device[c]) & copy_device[c] = d)
           end then
        undefine key[d];
      end;
    end;
    for d: DeviceBlock do
      if direction[t] != DIRECTION_STORE
         & exists c: Copy do
             (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
             & (!isundefined(copy_device[c]) & copy_device[c] = d)
           end then
        stray_device[d] := true;
      end;
    end;
    for d: DeviceBlock do
      if exists c: Copy do
           (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
           & (!isundefined(copy_device[c]) & copy_device[c] = d)
         end then
        if direction[t] = DIRECTION_STORE then
          lease_step(LEASE_ON_END_READ, lease[d]);
        else
          lease_step(LEASE_ON_LOSE, lease[d]);
        end;
      end;
    end;
    transfer_step(TRANSFER_ON_LOSE, transfer[t]);
    direction[t] := DIRECTION_NONE;
    for c: Copy do
      if !isundefined(copy_transfer[c]) & copy_transfer[c] = t then
        undefine copy_transfer[c];
      end;
    end;
    forget();
  end;
end;

-- A copy that was given up still writes its slot.
ruleset s: Slot; w: Worker do
  rule "stray_slot_write"
    stray_slot[s]
  ==>
  begin
    undefine slot_content[s][w];
    forget();
  end;
end;

-- A copy that was given up still writes its device block, after the kernels before it.
ruleset d: DeviceBlock; w: Worker do
  rule "stray_device_write"
    stray_device[d] & kernel[d][w] = KERNEL_NONE
  ==>
  begin
    undefine content[d][w];
    forget();
  end;
end;

-- The index names at most one slot for a key.
invariant "S1"
  forall k: Key do
    forall s: Slot do
      forall s2: Slot do
        (
          (
            block[s].state = BLOCK_ALLOCATED
            | block[s].state = BLOCK_STORING
            | block[s].state = BLOCK_STORED
            | block[s].state = BLOCK_LOADING
          )
          & (!isundefined(slot_key[s]) & slot_key[s] = k)
          & (
              block[s2].state = BLOCK_ALLOCATED
              | block[s2].state = BLOCK_STORING
              | block[s2].state = BLOCK_STORED
              | block[s2].state = BLOCK_LOADING
            )
          & (!isundefined(slot_key[s2]) & slot_key[s2] = k)
        )
        -> s = s2
      end
    end
  end
;

-- A slot that can be read holds its key's bytes on every worker.
invariant "S2"
  forall s: Slot do
    forall w: Worker do
      (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING)
      -> (
           isundefined(slot_content[s][w]) ? isundefined(slot_key[s]) : (!isundefined(slot_key[s]) & slot_content[s][w] = slot_key[s])
         )
    end
  end
;

-- The state of a slot fits each live transfer that touches it.
invariant "S3"
  forall t: Transfer do
    forall s: Slot do
      exists c: Copy do
        (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
        & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
      end
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
;

-- The numbers of copies, pins and leases equal the numbers of their holders.
invariant "S4"
  forall s: Slot do
    (
      block[s].state = BLOCK_FREE
      | block[s].state = BLOCK_EVICTED
      | block[s].state = BLOCK_RETIRED
    )
    | block[s].copies = total_1(s)
  end
  & forall s: Slot do true -> (block[s].pins = total_2(s)) end
  & forall d: DeviceBlock do true -> (lease[d].readers = total_3(d)) end
  & forall c: Copy do
      forall t: Transfer do
        forall d: DeviceBlock do
          (
            (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
            & direction[t] = DIRECTION_LOAD
            & (!isundefined(copy_device[c]) & copy_device[c] = d)
          )
          -> lease[d].state = LEASE_WRITING
        end
      end
    end
  & forall d: DeviceBlock do
      lease[d].state = LEASE_WRITING
      -> exists c: Copy do
           exists t: Transfer do
             (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
             & direction[t] = DIRECTION_LOAD
             & (!isundefined(copy_device[c]) & copy_device[c] = d)
           end
         end
    end
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

-- A slot that a match holds can be read.
invariant "S7"
  forall m: Match do
    forall s: Slot do
      (!isundefined(match_slot[m]) & match_slot[m] = s)
      -> (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING)
    end
  end
;

-- Every step taken is in its machine's table.
invariant "S8"
  forall s: Slot do block[s].state != BLOCK_ILLEGAL end
  & forall t: Transfer do transfer[t].state != TRANSFER_ILLEGAL end
  & forall d: DeviceBlock do lease[d].state != LEASE_ILLEGAL end
;

-- A queued kernel finds the bytes that it was queued for.
invariant "S12"
  forall d: DeviceBlock do
    forall w: Worker do
      kernel[d][w] = KERNEL_READS
      -> (
           isundefined(content[d][w]) ? isundefined(kernel_key[d]) : (!isundefined(kernel_key[d]) & content[d][w] = kernel_key[d])
         )
    end
  end
;

-- No slot that can be read dates from before the last reset.
invariant "S14"
  forall s: Slot do (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING) -> (!old[s]) end
;

-- A device block that counts as computed or loaded holds its key's bytes on every worker.
invariant "S15"
  forall d: DeviceBlock do
    forall w: Worker do
      (!(isundefined(key[d])) & !(lease[d].state = LEASE_WRITING) & kernel[d][w] != KERNEL_WRITES)
      -> (
           isundefined(content[d][w]) ? isundefined(key[d]) : (!isundefined(key[d]) & content[d][w] = key[d])
         )
    end
  end
;

-- The transfer of a copy is live.
invariant "CopiesBelongToLiveTransfers"
  forall c: Copy do
    forall t: Transfer do
      (!isundefined(copy_transfer[c]) & copy_transfer[c] = t) -> (direction[t] != DIRECTION_NONE)
    end
  end
;

-- A copy is between a device block and a slot.
invariant "ACopyHasTwoEnds"
  forall c: Copy do
    isundefined(copy_transfer[c]) | (!(isundefined(copy_device[c])) & !(isundefined(copy_slot[c])))
  end
;

-- No other copy touches the slot of a store's copy.
invariant "AStoreHasItsSlotsToItself"
  forall c: Copy do
    forall t: Transfer do
      forall c2: Copy do
        (
          (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
          & direction[t] = DIRECTION_STORE
          & !(isundefined(copy_transfer[c2]))
          & (
              isundefined(copy_slot[c2]) ? isundefined(copy_slot[c]) : (!isundefined(copy_slot[c]) & copy_slot[c2] = copy_slot[c])
            )
        )
        -> c = c2
      end
    end
  end
;

-- No other copy touches the device block of a load's copy.
invariant "ALoadHasItsDeviceBlocksToItself"
  forall c: Copy do
    forall t: Transfer do
      forall c2: Copy do
        (
          (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
          & direction[t] = DIRECTION_LOAD
          & !(isundefined(copy_transfer[c2]))
          & (
              isundefined(copy_device[c2]) ? isundefined(copy_device[c]) : (!isundefined(copy_device[c]) & copy_device[c2] = copy_device[c])
            )
        )
        -> c = c2
      end
    end
  end
;

-- Two copies of one transfer differ in their slots and in their device blocks.
invariant "ATransferTouchesABlockOnce"
  forall c: Copy do
    forall t: Transfer do
      forall c2: Copy do
        (
          (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
          & (!isundefined(copy_transfer[c2]) & copy_transfer[c2] = t)
          & (
              (
                isundefined(copy_slot[c2]) ? isundefined(copy_slot[c]) : (!isundefined(copy_slot[c]) & copy_slot[c2] = copy_slot[c])
              )
              | (
                  isundefined(copy_device[c2]) ? isundefined(copy_device[c]) : (!isundefined(copy_device[c]) & copy_device[c2] = copy_device[c])
                )
            )
        )
        -> c = c2
      end
    end
  end
;

-- The device block of a store's copy is leased for reading.
invariant "AStoreHoldsALease"
  forall c: Copy do
    forall t: Transfer do
      forall d: DeviceBlock do
        (
          (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
          & direction[t] = DIRECTION_STORE
          & (!isundefined(copy_device[c]) & copy_device[c] = d)
        )
        -> lease[d].state = LEASE_READING
      end
    end
  end
;

-- A slot that is being stored does not date from before the last reset.
invariant "WhatIsBeingStoredIsNew"
  forall s: Slot do
    (block[s].state = BLOCK_ALLOCATED | block[s].state = BLOCK_STORING) -> (!old[s])
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

-- No worker has started a copy of a planned transfer.
invariant "NoCopyOfAPlanHasStarted"
  forall c: Copy do
    forall t: Transfer do
      forall w: Worker do
        (
          (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
          & direction[t] != DIRECTION_NONE
          & transfer[t].state = TRANSFER_PLANNED
        )
        -> instant[c][w] = INSTANT_QUEUED
      end
    end
  end
;

-- No worker has reported a planned transfer.
invariant "NoWorkerReportsAPlan"
  forall t: Transfer do
    forall w: Worker do
      (direction[t] != DIRECTION_NONE & transfer[t].state = TRANSFER_PLANNED)
      -> report[t][w] = REPORT_NONE
    end
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

-- A worker that reported a transfer as good has written all its copies.
invariant "WhatIsReportedGoodIsWritten"
  forall c: Copy do
    forall t: Transfer do
      forall w: Worker do
        ((!isundefined(copy_transfer[c]) & copy_transfer[c] = t) & report[t][w] = REPORT_GOOD)
        -> instant[c][w] = INSTANT_WRITTEN
      end
    end
  end
;

-- A kernel that writes has a key: the key of its device block, unless this is free or being loaded.
invariant "AKernelWritesTheBlocksKey"
  forall d: DeviceBlock do
    forall w: Worker do
      kernel[d][w] = KERNEL_WRITES
      -> (
           !(isundefined(kernel_key[d]))
           & (
               isundefined(key[d])
               | lease[d].state = LEASE_WRITING
               | (
                   isundefined(key[d]) ? isundefined(kernel_key[d]) : (!isundefined(kernel_key[d]) & key[d] = kernel_key[d])
                 )
             )
         )
    end
  end
;

-- Until a store has read, the device block holds the slot's key, or a queued kernel will write it.
invariant "AStoreFindsItsKey"
  forall c: Copy do
    forall t: Transfer do
      forall d: DeviceBlock do
        forall s: Slot do
          forall w: Worker do
            (
              (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
              & !(transfer[t].state = TRANSFER_ABANDONED)
              & (!isundefined(copy_device[c]) & copy_device[c] = d)
              & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
              & direction[t] = DIRECTION_STORE
              & (instant[c][w] = INSTANT_QUEUED | instant[c][w] = INSTANT_STARTED)
            )
            -> (
                 kernel[d][w] = KERNEL_WRITES
                 ? (
                     (
                       isundefined(kernel_key[d]) ? isundefined(slot_key[s]) : (!isundefined(slot_key[s]) & kernel_key[d] = slot_key[s])
                     )
                     & instant[c][w] = INSTANT_QUEUED
                   )
                 : (
                     isundefined(content[d][w]) ? isundefined(slot_key[s]) : (!isundefined(slot_key[s]) & content[d][w] = slot_key[s])
                   )
               )
          end
        end
      end
    end
  end
;

-- What a store has read is the slot's key.
invariant "AStoreCarriesItsKey"
  forall c: Copy do
    forall t: Transfer do
      forall d: DeviceBlock do
        forall s: Slot do
          forall w: Worker do
            (
              (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
              & !(transfer[t].state = TRANSFER_ABANDONED)
              & (!isundefined(copy_device[c]) & copy_device[c] = d)
              & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
              & direction[t] = DIRECTION_STORE
              & instant[c][w] = INSTANT_READ
            )
            -> (
                 isundefined(in_flight[c][w]) ? isundefined(slot_key[s]) : (!isundefined(slot_key[s]) & in_flight[c][w] = slot_key[s])
               )
          end
        end
      end
    end
  end
;

-- Where a store has written, the slot holds its key.
invariant "AStoreWritesItsKey"
  forall c: Copy do
    forall t: Transfer do
      forall d: DeviceBlock do
        forall s: Slot do
          forall w: Worker do
            (
              (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
              & !(transfer[t].state = TRANSFER_ABANDONED)
              & (!isundefined(copy_device[c]) & copy_device[c] = d)
              & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
              & direction[t] = DIRECTION_STORE
              & instant[c][w] = INSTANT_WRITTEN
            )
            -> (
                 isundefined(slot_content[s][w]) ? isundefined(slot_key[s]) : (!isundefined(slot_key[s]) & slot_content[s][w] = slot_key[s])
               )
          end
        end
      end
    end
  end
;

-- Until a load has read, the slot holds the device block's key.
invariant "ALoadFindsItsKey"
  forall c: Copy do
    forall t: Transfer do
      forall d: DeviceBlock do
        forall s: Slot do
          forall w: Worker do
            (
              (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
              & !(transfer[t].state = TRANSFER_ABANDONED)
              & (!isundefined(copy_device[c]) & copy_device[c] = d)
              & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
              & direction[t] = DIRECTION_LOAD
              & (instant[c][w] = INSTANT_QUEUED | instant[c][w] = INSTANT_STARTED)
            )
            -> (
                 isundefined(slot_content[s][w]) ? isundefined(key[d]) : (!isundefined(key[d]) & slot_content[s][w] = key[d])
               )
          end
        end
      end
    end
  end
;

-- What a load has read is the device block's key.
invariant "ALoadCarriesItsKey"
  forall c: Copy do
    forall t: Transfer do
      forall d: DeviceBlock do
        forall s: Slot do
          forall w: Worker do
            (
              (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
              & !(transfer[t].state = TRANSFER_ABANDONED)
              & (!isundefined(copy_device[c]) & copy_device[c] = d)
              & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
              & direction[t] = DIRECTION_LOAD
              & instant[c][w] = INSTANT_READ
            )
            -> (
                 isundefined(in_flight[c][w]) ? isundefined(key[d]) : (!isundefined(key[d]) & in_flight[c][w] = key[d])
               )
          end
        end
      end
    end
  end
;

-- Where a load has written, the device block holds its key.
invariant "ALoadWritesItsKey"
  forall c: Copy do
    forall t: Transfer do
      forall d: DeviceBlock do
        forall s: Slot do
          forall w: Worker do
            (
              (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
              & !(transfer[t].state = TRANSFER_ABANDONED)
              & (!isundefined(copy_device[c]) & copy_device[c] = d)
              & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
              & direction[t] = DIRECTION_LOAD
              & instant[c][w] = INSTANT_WRITTEN
            )
            -> (
                 isundefined(content[d][w]) ? isundefined(key[d]) : (!isundefined(key[d]) & content[d][w] = key[d])
               )
          end
        end
      end
    end
  end
;

-- While a kernel is queued for its device block, a load has not started.
invariant "ALoadWaitsForKernels"
  forall c: Copy do
    forall t: Transfer do
      forall d: DeviceBlock do
        forall w: Worker do
          (
            (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
            & direction[t] = DIRECTION_LOAD
            & (!isundefined(copy_device[c]) & copy_device[c] = d)
            & kernel[d][w] != KERNEL_NONE
          )
          -> instant[c][w] = INSTANT_QUEUED
        end
      end
    end
  end
;

-- A slot that a lost copy may write is retired.
invariant "ASlotWithAStrayWriterIsRetired"
  forall s: Slot do stray_slot[s] -> (block[s].state = BLOCK_RETIRED) end
;

-- No copy touches a slot that a lost copy may write.
invariant "NobodyReadsWhatAStrayCopyWrites"
  forall s: Slot do
    forall c: Copy do
      (stray_slot[s] & !(isundefined(copy_transfer[c])))
      -> (!(!isundefined(copy_slot[c]) & copy_slot[c] = s))
    end
  end
;

-- A device block that a lost copy may write is retired.
invariant "ADeviceBlockWithAStrayWriterIsRetired"
  forall d: DeviceBlock do stray_device[d] -> (lease[d].state = LEASE_RETIRED) end
;

-- No request holds a retired device block.
invariant "ARetiredDeviceBlockIsFree"
  forall d: DeviceBlock do (lease[d].state = LEASE_RETIRED) -> (isundefined(key[d])) end
;

-- A load has written on every worker.
cover "a hit is loaded"
  exists t: Transfer do
    direction[t] = DIRECTION_LOAD
    & direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & forall c: Copy do
        forall w: Worker do
          (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
          -> instant[c][w] = INSTANT_WRITTEN
        end
      end
  end
;

-- A store was submitted before the kernel that writes its block ran.
cover "a store is ahead of its kernel"
  exists t: Transfer do
    direction[t] = DIRECTION_STORE
    & direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & exists c: Copy do
        exists d: DeviceBlock do
          exists w: Worker do
            (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
            & (!isundefined(copy_device[c]) & copy_device[c] = d)
            & kernel[d][w] = KERNEL_WRITES
          end
        end
      end
  end
;

-- A load was submitted before a kernel that reads its block's former content ran.
cover "a load is ahead of an old reader"
  exists t: Transfer do
    direction[t] = DIRECTION_LOAD
    & direction[t] != DIRECTION_NONE
    & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
    & exists c: Copy do
        exists d: DeviceBlock do
          exists w: Worker do
            (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
            & (!isundefined(copy_device[c]) & copy_device[c] = d)
            & kernel[d][w] = KERNEL_READS
          end
        end
      end
  end
;

-- The engine has freed a block that a store still reads.
cover "a freed block is stored"
  exists t: Transfer do
    exists d: DeviceBlock do
      direction[t] = DIRECTION_STORE
      & exists c: Copy do
          (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
          & (!isundefined(copy_device[c]) & copy_device[c] = d)
        end
      & isundefined(key[d])
    end
  end
;

-- A slot has two readers.
cover "two loads read one slot"
  exists s: Slot do block[s].state = BLOCK_LOADING & block[s].copies = 2 end
;

-- A device block has two readers: a reset made the first store's slot useless.
cover "two stores read one device block"
  exists d: DeviceBlock do lease[d].readers = 2 end
;

-- A store of two blocks is with the workers.
cover "a store has two blocks"
  exists t: Transfer do
    exists c: Copy do
      exists c2: Copy do
        (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
        & (!isundefined(copy_transfer[c2]) & copy_transfer[c2] = t)
        & !(c = c2)
        & direction[t] != DIRECTION_NONE
        & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
        & direction[t] = DIRECTION_STORE
      end
    end
  end
;

-- A load of two blocks is with the workers.
cover "a load has two blocks"
  exists t: Transfer do
    exists c: Copy do
      exists c2: Copy do
        (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
        & (!isundefined(copy_transfer[c2]) & copy_transfer[c2] = t)
        & !(c = c2)
        & direction[t] != DIRECTION_NONE
        & (transfer[t].state = TRANSFER_SUBMITTED | transfer[t].state = TRANSFER_ABANDONED)
        & direction[t] = DIRECTION_LOAD
      end
    end
  end
;

-- A reset has voided a slot that a copy touches.
cover "a slot is quarantined under a copy"
  exists t: Transfer do
    exists s: Slot do
      direction[t] != DIRECTION_NONE
      & transfer[t].state = TRANSFER_ABANDONED
      & exists c: Copy do
          (!isundefined(copy_transfer[c]) & copy_transfer[c] = t)
          & (!isundefined(copy_slot[c]) & copy_slot[c] = s)
        end
      & block[s].state = BLOCK_QUARANTINED
    end
  end
;

-- A worker reported a load as bad.
cover "a load fails"
  exists t: Transfer do direction[t] = DIRECTION_LOAD & transfer[t].failed != 0 end
;

-- A store and a load were given up.
cover "copies are lost"
  exists s: Slot do stray_slot[s] end & exists d: DeviceBlock do stray_device[d] end
;

-- From every state, rest can be reached.
liveness "S9"
  forall d: DeviceBlock do forall w: Worker do kernel[d][w] = KERNEL_NONE end end
  & forall t: Transfer do direction[t] = DIRECTION_NONE end
  & forall m: Match do isundefined(match_slot[m]) end
  & forall d: DeviceBlock do isundefined(key[d]) end
;
