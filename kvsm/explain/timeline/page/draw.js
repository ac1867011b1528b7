/* The canvas. Only what is on the screen is drawn, and bars that share a pixel are drawn as one. */

const MOST_FLIGHTS = 400;
const PATTERN = 8;
const NARROW = 4;

class Canvas {
  constructor(element, model, layout) {
    this.element = element;
    this.context = element.getContext('2d');
    this.model = model;
    this.layout = layout;
    this.frames = [];
    this.arrows = true;
    this.useAxis(model.wallTimes());
    this.resize();
    this.readColours();
  }

  useAxis(byTime) {
    this.byTime = byTime;
    this.axis = this.model.axis(byTime);
    this.end = this.axis[this.axis.length - 1] || 1;
    this.least = Math.min(byTime ? 100 : 4, this.end);
    this.showAll();
  }

  showAll() {
    const margin = this.end * 0.01;
    this.from = -margin;
    this.to = this.end + margin;
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    const box = this.element.getBoundingClientRect();
    this.width = Math.max(GUTTER + 50, box.width);
    this.height = Math.max(50, this.element.parentElement.parentElement.clientHeight);
    this.element.style.height = `${this.height}px`;
    this.element.width = Math.round(this.width * ratio);
    this.element.height = Math.round(this.height * ratio);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  /* Colours come from page.css; patterns are made from them. */
  readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.patterns = new Map();
    for (const [name, pattern] of [...ACTIVITY_LOOKS, ...COPY_LOOKS, ...POOL_LOOKS]) {
      this.patterns.set(name, this.makePattern(name, pattern));
    }
  }

  makePattern(name, pattern) {
    if (pattern === 'plain') return this.colour(name);
    const tile = document.createElement('canvas');
    tile.width = tile.height = PATTERN;
    paintPattern(tile.getContext('2d'), this.colour(name), this.colour('paper'), pattern, PATTERN);
    return this.context.createPattern(tile, 'repeat');
  }

  x(place) { return GUTTER + (this.axis[place] - this.from) * this.scale; }

  get scale() { return (this.width - GUTTER) / (this.to - this.from); }

  position(x) { return this.from + (x - GUTTER) / this.scale; }

  /* The place of the event that is nearest to a point of the screen. */
  placeAt(x) {
    const position = this.position(x);
    const right = Math.min(lowerBound(this.axis, position), this.axis.length - 1);
    return right > 0 && position - this.axis[right - 1] < this.axis[right] - position ? right - 1 : right;
  }

  zoom(factor, x) {
    const fixed = this.position(x);
    const span = Math.min(Math.max((this.to - this.from) * factor, this.least), this.end * 1.02);
    const share = (fixed - this.from) / (this.to - this.from);
    this.from = fixed - share * span;
    this.to = this.from + span;
    this.keepInside();
  }

  pan(pixels) {
    const by = pixels / this.scale;
    this.from += by;
    this.to += by;
    this.keepInside();
  }

  keepInside() {
    const span = this.to - this.from;
    const margin = Math.min(span, this.end) * 0.05;
    const by = Math.max(-margin - this.from, 0) - Math.max(this.to - this.end - margin, 0);
    if (span <= this.end + 2 * margin) {
      this.from += by;
      this.to += by;
    } else {
      this.showAll();
    }
  }

  /* Bring an event into view; `span` also sets how much is shown (units of the axis). */
  reveal(place, span = null) {
    const at = this.axis[place];
    if (span === null && at >= this.from && at <= this.to) return;
    const shown = Math.max(span ?? this.to - this.from, this.least);
    this.from = at - shown / 2;
    this.to = at + shown / 2;
    this.keepInside();
  }

  draw(scroll, selected) {
    const began = performance.now();
    const context = this.context;
    this.marked = selected?.place ?? null;
    context.fillStyle = this.colour('paper');
    context.fillRect(0, 0, this.width, this.height);
    context.save();
    context.beginPath();
    context.rect(GUTTER, RULER, this.width - GUTTER, this.height - RULER);
    context.clip();
    this.first = Math.max(0, lowerBound(this.axis, this.from) - 1);
    this.last = Math.min(this.axis.length - 1, lowerBound(this.axis, this.to) + 1);
    this.drawGrid();
    for (const track of this.layout.tracks) {
      const top = track.top - scroll;
      if (top > this.height || top + track.height < RULER) continue;
      this[`draw_${track.kind}`](track, top);
    }
    this.drawResetLines();
    if (selected !== null) this.drawSelected(selected, scroll);
    context.restore();
    this.drawTitles(scroll);
    this.drawRuler();
    this.frames.push(performance.now() - began);
    if (this.frames.length > 500) this.frames.shift();
  }

  draw_hits(track, top) {
    const { points, right } = this.pointsIn(track.places);
    const above = points.map(({ i }) => (track.percent[i] / 100) * track.height);
    this.context.fillStyle = this.colour('hit');
    this.drawColumns(points, points.map(() => 0), above, top + track.height, right);
  }

  /* The samples in view, the last one of each pixel, and where the last sample ends. places: of the samples. */
  pointsIn(places) {
    const points = [];
    let last = -Infinity;
    for (let i = Math.max(0, lowerBound(places, this.first + 1) - 1); i < places.length && places[i] <= this.last; i++) {
      const x = Math.max(GUTTER, this.x(places[i]));
      if (Math.floor(x) === last) points[points.length - 1].i = i;
      else points.push({ x, i });
      last = Math.floor(x);
    }
    return { points, right: Math.min(this.width, Math.round(this.x(this.model.count - 1))) };
  }

  draw_pool(track, top) {
    const pool = this.model.data.pool;
    const total = track.looks.reduce((sum, [name]) => sum + pool[name][0], 0);
    const { points, right } = this.pointsIn(pool.event);
    let below = points.map(() => 0);
    for (const [name] of track.looks) {
      const above = points.map(({ i }, n) => below[n] + (pool[name][i] / total) * track.height);
      this.context.fillStyle = this.patterns.get(name);
      this.drawColumns(points, below, above, top + track.height, right);
      below = above;
    }
  }

  /* An area as columns of whole pixels, because a path of many pieces is slow to fill. */
  drawColumns(points, below, above, floor, right) {
    for (let n = 0; n < points.length;) {
      const [low, high] = [Math.round(below[n]), Math.round(above[n])];
      const left = Math.round(points[n].x);
      do n++; while (n < points.length && Math.round(below[n]) === low && Math.round(above[n]) === high);
      const end = n < points.length ? Math.round(points[n].x) : right;
      if (high > low) this.context.fillRect(left, floor - high, end - left, high - low);
    }
  }

  draw_marks(track, top) {
    const colour = this.colour(MARK_LOOKS[track.id]);
    const middle = top + track.height / 2;
    const from = lowerBound(track.places, this.first);
    const context = this.context;
    context.fillStyle = context.strokeStyle = colour;
    let i = from;
    while (i < track.places.length && track.places[i] <= this.last) {
      const x = this.x(track.places[i]);
      let together = 1;
      while (i + together < track.places.length && this.x(track.places[i + together]) < x + 7) together++;
      drawShape(context, track.shape, x, middle, Math.min(4 + Math.log2(together), 9));
      i += together;
    }
  }

  draw_flights(track, top) {
    if (!this.arrows) return;
    const seen = track.flights.filter(({ from, to }) => to >= this.first && from <= this.last);
    const stride = Math.ceil(seen.length / MOST_FLIGHTS);
    const context = this.context;
    context.strokeStyle = this.colour('miss');
    context.globalAlpha = seen.length > 60 ? 0.35 : 0.8;
    for (let i = 0; i < seen.length; i += stride || 1) this.drawFlight(seen[i], top, track.height);
    context.globalAlpha = 1;
    context.lineWidth = 2;
    context.strokeStyle = this.colour('select');
    for (const flight of seen) {
      if (flight.to === this.marked || flight.from === this.marked) this.drawFlight(flight, top, track.height);
    }
    context.lineWidth = 1;
    this.hiddenFlights = stride > 1 ? seen.length - Math.ceil(seen.length / stride) : 0;
    if (this.hiddenFlights > 0) {
      context.fillStyle = this.colour('ink');
      context.font = '11px system-ui';
      context.fillText(`${grouped(this.hiddenFlights)} more arrows; zoom in`, GUTTER + 6, top + 12);
    }
  }

  drawFlight({ from, to }, top, height) {
    const context = this.context;
    const [x, end] = [this.x(from), this.x(to)];
    context.beginPath();
    context.moveTo(x, top - 4);
    context.bezierCurveTo(x, top + height * 0.7, end, top + height * 0.3, end, top + height);
    context.moveTo(end - 3, top + height - 6);
    context.lineTo(end, top + height);
    context.lineTo(end + 3, top + height - 6);
    context.stroke();
  }

  draw_lanes(track, top) {
    const wide = track.looks.map(() => []);
    const narrow = track.looks.map(() => []);
    track.lanes.forEach((lane, number) => {
      const y = top + number * (LANE + GAP);
      if (y > this.height || y + LANE < RULER) return;
      this.collect(lane, y, wide, narrow);
    });
    const context = this.context;
    track.looks.forEach(([name], look) => {
      context.fillStyle = this.colour(name);
      for (const [x, y, width] of narrow[look]) context.fillRect(x, y, width, LANE);
      context.fillStyle = this.patterns.get(name);
      for (const [x, y, width] of wide[look]) context.fillRect(x, y, width, LANE);
    });
    if (track.names !== null) this.drawNames(track, top);
    this.drawFailures(track, top);
  }

  /* The bars of a lane that are in view. Bars within one pixel become one, with the look that matters most. */
  collect(lane, y, wide, narrow) {
    const { first, last, look } = lane;
    let pixel = -1;
    let worst = 0;
    for (let i = lowerBound(last, this.first); i < first.length && first[i] <= this.last; i++) {
      const left = Math.max(this.x(first[i]), GUTTER - 2);
      const right = Math.min(this.x(last[i]), this.width + 2);
      if (right - left >= 1.5) {
        (right - left < NARROW ? narrow : wide)[look[i]].push([left, y, right - left]);
        continue;
      }
      const column = Math.floor(left);
      if (column !== pixel) {
        if (pixel >= 0) narrow[worst].push([pixel, y, 1.5]);
        pixel = column;
        worst = look[i];
      } else if (look[i] > worst) {
        worst = look[i];
      }
    }
    if (pixel >= 0) narrow[worst].push([pixel, y, 1.5]);
  }

  drawNames(track, top) {
    const context = this.context;
    context.font = '11px system-ui';
    context.textBaseline = 'middle';
    track.names.forEach((lane, number) => {
      const y = top + number * (LANE + GAP);
      if (y > this.height || y + LANE < RULER) return;
      for (let i = lowerBound(lane.last, this.first); i < lane.first.length && lane.first[i] <= this.last; i++) {
        const left = Math.max(this.x(lane.first[i]), GUTTER);
        const room = Math.floor((Math.min(this.x(lane.last[i]), this.width) - left - 8) / 6.5);
        const whole = track.label(lane.things[i].row);
        if (room < whole.length && room < 8) continue; // r1 must not stand for r1234
        const name = whole.length > room ? `${whole.slice(0, room - 1)}\u2026` : whole;
        context.fillStyle = this.colour('paper');
        context.fillRect(left + 1, y + 1, context.measureText(name).width + 6, LANE - 2);
        context.fillStyle = this.colour('ink');
        context.fillText(name, left + 4, y + LANE / 2 + 0.5);
      }
    });
    context.textBaseline = 'alphabetic';
  }

  drawFailures(track, top) {
    const context = this.context;
    context.strokeStyle = context.fillStyle = this.colour('ink');
    let drawn = -Infinity;
    for (const bar of track.failed) {
      if (bar.last < this.first || bar.first > this.last) continue;
      const x = this.x(bar.last);
      if (x - drawn < 5) continue;
      drawShape(context, 'cross', x, top + bar.lane * (LANE + GAP) + LANE / 2, 4);
      drawn = x;
    }
  }

  drawResetLines() {
    const track = this.layout.tracks.find(({ id }) => id === 'resets');
    if (track === undefined) return;
    const context = this.context;
    context.strokeStyle = this.colour('reset');
    context.setLineDash([4, 3]);
    let drawn = -Infinity;
    for (let i = lowerBound(track.places, this.first); i < track.places.length && track.places[i] <= this.last; i++) {
      const x = Math.round(this.x(track.places[i])) + 0.5;
      if (x - drawn < 2) continue;
      context.beginPath();
      context.moveTo(x, RULER);
      context.lineTo(x, this.height);
      context.stroke();
      drawn = x;
    }
    context.setLineDash([]);
  }

  drawSelected({ place, bar }, scroll) {
    const context = this.context;
    const x = Math.round(this.x(place)) + 0.5;
    context.strokeStyle = this.colour('select');
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, RULER);
    context.lineTo(x, this.height);
    context.stroke();
    if (bar !== null) {
      const left = this.x(bar.first);
      context.strokeRect(left - 1, bar.top - scroll - 1, Math.max(this.x(bar.last) - left, 2) + 2, LANE + 2);
    }
    context.lineWidth = 1;
  }

  drawTitles(scroll) {
    const context = this.context;
    context.fillStyle = this.colour('panel');
    context.fillRect(0, 0, GUTTER, this.height);
    context.save();
    context.beginPath();
    context.rect(0, RULER, GUTTER, this.height - RULER);
    context.clip();
    context.fillStyle = this.colour('ink');
    context.font = '12px system-ui';
    for (const track of this.layout.tracks) {
      if (track.top - scroll < this.height && track.top + track.height - scroll > RULER) {
        const y = Math.max(track.top - scroll, RULER) + 12;
        context.fillText(track.title, 8, y, GUTTER - 12);
      }
    }
    context.restore();
  }

  drawGrid() {
    this.context.strokeStyle = this.colour('line');
    this.context.beginPath();
    for (const { x } of this.ticks()) {
      this.context.moveTo(x, RULER);
      this.context.lineTo(x, this.height);
    }
    this.context.stroke();
  }

  ticks() {
    const wanted = (this.to - this.from) / Math.max(2, (this.width - GUTTER) / 130);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = Math.max([1, 2, 5, 10].find((one) => one * power >= wanted) * power, 1);
    const ticks = [];
    for (let at = Math.ceil(Math.max(this.from, 0) / step) * step; at <= Math.min(this.to, this.end); at += step) {
      ticks.push({ x: Math.round(GUTTER + (at - this.from) * this.scale) + 0.5, at, step });
    }
    return ticks;
  }

  drawRuler() {
    const context = this.context;
    context.fillStyle = this.colour('panel');
    context.fillRect(GUTTER, 0, this.width - GUTTER, RULER);
    context.fillStyle = this.colour('ink');
    context.font = '11px system-ui';
    const [above, below] = this.byTime ? [this.model.isVirtual() ? '' : 'UTC', 'after the start'] : ['event', 'after the start'];
    context.fillText(above, 8, 14);
    context.fillText(below, 8, 28);
    for (const { x, at, step } of this.ticks()) {
      const place = Math.min(Math.round(at), this.model.count - 1);
      const ns = this.byTime ? at + this.model.at[0] : this.model.at[place];
      const digits = this.byTime ? Math.max(0, Math.min(9, 9 - Math.floor(Math.log10(step)))) : 3;
      const clock = this.model.isVirtual() ? '' : this.model.utc(ns).slice(11, 23);
      context.fillText(this.byTime ? clock : grouped(this.model.number[place]), x + 3, 14);
      context.fillText(this.byTime ? `${(ns / 1e9).toFixed(digits)} s` : after(ns), x + 3, 28);
    }
  }
}

function paintPattern(context, colour, other, pattern, size) {
  context.fillStyle = colour;
  context.fillRect(0, 0, size, size);
  context.strokeStyle = context.fillStyle = other;
  context.globalAlpha = 0.55;
  context.lineWidth = 1.5;
  const line = (x, y, toX, toY) => {
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(toX, toY);
    context.stroke();
  };
  if (pattern === 'rising' || pattern === 'cross') for (const by of [-size, 0, size]) line(by, size, by + size, 0);
  if (pattern === 'falling' || pattern === 'cross') for (const by of [-size, 0, size]) line(by, 0, by + size, size);
  if (pattern === 'level') line(0, size / 2, size, size / 2);
  if (pattern === 'dots') {
    context.fillRect(1, 1, 2, 2);
    context.fillRect(size / 2 + 1, size / 2 + 1, 2, 2);
  }
  context.globalAlpha = 1;
}

function drawShape(context, shape, x, y, size) {
  context.beginPath();
  if (shape === 'triangle') {
    context.moveTo(x - size, y - size);
    context.lineTo(x + size, y - size);
    context.lineTo(x, y + size);
    context.fill();
  } else if (shape === 'diamond') {
    context.moveTo(x, y - size);
    context.lineTo(x + size, y);
    context.lineTo(x, y + size);
    context.lineTo(x - size, y);
    context.fill();
  } else {
    context.lineWidth = 2;
    if (shape === 'ring') context.arc(x, y, size - 1, 0, 7);
    else {
      context.moveTo(x - size, y - size);
      context.lineTo(x + size, y + size);
      context.moveTo(x + size, y - size);
      context.lineTo(x - size, y + size);
    }
    context.stroke();
    context.lineWidth = 1;
  }
}
