// Script of the dashboard: fetches the coordinator's data once a second and draws it. server/dashboard.py decides all texts
// except the time of day and the charts' scales. Names and texts come from peers, so they are only set as text and never
// parsed as HTML. Elements are kept from one answer to the next, so that focus and selection stay.
"use strict";

const EVERY_MS = 1000;
const HIDDEN_MS = 5000;
const DEADLINE_MS = 15000;
const MOST_EVENTS = 200;
const MOST_POINTS = 600;
const SHARE_S = 30; // seconds over which the share of a source is measured
const SVG = "http://www.w3.org/2000/svg";
const SPANS = [[120, "2 min"], [600, "10 min"]];
const HALVES = { 120: "1 min", 600: "5 min" };

const byId = (id) => document.getElementById(id);
const history = {}; // run -> what was seen since this page was opened: points, and of its sources counted and shares
let awaySince = 0;
let latest = null;
const cards = new Map(); // run -> its card
let made = 0; // cards, ever

// ---- helpers

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function text(element, value) {
  const string = String(value);
  if (element.textContent !== string) element.textContent = string;
}

function attribute(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

// Gives `parent` one child for each of `items`, in order. A child with the same key is kept and filled again.
function fill(parent, items, keyOf, create, update) {
  const known = parent.known || (parent.known = new Map());
  const wanted = new Set();
  let before = null;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let child = known.get(key);
    if (!child) {
      child = create(item);
      known.set(key, child);
    }
    const place = before ? before.nextSibling : parent.firstChild;
    if (place !== child) parent.insertBefore(child, place);
    before = child;
    update(child, item);
  }
  for (const [key, child] of known) {
    if (!wanted.has(key)) {
      child.remove();
      known.delete(key);
    }
  }
}

// Formats of the charts' scales and points; all other texts come from the coordinator.
const percent = (share) => `${Math.round(100 * share)}%`;
const rate = (value) => (value >= 100 ? String(Math.round(value)) : value.toFixed(1));
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });

// A cell is a text, or an object with a text and its state or share: see Cell in server/dashboard.py.
function drawCell(cell, value, heading) {
  const { text: said, state, share, hot, at } = typeof value === "string" ? { text: value } : value;
  attribute(cell, "class", state ? "state text" : heading.endsWith(">") ? "number" : at || share !== undefined ? "" : "text");
  if (state) attribute(cell, "data-state", state);
  if (share === undefined) {
    text(cell, at ? clock(at) : said || "\u2013");
    return;
  }
  if (!cell.firstChild) {
    cell.append(make("span", { class: "bar" }, make("i", { "aria-hidden": "true" }, make("b")), make("span")));
  }
  attribute(cell.firstChild, "data-hot", Boolean(hot));
  cell.querySelector("b").style.width = `${100 * share}%`;
  text(cell.firstChild.lastChild, said);
}

// The first cell of a row is its heading.
function drawTable(table, { headings, rows }) {
  const head = table.tHead.rows[0] || table.tHead.insertRow();
  fill(head, headings, (heading) => heading, () => make("th", { scope: "col" }), (cell, heading) => {
    if (heading.endsWith(">")) cell.className = "number";
    text(cell, heading.replace(">", ""));
  });
  fill(table.tBodies[0], rows.map((cells, number) => [number, cells]), ([number]) => number, () => {
    const row = make("tr");
    row.append(...headings.map((heading, column) => {
      const named = { "data-heading": heading.replace(">", "") }; // shown where the page is narrow
      return column ? make("td", named) : make("th", { scope: "row", ...named });
    }));
    return row;
  }, (row, [, cells]) => cells.forEach((value, column) => drawCell(row.children[column], value, headings[column])));
}

function table(title) {
  const of = make("table", null, make("caption", null, title), make("thead"), make("tbody"));
  return { of, whole: make("div", { class: "scroll" }, of) };
}

// ---- charts

class Chart {
  constructor(kind, title, unit) {
    this.kind = kind;
    this.unit = unit;
    this.now = make("b");
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.title = title;
    this.figure = make("figure", null, make("figcaption", null, title, this.now), this.svg);
    this.points = [];
    this.span = 600;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  show(value) {
    return this.kind === "wait" ? percent(value) : `${rate(value)} ${this.unit}`;
  }

  // points: [seconds since the epoch, value], in order
  set(points, span, end) {
    this.points = points.filter(([at]) => at >= end - span);
    this.span = span;
    this.end = end;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width || !this.end) return;
    const left = 38, bottom = 18, top = 8;
    const most = this.kind === "wait" ? 1 : nice(Math.max(1, ...this.points.map(([, value]) => value)));
    const x = (at) => left + (width - left) * (1 - (this.end - at) / this.span);
    const y = (value) => top + (height - bottom - top) * (1 - value / most);
    this.x = x;
    const parts = [];
    for (const part of [0, 0.5, 1]) {
      parts.push(shape("line", { class: "grid", x1: left, x2: width, y1: y(part * most), y2: y(part * most) }));
      const label = this.kind === "wait" ? percent(part) : short(part * most);
      parts.push(shape("text", { x: left - 6, y: y(part * most) + 4, "text-anchor": "end" }, label));
    }
    if (this.kind === "wait") {
      parts.push(shape("line", { class: "limit", x1: left, x2: width, y1: y(latest.input_bound), y2: y(latest.input_bound) }));
    }
    for (const part of [0, 0.5, 1]) {
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      const ago = { 0: spanName(this.span), 0.5: HALVES[this.span] }[part];
      const label = ago ? `\u2212${ago}` : "now";
      parts.push(shape("text", { x: left + (width - left) * part, y: height - 3, "text-anchor": anchor }, label));
    }
    const group = shape("g", { class: this.kind });
    for (const stretch of unbroken(this.points, this.span / 60)) {
      const path = stretch.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      const first = x(stretch[0][0]).toFixed(1), last = x(stretch[stretch.length - 1][0]).toFixed(1);
      group.append(shape("path", { class: "area", d: `${path}L${last} ${y(0)}L${first} ${y(0)}Z` }));
      group.append(shape("path", { class: "stroke", d: path }));
    }
    parts.push(group);
    this.cross = shape("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    parts.push(this.cross);
    this.svg.replaceChildren(...parts);
    const values = this.points.map(([, value]) => value);
    if (!this.pointing) text(this.now, values.length ? this.show(values[values.length - 1]) : "");
    const told = values.length
      ? `now ${this.show(values[values.length - 1])}, between ${this.show(Math.min(...values))} and ` +
        `${this.show(Math.max(...values))} over ${spanName(this.span)}`
      : "nothing yet";
    this.svg.setAttribute("aria-label", `${this.title}: ${told}`);
  }

  point(event) {
    this.pointing = Boolean(event && this.points.length);
    if (!this.pointing) {
      this.draw();
      return;
    }
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const nearest = this.points.reduce((a, b) => (Math.abs(this.x(b[0]) - at) < Math.abs(this.x(a[0]) - at) ? b : a));
    this.cross.setAttribute("x1", this.x(nearest[0]));
    this.cross.setAttribute("x2", this.x(nearest[0]));
    this.cross.setAttribute("visibility", "visible");
    text(this.now, `${this.show(nearest[1])} at ${clock(nearest[0])}`);
  }
}

// Shares of a run's sources over time: delivered ones as lines, wanted ones dashed. Points: [seconds since the epoch,
// delivered shares ..., wanted shares ...], in the order of the names.
class Shares {
  constructor() {
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.title = make("span");
    this.key = make("ul", { class: "key", "aria-label": "Sources" });
    this.figure = make("figure", { class: "shares", hidden: "" }, make("figcaption", null, this.title), this.svg, this.key);
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  set({ names, unit, imbalance }, points, span, end) {
    Object.assign(this, { names, unit, imbalance, span, end });
    this.points = points.filter(([at]) => at >= end - span);
    this.figure.hidden = !names.length;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth, height = this.svg.clientHeight;
    if (!width || !this.end || !this.names.length) return;
    const left = 38, bottom = 18, top = 8, count = this.names.length;
    const x = (at) => left + (width - left) * (1 - (this.end - at) / this.span);
    const y = (value) => top + (height - bottom - top) * (1 - value);
    const parts = [];
    for (const part of [0, 0.5, 1]) {
      parts.push(shape("line", { class: "grid", x1: left, x2: width, y1: y(part), y2: y(part) }));
      parts.push(shape("text", { x: left - 6, y: y(part) + 4, "text-anchor": "end" }, percent(part)));
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      const ago = { 0: spanName(this.span), 0.5: HALVES[this.span] }[part];
      const label = ago ? `\u2212${ago}` : "now";
      parts.push(shape("text", { x: left + (width - left) * part, y: height - 3, "text-anchor": anchor }, label));
    }
    this.names.forEach((name, number) => {
      for (const [kind, column] of [["wanted", 1 + count + number], ["delivered", 1 + number]]) {
        const known = this.points.filter((point) => kind === "delivered" || point[column] > 0);
        for (const stretch of unbroken(known, this.span / 60)) {
          const path = stretch.map((point, index) => `${index ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[column]).toFixed(1)}`);
          parts.push(shape("path", { class: `source s${number} ${kind}`, d: path.join("") }));
        }
      }
    });
    this.svg.replaceChildren(...parts);
    const now = this.points[this.points.length - 1] || [];
    const told = this.names.map((name, number) => {
      const wanted = now[1 + count + number];
      return `${name || "\u2013"} ${percent(now[1 + number] || 0)}${wanted ? ` (wanted ${percent(wanted)})` : ""}`;
    });
    const cost = this.imbalance ? `. Cost of a step's most expensive box: ${this.imbalance.toFixed(2)} times the mean` : "";
    text(this.title, `Share of ${this.unit} by source: delivered, and wanted (dashed)${cost}`);
    this.svg.setAttribute("aria-label", `${this.title.textContent}: ${told.join(", ")}`);
    fill(this.key, told.map((said, number) => [number, said]), ([number]) => number,
      ([number]) => make("li", null, make("i", { class: `swatch s${number}`, "aria-hidden": "true" }), make("span")),
      (item, [, said]) => text(item.lastChild, said));
  }
}

const spanName = (span) => SPANS.find(([of]) => of === span)[1];

function shape(tag, attributes, label) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (label !== undefined) element.textContent = label;
  return element;
}

// Stretches without a gap, because no line is drawn where no values were recorded.
function unbroken(points, gap) {
  const stretches = [];
  for (const point of points) {
    const last = stretches[stretches.length - 1];
    if (last && point[0] - last[last.length - 1][0] <= Math.max(5, gap)) last.push(point);
    else stretches.push([point]);
  }
  return stretches;
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 2.5, 5, 10].find((step) => step * power >= value);
}

function short(value) {
  if (value >= 1000) return `${+(value / 1000).toFixed(1)}k`;
  return String(+value.toPrecision(2));
}

// ---- runs

class Card {
  constructor(run) {
    const title = make("h2", { id: `run-${(made += 1)}` });
    this.title = title;
    this.about = make("p", { class: "quiet" });
    this.kind = make("strong");
    this.finding = make("p");
    this.banner = make("div", { class: "finding", role: "status" }, this.kind, this.finding);
    this.rates = new Chart("rate", "Steps/s of a box", "steps/s");
    this.waits = new Chart("wait", "Waiting for data, of the box that waits most", "");
    this.shares = new Shares();
    this.span = 600;
    this.ranges = SPANS.map(([span, label]) => {
      const button = make("button", { type: "button", "aria-pressed": span === this.span }, label);
      button.addEventListener("click", () => this.choose(span));
      return [span, button];
    });
    const range = make("div", { class: "range", role: "group", "aria-label": "Time shown" });
    range.append(...this.ranges.map(([, button]) => button));
    const charts = make("div", { class: "charts" });
    charts.append(make("div", { class: "line" }, make("h3", null, "Over time"), range), this.rates.figure, this.waits.figure, this.shares.figure);
    this.map = make("div", { class: "map" });
    this.more = make("p", { class: "note" });
    this.detail = make("p", { class: "detail", role: "status", hidden: "" });
    const slots = make("div", null, make("h3", null, "Slots, with their ready batches"), this.map, this.more);
    slots.append(legend(), this.detail);
    this.boxes = table("Boxes");
    this.states = table("Checkpoints and other states that were fetched");
    this.noStates = make("p", { class: "note" }, "No state was fetched yet.");
    const lower = make("div", null, this.states.whole, this.noStates);
    this.root = make("article", { class: "card", "aria-labelledby": title.id, "data-run": run.run });
    this.root.append(make("div", { class: "line" }, title, this.about), this.banner, charts, slots, this.boxes.whole, lower);
    this.chosen = null;
  }

  choose(span) {
    this.span = span;
    for (const [of, button] of this.ranges) attribute(button, "aria-pressed", of === span);
    this.drawCharts();
  }

  drawCharts() {
    const { points, sources, shares } = history[this.run.run];
    const end = latest.at;
    this.rates.set(points.map((point) => [point[0], point[1]]), this.span, end);
    this.waits.set(points.map((point) => [point[0], point[2]]), this.span, end);
    if (sources) this.shares.set(sources, shares, this.span, end);
  }

  update(run) {
    this.run = run;
    text(this.title, run.run);
    text(this.about, run.about);
    attribute(this.banner, "data-alarm", run.finding.alarm);
    text(this.kind, run.finding.title);
    text(this.finding, run.finding.text);
    this.drawCharts();
    text(this.more, run.more);
    fill(this.map, run.map.flatMap((box) => [["name", box], ["slots", box]]), ([what, box]) => `${what} ${box.name}`,
      ([what]) => make("div", { class: what }), (element, [what, box]) => {
        if (what === "name") text(element, box.name);
        else this.drawSlots(element, box.slots);
      });
    drawTable(this.boxes.of, run.boxes);
    this.noStates.hidden = Boolean(run.states.rows.length);
    this.states.whole.hidden = !run.states.rows.length;
    drawTable(this.states.of, run.states);
  }

  drawSlots(element, slots) {
    fill(element, slots, ({ slot }) => slot, ({ slot }) => {
      const button = make("button", { type: "button", class: "slot", "aria-pressed": "false" });
      button.addEventListener("click", () => {
        this.chosen = this.chosen === slot ? null : slot;
        this.update(this.run);
      });
      return button;
    }, (button, { slot, state, sign, text: told }) => {
      attribute(button, "data-state", state);
      text(button, sign);
      attribute(button, "aria-label", told);
      attribute(button, "title", told);
      attribute(button, "aria-pressed", this.chosen === slot);
      if (this.chosen === slot) text(this.detail, told);
    });
    this.detail.hidden = !this.chosen;
  }
}

function legend() {
  const entries = [["ahead", "3", "batches are ready"], ["dry", "0", "no batch is ready"], ["hot", "\u25B20", "waited for most"],
    ["starting", "\u2026", "starting"], ["waiting", "\u2013", "without a worker"], ["failed", "\u2715", "failed"]];
  const list = make("ul", { class: "key", "aria-label": "Meaning of the slots' symbols" });
  for (const [kind, sign, meaning] of entries) {
    list.append(make("li", null, make("span", { class: "slot", "data-state": kind, "aria-hidden": "true" }, sign), meaning));
  }
  return list;
}

// ---- the page

function draw(status) {
  text(byId("about"), status.about);
  fill(byId("tiles"), status.tiles, ([what]) => what,
    ([what]) => make("div", null, make("dt", null, what), make("dd", null, make("span"), " ", make("small"))),
    (tile, [, count, of, alarm]) => {
      text(tile.querySelector("span"), count);
      text(tile.querySelector("small"), of);
      tile.classList.toggle("alarm", Boolean(alarm));
    });
  byId("no-runs").hidden = Boolean(status.runs.length);
  fill(byId("runs"), status.runs, (run) => run.run, (run) => {
    const card = new Card(run);
    cards.set(run.run, card);
    return card.root;
  }, (root, run) => cards.get(run.run).update(run));
  for (const name of [...cards.keys()]) {
    if (!status.runs.some((run) => run.run === name)) cards.delete(name);
  }
  text(byId("ended"), status.ended);
  byId("ended").hidden = !status.ended;
  byId("ends-of-runs").hidden = !status.ends.rows.length;
  drawTable(byId("ends"), status.ends);
  byId("no-workers").hidden = Boolean(status.workers.rows.length);
  byId("workers").hidden = !status.workers.rows.length;
  drawTable(byId("workers"), status.workers);
  drawEvents(status.events);
}

function drawEvents(all) {
  const only = byId("faults-only").checked;
  const events = all.filter((event) => event.fault || !only).slice(0, MOST_EVENTS);
  byId("no-events").hidden = Boolean(events.length);
  fill(byId("events"), events, (event) => [event.at, event.title, event.what].join(" "), () => make("li", null,
    make("time"), make("span", { class: "kind" }), make("span", { class: "said" })), (item, event) => {
    attribute(item, "data-fault", event.fault);
    text(item.children[0], clock(event.at));
    text(item.children[1], event.title);
    text(item.children[2], event.what);
  });
}

function remember(status) {
  for (const run of status.runs) {
    const track = history[run.run] || (history[run.run] = { points: [], counted: [], shares: [] });
    track.points.push([status.at, ...run.point]);
    if (track.points.length > MOST_POINTS) track.points.shift();
    if (status.sources[run.run]) rememberShares(track, status.at, status.sources[run.run]);
  }
}

// Adds a point unless no sample was delivered in the last SHARE_S seconds.
function rememberShares(track, at, sources) {
  if (String(track.sources && track.sources.names) !== String(sources.names)) Object.assign(track, { counted: [], shares: [] });
  track.sources = sources;
  while (track.counted.length && track.counted[0][0] < at - SHARE_S) track.counted.shift();
  const before = track.counted.length ? track.counted[0][1] : sources.counts;
  const fresh = sources.counts.map((count, number) => count - before[number]);
  if (fresh.some((count) => count < 0)) track.counted = []; // resumed from an earlier state
  track.counted.push([at, sources.counts]);
  const total = fresh.reduce((sum, count) => sum + count, 0);
  if (total > 0 && track.counted.length > 1) track.shares.push([at, ...fresh.map((count) => count / total), ...sources.wanted]);
  if (track.shares.length > MOST_POINTS) track.shares.shift();
}

async function ask(path) {
  const reply = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(DEADLINE_MS) });
  if (!reply.ok) throw new Error(`${reply.status} ${reply.statusText}`);
  return reply.json();
}

function connected(yes, why) {
  document.body.classList.toggle("away", !yes);
  const link = byId("link");
  attribute(link, "data-state", yes ? "live" : "away");
  if (yes) {
    awaySince = 0;
    text(link, "live");
    return;
  }
  awaySince = awaySince || Date.now();
  const seconds = Math.round((Date.now() - awaySince) / 1000);
  text(link, `the coordinator is away for ${seconds} s${why ? ` (${why})` : ""}; training goes on from what its lanes hold`);
}

async function look() {
  try {
    latest = await ask("api/dashboard.json");
    remember(latest);
    connected(true);
  } catch (error) {
    connected(false, error instanceof TypeError ? "" : error.message);
  }
  if (!awaySince) draw(latest); // outside: a mistake in drawing is no sign that nobody answers
}

// The status of a large fleet takes longer, so it is fetched less often.
async function watch() {
  for (;;) {
    const began = performance.now();
    try {
      await look();
    } catch (error) {
      console.error(error);
    }
    const took = performance.now() - began;
    await new Promise((done) => setTimeout(done, Math.max(document.hidden ? HIDDEN_MS : EVERY_MS, 4 * took)));
  }
}

byId("faults-only").addEventListener("change", () => latest && drawEvents(latest.events));
watch();
