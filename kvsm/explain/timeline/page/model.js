/* The data of the page as columns, and the times and words that follow from them.

An event's place is its index in the columns of the window. Everything else on the page is placed by it. */

async function unpack(base64) {
  const text = atob(base64.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}

function sums(differences) {
  const column = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < column.length; i++) column[i] = sum += differences[i];
  return column;
}

/* The first index whose value is at least `value`, in a rising column. */
function lowerBound(column, value, low = 0, high = column.length) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

class Model {
  constructor(data) {
    this.data = data;
    this.names = data.names;
    this.tables = data.tables;
    this.began = BigInt(data.began_ns);
    this.number = sums(data.events.number);
    this.at = sums(data.events.at);
    this.step = sums(data.events.step);
    this.kind = data.events.kind;
    this.text = data.events.text;
    this.count = this.number.length;
    this.transferRow = new Map(this.tables.transfers.transfer.map((id, row) => [id, row]));
    this.byEvent = new Map();
    this.note('lookup', this.tables.lookups.event);
    this.note('transfer', this.tables.transfers.transfer);
    this.note('copy', this.tables.copies.reported);
    this.note('reset', this.tables.resets.event);
    this.note('restart', this.tables.restarts.event);
    this.note('rejection', this.tables.rejections.event);
    this.note('skip', this.tables.skips.event);
    this.note('stay', this.tables.request_states.began);
    this.note('request', this.tables.requests.arrived);
    this.note('gone', this.tables.blocks.gone);
  }

  /* Note which requests, transfers and other things an event is part of. */
  note(type, events) {
    events.forEach((event, row) => {
      if (event === null) return;
      const things = this.byEvent.get(event);
      if (things === undefined) this.byEvent.set(event, [{ type, row }]);
      else things.push({ type, row });
    });
  }

  thingsAt(event) { return this.byEvent.get(event) ?? []; }

  /* The place of an event. One before the window is at the first place, one after it at the last. */
  place(event) {
    return Math.min(lowerBound(this.number, event), this.count - 1);
  }

  has(event) { return event !== null && this.number[lowerBound(this.number, event)] === event; }

  /* Whether the clock is virtual: no log is as old as 1971. */
  isVirtual() { return this.began < 31536000000000000n; }

  /* Whether events have different wall times. In some simulated runs the clock stands still. */
  wallTimes() { return this.at[this.count - 1] > this.at[0]; }

  /* Positions of all events on the axis. A clock that was set back must not turn a bar around. */
  axis(byTime) {
    const axis = new Float64Array(this.count);
    let latest = -Infinity;
    for (let i = 0; i < this.count; i++) {
      latest = Math.max(latest, this.at[i]);
      axis[i] = byTime ? latest - this.at[0] : i;
    }
    return axis;
  }

  /* As `utc` of times.py. A virtual clock counts from 0, so its times have no date. */
  utc(ns) {
    const ms = Number((this.began + BigInt(Math.round(ns))) / 1000000n);
    if (this.isVirtual()) return `${(ms / 1000).toFixed(3)}s of a virtual clock`;
    return new Date(ms).toISOString();
  }

  /* `event 12 at +0.345s`, or only its number if it is not in the window. */
  when(event) {
    return this.has(event) ? `event ${grouped(event)} at ${after(this.at[this.place(event)])}` : `event ${grouped(event)}`;
  }

  request(row) { return this.names[this.tables.requests.request[row]]; }

  /* `store 12 of requests r1, r2`. */
  transferWords(id) {
    const row = this.transferRow.get(id);
    if (row === undefined) return `transfer ${id}`;
    const transfers = this.tables.transfers;
    return `${transfers.direction[row]} ${id} of ${this.requestWords(transfers.requests[row])}`;
  }

  requestWords(names) {
    if (names.length === 0) return 'no request';
    const shown = names.slice(0, 4).map((name) => this.names[name]).join(', ');
    const more = names.length > 4 ? `, ... (${names.length})` : '';
    return `request${names.length > 1 ? 's' : ''} ${shown}${more}`;
  }

  /* Why a key is gone, as a sentence without its first capital. */
  whyGone(why, cause, transfer, requests) {
    const sentence = this.data.why_gone[why] ?? 'the log does not tell why';
    let named = transfer === null ? 'a transfer' : this.transferWords(transfer);
    if (transfer !== null && !this.transferRow.has(transfer) && requests !== null) {
      named = `transfer ${transfer} of ${this.requestWords(requests)}`;
    }
    return sentence.replaceAll(/\{(cause|transfer)\}/g, (_, what) => (
      what === 'transfer' ? named : cause === null ? 'that the log does not tell' : grouped(cause)
    ));
  }

  /* Blocks by state after the event at a place. */
  blocksAfter(place) {
    const { event, blocks } = this.data.checkpoints;
    let from = lowerBound(event, place + 1) - 1;
    const states = [...blocks[from]];
    const moves = this.data.moves;
    for (let i = lowerBound(moves.event, event[from]); i < moves.event.length && moves.event[i] <= place; i++) {
      const edge = this.data.edges[moves.edge[i]];
      states[edge.source] -= moves.blocks[i];
      states[edge.target] += moves.blocks[i];
    }
    return states;
  }

  /* The pool after the event at a place: [part, slots], without what is empty. */
  poolAfter(place) {
    const { event, ...parts } = this.data.pool;
    const sample = lowerBound(event, place + 1) - 1;
    return Object.entries(parts).map(([part, slots]) => [part, slots[sample]]).filter(([, slots]) => slots > 0);
  }

  /* What the event at a place did: [{edge, blocks}]. */
  movesAt(place) {
    const { event, edge, blocks } = this.data.moves;
    const found = [];
    for (let i = lowerBound(event, place); i < event.length && event[i] === place; i++) {
      found.push({ edge: edge[i], blocks: blocks[i] });
    }
    return found;
  }
}

function grouped(number) { return number.toLocaleString('en-US'); }

function plural(count, noun) { return `${grouped(count)} ${noun}${count === 1 ? '' : 's'}`; }

/* `+12.345s`, as `kvsm show` prints it and `--since` takes it. */
function after(ns) {
  const ms = Math.floor(Math.abs(ns) / 1e6);
  return `${ns < 0 ? '-' : '+'}${Math.floor(ms / 1000)}.${String(ms % 1000).padStart(3, '0')}s`;
}

/* As `kvsm.explain.story.times.duration`. */
function duration(ns) {
  if (ns < 0) return `-${duration(-ns)}`;
  if (ns < 1e3) return `${ns} ns`;
  if (ns < 1e6) return `${digits(ns / 1e3)} us`;
  if (ns < 1e8) return `${digits(ns / 1e6)} ms`;
  if (ns < 1e10) return `${(ns / 1e9).toFixed(2)} s`;
  if (ns < 6e10) return `${(ns / 1e9).toFixed(1)} s`;
  const seconds = Math.floor(ns / 1e9);
  if (seconds < 3600) return two(seconds, 60, 'min', 1, 's');
  return seconds < 86400 ? two(seconds, 3600, 'h', 60, 'min') : two(seconds, 86400, 'd', 3600, 'h');
}

function digits(number) { return number.toFixed(number < 10 ? 2 : number < 100 ? 1 : 0); }

function two(seconds, large, largeName, small, smallName) {
  const rest = Math.floor((seconds % large) / small);
  return `${grouped(Math.floor(seconds / large))} ${largeName}${rest ? ` ${rest} ${smallName}` : ''}`;
}
