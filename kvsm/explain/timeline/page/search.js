/* Finding a request, a key, a transfer or an event. */

const MOST_FOUND = 200;

/* The things that a query may mean, the likeliest first. */
function search(model, query) {
  const text = query.trim();
  if (text === '') return [];
  const lower = text.toLowerCase();
  const found = [];
  const number = /^(?:(event|transfer|store|load|#)\s*)?([\d,]+)$/.exec(lower);
  if (number !== null) {
    const value = Number(number[2].replaceAll(',', ''));
    const kind = number[1] ?? '';
    if (kind !== 'event' && kind !== '#' && model.transferRow.has(value)) found.push({ type: 'transfer', row: model.transferRow.get(value) });
    if (['', 'event', '#'].includes(kind) && model.has(value)) found.push({ type: 'event', row: value });
  }
  const asked = /^(?:(request|key)\s+)?(.+)$/.exec(text);
  if (asked[1] !== 'key') found.push(...findRequests(model, asked[2]));
  if (asked[1] !== 'request') found.push(...findKeys(model, asked[2].toLowerCase()));
  return found;
}

/* Requests of this name first, then names that begin with it, then names that have it somewhere. Each in the
   order of arrival. */
function findRequests(model, wanted) {
  const ranks = new Map();
  model.names.forEach((name, place) => {
    const at = name.indexOf(wanted);
    if (at >= 0) ranks.set(place, name === wanted ? 0 : at === 0 ? 1 : 2);
  });
  const rows = [];
  model.tables.requests.request.forEach((place, row) => { if (ranks.has(place)) rows.push([ranks.get(place), row]); });
  const { arrived } = model.tables.requests;
  return rows.sort((a, b) => a[0] - b[0] || arrived[a[1]] - arrived[b[1]]).map(([, row]) => ({ type: 'request', row }));
}

/* Blocks of a key and lookups that stopped at it. The page shows a key as its first and last digits, and a
   person may ask for it so, in full, or by the digits that it begins with. */
function findKeys(model, wanted) {
  const [first, last = ''] = wanted.split('..');
  if (!/^[0-9a-f]{4,}$/.test(first) || !/^[0-9a-f]*$/.test(last)) return [];
  const meets = (key) => {
    if (key === null) return false;
    const [begin, end = ''] = key.split('..');
    return (begin.startsWith(first) && end.endsWith(last)) || (first.length > begin.length && first.startsWith(begin) && first.endsWith(end));
  };
  const { blocks, lookups } = model.tables;
  return [
    ...blocks.key.flatMap((key, row) => (meets(key) ? [{ type: 'block', row }] : [])),
    ...lookups.missed.flatMap((key, row) => (meets(key) ? [{ type: 'lookup', row }] : [])),
  ];
}

class Search {
  constructor(model, why, select) {
    Object.assign(this, { model, why, select, found: [], at: -1 });
    this.query = document.getElementById('query');
    this.output = document.getElementById('found');
    this.results = document.getElementById('results');
    this.query.addEventListener('input', () => this.look());
    this.query.addEventListener('focus', () => { this.results.hidden = this.found.length === 0; });
    this.query.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.close();
      if (event.key === 'ArrowDown' && !this.results.hidden) this.results.querySelector('button').focus();
    });
    this.results.addEventListener('keydown', (event) => {
      const item = event.target.closest('li');
      const next = { ArrowDown: item?.nextElementSibling, ArrowUp: item?.previousElementSibling ?? null }[event.key];
      if (event.key === 'Escape') this.close();
      if (next === undefined) return;
      event.preventDefault();
      (next?.querySelector('button') ?? this.query).focus();
    });
    document.getElementById('search').addEventListener('submit', (event) => {
      event.preventDefault();
      this.look();
      this.go(0);
      this.results.hidden = true;
      if (this.found.length > 0) document.getElementById('canvas').focus(); // so that n and p go on
    });
    document.addEventListener('pointerdown', (event) => {
      if (!event.target.closest('#search')) this.results.hidden = true;
    });
  }

  look() {
    this.found = search(this.model, this.query.value);
    this.at = -1;
    const shown = this.found.slice(0, MOST_FOUND);
    this.results.replaceChildren(...shown.map((thing, place) => element('li', {}, element('button', {
      type: 'button', onclick: () => { this.go(place); this.close(); },
    }, this.why.title(thing)))));
    this.results.hidden = this.found.length === 0;
    this.say();
  }

  /* Select the thing found at this place, around the ends. */
  go(place) {
    if (this.found.length === 0) return;
    this.at = (place + this.found.length) % this.found.length;
    this.select(this.found[this.at]);
    this.say();
  }

  say() {
    const total = grouped(this.found.length);
    this.output.textContent = this.query.value.trim() === '' ? ''
      : this.found.length === 0 ? 'nothing found' : this.at < 0 ? `${total} found` : `${grouped(this.at + 1)} of ${total}`;
  }

  close() {
    this.results.hidden = true;
    this.query.focus();
  }
}
