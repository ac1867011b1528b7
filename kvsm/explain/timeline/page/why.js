/* The explanation of the selected thing. All text becomes text nodes, so that text of a log is never markup. */

const MOST_LISTED = 12;

function element(tag, properties, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith('aria-') || name === 'role') node.setAttribute(name, value); else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

/* For each type of thing: its name, its event, and its explanation. */
class Why {
  constructor(model, select) {
    this.model = model;
    this.select = select;
  }

  /* The event that a thing is selected at. */
  eventOf({ type, row }) {
    const tables = this.model.tables;
    switch (type) {
      case 'event': case 'eviction': return row;
      case 'stay': return tables.request_states.began[row];
      case 'request': return tables.requests.arrived[row];
      case 'lookup': return tables.lookups.event[row];
      case 'copy': return tables.copies.reported[row] ?? tables.copies.submitted[row];
      case 'transfer': return tables.transfers.transfer[row];
      case 'block': return tables.blocks.wanted[row] ?? tables.blocks.gone[row] ?? tables.blocks.transfer[row];
      case 'gone': return tables.blocks.gone[row];
      case 'reset': return tables.resets.event[row];
      case 'restart': return tables.restarts.event[row];
      case 'rejection': return tables.rejections.event[row];
      case 'skip': return tables.skips.event[row];
      default: throw new Error(`no thing of type ${type}`);
    }
  }

  /* The name of a thing, for a heading or a link. */
  title({ type, row }) {
    const { model } = this;
    const tables = model.tables;
    switch (type) {
      case 'event': return `Event ${grouped(row)}`;
      case 'eviction': return `Eviction at event ${grouped(row)}`;
      case 'stay': return `Request ${this.name(tables.request_states.request[row])}: ${model.data.activity[tables.request_states.state[row]] ?? 'over'}`;
      case 'request': return `Request ${model.request(row)}`;
      case 'lookup': return `Lookup of request ${this.name(tables.lookups.request[row])} at event ${grouped(tables.lookups.event[row])}`;
      case 'copy': return `Rank ${tables.copies.worker[row]}, ${tables.copies.direction[row]} ${tables.copies.transfer[row]}`;
      case 'transfer': return capital(model.transferWords(tables.transfers.transfer[row]));
      case 'block': case 'gone': return `Key ${tables.blocks.key[row]} in slot ${tables.blocks.slot[row]}`;
      case 'restart': return `Restart: life ${tables.restarts.life[row]} begins`;
      case 'reset': return `Reset: epoch ${tables.resets.epoch[row]} begins`;
      case 'rejection': return `Rejected report of rank ${tables.rejections.worker[row]}`;
      case 'skip': return `Blocks not stored at event ${grouped(tables.skips.event[row])}`;
      default: throw new Error(`no thing of type ${type}`);
    }
  }

  /* The panel for a thing: its title, the answer first, then the evidence. */
  tell(thing) {
    const told = this[`tell_${thing.type}`](thing.row);
    const event = this.eventOf(thing);
    return [
      element('h3', {}, this.title(thing)),
      element('p', { className: 'answer' }, told.answer),
      ...told.rest.filter((one) => one !== null).map((one) => (typeof one === 'string' ? element('p', {}, one) : one)),
      thing.type === 'event' ? null : element('p', {}, 'Selected: ', this.link({ type: 'event', row: event }, this.model.when(event))),
      told.command ? element('p', {}, 'More: ', element('code', {}, `kvsm why ${quoted(this.model.data.directory)} ${told.command}`)) : null,
    ].filter((one) => one !== null);
  }

  tell_event(event) {
    const { model } = this;
    const place = model.place(event);
    if (!model.has(event)) return { answer: 'This event is not on the page.', rest: [], command: null };
    const things = model.thingsAt(event);
    const moves = model.movesAt(place).map(({ edge, blocks }) => moveWords(model.data.edges[edge], model.data.states, blocks));
    return {
      answer: model.text[place],
      rest: [
        `${model.utc(model.at[place])}, ${after(model.at[place])}, step ${grouped(model.step[place])}`,
        this.list(moves),
        `The pool after it: ${model.poolAfter(place).map(([part, slots]) => `${grouped(slots)} ${part}`).join(', ')}.`,
        this.links('Concerns', things),
      ],
      command: null,
    };
  }

  tell_stay(row) {
    const { model } = this;
    const stays = model.tables.request_states;
    const activity = model.data.activity[stays.state[row]];
    const [began, ended, transfer] = [stays.began[row], stays.ended[row], stays.transfer[row]];
    const life = stays.life[row];
    return {
      answer: transfer === null ? model.data.activities[activity] ?? 'It is over.'
        : `${activity === 'loading' ? 'It waits for its own' : 'It waits for'} ${model.transferWords(transfer)}.`,
      rest: [
        this.span(began, ended, 'It lasts'),
        ...(transfer === null ? [] : this.ranks(transfer)),
        this.links('See', [
          ...(life === null ? [] : [{ type: 'request', row: life }]),
          ...this.transferThing(transfer),
        ]),
      ],
      command: quoted(this.name(stays.request[row])),
    };
  }

  tell_request(row) {
    const { model } = this;
    const requests = model.tables.requests;
    const lookups = this.rowsOf('lookups', 'request', requests.request[row]);
    const first = lookups[0];
    const ended = requests.cut_off[row] ? 'was cut off by a restart' : requests.aborted[row] ? 'was aborted' : 'finished';
    const end = requests.finished[row] === null
      ? `It never finished: its state is ${requests.state[row]} where the page ends.`
      : `It ${ended} at ${model.when(requests.finished[row])}.`;
    return {
      answer: first === undefined ? 'No lookup of it is on this page.' : this.lookupAnswer(first),
      rest: [
        end,
        this.requestSums(requests, row),
        this.links('Lookups', lookups.map((one) => ({ type: 'lookup', row: one }))),
      ],
      command: quoted(model.request(row)),
    };
  }

  /* The waits and copies of a request. Zeros are left out. */
  requestSums(requests, row) {
    const told = [
      requests.deferred_ns[row] ? `waited ${duration(requests.deferred_ns[row])} for other copies` : null,
      requests.loading_ns[row] ? `waited ${duration(requests.loading_ns[row])} for its own loads` : null,
      requests.preemptions[row] ? `was preempted ${plural(requests.preemptions[row], 'time')}` : null,
      requests.loaded[row] ? `loaded ${plural(requests.loaded[row], 'block')}` : null,
      requests.stored[row] ? `stored ${plural(requests.stored[row], 'block')}` : null,
      requests.failed_loads[row] ? `had ${plural(requests.failed_loads[row], 'failed load')} of ${requests.loads[row]}` : null,
    ].filter((one) => one !== null);
    return told.length === 0 ? null : `It ${told.join(', ')}.`;
  }

  lookupAnswer(row) {
    const lookups = this.model.tables.lookups;
    const [missed, why] = [lookups.missed[row], lookups.why[row]];
    if (missed === null) return `The host serves ${plural(lookups.hit_slots[row], 'slot')}, and the prefix stops nowhere.`;
    const cause = why === null ? 'the log does not tell why'
      : this.model.whyGone(why, lookups.cause[row], lookups.cause_transfer[row], lookups.cause_requests[row]);
    return `It stops at key ${missed}: ${cause}.`;
  }

  tell_lookup(row) {
    const lookups = this.model.tables.lookups;
    const asked = lookups.asked[row] === null
      ? `It found ${plural(lookups.hit_slots[row], 'slot')} on the host.`
      : `It asked for ${plural(lookups.asked[row], 'block')}. The device had ${grouped(lookups.on_device[row] ?? 0)}, `
        + `and the host served ${grouped(lookups.on_host[row] ?? 0)}.`;
    const cause = lookups.cause[row];
    return {
      answer: this.lookupAnswer(row),
      rest: [
        asked,
        this.links('See', [
          ...(cause === null ? [] : [{ type: 'event', row: cause }]),
          ...this.transferThing(lookups.cause_transfer[row]),
          ...this.livesOf(lookups.missed[row]),
        ]),
      ],
      command: quoted(this.name(lookups.request[row])),
    };
  }

  tell_copy(row) {
    const copies = this.model.tables.copies;
    const error = copies.error[row] ? `: ${copies.error[row]}` : ', and the log does not tell why';
    const answer = copies.good[row] === null ? 'This rank has not reported the copy.'
      : copies.good[row] ? 'This rank made a good copy.' : `This rank failed${error}.`;
    return {
      answer,
      rest: [
        this.span(copies.submitted[row], copies.reported[row], 'The copy took'),
        ...this.ranks(copies.transfer[row]),
        this.links('See', this.transferThing(copies.transfer[row])),
      ],
      command: `--transfer ${copies.transfer[row]}`,
    };
  }

  tell_transfer(row) {
    const { model } = this;
    const transfers = model.tables.transfers;
    const outcome = transfers.outcome[row];
    const answer = outcome === null
      ? `It has not ended: ${transfers.pending[row]} of ${plural(transfers.workers[row], 'rank')} have not reported.`
      : `It is ${outcome}.`;
    return {
      answer,
      rest: [
        `It copies ${plural(transfers.slots[row], 'slot')}.`,
        this.span(transfers.transfer[row], transfers.ended[row], 'From its plan it took'),
        transfers.waited_for[row] ? `The engine stood still for it: ${plural(transfers.waited_for[row], 'flush')}.` : null,
        ...this.ranks(transfers.transfer[row]),
        this.links('Requests', this.requestThings(transfers.requests[row])),
      ],
      command: `--transfer ${transfers.transfer[row]}`,
    };
  }

  tell_block(row) {
    const { model } = this;
    const blocks = model.tables.blocks;
    const [gone, wanted] = [blocks.gone[row], blocks.wanted[row]];
    const why = gone === null ? `The slot holds it where the page ends.`
      : `${capital(model.whyGone(blocks.why[row], gone, blocks.gone_for[row] ?? blocks.transfer[row], blocks.gone_for_requests[row]))}.`;
    const later = wanted === null ? null
      : `Request ${this.name(blocks.wanted_by[row])} wanted it at ${model.when(wanted)}${this.later(gone, wanted)}.`;
    return {
      answer: later === null ? why : `${why} ${later}`,
      rest: [
        `Stored by ${model.transferWords(blocks.transfer[row])}; it served ${plural(blocks.hits[row], 'lookup')}.`,
        this.links('See', [
          ...this.transferThing(blocks.transfer[row]),
          ...(gone === null ? [] : [{ type: 'event', row: gone }]),
          ...this.transferThing(blocks.gone_for[row]),
          ...(wanted === null ? [] : model.thingsAt(wanted).filter(({ type }) => type === 'lookup')),
        ]),
      ],
      command: `--key ${blocks.key[row]}`,
    };
  }

  tell_gone(row) { return this.tell_block(row); }

  tell_eviction(event) {
    const { model } = this;
    const blocks = model.tables.blocks;
    const rows = model.thingsAt(event).filter(({ type }) => type === 'gone').map(({ row }) => row);
    const wanted = rows.filter((row) => blocks.wanted[row] !== null);
    const room = rows.length > 0 && blocks.gone_for[rows[0]] !== null ? ` to make room for ${model.transferWords(blocks.gone_for[rows[0]])}` : '';
    const order = [...wanted, ...rows.filter((row) => blocks.wanted[row] === null)];
    return {
      answer: `${plural(rows.length, 'block')} evicted${room}. ${wanted.length} of them ${wanted.length === 1 ? 'was' : 'were'} missed later.`,
      rest: [this.links('Blocks', order.map((row) => ({ type: 'block', row })), (thing) => this.blockFate(thing))],
      command: rows.length > 0 && blocks.gone_for[rows[0]] !== null ? `--transfer ${blocks.gone_for[rows[0]]}` : null,
    };
  }

  /* `Key 3fa9..0000: request r7 missed it, 5.10 s later`. */
  blockFate({ row }) {
    const blocks = this.model.tables.blocks;
    const [gone, wanted] = [blocks.gone[row], blocks.wanted[row]];
    if (wanted === null) return `Key ${blocks.key[row]}`;
    return `Key ${blocks.key[row]}: request ${this.name(blocks.wanted_by[row])} missed it${this.later(gone, wanted)}`;
  }

  tell_reset(row) {
    const resets = this.model.tables.resets;
    return {
      answer: `The cache was reset: ${plural(resets.keys[row], 'key')} dropped.`,
      rest: [`${plural(resets.cancelled[row], 'transfer')} cancelled, ${grouped(resets.abandoned[row])} abandoned in flight.`],
      command: null,
    };
  }

  tell_restart(row) {
    const restarts = this.model.tables.restarts;
    const lost = restarts.storing[row] + restarts.planned[row];
    return {
      answer: `Another process goes on. Before it: ${restarts.last_end[row] ?? 'the log was closed'}.`,
      rest: [
        `${plural(restarts.kept[row], 'block')} kept; ${grouped(lost)} not, because their stores had not ended.`,
        `${plural(restarts.requests_cut_off[row], 'request')} and ${plural(restarts.transfers_cut_off[row], 'transfer')} cut off.`,
      ],
      command: null,
    };
  }

  tell_rejection(row) {
    const rejections = this.model.tables.rejections;
    return {
      answer: `The report changed nothing: ${rejections.reason[row]}.`,
      rest: [
        `Rank ${rejections.worker[row]} reported transfer ${rejections.transfer[row]} as ${rejections.good[row] ? 'good' : 'failed'}.`,
        this.links('See', this.transferThing(rejections.transfer[row])),
      ],
      command: `--transfer ${rejections.transfer[row]}`,
    };
  }

  tell_skip(row) {
    const skips = this.model.tables.skips;
    return {
      answer: `${plural(skips.blocks[row], 'block')} of ${this.model.requestWords(skips.requests[row])} not stored: ${skips.reason[row]}.`,
      rest: [this.links('Requests', this.requestThings(skips.requests[row]))],
      command: null,
    };
  }

  /* The result of each rank's part of a transfer, the slowest last. */
  ranks(transfer) {
    const copies = this.model.tables.copies;
    const rows = this.rowsOf('copies', 'transfer', transfer);
    const said = rows.map((row) => {
      const reported = copies.reported[row];
      if (reported === null) return { ns: Infinity, text: `rank ${copies.worker[row]}: no report` };
      const known = this.model.has(reported) && this.model.has(copies.submitted[row]);
      const ns = known ? this.nsBetween(copies.submitted[row], reported) : 0;
      const how = copies.good[row] ? 'good' : `failed${copies.error[row] ? `: ${copies.error[row]}` : ''}`;
      return { ns, text: `rank ${copies.worker[row]}: ${how}${known ? ` after ${duration(ns)}` : ''}` };
    });
    said.sort((a, b) => a.ns - b.ns);
    return [this.list(said.map(({ text }) => text))];
  }

  nsBetween(began, ended) {
    return this.model.at[this.model.place(ended)] - this.model.at[this.model.place(began)];
  }

  /* `It lasts 0.61 s, 2,802 steps: event 12 at +0.345s to event 99 at +0.955s`. */
  span(began, ended, what) {
    const { model } = this;
    if (began === null) return 'It never left for the workers.';
    const from = model.when(began);
    if (ended === null) return `It began with ${from} and has not ended where the page ends.`;
    if (!model.has(began) || !model.has(ended)) return `From ${from} to ${model.when(ended)}.`;
    const steps = model.step[model.place(ended)] - model.step[model.place(began)];
    return `${what} ${duration(this.nsBetween(began, ended))}, ${plural(steps, 'step')}: ${from} to ${model.when(ended)}.`;
  }

  later(gone, wanted) {
    return gone !== null && this.model.has(gone) && this.model.has(wanted) ? `, ${duration(this.nsBetween(gone, wanted))} later` : '';
  }

  name(place) { return this.model.names[place]; }

  rowsOf(table, column, value) {
    this.indexes ??= new Map();
    const key = `${table}.${column}`;
    if (!this.indexes.has(key)) {
      const index = new Map();
      this.model.tables[table][column].forEach((one, row) => {
        if (index.has(one)) index.get(one).push(row); else index.set(one, [row]);
      });
      this.indexes.set(key, index);
    }
    return this.indexes.get(key).get(value) ?? [];
  }

  transferThing(id) {
    const row = id === null ? undefined : this.model.transferRow.get(id);
    return row === undefined ? [] : [{ type: 'transfer', row }];
  }

  requestThings(names) {
    return names.flatMap((name) => this.rowsOf('requests', 'request', name).map((row) => ({ type: 'request', row })));
  }

  livesOf(key) {
    return key === null ? [] : this.rowsOf('blocks', 'key', key).map((row) => ({ type: 'block', row }));
  }

  list(lines) {
    if (lines.length === 0) return null;
    const shown = lines.slice(0, MOST_LISTED);
    if (lines.length > MOST_LISTED) shown.push(`and ${grouped(lines.length - MOST_LISTED)} more`);
    return element('ul', {}, ...shown.map((line) => element('li', {}, line)));
  }

  links(what, things, words = (thing) => this.title(thing)) {
    if (things.length === 0) return null;
    const items = things.slice(0, MOST_LISTED).map((thing) => element('li', {}, this.link(thing, words(thing))));
    if (things.length > MOST_LISTED) items.push(element('li', {}, `and ${grouped(things.length - MOST_LISTED)} more`));
    return element('div', {}, `${what}:`, element('ul', {}, ...items));
  }

  link(thing, text) {
    return element('button', { type: 'button', className: 'link', onclick: () => this.select(thing) }, text);
  }
}

function moveWords(edge, states, blocks) {
  const change = edge.source === edge.target ? `stay ${states[edge.source]}` : `${states[edge.source]} to ${states[edge.target]}`;
  return `${plural(blocks, 'block')}: ${change}, ${edge.trigger} (${edge.why})`;
}

function capital(text) { return text.charAt(0).toUpperCase() + text.slice(1); }

/* Quote a word for a shell. */
function quoted(text) {
  return /^[\w./:@%+=-]+$/.test(text) && !text.startsWith('-') ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
