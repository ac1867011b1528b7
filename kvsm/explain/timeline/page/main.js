/* The page: what is selected, and what pointer and keys do. */

class Page {
  constructor(data) {
    this.model = new Model(data);
    this.layout = makeTracks(this.model);
    this.viewport = document.getElementById('viewport');
    document.getElementById('sheet').style.height = `${this.layout.height}px`;
    this.showHead();
    this.canvas = new Canvas(document.getElementById('canvas'), this.model, this.layout);
    this.selected = null;
    this.why = new Why(this.model, (thing) => this.select(thing));
    this.list = new EventList(document.getElementById('list'), document.getElementById('rows'), this.model, (place) => this.selectPlace(place));
    this.machine = new MachineView(document.getElementById('machine'), document.getElementById('machine-said'), this.model);
    this.search = new Search(this.model, this.why, (thing) => this.select(thing));
    this.words = { after, duration, quoted };
    this.listen();
    this.showTheme();
    this.showAxis();
    this.clear();
  }

  showHead() {
    const { model } = this;
    const { directory, whole, notes } = model.data;
    const last = model.count - 1;
    document.getElementById('log').textContent = `${directory}: events ${grouped(model.number[0])} to ${grouped(model.number[last])} of `
      + `${grouped(whole[0])} to ${grouped(whole[1])}; ${model.utc(model.at[0])} to ${model.utc(model.at[last])}`;
    document.getElementById('notes').append(...notes.map((note) => element('li', {}, note)));
  }

  /* Request a redraw: at the next frame, and only once per frame. */
  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.canvas.draw(this.viewport.scrollTop, this.selected);
    });
  }

  select(thing) {
    const event = this.why.eventOf(thing);
    const place = this.model.place(event);
    const bar = this.layout.bars.get(`${thing.type} ${thing.row}`) ?? null;
    this.selected = { thing, place, bar };
    this.canvas.reveal(place);
    if (bar !== null) this.scrollTo(bar.top);
    document.getElementById('detail').replaceChildren(...this.why.tell(thing));
    document.getElementById('why').scrollTop = 0;
    this.list.choose(this.model.has(event) ? place : null);
    this.machine.show(this.model.has(event) ? place : null);
    this.redraw();
  }

  selectPlace(place) { this.select({ type: 'event', row: this.model.number[place] }); }

  clear() {
    this.selected = null;
    document.getElementById('detail').replaceChildren(element('p', {}, 'Click anything, or find a request, a key, a transfer or an event.'));
    this.list.choose(null);
    this.machine.show(null);
    this.redraw();
  }

  scrollTo(top) {
    const from = this.viewport.scrollTop + RULER;
    if (top < from || top + LANE > this.viewport.scrollTop + this.canvas.height) {
      this.viewport.scrollTop = top - this.canvas.height / 2;
    }
  }

  /* What is drawn at a point of the canvas. */
  thingAt(x, y) {
    const sheet = y + this.viewport.scrollTop;
    const place = this.canvas.placeAt(x);
    const event = { type: 'event', row: this.model.number[place] };
    const track = y < RULER ? undefined : this.layout.tracks.find((one) => sheet >= one.top - 4 && sheet < one.top + one.height + 4);
    if (track === undefined || x < GUTTER) return event;
    if (track.kind === 'marks') return this.nearestMark(track, x) ?? event;
    if (track.kind === 'flights') return this.nearestFlight(track, x, (sheet - track.top) / track.height) ?? event;
    if (track.kind === 'lanes') return this.barAt(track, Math.floor((sheet - track.top) / (LANE + GAP)), x) ?? event;
    return event;
  }

  nearestMark(track, x) {
    let [best, distance] = [null, 12];
    const near = lowerBound(track.places, this.canvas.placeAt(x - 12));
    for (let i = near; i < track.places.length && this.canvas.x(track.places[i]) <= x + 12; i++) {
      const away = Math.abs(this.canvas.x(track.places[i]) - x);
      if (away < distance) [best, distance] = [track.things[i], away];
    }
    return best;
  }

  nearestFlight(track, x, depth) {
    let [best, distance] = [null, 20];
    for (const { from, to, thing } of track.flights) {
      const [left, right] = [this.canvas.x(from), this.canvas.x(to)];
      const along = depth * depth * (3 - 2 * depth);
      const away = Math.abs(left + (right - left) * along - x);
      if (away < distance) [best, distance] = [thing, away];
    }
    return best;
  }

  barAt(track, number, x) {
    for (const lanes of [track.lanes, track.names ?? []]) {
      const lane = lanes[Math.min(Math.max(number, 0), lanes.length - 1)];
      if (lane === undefined) continue;
      let [best, distance] = [null, 4];
      for (let i = Math.max(0, lowerBound(lane.last, this.canvas.placeAt(x - 4)) - 1); i < lane.first.length; i++) {
        const [left, right] = [this.canvas.x(lane.first[i]), this.canvas.x(lane.last[i])];
        if (left > x + 4) break;
        const away = Math.max(left - x, x - right, 0);
        if (away < distance) [best, distance] = [lane.things[i], away];
      }
      if (best !== null) return best;
    }
    return null;
  }

  zoom(factor, x = null) {
    const middle = this.selected === null ? (GUTTER + this.canvas.width) / 2 : this.canvas.x(this.selected.place);
    const inside = middle >= GUTTER && middle <= this.canvas.width;
    this.canvas.zoom(factor, x ?? (inside ? middle : (GUTTER + this.canvas.width) / 2));
    this.redraw();
  }

  pan(pixels) {
    this.canvas.pan(pixels);
    this.redraw();
  }

  showAll() {
    this.canvas.showAll();
    this.redraw();
  }

  /* Zoom to what is selected: a bar with some room around it, or an event. */
  showSelected() {
    if (this.selected === null) return;
    const { place, bar } = this.selected;
    const axis = this.canvas.axis;
    const [first, last] = bar === null ? [Math.max(0, place - 20), Math.min(axis.length - 1, place + 20)] : [bar.first, bar.last];
    this.canvas.reveal(first, Math.max((axis[last] - axis[first]) * 1.4, this.canvas.least));
    this.canvas.pan(((axis[last] - axis[first]) / 2) * this.canvas.scale);
    this.redraw();
  }

  step(by) {
    const from = this.selected === null ? this.canvas.placeAt((GUTTER + this.canvas.width) / 2) - by : this.selected.place;
    this.selectPlace(Math.min(Math.max(from + by, 0), this.model.count - 1));
  }

  switchAxis() {
    this.canvas.useAxis(!this.canvas.byTime);
    this.showAxis();
    if (this.selected !== null) this.canvas.reveal(this.selected.place);
    this.redraw();
  }

  showAxis() {
    document.getElementById('axis').textContent = this.canvas.byTime ? 'By time' : 'By event';
    document.getElementById('axis').disabled = !this.model.wallTimes();
  }

  switchArrows() {
    this.canvas.arrows = !this.canvas.arrows;
    document.getElementById('arrows').setAttribute('aria-pressed', this.canvas.arrows);
    this.redraw();
  }

  switchTheme() {
    document.documentElement.dataset.theme = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
    this.showTheme();
  }

  showTheme() {
    document.getElementById('theme').textContent = document.documentElement.dataset.theme === 'dark' ? 'Light' : 'Dark';
    this.canvas.readColours();
    this.showLegend();
    this.redraw();
  }

  showLegend() {
    const swatch = (name, pattern) => {
      const box = element('canvas', { width: 16, height: 12 });
      paintPattern(box.getContext('2d'), this.canvas.colour(name), this.canvas.colour('paper'), pattern, 16);
      return box;
    };
    const group = (title, looks) => element('span', {}, element('b', {}, title), ...looks.flatMap(([name, pattern]) => [
      swatch(name, pattern), name,
    ]));
    document.getElementById('legend').replaceChildren(
      group('Requests', ACTIVITY_LOOKS), group('Copies', COPY_LOOKS), group('Pool', [...POOL_LOOKS].reverse()),
    );
  }

  listen() {
    const { element: canvas } = this.canvas;
    this.viewport.addEventListener('scroll', () => this.redraw());
    new ResizeObserver(() => { this.canvas.resize(); this.list.draw(); this.redraw(); }).observe(this.viewport);
    canvas.addEventListener('wheel', (event) => this.wheel(event), { passive: false });
    canvas.addEventListener('pointerdown', (event) => this.press(event));
    document.addEventListener('keydown', (event) => this.key(event));
    const buttons = {
      in: () => this.zoom(0.5), out: () => this.zoom(2), all: () => this.showAll(), axis: () => this.switchAxis(),
      arrows: () => this.switchArrows(), theme: () => this.switchTheme(), keys: () => document.getElementById('help').showModal(),
    };
    for (const [id, act] of Object.entries(buttons)) document.getElementById(id).addEventListener('click', act);
  }

  wheel(event) {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 16 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan((event.deltaX || event.deltaY) * lines);
    } else {
      this.zoom(Math.exp(event.deltaY * lines * 0.002), Math.max(event.offsetX, GUTTER));
    }
  }

  /* A press that moves drags the view; one that stays selects. */
  press(event) {
    if (event.button !== 0) return;
    const canvas = this.canvas.element;
    let [x, y, moved] = [event.clientX, event.clientY, 0];
    canvas.setPointerCapture(event.pointerId);
    const move = (next) => {
      moved += Math.abs(next.clientX - x) + Math.abs(next.clientY - y);
      if (moved > 4) {
        this.pan(x - next.clientX);
        this.viewport.scrollTop += y - next.clientY;
      }
      [x, y] = [next.clientX, next.clientY];
    };
    const release = (next) => {
      canvas.removeEventListener('pointermove', move);
      canvas.removeEventListener('pointerup', release);
      canvas.removeEventListener('pointercancel', release);
      if (next.type === 'pointerup' && moved <= 4) this.select(this.thingAt(next.offsetX, next.offsetY));
    };
    canvas.addEventListener('pointermove', move);
    canvas.addEventListener('pointerup', release);
    canvas.addEventListener('pointercancel', release);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, dialog')) return;
    const onButton = event.target.closest('button') !== null;
    const act = {
      '+': () => this.zoom(0.5), '=': () => this.zoom(0.5), '-': () => this.zoom(2), w: () => this.zoom(0.8), s: () => this.zoom(1.25),
      a: () => this.pan(-100), d: () => this.pan(100), 0: () => this.showAll(), f: () => this.showSelected(),
      ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1),
      ArrowUp: () => { this.viewport.scrollTop -= 40; }, ArrowDown: () => { this.viewport.scrollTop += 40; },
      PageUp: () => { this.viewport.scrollTop -= this.canvas.height; }, PageDown: () => { this.viewport.scrollTop += this.canvas.height; },
      n: () => this.search.go(this.search.at + 1), p: () => this.search.go(this.search.at - 1),
      x: () => { if (this.model.wallTimes()) this.switchAxis(); }, m: () => this.switchArrows(), t: () => this.switchTheme(),
      '/': () => this.search.query.focus(), '?': () => document.getElementById('help').showModal(), Escape: () => this.clear(),
    }[event.key];
    if (act === undefined || (onButton && event.key.startsWith('Arrow'))) return;
    event.preventDefault();
    act();
  }
}

async function start() {
  const began = performance.now();
  const root = document.documentElement;
  const dark = matchMedia('(prefers-color-scheme: dark)');
  root.dataset.theme = dark.matches ? 'dark' : 'light';
  const data = await unpack(document.getElementById('data').textContent);
  document.querySelector('main').hidden = false;
  const page = new Page(data);
  dark.addEventListener('change', () => { root.dataset.theme = dark.matches ? 'dark' : 'light'; page.showTheme(); });
  document.getElementById('loading').hidden = true;
  requestAnimationFrame(() => {
    page.loadedMs = performance.now() - began;
    window.kvsmTimeline = page; // for the tests, and for use in the browser's console
  });
}

start().catch((error) => {
  document.getElementById('loading').textContent = `The page cannot be shown: ${error.message}`;
  throw error;
});
