/* The tracks from top to bottom, and the bars in each of their lanes, sorted by event. */

const LANE = 14;
const GAP = 2;
const RULER = 36;
const GUTTER = 148;
const POOL_HEIGHT = 110;
const HITS_HEIGHT = 44;
const MARKS_HEIGHT = 20;
const FLIGHT_HEIGHT = 44;

/* What a bar or an area looks like: a colour of page.css and a pattern. Where several bars share a pixel, the
   one furthest down in its list is shown. */
const ACTIVITY_LOOKS = [
  ['running', 'plain'],
  ['finishing', 'level'],
  ['queued', 'dots'],
  ['loading', 'falling'],
  ['deferred', 'rising'],
  ['preempted', 'cross'],
];
const COPY_LOOKS = [
  ['store', 'plain'],
  ['load', 'falling'],
  ['unreported', 'rising'],
  ['failed', 'cross'],
];
const POOL_LOOKS = [
  ['retired', 'plain'],
  ['quarantined', 'cross'],
  ['storing', 'dots'],
  ['pinned', 'rising'],
  ['idle', 'plain'],
  ['free', 'plain'],
];
const MARK_LOOKS = { resets: 'reset', evictions: 'eviction', misses: 'miss', trouble: 'trouble' };

/* Lanes of bars, as columns. bars: {lane, first, last, look, thing} with places of events. */
function makeLanes(bars) {
  const lanes = [];
  for (const bar of bars) (lanes[bar.lane] ??= []).push(bar);
  return Array.from(lanes, (lane = []) => {
    lane.sort((a, b) => a.first - b.first);
    return {
      first: Int32Array.from(lane, (bar) => bar.first),
      last: Int32Array.from(lane, (bar) => bar.last),
      look: Uint8Array.from(lane, (bar) => bar.look),
      things: lane.map((bar) => bar.thing),
    };
  });
}

function requestTrack(model) {
  const { requests, request_states: stays } = model.tables;
  const looks = ACTIVITY_LOOKS.map(([name]) => name);
  const bars = [];
  const until = requests.finished.map((event) => (event === null ? model.count - 1 : model.place(event)));
  stays.life.forEach((life, row) => {
    const activity = model.data.activity[stays.state[row]];
    if (life === null || activity === null) return;
    const last = stays.ended[row] === null ? model.count - 1 : model.place(stays.ended[row]);
    until[life] = Math.max(until[life], last);
    bars.push({
      lane: requests.lane[life], first: model.place(stays.began[row]), last, look: looks.indexOf(activity),
      thing: { type: 'stay', row },
    });
  });
  const lives = requests.request.map((_, row) => ({
    lane: requests.lane[row], first: model.place(requests.arrived[row]), last: until[row], look: 0,
    thing: { type: 'request', row },
  }));
  return {
    id: 'requests', title: 'requests', kind: 'lanes', looks: ACTIVITY_LOOKS,
    lanes: makeLanes(bars), names: makeLanes(lives), label: (row) => model.request(row), failed: [],
  };
}

function copyTracks(model) {
  const copies = model.tables.copies;
  const tracks = new Map();
  copies.transfer.forEach((_, row) => {
    if (copies.submitted[row] === null) return;
    const id = `rank ${copies.worker[row]} ${copies.direction[row]}s`;
    const unreported = copies.reported[row] === null;
    const look = copies.good[row] === false ? 'failed' : unreported ? 'unreported' : copies.direction[row];
    const bar = {
      lane: copies.lane[row],
      first: model.place(copies.submitted[row]),
      last: copies.until[row] === null ? model.count - 1 : model.place(copies.until[row]),
      look: COPY_LOOKS.findIndex(([name]) => name === look),
      thing: { type: 'copy', row },
    };
    if (!tracks.has(id)) tracks.set(id, { worker: copies.worker[row], direction: copies.direction[row], bars: [] });
    tracks.get(id).bars.push(bar);
  });
  return [...tracks]
    .sort(([, a], [, b]) => a.worker - b.worker || b.direction.localeCompare(a.direction))
    .map(([id, { bars }]) => ({
      id, title: id, kind: 'lanes', looks: COPY_LOOKS, lanes: makeLanes(bars), names: null, label: null,
      failed: bars.filter((bar) => COPY_LOOKS[bar.look][0] === 'failed').sort((a, b) => a.last - b.last),
    }));
}

function marksTrack(id, title, shape, marks) {
  marks.sort((a, b) => a.place - b.place);
  return {
    id, title, kind: 'marks', shape, places: Int32Array.from(marks, (mark) => mark.place),
    things: marks.map((mark) => mark.thing),
  };
}

function markTracks(model) {
  const { lookups, resets, restarts, rejections, transfers, blocks } = model.tables;
  const within = (event, thing) => (model.has(event) ? [{ place: model.place(event), thing }] : []);
  const evicted = model.data.kinds.indexOf('BlocksEvicted');
  const evictions = [];
  model.kind.forEach((kind, place) => {
    if (kind === evicted) evictions.push({ place, thing: { type: 'eviction', row: model.number[place] } });
  });
  const misses = lookups.event.flatMap((event, row) => (
    lookups.missed[row] === null || lookups.why[row] === 'never stored' ? [] : within(event, { type: 'lookup', row })
  ));
  const trouble = [
    ...rejections.event.flatMap((event, row) => within(event, { type: 'rejection', row })),
    ...transfers.ended.flatMap((event, row) => (
      transfers.outcome[row] === 'lost' ? within(event, { type: 'transfer', row }) : []
    )),
  ];
  const flights = new Map();
  blocks.wanted.forEach((wanted, row) => {
    if (blocks.why[row] !== 'evicted' || !model.has(wanted)) return;
    const key = `${blocks.gone[row]} ${wanted}`;
    if (!flights.has(key)) {
      flights.set(key, { from: model.place(blocks.gone[row]), to: model.place(wanted), thing: { type: 'block', row } });
    }
  });
  return {
    resets: marksTrack('resets', 'resets, restarts', 'triangle', [
      ...resets.event.flatMap((event, row) => within(event, { type: 'reset', row })),
      ...restarts.event.flatMap((event, row) => within(event, { type: 'restart', row })),
    ]),
    trouble: marksTrack('trouble', 'lost, rejected reports', 'cross', trouble),
    evictions: marksTrack('evictions', 'evictions', 'diamond', evictions),
    flights: { id: 'flights', title: 'evicted, then missed', kind: 'flights', flights: [...flights.values()].sort((a, b) => a.to - b.to) },
    misses: marksTrack('misses', 'keys missed again', 'ring', misses),
  };
}

/* The hit rate after each admission. */
function hitTrack(model) {
  const { lookups, event, percent } = model.data.hits;
  return {
    id: 'hits', title: `hits, last ${lookups}`, kind: 'hits', places: event.map((one) => model.place(one)), percent,
  };
}

/* All tracks with their position on the sheet. A track for hits or marks without any is left out. */
function makeTracks(model) {
  const { resets, trouble, evictions, flights, misses } = markTracks(model);
  const hits = hitTrack(model);
  const tracks = [
    ...(hits.places.length > 0 ? [hits] : []),
    { id: 'pool', title: 'host pool', kind: 'pool', looks: POOL_LOOKS },
    ...[resets, trouble, evictions, flights, misses].filter((track) => (track.flights ?? track.things).length > 0),
    ...copyTracks(model), requestTrack(model),
  ];
  let top = RULER + 4;
  for (const track of tracks) {
    track.top = top;
    track.height = { hits: HITS_HEIGHT, pool: POOL_HEIGHT, marks: MARKS_HEIGHT, flights: FLIGHT_HEIGHT }[track.kind]
      ?? Math.max(1, track.lanes.length) * (LANE + GAP);
    top += track.height + 8;
  }
  return { tracks, height: top + 8, bars: placeBars(tracks) };
}

/* Where each bar is on the sheet, by its thing: `stay 12`, `copy 3`, `request 7`. */
function placeBars(tracks) {
  const bars = new Map();
  for (const track of tracks.filter(({ kind }) => kind === 'lanes')) {
    for (const lanes of [track.lanes, track.names ?? []]) {
      lanes.forEach((lane, number) => lane.things.forEach(({ type, row }, i) => bars.set(`${type} ${row}`, {
        first: lane.first[i], last: lane.last[i], top: track.top + number * (LANE + GAP),
      })));
    }
  }
  return bars;
}
