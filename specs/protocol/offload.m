-- The offload protocol. Within these bounds: 2 keys, 2 device blocks, 2 slots, 2 workers; at most 2
-- live transfers, 1 matches, 2 device blocks with queued kernels; failures, resets, losses.
--
-- The same protocol as in Offload.tla beside it, which is easier to read. Murphi's undefined value
-- stands for None. Not modelled:
-- - Requests: a match holds one slot, and a device block does not say which request holds it.
-- - Transfers of several blocks: each copies one block.
-- - A second kernel for a block before the first one ran: a stream runs them in order.
-- - Names of transfers and workers in reports: the ledger refuses late and doubled reports.
-- - The device's own prefix cache, and data that a load of an older epoch left on the device.
--
-- Generated from kvsm's declaration and tables (specs/protocol/texts.py); do not edit.

type
  Count: 0..255;
  DeviceBlock: scalarset(2);
  Slot: scalarset(2);
  Worker: scalarset(2);
  Key: scalarset(2);
  Kernel: enum {
    KERNEL_NONE, KERNEL_WRITES, KERNEL_READS
  };
  LeaseState: enum {
    LEASE_NONE, LEASE_READING, LEASE_WRITING, LEASE_RETIRED, LEASE_ILLEGAL
  };
  LeaseTrigger: enum {
    LEASE_ON_BEGIN_READ, LEASE_ON_END_READ, LEASE_ON_BEGIN_WRITE, LEASE_ON_END_WRITE, LEASE_ON_LOSE
  };
  LeaseWord: record state: LeaseState; readers: 0..1; end;
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
  Instant: enum {
    INSTANT_QUEUED, INSTANT_STARTED, INSTANT_READ, INSTANT_WRITTEN, INSTANT_REPORTED
  };
  BlockState: enum {
    BLOCK_FREE, BLOCK_ALLOCATED, BLOCK_STORING, BLOCK_STORED, BLOCK_LOADING, BLOCK_EVICTED,
    BLOCK_QUARANTINED, BLOCK_RETIRED, BLOCK_ILLEGAL
  };
  BlockTrigger: enum {
    BLOCK_ON_ALLOCATE, BLOCK_ON_SUBMIT_STORE, BLOCK_ON_CANCEL, BLOCK_ON_PIN, BLOCK_ON_UNPIN,
    BLOCK_ON_BEGIN_LOAD, BLOCK_ON_END_COPY_GOOD, BLOCK_ON_END_COPY_BAD, BLOCK_ON_EVICT,
    BLOCK_ON_INVALIDATE, BLOCK_ON_LOSE, BLOCK_ON_TOUCH
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
  -- The copy's hold on the device block.
  lease: array [DeviceBlock] of LeaseWord;
  -- The direction of the device block's live transfer; NONE if it has none.
  direction: array [DeviceBlock] of Direction;
  -- The slot that its live transfer reads or writes.
  transfer_slot: array [DeviceBlock] of Slot;
  -- The state of its live transfer.
  transfer: array [DeviceBlock] of TransferWord;
  -- How far the worker's copy has come.
  instant: array [DeviceBlock] of array [Worker] of Instant;
  -- The key whose bytes the worker's copy has read and not yet written.
  in_flight: array [DeviceBlock] of array [Worker] of Key;
  -- Whether a lost copy may still write the device block.
  stray_device: array [DeviceBlock] of boolean;
  -- The state of the slot's block.
  block: array [Slot] of BlockWord;
  -- The key under which the index names the slot.
  slot_key: array [Slot] of Key;
  -- The key whose bytes are in the worker's shard of the slot; none for garbage.
  slot_content: array [Slot] of array [Worker] of Key;
  -- How many matches hold the slot and have not begun to load from it.
  matches: array [Slot] of 0..1;
  -- Whether the slot's block dates from before the last reset.
  old: array [Slot] of boolean;
  -- Whether a lost copy may still write the slot.
  stray_slot: array [Slot] of boolean;

-- The row of the lease's table that matches; 0 if none does.
function lease_row(trigger: LeaseTrigger; word: LeaseWord): Count;
begin
  -- a store is planned
  if trigger = LEASE_ON_BEGIN_READ
     & (word.state = LEASE_NONE | word.state = LEASE_READING)
     & word.readers = 0 then
    return 1;
  end;
  -- the last store ended
  if trigger = LEASE_ON_END_READ
     & (word.state = LEASE_READING)
     & word.readers = 1 then
    return 2;
  end;
  -- a load is planned
  if trigger = LEASE_ON_BEGIN_WRITE
     & (word.state = LEASE_NONE) then
    return 3;
  end;
  -- the load ended
  if trigger = LEASE_ON_END_WRITE
     & (word.state = LEASE_WRITING) then
    return 4;
  end;
  -- a worker will never report: it may still write
  if trigger = LEASE_ON_LOSE
     & (word.state = LEASE_WRITING) then
    return 5;
  end;
  return 0;
end;

procedure lease_step(trigger: LeaseTrigger; var word: LeaseWord);
begin
  switch lease_row(trigger, word)
    case 1: word.state := LEASE_READING; word.readers := word.readers + 1;
    case 2: word.state := LEASE_NONE; word.readers := word.readers - 1;
    case 3: word.state := LEASE_WRITING;
    case 4: word.state := LEASE_NONE;
    case 5: word.state := LEASE_RETIRED;
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
  -- other loads still read it
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_LOADING)
     & word.copies = 2 then
    return 16;
  end;
  -- the last reader left
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_LOADING)
     & word.copies = 1 then
    return 17;
  end;
  -- other copies go on
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_QUARANTINED)
     & word.copies = 2 then
    return 18;
  end;
  -- the last copy ended
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_QUARANTINED)
     & word.copies = 1 then
    return 19;
  end;
  -- another copy of a lost slot ended
  if trigger = BLOCK_ON_END_COPY_GOOD
     & (word.state = BLOCK_RETIRED) then
    return 20;
  end;
  -- other loads still read it
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_LOADING)
     & word.copies = 2 then
    return 21;
  end;
  -- the last reader left
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_LOADING)
     & word.copies = 1 then
    return 22;
  end;
  -- other copies go on
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_QUARANTINED)
     & word.copies = 2 then
    return 23;
  end;
  -- the last copy ended
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_QUARANTINED)
     & word.copies = 1 then
    return 24;
  end;
  -- another copy of a lost slot ended
  if trigger = BLOCK_ON_END_COPY_BAD
     & (word.state = BLOCK_RETIRED) then
    return 25;
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
    case 16: word.state := BLOCK_LOADING; word.copies := word.copies - 1;
    case 17: word.state := BLOCK_STORED; word.copies := word.copies - 1;
    case 18: word.state := BLOCK_QUARANTINED; word.copies := word.copies - 1;
    case 19: word.state := BLOCK_EVICTED; word.copies := word.copies - 1;
    case 20:
    case 21: word.state := BLOCK_LOADING; word.copies := word.copies - 1;
    case 22: word.state := BLOCK_STORED; word.copies := word.copies - 1;
    case 23: word.state := BLOCK_QUARANTINED; word.copies := word.copies - 1;
    case 24: word.state := BLOCK_EVICTED; word.copies := word.copies - 1;
    case 25:
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

function total_1(): Count;
var total: Count;
begin
  total := 0;
  for d2: DeviceBlock do
    if !forall w: Worker do kernel[d2][w] = KERNEL_NONE end then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_2(): Count;
var total: Count;
begin
  total := 0;
  for s2: Slot do
    total := total + (
      matches[s2]
    );
  end;
  return total;
end;

function total_3(): Count;
var total: Count;
begin
  total := 0;
  for d2: DeviceBlock do
    if direction[d2] != DIRECTION_NONE then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_4(k: Key): Count;
var total: Count;
begin
  total := 0;
  for s: Slot do
    if (
         block[s].state = BLOCK_ALLOCATED
         | block[s].state = BLOCK_STORING
         | block[s].state = BLOCK_STORED
         | block[s].state = BLOCK_LOADING
       )
       & (!isundefined(slot_key[s]) & slot_key[s] = k) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_5(s: Slot): Count;
var total: Count;
begin
  total := 0;
  for d: DeviceBlock do
    if direction[d] != DIRECTION_NONE
       & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
       & (
           ! (
               direction[d] = DIRECTION_STORE
               & direction[d] != DIRECTION_NONE
               & transfer[d].state = TRANSFER_PLANNED
             )
         ) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_6(d: DeviceBlock): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if instant[d][w] != INSTANT_REPORTED then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_9(d: DeviceBlock): Count;
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

function total_10(d: DeviceBlock): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if direction[d] != DIRECTION_NONE & instant[d][w] = INSTANT_QUEUED then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_11(d: DeviceBlock): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if direction[d] != DIRECTION_NONE & (instant[d][w] = INSTANT_QUEUED | instant[d][w] = INSTANT_STARTED) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_12(d: DeviceBlock): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if direction[d] != DIRECTION_NONE
       & (instant[d][w] = INSTANT_QUEUED | instant[d][w] = INSTANT_STARTED | instant[d][w] = INSTANT_READ) then
      total := total + 1;
    end;
  end;
  return total;
end;

function total_13(d: DeviceBlock): Count;
var total: Count;
begin
  total := 0;
  for w: Worker do
    if direction[d] != DIRECTION_NONE & instant[d][w] != INSTANT_REPORTED then
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
      (!(isundefined(key[d])) ? 1 : 0)
      + total_9(d)
      + (direction[d] != DIRECTION_NONE & transfer[d].state = TRANSFER_PLANNED ? 1 : 0)
      + (direction[d] != DIRECTION_NONE ? 1 : 0)
      + total_10(d)
      + total_11(d)
      + total_12(d)
      + total_13(d)
    );
  end;
  return total;
end;

function total_8(): Count;
var total: Count;
begin
  total := 0;
  for s: Slot do
    total := total + (
      matches[s]
    );
  end;
  return total;
end;

-- An upper bound on the draining actions left to take.
function rank(): Count;
begin
  return total_7() + total_8();
end;

procedure forget();
begin
  -- The transfer has ended, and nothing asks about it.
  for d: DeviceBlock do
    if direction[d] = DIRECTION_NONE then
      undefine transfer_slot[d];
    end;
  end;
  -- The transfer has ended, and nothing asks about it.
  for d: DeviceBlock do
    if direction[d] = DIRECTION_NONE & transfer[d].state != TRANSFER_ILLEGAL then
      transfer[d].state := TRANSFER_PLANNED;
      transfer[d].pending := 2;
      transfer[d].failed := 0;
    end;
  end;
  -- The transfer has ended, and nothing asks about it.
  for d: DeviceBlock do
    for w: Worker do
      if direction[d] = DIRECTION_NONE then
        instant[d][w] := INSTANT_QUEUED;
      end;
    end;
  end;
  -- Bytes that were written are no longer in flight.
  for d: DeviceBlock do
    for w: Worker do
      if instant[d][w] != INSTANT_READ then
        undefine in_flight[d][w];
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
                     ! (
                         direction[d] = DIRECTION_STORE
                         & (instant[d][w] = INSTANT_QUEUED | instant[d][w] = INSTANT_STARTED)
                       )
                   )
               )
             | (
                 direction[d] = DIRECTION_LOAD
                 & (
                     instant[d][w] = INSTANT_QUEUED
                     | instant[d][w] = INSTANT_STARTED
                     | instant[d][w] = INSTANT_READ
                   )
               )
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
             ! exists d: DeviceBlock do
                 direction[d] = DIRECTION_LOAD
                 & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
                 & (instant[d][w] = INSTANT_QUEUED | instant[d][w] = INSTANT_STARTED)
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
    direction[i0] := DIRECTION_NONE;
  end;
  for i0: DeviceBlock do
    undefine transfer_slot[i0];
  end;
  for i0: DeviceBlock do
    transfer[i0].state := TRANSFER_PLANNED;
    transfer[i0].pending := 2;
    transfer[i0].failed := 0;
  end;
  for i0: DeviceBlock do
    for i1: Worker do
      instant[i0][i1] := INSTANT_QUEUED;
    end;
  end;
  for i0: DeviceBlock do
    for i1: Worker do
      undefine in_flight[i0][i1];
    end;
  end;
  for i0: DeviceBlock do
    stray_device[i0] := false;
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
    matches[i0] := 0;
  end;
  for i0: Slot do
    old[i0] := false;
  end;
  for i0: Slot do
    stray_slot[i0] := false;
  end;
end;

-- The engine takes a free device block and queues kernels that will write key k into it.
ruleset d: DeviceBlock; k: Key do
  rule "compute"
    isundefined(key[d])
    & lease[d].state = LEASE_NONE
    & forall w: Worker do kernel[d][w] = KERNEL_NONE end
    & total_1() < 2
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
    & direction[d] != DIRECTION_LOAD
    & forall w: Worker do kernel[d][w] = KERNEL_NONE end
    & total_1() < 2
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
    !(isundefined(key[d])) & direction[d] != DIRECTION_LOAD
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
ruleset s: Slot do
  rule "match"
    (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING) & total_2() < 1
  ==>
  begin
    block_step(BLOCK_ON_PIN, block[s]);
    matches[s] := matches[s] + 1;
    forget();
  end;
end;

-- A match ends without a load.
ruleset s: Slot do
  rule "release"
    matches[s] != 0
  ==>
  var before: Count;
  begin
    before := rank();
    block_step(BLOCK_ON_UNPIN, block[s]);
    matches[s] := matches[s] - 1;
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

-- A computed device block whose key is not on the host gets a slot and is leased for reading.
ruleset d: DeviceBlock; s: Slot do
  rule "plan_store"
    !(isundefined(key[d]))
    & lease[d].state = LEASE_NONE
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
    & total_3() < 2
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
    direction[d] := DIRECTION_STORE;
    transfer_slot[d] := s;
    forget();
  end;
end;

-- A match becomes a load: its pin becomes a reader, a free device block is leased for writing.
ruleset d: DeviceBlock; s: Slot do
  rule "plan_load"
    matches[s] != 0 & isundefined(key[d]) & lease[d].state = LEASE_NONE & total_3() < 2
  ==>
  begin
    block_step(BLOCK_ON_BEGIN_LOAD, block[s]);
    matches[s] := matches[s] - 1;
    if isundefined(slot_key[s]) then
      undefine key[d];
    else
      key[d] := slot_key[s];
    end;
    lease_step(LEASE_ON_BEGIN_WRITE, lease[d]);
    direction[d] := DIRECTION_LOAD;
    transfer_slot[d] := s;
    forget();
  end;
end;

-- A planned transfer leaves for the workers, who queue its copies.
ruleset d: DeviceBlock; s: Slot do
  rule "submit"
    direction[d] != DIRECTION_NONE
    & transfer[d].state = TRANSFER_PLANNED
    & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
  ==>
  var before: Count;
  begin
    before := rank();
    transfer_step(TRANSFER_ON_SUBMIT, transfer[d]);
    if direction[d] = DIRECTION_STORE then
      block_step(BLOCK_ON_SUBMIT_STORE, block[s]);
    end;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A copy starts: a store after the kernels that write its device block, a load after all kernels that
-- use it.
ruleset d: DeviceBlock; w: Worker do
  rule "start"
    direction[d] != DIRECTION_NONE
    & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    & instant[d][w] = INSTANT_QUEUED
    & (
        direction[d] = DIRECTION_STORE
        ? kernel[d][w] != KERNEL_WRITES
        : kernel[d][w] = KERNEL_NONE
      )
  ==>
  var before: Count;
  begin
    before := rank();
    instant[d][w] := INSTANT_STARTED;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A store's copy reads the device block.
ruleset d: DeviceBlock; w: Worker do
  rule "read_device"
    direction[d] = DIRECTION_STORE & instant[d][w] = INSTANT_STARTED
  ==>
  var before: Count;
  begin
    before := rank();
    if isundefined(content[d][w]) then
      undefine in_flight[d][w];
    else
      in_flight[d][w] := content[d][w];
    end;
    instant[d][w] := INSTANT_READ;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A load's copy reads the slot.
ruleset d: DeviceBlock; s: Slot; w: Worker do
  rule "read_slot"
    direction[d] = DIRECTION_LOAD
    & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
    & instant[d][w] = INSTANT_STARTED
  ==>
  var before: Count;
  begin
    before := rank();
    if isundefined(slot_content[s][w]) then
      undefine in_flight[d][w];
    else
      in_flight[d][w] := slot_content[s][w];
    end;
    instant[d][w] := INSTANT_READ;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A store's copy writes the slot.
ruleset d: DeviceBlock; s: Slot; w: Worker do
  rule "write_slot"
    direction[d] = DIRECTION_STORE
    & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
    & instant[d][w] = INSTANT_READ
  ==>
  var before: Count;
  begin
    before := rank();
    if isundefined(in_flight[d][w]) then
      undefine slot_content[s][w];
    else
      slot_content[s][w] := in_flight[d][w];
    end;
    instant[d][w] := INSTANT_WRITTEN;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A load's copy writes the device block.
ruleset d: DeviceBlock; w: Worker do
  rule "write_device"
    direction[d] = DIRECTION_LOAD & instant[d][w] = INSTANT_READ
  ==>
  var before: Count;
  begin
    before := rank();
    if isundefined(in_flight[d][w]) then
      undefine content[d][w];
    else
      content[d][w] := in_flight[d][w];
    end;
    instant[d][w] := INSTANT_WRITTEN;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A worker reports its copy as good; other reports are still to come.
ruleset d: DeviceBlock; w: Worker do
  rule "report_good"
    direction[d] != DIRECTION_NONE
    & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    & instant[d][w] = INSTANT_WRITTEN
    & (
        transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_SUBMITTED
        | transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_ABANDONED
      )
  ==>
  var before: Count;
  begin
    before := rank();
    instant[d][w] := INSTANT_REPORTED;
    transfer_step(TRANSFER_ON_REPORT_GOOD, transfer[d]);
    forget();
    assert rank() < before "S9";
  end;
end;

-- The last worker reports its copy as good, and the transfer ends. A store's slot can be read if all
-- copies were good. A failed load's key leaves the index at once.
ruleset d: DeviceBlock; s: Slot; w: Worker do
  rule "end_good"
    direction[d] != DIRECTION_NONE
    & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    & instant[d][w] = INSTANT_WRITTEN
    & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
    & (
        ! (
            transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_SUBMITTED
            | transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_ABANDONED
          )
      )
  ==>
  var before: Count;
  begin
    before := rank();
    instant[d][w] := INSTANT_REPORTED;
    if direction[d] = DIRECTION_LOAD
       & transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_FAILED then
      if transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_COMPLETED then
        block_step(BLOCK_ON_END_COPY_GOOD, block[s]);
      else
        block_step(BLOCK_ON_END_COPY_BAD, block[s]);
      end;
      block_step(BLOCK_ON_INVALIDATE, block[s]);
    else
      if transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_COMPLETED then
        block_step(BLOCK_ON_END_COPY_GOOD, block[s]);
      else
        block_step(BLOCK_ON_END_COPY_BAD, block[s]);
      end;
    end;
    if direction[d] = DIRECTION_LOAD
       & transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_FAILED then
      matches[s] := 0;
    end;
    if direction[d] = DIRECTION_STORE then
      lease_step(LEASE_ON_END_READ, lease[d]);
    else
      lease_step(LEASE_ON_END_WRITE, lease[d]);
    end;
    if direction[d] = DIRECTION_LOAD
       & !(transfer_after(TRANSFER_ON_REPORT_GOOD, transfer[d]) = TRANSFER_COMPLETED) then
      undefine key[d];
    end;
    transfer_step(TRANSFER_ON_REPORT_GOOD, transfer[d]);
    direction[d] := DIRECTION_NONE;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A worker reports its copy as bad; other reports are still to come.
ruleset d: DeviceBlock; w: Worker do
  rule "report_bad"
    direction[d] != DIRECTION_NONE
    & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    & (instant[d][w] = INSTANT_STARTED | instant[d][w] = INSTANT_WRITTEN)
    & (
        transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_SUBMITTED
        | transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_ABANDONED
      )
  ==>
  var before: Count;
  begin
    before := rank();
    instant[d][w] := INSTANT_REPORTED;
    transfer_step(TRANSFER_ON_REPORT_BAD, transfer[d]);
    forget();
    assert rank() < before "S9";
  end;
end;

-- The last worker reports its copy as bad, and the transfer ends. A store's slot can be read if all
-- copies were good. A failed load's key leaves the index at once.
ruleset d: DeviceBlock; s: Slot; w: Worker do
  rule "end_bad"
    direction[d] != DIRECTION_NONE
    & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    & (instant[d][w] = INSTANT_STARTED | instant[d][w] = INSTANT_WRITTEN)
    & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
    & (
        ! (
            transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_SUBMITTED
            | transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_ABANDONED
          )
      )
  ==>
  var before: Count;
  begin
    before := rank();
    instant[d][w] := INSTANT_REPORTED;
    if direction[d] = DIRECTION_LOAD
       & transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_FAILED then
      if transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_COMPLETED then
        block_step(BLOCK_ON_END_COPY_GOOD, block[s]);
      else
        block_step(BLOCK_ON_END_COPY_BAD, block[s]);
      end;
      block_step(BLOCK_ON_INVALIDATE, block[s]);
    else
      if transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_COMPLETED then
        block_step(BLOCK_ON_END_COPY_GOOD, block[s]);
      else
        block_step(BLOCK_ON_END_COPY_BAD, block[s]);
      end;
    end;
    if direction[d] = DIRECTION_LOAD
       & transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_FAILED then
      matches[s] := 0;
    end;
    if direction[d] = DIRECTION_STORE then
      lease_step(LEASE_ON_END_READ, lease[d]);
    else
      lease_step(LEASE_ON_END_WRITE, lease[d]);
    end;
    if direction[d] = DIRECTION_LOAD
       & !(transfer_after(TRANSFER_ON_REPORT_BAD, transfer[d]) = TRANSFER_COMPLETED) then
      undefine key[d];
    end;
    transfer_step(TRANSFER_ON_REPORT_BAD, transfer[d]);
    direction[d] := DIRECTION_NONE;
    forget();
    assert rank() < before "S9";
  end;
end;

-- A plan is taken back before it left, so no byte was touched.
ruleset d: DeviceBlock; s: Slot do
  rule "cancel"
    direction[d] != DIRECTION_NONE
    & transfer[d].state = TRANSFER_PLANNED
    & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
  ==>
  var before: Count;
  begin
    before := rank();
    transfer_step(TRANSFER_ON_CANCEL, transfer[d]);
    if direction[d] = DIRECTION_STORE then
      block_step(BLOCK_ON_CANCEL, block[s]);
    else
      block_step(BLOCK_ON_END_COPY_BAD, block[s]);
    end;
    if direction[d] = DIRECTION_STORE then
      lease_step(LEASE_ON_END_READ, lease[d]);
    else
      lease_step(LEASE_ON_END_WRITE, lease[d]);
    end;
    if direction[d] = DIRECTION_LOAD then
      undefine key[d];
    end;
    direction[d] := DIRECTION_NONE;
    forget();
    assert rank() < before "S9";
  end;
end;

-- All blocks are voided, and transfers under way are abandoned. Plans were cancelled before.
rule "reset"
  forall d: DeviceBlock do
    !(direction[d] != DIRECTION_NONE & transfer[d].state = TRANSFER_PLANNED)
  end
==>
begin
  for d: DeviceBlock do
    if direction[d] != DIRECTION_NONE then
      transfer_step(TRANSFER_ON_ABANDON, transfer[d]);
    end;
  end;
  for s: Slot do
    block_step(BLOCK_ON_INVALIDATE, block[s]);
  end;
  for s: Slot do
    matches[s] := 0;
  end;
  for s: Slot do
    old[s] := true;
  end;
  forget();
end;

-- A worker will never report: the transfer is given up, and memory that it may still write is retired.
ruleset d: DeviceBlock; s: Slot do
  rule "lose"
    direction[d] != DIRECTION_NONE
    & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
  ==>
  begin
    transfer_step(TRANSFER_ON_LOSE, transfer[d]);
    block_step(BLOCK_ON_LOSE, block[s]);
    matches[s] := 0;
    if direction[d] = DIRECTION_STORE then
      lease_step(LEASE_ON_END_READ, lease[d]);
    else
      lease_step(LEASE_ON_LOSE, lease[d]);
    end;
    if direction[d] != DIRECTION_STORE then
      undefine key[d];
    end;
    if direction[d] = DIRECTION_STORE then
      stray_slot[s] := true;
    end;
    if direction[d] != DIRECTION_STORE then
      stray_device[d] := true;
    end;
    direction[d] := DIRECTION_NONE;
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
  forall k: Key do total_4(k) < 2 end
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

-- The state of a slot fits the live copy that touches it.
invariant "S3"
  forall d: DeviceBlock do
    forall s: Slot do
      (direction[d] != DIRECTION_NONE & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s))
      -> (
           direction[d] = DIRECTION_STORE
           ? (
               (transfer[d].state = TRANSFER_PLANNED & block[s].state = BLOCK_ALLOCATED)
               | (transfer[d].state = TRANSFER_SUBMITTED & block[s].state = BLOCK_STORING)
               | (transfer[d].state = TRANSFER_ABANDONED & block[s].state = BLOCK_QUARANTINED)
             )
           : (
               (block[s].state = BLOCK_QUARANTINED | block[s].state = BLOCK_RETIRED)
               | (!(transfer[d].state = TRANSFER_ABANDONED) & block[s].state = BLOCK_LOADING)
             )
         )
    end
  end
;

-- The numbers of copies, pins and leases equal the numbers of their holders.
invariant "S4"
  forall s: Slot do
    (
      (
        block[s].state = BLOCK_FREE
        | block[s].state = BLOCK_EVICTED
        | block[s].state = BLOCK_RETIRED
      )
      | block[s].copies = total_5(s)
    )
    & block[s].pins = matches[s]
  end
  & forall d: DeviceBlock do
      (lease[d].state = LEASE_READING) = (direction[d] = DIRECTION_STORE)
      & (lease[d].state = LEASE_WRITING) = (direction[d] = DIRECTION_LOAD)
    end
;

-- A transfer waits once for each worker that has not reported.
invariant "S5"
  forall d: DeviceBlock do
    (
      direction[d] != DIRECTION_NONE
      & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    )
    -> transfer[d].pending = total_6(d)
  end
;

-- A slot that a match holds can be read.
invariant "S7"
  forall s: Slot do
    matches[s] = 0 | (block[s].state = BLOCK_STORED | block[s].state = BLOCK_LOADING)
  end
;

-- Every step taken is in its machine's table.
invariant "S8"
  forall s: Slot do block[s].state != BLOCK_ILLEGAL end
  & forall d: DeviceBlock do
      transfer[d].state != TRANSFER_ILLEGAL & lease[d].state != LEASE_ILLEGAL
    end
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
      (!(isundefined(key[d])) & direction[d] != DIRECTION_LOAD & kernel[d][w] != KERNEL_WRITES)
      -> (
           isundefined(content[d][w]) ? isundefined(key[d]) : (!isundefined(key[d]) & content[d][w] = key[d])
         )
    end
  end
;

-- A load has written on every worker.
cover "a hit is loaded"
  exists d: DeviceBlock do
    direction[d] = DIRECTION_LOAD
    & forall w: Worker do instant[d][w] = INSTANT_WRITTEN | instant[d][w] = INSTANT_REPORTED end
  end
;

-- A store was submitted before the kernel that writes its block ran.
cover "a store is ahead of its kernel"
  exists d: DeviceBlock do
    direction[d] = DIRECTION_STORE
    & direction[d] != DIRECTION_NONE
    & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    & exists w: Worker do kernel[d][w] = KERNEL_WRITES end
  end
;

-- A load was submitted before a kernel that reads its block's former content ran.
cover "a load is ahead of an old reader"
  exists d: DeviceBlock do
    direction[d] = DIRECTION_LOAD
    & direction[d] != DIRECTION_NONE
    & (transfer[d].state = TRANSFER_SUBMITTED | transfer[d].state = TRANSFER_ABANDONED)
    & exists w: Worker do kernel[d][w] = KERNEL_READS end
  end
;

-- The engine has freed a block that a store still reads.
cover "a freed block is stored"
  exists d: DeviceBlock do direction[d] = DIRECTION_STORE & isundefined(key[d]) end
;

-- A slot has two readers.
cover "two loads read one slot"
  exists s: Slot do block[s].state = BLOCK_LOADING & block[s].copies = 2 end
;

-- A reset has voided a slot that a copy touches.
cover "a slot is quarantined under a copy"
  exists d: DeviceBlock do
    exists s: Slot do
      direction[d] != DIRECTION_NONE
      & transfer[d].state = TRANSFER_ABANDONED
      & (!isundefined(transfer_slot[d]) & transfer_slot[d] = s)
      & block[s].state = BLOCK_QUARANTINED
    end
  end
;

-- A worker reported a load as bad.
cover "a load fails"
  exists d: DeviceBlock do direction[d] = DIRECTION_LOAD & transfer[d].failed != 0 end
;

-- A store and a load were given up.
cover "copies are lost"
  exists s: Slot do stray_slot[s] end & exists d: DeviceBlock do stray_device[d] end
;

-- From every state, rest can be reached.
liveness "S9"
  forall d: DeviceBlock do
    isundefined(key[d])
    & direction[d] = DIRECTION_NONE
    & forall w: Worker do kernel[d][w] = KERNEL_NONE end
  end
  & forall s: Slot do matches[s] = 0 end
;
