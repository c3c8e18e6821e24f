// The dashboard: asks the coordinator once a second and draws. Names and texts come from peers: they are only ever set
// as text, and never parsed as HTML. Elements are kept from one answer to the next, so focus and selection stay.
"use strict";

const EVERY_MS = 1000;
const HIDDEN_MS = 5000;
const HISTORY_MS = 60000;
const DEADLINE_MS = 15000;
const INPUT_BOUND = 0.05; // as in bottleneck.py
const MOST_BOXES = 100; // of a run that are drawn: those that wait most
const MOST_EVENTS = 200;
const MOST_STATES = 6;
const MOST_POINTS = 600;
const SVG = "http://www.w3.org/2000/svg";

const KINDS = {
  loop: "\u2713 Loop-bound", starting: "\u2026 Starting", straggler: "\u25B2 Straggler",
  workers: "\u25B2 Too few workers", network: "\u25B2 Batches arrive late", unplaced: "\u25B2 Slots without a worker",
  recovering: "\u25B2 Recovering",
};

const byId = (id) => document.getElementById(id);
let history = {}; // run -> {seconds, minutes}
let historyAt = -Infinity;
let awaySince = 0;
let latest = null;
const cards = new Map(); // run -> its card
let made = 0; // cards, ever

// ---- small things

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

// Makes the children of `parent` those of `items`, in order; what is there already, by its key, is filled again.
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

const percent = (share) => `${Math.round(100 * share)}%`;

function rate(value) {
  return value >= 100 ? String(Math.round(value)) : value.toFixed(1);
}

function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });

function bar(cell, share, what) {
  if (!cell.firstChild) {
    cell.append(make("span", { class: "bar" }, make("i", { "aria-hidden": "true" }, make("b")), make("span")));
  }
  const whole = cell.firstChild;
  attribute(whole, "data-hot", share > INPUT_BOUND && what === "wait");
  whole.querySelector("b").style.width = `${100 * Math.min(1, share)}%`;
  return whole.lastChild;
}

// A table row: `cells` are [class, value] or [class, function that draws into the cell]; the first is the row's head.
function row(element, cells) {
  while (element.children.length < cells.length) {
    element.append(element.children.length ? make("td") : make("th", { scope: "row" }));
  }
  cells.forEach(([kind, value], index) => {
    const cell = element.children[index];
    if (kind) attribute(cell, "class", kind);
    if (typeof value === "function") value(cell);
    else text(cell, value);
  });
}

function state(name, shown) {
  return ["state", (cell) => {
    attribute(cell, "data-state", name);
    text(cell, shown);
  }];
}

function waits(share) {
  return ["", (cell) => text(bar(cell, share, "wait"), percent(share))];
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
      parts.push(shape("line", { class: "limit", x1: left, x2: width, y1: y(INPUT_BOUND), y2: y(INPUT_BOUND) }));
    }
    for (const part of [0, 0.5, 1]) {
      const seconds = this.span * (1 - part);
      const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
      const label = seconds ? `\u2212${duration(seconds)}` : "now";
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
        `${this.show(Math.max(...values))} over ${duration(this.span)}`
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

function shape(tag, attributes, label) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (label !== undefined) element.textContent = label;
  return element;
}

// Stretches without a gap: where nobody noted anything, no line is drawn.
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
    this.span = 600;
    this.ranges = [[120, "2 min"], [600, "10 min"], [86400, "24 h"]].map(([span, label]) => {
      const button = make("button", { type: "button", "aria-pressed": span === this.span }, label);
      button.addEventListener("click", () => this.choose(span));
      return [span, button];
    });
    const range = make("div", { class: "range", role: "group", "aria-label": "Time shown" });
    range.append(...this.ranges.map(([, button]) => button));
    const charts = make("div", { class: "charts" });
    charts.append(make("div", { class: "line" }, make("h3", null, "Over time"), range), this.rates.figure, this.waits.figure);
    this.map = make("div", { class: "map" });
    this.more = make("p", { class: "note" });
    this.detail = make("p", { class: "detail", role: "status", hidden: "" });
    const slots = make("div", null, make("h3", null, "Slots, with the batches that lie ready"), this.map, this.more);
    slots.append(legend(), this.detail);
    this.boxes = table("Boxes", ["Box", "State", ">Step", ">Epoch", ">Steps/s", "Waits (last minute)", "Waits now for"]);
    this.states = table("Checkpoints and other states that were fetched",
      ["Step", "For", "At", ">Took", ">Size", "Result"]);
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
    const track = history[this.run.run];
    const points = track ? (this.span > 600 ? [...track.minutes, ...track.seconds.slice(-1)] : track.seconds) : [];
    const end = latest.at;
    this.rates.set(points.map((point) => [point[0], point[1]]), this.span, end);
    this.waits.set(points.map((point) => [point[0], point[2]]), this.span, end);
  }

  update(run) {
    this.run = run;
    text(this.title, run.run);
    const shapeOf = `${run.num_boxes} ${run.num_boxes === 1 ? "box" : "boxes"} \u00D7 ${run.num_workers_per_box} workers`;
    const recovered = run.recoveries ? `, ${run.recoveries} recoveries` : "";
    text(this.about, `${run.input_fn || "?"} \u00B7 ${shapeOf} \u00B7 attempt ${run.attempt}${recovered} \u00B7 ` +
      `${rate(run.batches_per_s)} batches/s made`);
    const found = run.bottleneck;
    attribute(this.banner, "data-kind", found ? found.kind : "starting");
    text(this.kind, found ? KINDS[found.kind] || found.kind : "\u2026 No box is live");
    text(this.finding, found ? found.text : "Its training job has ended, or was not heard of.");
    this.drawCharts();
    const boxes = [...run.boxes].sort((a, b) => b.wait_share - a.wait_share).slice(0, MOST_BOXES).sort((a, b) => a.box - b.box);
    text(this.more, boxes.length < run.boxes.length ? `The ${boxes.length} of ${run.boxes.length} boxes that wait most.` : "");
    fill(this.map, boxes.flatMap((box) => [["name", box], ["slots", box]]), ([what, box]) => `${what} ${box.box}`,
      ([what]) => make("div", { class: what }), (element, [what, box]) => this.drawBox(element, what, box, found));
    fill(this.boxes.body, boxes, (box) => box.box, () => make("tr"), (element, box) => row(element, [
      ["", box.box], boxState(box), ["number", box.step], ["number", box.epoch], ["number", rate(box.steps_per_s)],
      waits(box.wait_share), ["text", box.waiting_for || "\u2013"],
    ]));
    const states = [...run.states].reverse().slice(0, MOST_STATES);
    this.states.whole.hidden = !states.length;
    this.noStates.hidden = Boolean(states.length);
    fill(this.states.body, states, (one) => `${one.at} ${one.step} ${one.asker}`, () => make("tr"), (element, one) => row(element, [
      ["", one.step], ["text", one.askers > 1 ? `${one.askers} ranks` : one.asker], ["", clock(one.at)],
      ["number", duration(one.seconds)], ["number", size(one.bytes)],
      one.error ? ["state text", (cell) => { attribute(cell, "data-state", "lost"); text(cell, one.error); }]
        : ["state", (cell) => { attribute(cell, "data-state", "live"); text(cell, "done"); }],
    ]));
  }

  drawBox(element, what, box, found) {
    if (what === "name") {
      text(element, `box ${box.box}`);
      return;
    }
    fill(element, box.slots, (slot) => slot.slot, (slot) => {
      const button = make("button", { type: "button", class: "slot", "aria-pressed": "false" });
      button.addEventListener("click", () => {
        const key = `${box.box}.${slot.slot}`;
        this.chosen = this.chosen === key ? null : key;
        this.update(this.run);
      });
      return button;
    }, (button, slot) => {
      const kind = slotState(box, slot, found);
      attribute(button, "data-state", kind);
      text(button, { failed: "\u2715", waiting: "\u2013", starting: "\u2026", hot: `\u25B2${slot.queued}` }[kind] || slot.queued);
      const told = `Box ${box.box} slot ${slot.slot}: ${slotText(slot)}`;
      attribute(button, "aria-label", told);
      attribute(button, "title", told);
      const chosen = this.chosen === `${box.box}.${slot.slot}`;
      attribute(button, "aria-pressed", chosen);
      if (chosen) text(this.detail, told);
    });
    this.detail.hidden = !this.chosen;
  }
}

function boxState(box) {
  if (!box.live) return state("lost", "lost");
  return box.epoch_ended ? state("idle", "pass ended") : state("live", "live");
}

function slotState(box, slot, found) {
  if (slot.phase === "FAILED") return "failed";
  if (slot.phase === "WAITING") return "waiting";
  if (slot.phase === "STARTING") return "starting";
  const blamed = found && found.input_bound && found.box === box.box && found.slot === slot.slot;
  if (blamed || (slot.wait_share > INPUT_BOUND && slot.wait_share > 0.5 * box.wait_share)) return "hot";
  return slot.queued ? "ahead" : "dry";
}

function slotText(slot) {
  const parts = [slot.phase.toLowerCase(), slot.worker ? `worker ${slot.worker}` : "no worker"];
  parts.push(`${slot.queued} batches ready`, `${rate(slot.batches_per_s)} batches/s`);
  parts.push(`its box waits ${percent(slot.wait_share)} of the time for it`);
  parts.push(slot.snapshot_age_s === null ? "no durable snapshot since the coordinator started"
    : `durable snapshot ${duration(slot.snapshot_age_s)} old`);
  if (slot.restarts) parts.push(`${slot.restarts} recoveries`);
  if (slot.skipped) parts.push(`${slot.skipped} batches left out`);
  if (slot.error) parts.push(`${slot.error.name}: ${slot.error.message}`);
  else if (slot.doing || slot.note) parts.push(slot.doing || slot.note);
  return parts.join(", ");
}

function legend() {
  const entries = [["ahead", "3", "batches lie ready"], ["dry", "0", "none lies ready"], ["hot", "\u25B20", "waited for most"],
    ["starting", "\u2026", "starting"], ["waiting", "\u2013", "without a worker"], ["failed", "\u2715", "failed"]];
  const list = make("ul", { class: "key", "aria-label": "What the slots' signs mean" });
  for (const [kind, sign, meaning] of entries) {
    list.append(make("li", null, make("span", { class: "slot", "data-state": kind, "aria-hidden": "true" }, sign), meaning));
  }
  return list;
}

function table(title, headings) {
  const head = make("tr");
  for (const heading of headings) {
    const number = heading.startsWith(">");
    head.append(make("th", number ? { scope: "col", class: "number" } : { scope: "col" }, heading.replace(">", "")));
  }
  const body = make("tbody");
  const whole = make("div", { class: "scroll" });
  whole.append(make("table", null, make("caption", null, title), make("thead", null, head), body));
  return { whole, body };
}

// ---- the page

function draw(status) {
  const runs = status.runs.filter((run) => run.open);
  const boxes = runs.flatMap((run) => run.boxes);
  const slots = boxes.flatMap((box) => box.slots);
  const faults = status.events.filter((event) => event.fault && event.age_s < 600).reduce((sum, event) => sum + event.count, 0);
  text(byId("about"), `${status.coordinator.address} \u00B7 ${status.coordinator.version} \u00B7 up ` +
    duration(status.coordinator.uptime_s));
  const tiles = [
    ["Open runs", runs.length, ""],
    ["Boxes live", boxes.filter((box) => box.live).length, `of ${boxes.length}`],
    ["Slots ready", slots.filter((slot) => slot.phase === "READY").length, `of ${slots.length}`],
    ["Workers", status.workers.filter((worker) => worker.live).length, ""],
    ["Batches/s delivered", rate(boxes.reduce((sum, box) => sum + (box.live ? box.steps_per_s : 0), 0)), ""],
    ["Faults, 10 min", faults, ""],
  ];
  fill(byId("tiles"), tiles, ([name]) => name, ([name]) => make("div", null, make("dt", null, name), make("dd", null, make("span"), " ", make("small"))),
    (tile, [name, value, of]) => {
      text(tile.querySelector("span"), value);
      text(tile.querySelector("small"), of);
      tile.classList.toggle("alarm", name.startsWith("Faults") && value > 0);
    });
  byId("no-runs").hidden = Boolean(runs.length);
  fill(byId("runs"), runs, (run) => run.run, (run) => {
    const card = new Card(run);
    cards.set(run.run, card);
    return card.root;
  }, (root, run) => cards.get(run.run).update(run));
  for (const name of [...cards.keys()]) {
    if (!runs.some((run) => run.run === name)) cards.delete(name);
  }
  byId("no-workers").hidden = Boolean(status.workers.length);
  fill(byId("workers").tBodies[0], status.workers, (worker) => worker.worker, () => make("tr"), (element, worker) => row(element, [
    ["", worker.worker],
    worker.draining ? state("idle", "draining") : worker.live ? state("live", "live") : state("lost", "lost"),
    ["", (cell) => text(bar(cell, worker.slots_used / Math.max(1, worker.slots), "used"), `${worker.slots_used}/${worker.slots}`)],
    ["number", rate(worker.batches_per_s)], waits(worker.wait_share),
    ["number", `${duration(worker.seen_s_ago)} ago`], ["text", worker.tcp_address || "\u2013"],
  ]));
  drawEvents(status.events);
}

function drawEvents(all) {
  const only = byId("faults-only").checked;
  const events = all.filter((event) => event.fault || !only).slice(-MOST_EVENTS).reverse();
  byId("no-events").hidden = Boolean(events.length);
  fill(byId("events"), events, (event) => [event.at, event.kind, event.run, event.worker, event.text].join(" "), () => make("li", null,
    make("time"), make("span", { class: "kind" }), make("span", { class: "said" })), (item, event) => {
    attribute(item, "data-fault", event.fault);
    text(item.children[0], clock(event.at));
    text(item.children[1], event.count > 1 ? `${event.kind} \u00D7${event.count}` : event.kind);
    text(item.children[2], event.run ? `${event.run}: ${event.text}` : event.text);
  });
}

// What the history lacks since it was fetched is added from each answer.
function remember(status) {
  for (const run of status.runs) {
    if (!run.open) continue;
    const track = history[run.run] || (history[run.run] = { seconds: [], minutes: [] });
    const going = run.boxes.filter((box) => box.live && !box.epoch_ended);
    const waited = Math.max(0, ...going.map((box) => box.waited_share));
    track.seconds.push([status.at, run.steps_per_s, waited, run.batches_per_s]);
    if (track.seconds.length > MOST_POINTS) track.seconds.shift();
  }
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
  historyAt = -Infinity;
  const seconds = Math.round((Date.now() - awaySince) / 1000);
  text(link, `the coordinator is away for ${seconds} s${why ? ` (${why})` : ""}; training goes on from what its lanes hold`);
}

async function look() {
  const began = performance.now();
  try {
    if (began - historyAt > HISTORY_MS) {
      history = (await ask("api/history.json")).runs;
      historyAt = began;
    }
    latest = await ask("api/status.json");
    remember(latest);
    connected(true);
  } catch (error) {
    connected(false, error instanceof TypeError ? "" : error.message);
  }
  if (!awaySince) draw(latest); // outside: a mistake in drawing is no sign that nobody answers
}

// A large fleet's status takes its time: then it is asked for less often.
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
