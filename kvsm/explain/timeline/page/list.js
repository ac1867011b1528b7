/* The list of events and the block machine: two views of the one stream. Only rows in view exist. */

const ROW = 20;

class EventList {
  constructor(box, rows, model, select) {
    this.box = box;
    this.rows = rows;
    this.model = model;
    this.selected = null;
    rows.style.height = `${model.count * ROW}px`;
    box.addEventListener('scroll', () => this.draw());
    rows.addEventListener('click', (event) => {
      const row = event.target.closest('.row');
      if (row !== null) select(Number(row.dataset.place));
    });
    box.addEventListener('keydown', (event) => {
      const page = Math.max(1, Math.floor(box.clientHeight / ROW) - 1);
      const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -model.count, End: model.count }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      select(Math.min(Math.max((this.selected ?? -1) + by, 0), model.count - 1));
    });
  }

  choose(place) {
    this.selected = place;
    if (place !== null) {
      const top = place * ROW;
      if (top < this.box.scrollTop || top + ROW > this.box.scrollTop + this.box.clientHeight) {
        this.box.scrollTop = top - this.box.clientHeight / 2;
      }
    }
    this.draw();
  }

  draw() {
    const { model } = this;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 4);
    const last = Math.min(model.count, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + 4);
    const drawn = [];
    for (let place = first; place < last; place++) {
      const row = element('div', {
        className: 'row', id: `event-${place}`, role: 'option', 'aria-selected': String(place === this.selected),
        'aria-posinset': place + 1, 'aria-setsize': model.count, title: model.text[place],
      }, `${grouped(model.number[place])}  ${after(model.at[place])}  ${model.text[place]}`);
      row.dataset.place = place;
      row.style.top = `${place * ROW}px`;
      drawn.push(row);
    }
    this.rows.replaceChildren(...drawn);
    if (this.selected !== null && this.selected >= first && this.selected < last) {
      this.box.setAttribute('aria-activedescendant', `event-${this.selected}`);
    } else {
      this.box.removeAttribute('aria-activedescendant');
    }
  }
}

/* The picture of the block machine, on which the selected event lights up its edges. */
class MachineView {
  constructor(section, said, model) {
    this.section = section;
    this.said = said;
    this.model = model;
  }

  show(place) {
    for (const lit of this.section.querySelectorAll('.lit')) lit.classList.remove('lit');
    const { model } = this;
    const moves = place === null ? [] : model.movesAt(place);
    for (const { edge } of moves) this.light(edge);
    const counts = place === null ? null : model.blocksAfter(place);
    for (const state of this.section.querySelectorAll('.state')) {
      const count = counts === null ? '' : plural(counts[Number(state.dataset.state)], 'slot');
      state.querySelector('.count').textContent = count;
    }
    this.said.textContent = place === null ? 'Select an event: it lights up what it did.'
      : moves.length === 0 ? `Event ${grouped(model.number[place])} moves no block.`
        : moves.map(({ edge, blocks }) => moveWords(model.data.edges[edge], model.data.states, blocks)).join('; ');
  }

  light(edge) {
    const trigger = this.section.querySelector(`[data-edge="${edge}"]`);
    trigger.classList.add('lit');
    trigger.closest('.arrow')?.classList.add('lit');
    const { source, target } = this.model.data.edges[edge];
    for (const state of [source, target]) {
      this.section.querySelector(`[data-state="${state}"]`).classList.add('lit');
    }
  }
}
