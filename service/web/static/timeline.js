// A job's timeline on a canvas: the attempts on each slot over time. Only visible ones are drawn, so a hundred thousand
// attempts cost no more than a screen of them. Untrusted names and words reach the page only by fillText and textContent.

const AXIS = 22, QUEUE = 34, HEAD = 20, ROW = 18, GAP = 8; // heights, in CSS pixels
const LEAST_S = 1e-4; // the smallest visible range
const NARROW = 4; // narrower attempts, in pixels, are merged with their neighbours
const NEAR = 6; // most pixels between the pointer and a mark that it is on
const LISTED = 50; // last incidents in the list
const BAD = new Set(["failed"]);
const OPEN = new Set(["queued", "running"]); // states of jobs
const COLOURS = [
  "ink", "faint", "line", "band", "completed", "reading", "failed", "cancelled", "in_flight", "queue", "incident",
  "ready", "starting", "draining", "stopping", "stopped", "backoff", "down", "select", "over",
];
const HELP =
  "Plus and minus zoom, 0 shows all. Left and right go from attempt to attempt, up and down from slot to slot, " +
  "with Shift they move the view. Escape lets go.";

// Turns a timeline of GET /v1/jobs/{id}/timeline into rows with sorted times in typed arrays.
export function modelOf(data) {
  const attempts = data.attempts;
  const rows = [];
  const rowOf = new Map();
  const lanes = data.workers.map((worker) => {
    const lane = {
      worker, states: [], incidents: [], first: rows.length,
      states_of: data.states.filter((each) => each.worker === worker.id),
    };
    lane.incidents = data.incidents.filter((each) => each.worker === worker.id);
    lane.states = lane.states_of.map((each, place) => ({
      ...each, until_s: lane.states_of[place + 1]?.at_s ?? data.until_s,
    }));
    for (let number = 0; number < worker.rows; number++) {
      rowOf.set(`${number} ${worker.id}`, rows.length);
      rows.push({ lane, number, spans: [] });
    }
    return lane;
  });
  attempts.forEach((span, place) => rows[rowOf.get(`${span.row ?? 0} ${span.worker}`)].spans.push(place));
  const endOf = (span) => Math.max(span.started_s, span.finished_s ?? data.until_s);
  for (const row of rows) {
    row.spans.sort((a, b) => attempts[a].started_s - attempts[b].started_s);
    row.starts = Float64Array.from(row.spans, (place) => attempts[place].started_s);
    row.ends = Float64Array.from(row.spans, (place) => endOf(attempts[place]));
    row.bad = new Int32Array(row.spans.length + 1); // failed attempts before each
    row.spans.forEach((place, at) => (row.bad[at + 1] = row.bad[at] + BAD.has(attempts[place].outcome)));
  }
  let from = Infinity, to = -Infinity, failed = 0;
  for (const span of attempts) {
    from = Math.min(from, span.queued_s ?? span.started_s);
    to = Math.max(to, endOf(span));
    failed += BAD.has(span.outcome);
  }
  if (!attempts.length) [from, to] = [0, Math.max(data.until_s, 1)];
  if (OPEN.has(data.state)) to = Math.max(to, data.until_s); // a standstill shows as a gap
  const pad = Math.max((to - from) * 0.01, LEAST_S);
  return {
    data, attempts, lanes, rows, endOf, failed, waiting: waitingOf(attempts, data.waiting ?? []), from: from - pad, to: to + pad,
    seconds: to - from,
  };
}

// The number of waiting turns over time: {times, counts, most}.
function waitingOf(attempts, waiting) {
  const moves = waiting.map((since) => [since, 1]);
  for (const span of attempts) {
    if (span.queued_s !== undefined && span.queued_s < span.started_s) {
      moves.push([span.queued_s, 1], [span.started_s, -1]);
    }
  }
  moves.sort((a, b) => a[0] - b[0]);
  const times = Float64Array.from(moves, (move) => move[0]);
  const counts = new Int32Array(moves.length);
  let count = 0, most = 0;
  moves.forEach((move, at) => {
    counts[at] = count += move[1];
    most = Math.max(most, count);
  });
  return { times, counts, most };
}

// The first index in a sorted array whose value is above a limit.
function above(sorted, limit, begin = 0) {
  let low = begin, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

export function lengthOf(seconds) {
  const size = Math.abs(seconds);
  if (size < 1) return `${+(seconds * 1000).toPrecision(3)} ms`;
  if (size < 60) return `${+seconds.toFixed(2)} s`;
  const whole = Math.round(seconds);
  if (size < 3600) return `${Math.floor(whole / 60)}m${String(whole % 60).padStart(2, "0")}s`;
  return `${Math.floor(whole / 3600)}h${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")}m`;
}

// The facts of an attempt, as pairs of a name and a text.
export function factsOf(model, span) {
  const facts = [
    ["agent", span.agent], ["round", span.round + 1], ["conversation", span.conversation],
    ["attempt", span.number], ["worker", `${span.worker}, engine ${span.incarnation}`],
    ["outcome", span.outcome.replace("_", " ")],
  ];
  if (span.queued_s !== undefined) facts.push(["waited", lengthOf(span.started_s - span.queued_s)]);
  facts.push(["started", `${lengthOf(span.started_s)} after the job came`]);
  if (span.first_token_s !== undefined) facts.push(["first token", `after ${lengthOf(span.first_token_s - span.started_s)}`]);
  facts.push([span.finished_s === undefined ? "so far" : "held its slot", lengthOf(model.endOf(span) - span.started_s)]);
  if (span.prompt_tokens !== undefined) {
    const cached = span.cached_tokens === undefined ? "" : `, ${span.cached_tokens} of them cached`;
    facts.push(["prompt", `${span.prompt_tokens} tokens${cached}`]);
  }
  if (span.completion_tokens !== undefined) facts.push(["answer", `${span.completion_tokens} tokens`]);
  if (span.tools) facts.push(["tools", span.tools.join(", ")]);
  if (span.reason) facts.push(["reason", span.reason]);
  if (span.detail) facts.push(["detail", span.detail]);
  return facts;
}

function many(count, noun) {
  return `${count || "no"} ${noun}${count === 1 ? "" : "s"}`;
}

function make(kind, name, parent, text = "") {
  const made = document.createElement(kind);
  if (name) made.className = name;
  made.textContent = text;
  parent?.append(made);
  return made;
}

class Chart {
  constructor(element, data) {
    this.model = modelOf(data);
    this.view = { from: this.model.from, to: this.model.to };
    this.chosen = null; // {row, at}
    this.over = null; // the attempt under the pointer: {row, at}
    this.pointers = new Map();
    this.left = new AbortController();
    this.build(element);
    this.listen();
    this.measure();
  }

  build(element) {
    const { model } = this, { data } = model;
    this.root = make("div", "tl", null);
    const bar = make("div", "tl-bar", this.root);
    const button = (text, label, act) => {
      const made = make("button", "", bar, text);
      made.type = "button";
      made.setAttribute("aria-label", label);
      made.addEventListener("click", act);
    };
    button("+", "Zoom in", () => this.zoom(0.5));
    button("−", "Zoom out", () => this.zoom(2));
    button("Fit", "Show all", () => this.fit());
    this.range = make("output", "tl-range", bar);
    const broken = data.incidents.length;
    make(
      "p", "tl-sum", this.root,
      `${many(model.attempts.length, "attempt")} on ${many(data.workers.length, "worker")} in ${lengthOf(model.seconds)}, ` +
        `${model.failed} failed; ${many(broken, "engine")} broke; at most ${many(model.waiting.most, "turn")} waited`,
    );
    this.scroll = make("div", "tl-scroll", this.root);
    this.space = make("div", "tl-space", this.scroll);
    this.canvas = make("canvas", "tl-canvas", this.space);
    this.canvas.setAttribute("aria-hidden", "true");
    this.scroll.tabIndex = 0;
    this.scroll.setAttribute("role", "application");
    this.scroll.setAttribute("aria-label", `Timeline of ${data.name}. ${HELP}`);
    this.tip = make("div", "tl-tip", this.root);
    this.tip.hidden = true;
    this.tip.setAttribute("aria-hidden", "true");
    const legend = make("ul", "tl-legend", this.root);
    for (const [name, text] of [
      ["reading", "reading its prompt"], ["completed", "answering"], ["failed", "failed"], ["cancelled", "cancelled"],
      ["in_flight", "running"], ["queue", "waiting"], ["starting", "engine starting"], ["down", "engine away"],
      ["incident", "engine broke"],
    ]) {
      const item = make("li", "", legend);
      make("span", `tl-swatch tl-${name}`, item);
      item.append(text);
    }
    make("p", "tl-help", this.root, HELP);
    this.details = make("dl", "tl-details", this.root);
    const status = make("div", "tl-status", this.root);
    status.setAttribute("role", "status");
    this.status = status;
    if (broken) this.list(data.incidents.slice(-LISTED));
    element.replaceChildren(this.root);
    this.paint = this.canvas.getContext("2d");
  }

  list(incidents) {
    const box = make("details", "tl-incidents", this.root);
    make("summary", "", box, "Engines that broke");
    const list = make("ul", "", box);
    for (const each of incidents) {
      const text = `${lengthOf(each.at_s)}: ${each.worker}, engine ${each.incarnation}: ${each.reason}: ${each.because}`;
      const made = make("button", "", make("li", "", list), text);
      made.type = "button";
      made.addEventListener("click", () => this.center(each.at_s, Math.min(this.seconds, this.model.seconds / 10)));
    }
  }

  listen() {
    const on = (target, kind, act, more = {}) => target.addEventListener(kind, act, { signal: this.left.signal, ...more });
    on(this.canvas, "wheel", (event) => this.wheel(event), { passive: false });
    on(this.canvas, "pointerdown", (event) => this.down(event));
    on(this.canvas, "pointermove", (event) => this.move(event));
    for (const kind of ["pointerup", "pointercancel", "pointerleave"]) on(this.canvas, kind, (event) => this.up(event));
    on(this.scroll, "keydown", (event) => this.key(event));
    on(this.scroll, "scroll", () => this.redraw());
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.measure());
    this.size = new ResizeObserver(() => this.measure());
    this.size.observe(this.root);
  }

  destroy() {
    this.left.abort();
    this.size.disconnect();
    cancelAnimationFrame(this.frame);
    this.root.remove();
  }

  // Places

  measure() {
    const style = getComputedStyle(this.root);
    const probe = make("i", "", this.root); // browsers compute colours, but not custom properties
    this.colour = Object.fromEntries(COLOURS.map((name) => {
      probe.style.color = `var(--tl-${name})`;
      return [name, getComputedStyle(probe).color];
    }));
    probe.remove();
    this.font = `11px ${style.fontFamily}`;
    const width = this.root.clientWidth;
    this.label = width < 560 ? 76 : 132;
    let top = AXIS + QUEUE;
    for (const lane of this.model.lanes) {
      lane.y = top;
      lane.height = HEAD + lane.worker.rows * ROW;
      this.model.rows.slice(lane.first, lane.first + lane.worker.rows).forEach((row, at) => (row.y = top + HEAD + at * ROW));
      top += lane.height + GAP;
    }
    this.space.style.height = `${top}px`;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.scroll.clientWidth;
    this.height = Math.min(top, this.scroll.clientHeight || top);
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw(); // at once: a resized canvas is empty and would flash
  }

  get seconds() { return this.view.to - this.view.from; }
  get scale() { return Math.max(1, this.width - this.label) / this.seconds; }
  x(at) { return this.label + (at - this.view.from) * this.scale; }
  time(x) { return this.view.from + (x - this.label) / this.scale; }

  show(from, seconds) {
    const { model } = this, whole = model.to - model.from;
    seconds = Math.min(whole, Math.max(LEAST_S, seconds));
    from = Math.min(model.to - seconds, Math.max(model.from, from));
    this.view = { from, to: from + seconds };
    this.hover(null); // its subject has moved
  }

  fit() { this.show(this.model.from, Infinity); }
  center(at, seconds) { this.show(at - seconds / 2, seconds); }
  pan(share) { this.show(this.view.from + share * this.seconds, this.seconds); }

  zoom(factor, at = (this.view.from + this.view.to) / 2) {
    const seconds = Math.min(this.model.to - this.model.from, Math.max(LEAST_S, this.seconds * factor));
    this.show(at - ((at - this.view.from) * seconds) / this.seconds, seconds);
  }

  // Hands

  wheel(event) {
    event.preventDefault();
    if (event.shiftKey && !event.ctrlKey) this.scroll.scrollTop += event.deltaY || event.deltaX;
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / this.width);
    else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * (event.ctrlKey ? 0.01 : 0.0025)))), this.time(event.offsetX));
  }

  down(event) {
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.dragged = 0;
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    const last = this.pointers.get(event.pointerId), now = { x: event.offsetX, y: event.offsetY };
    if (!last) return this.hover(now, event);
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const before = Math.abs(last.x - other.x), after = Math.abs(now.x - other.x);
      if (before > 4 && after > 4) this.zoom(before / after, this.time((now.x + other.x) / 2));
    } else {
      this.dragged += Math.abs(now.x - last.x) + Math.abs(now.y - last.y);
      this.pan((last.x - now.x) / Math.max(1, this.width - this.label));
      if (event.pointerType === "mouse") this.scroll.scrollTop += last.y - now.y;
    }
    this.pointers.set(event.pointerId, now);
  }

  up(event) {
    const was = this.pointers.delete(event.pointerId);
    if (event.type === "pointerup" && was && this.dragged < NEAR) {
      const found = this.at({ x: event.offsetX, y: event.offsetY });
      this.choose(found?.row ? found : null);
    }
    if (event.type === "pointerleave") this.hover(null);
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key], upright = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "+" || event.key === "=") this.zoom(0.5, this.focusTime());
    else if (event.key === "-" || event.key === "_") this.zoom(2, this.focusTime());
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape") this.choose(null);
    else if (sideways && event.shiftKey) this.pan(sideways * 0.2);
    else if (upright && event.shiftKey) this.scroll.scrollTop += upright * ROW * 4;
    else if (sideways) this.step(sideways);
    else if (upright) this.climb(upright);
    else if (event.key === "Home" || event.key === "End") this.end(event.key === "Home");
    else return;
    event.preventDefault();
  }

  focusTime() {
    return this.chosen ? this.model.attempts[this.spanOf(this.chosen)].started_s : (this.view.from + this.view.to) / 2;
  }

  spanOf({ row, at }) { return row.spans[at]; }

  step(way) {
    if (!this.chosen) return this.climb(1);
    const { row, at } = this.chosen;
    this.choose({ row, at: Math.min(row.spans.length - 1, Math.max(0, at + way)) }, true);
  }

  end(isFirst) {
    const row = this.chosen?.row ?? this.model.rows[0];
    if (row) this.choose({ row, at: isFirst ? 0 : row.spans.length - 1 }, true);
  }

  // Chooses the attempt of the next row that is nearest in time.
  climb(way) {
    const { rows } = this.model, time = this.chosen ? this.focusTime() : this.view.from;
    const row = rows[this.chosen ? Math.min(rows.length - 1, Math.max(0, rows.indexOf(this.chosen.row) + way)) : 0];
    if (row) this.choose({ row, at: Math.max(0, above(row.starts, time) - (this.chosen ? 1 : 0)) % row.spans.length }, true);
  }

  choose(chosen, isBrought = false) {
    this.chosen = chosen;
    this.details.replaceChildren();
    if (!chosen) {
      this.status.textContent = "";
      return this.redraw();
    }
    const span = this.model.attempts[this.spanOf(chosen)];
    const facts = factsOf(this.model, span);
    for (const [name, text] of facts) {
      const pair = make("div", "", this.details);
      make("dt", "", pair, name);
      make("dd", "", pair, String(text));
    }
    this.status.textContent = facts.map((fact) => fact.join(" ")).join(", ");
    if (isBrought) this.bring(chosen.row, span);
    this.redraw();
  }

  // Moves the view to show an attempt.
  bring(row, span) {
    if (span.started_s < this.view.from || span.started_s > this.view.to) this.center(span.started_s, this.seconds);
    const top = AXIS + QUEUE, y = row.y - this.scroll.scrollTop;
    if (y < top) this.scroll.scrollTop = row.y - top - HEAD;
    else if (y + ROW > this.height) this.scroll.scrollTop = row.y + ROW - this.height;
  }

  // Returns {row, at} for an attempt at a point, {mark} for a worker's mark, or null.
  at({ x, y }) {
    if (x < this.label || y < AXIS + QUEUE) return null;
    const inside = y + this.scroll.scrollTop, time = this.time(x), near = NEAR / 2 / this.scale;
    const lane = this.model.lanes.find((each) => inside >= each.y && inside < each.y + each.height);
    if (!lane) return null;
    if (inside < lane.y + HEAD) {
      const broke = lane.incidents.find((each) => Math.abs(each.at_s - time) * this.scale < NEAR);
      if (broke) return { mark: [["engine", `${broke.worker}, engine ${broke.incarnation}`], ["broke", broke.reason], ["because", broke.because], ["exit", broke.exit ?? "lives on"]] };
      const state = lane.states.findLast((each) => each.at_s <= time + near);
      return state ? { mark: [["engine", `${state.worker}, engine ${state.incarnation}`], ["state", state.state], ["because", state.because], ["since", lengthOf(state.at_s)]] } : null;
    }
    const row = this.model.rows[lane.first + Math.floor((inside - lane.y - HEAD) / ROW)];
    const at = above(row.starts, time + near) - 1;
    return at >= 0 && row.ends[at] >= time - near ? { row, at } : null;
  }

  hover(point, event) {
    const found = point && this.at(point);
    this.over = found?.row ? found : null;
    this.tip.hidden = !found;
    if (found) {
      this.tip.replaceChildren();
      const facts = found.mark ?? factsOf(this.model, this.model.attempts[this.spanOf(found)]);
      for (const [name, text] of facts) {
        const line = make("div", "", this.tip);
        make("b", "", line, name);
        line.append(` ${text}`);
      }
      const box = this.root.getBoundingClientRect();
      const x = event.clientX - box.left, y = event.clientY - box.top;
      this.tip.style.left = `${Math.max(0, Math.min(x + 14, this.root.clientWidth - this.tip.offsetWidth - 4))}px`;
      this.tip.style.top = `${y + 18}px`;
    }
    this.redraw();
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = undefined;
      this.draw();
    });
  }

  draw() {
    drawChart(this);
    const isAll = this.seconds >= this.model.to - this.model.from;
    this.range.textContent = `${isAll ? "all" : `${lengthOf(this.seconds)} of`} ${lengthOf(this.model.seconds)}`;
  }
}

// Painting

function drawChart(chart) {
  const { paint, colour, model } = chart, top = AXIS + QUEUE, shift = chart.scroll.scrollTop;
  paint.clearRect(0, 0, chart.width, chart.height);
  paint.font = chart.font;
  paint.textBaseline = "middle";
  const ticks = ticksOf(chart);
  paint.fillStyle = colour.line;
  for (const tick of ticks.at) paint.fillRect(Math.round(chart.x(tick)), AXIS, 1, chart.height);
  paint.save();
  paint.beginPath();
  paint.rect(0, top, chart.width, chart.height - top);
  paint.clip();
  paint.translate(0, -shift);
  for (const lane of model.lanes) {
    if (lane.y + lane.height < shift + top || lane.y > shift + chart.height) continue;
    drawLane(chart, lane);
  }
  drawChosen(chart);
  paint.restore();
  drawQueue(chart);
  drawAxis(chart, ticks);
}

function ticksOf(chart) {
  const wanted = (chart.seconds * 90) / Math.max(1, chart.width - chart.label), power = 10 ** Math.floor(Math.log10(wanted));
  let step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= wanted);
  if (wanted > 10) step = [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200].find((each) => each >= wanted) ?? 86400 * Math.ceil(wanted / 86400);
  const at = [];
  for (let number = Math.ceil(chart.view.from / step); number * step <= chart.view.to; number++) at.push(number * step);
  return { at, step };
}

function drawAxis(chart, ticks) {
  const { paint, colour } = chart;
  paint.fillStyle = colour.faint;
  paint.textAlign = "left";
  let free = chart.label - 4;
  for (const tick of ticks.at) {
    const text = tick === 0 ? "0" : ticks.step < 1 && Math.abs(tick) >= 1 ? `${tick.toFixed(Math.ceil(-Math.log10(ticks.step)))} s` : lengthOf(tick);
    const x = chart.x(tick) + 3;
    if (x < free || x + text.length * 6 > chart.width) continue;
    paint.fillText(text, x, AXIS / 2);
    free = x + text.length * 6 + 12;
  }
}

// Draws the number of waiting turns as steps over time; each pixel shows its maximum.
function drawQueue(chart) {
  const { paint, colour } = chart, { times, counts, most } = chart.model.waiting;
  const bottom = AXIS + QUEUE - 4, tall = QUEUE - 8;
  paint.fillStyle = colour.faint;
  paint.textAlign = "left";
  paint.fillText(most ? `waiting (≤ ${most})` : "waiting", 4, AXIS + QUEUE / 2, chart.label - 8);
  paint.fillStyle = colour.line;
  paint.fillRect(chart.label, bottom, chart.width - chart.label, 1);
  if (!most) return;
  paint.fillStyle = colour.queue;
  let at = above(times, chart.view.from) - 1;
  for (let x = chart.label; x < chart.width; ) {
    let count = at >= 0 ? counts[at] : 0;
    const next = above(times, chart.time(x + 1), Math.max(0, at));
    for (let each = at + 1; each < next && each < at + 2000; each++) count = Math.max(count, counts[each]);
    const until = next < times.length ? Math.max(x + 1, Math.floor(chart.x(times[next]))) : chart.width;
    const wide = next === at + 1 ? until - x : 1; // nothing changes before the next time
    if (count) paint.fillRect(x, bottom - (tall * count) / most, Math.min(wide, chart.width - x), (tall * count) / most);
    at = next - 1;
    x += wide;
  }
}

function drawLane(chart, lane) {
  const { paint, colour, model } = chart, right = chart.width;
  paint.fillStyle = colour.band;
  paint.fillRect(0, lane.y, right, HEAD);
  paint.fillStyle = colour.ink;
  paint.textAlign = "left";
  const { worker } = lane;
  const name = cut(worker.id, chart.label - 8);
  paint.fillText(name, 4, lane.y + HEAD / 2);
  const shift = chart.scroll.scrollTop;
  for (const row of model.rows.slice(lane.first, lane.first + worker.rows)) {
    if (row.y + ROW < shift || row.y > shift + chart.height) continue;
    paint.fillStyle = colour.faint;
    paint.fillText(`slot ${row.number}`, 12, row.y + ROW / 2, chart.label - 16);
    drawRow(chart, row);
  }
  paint.save();
  paint.beginPath();
  paint.rect(chart.label, lane.y, right, lane.height);
  paint.clip();
  for (const state of lane.states) drawState(chart, lane, state);
  for (const incident of lane.incidents) {
    const x = Math.round(chart.x(incident.at_s));
    if (x < chart.label - NEAR || x > right + NEAR) continue;
    paint.fillStyle = colour.incident;
    paint.fillRect(x - 1, lane.y + HEAD / 2, 2, lane.height - HEAD / 2);
    paint.strokeStyle = colour.incident;
    paint.lineWidth = 2;
    paint.beginPath();
    paint.moveTo(x - 4, lane.y + 6);
    paint.lineTo(x + 4, lane.y + 14);
    paint.moveTo(x + 4, lane.y + 6);
    paint.lineTo(x - 4, lane.y + 14);
    paint.stroke();
  }
  paint.restore();
}

function drawState(chart, lane, state) {
  const { paint, colour } = chart;
  const from = Math.max(chart.label, chart.x(state.at_s)), to = Math.min(chart.width, chart.x(state.until_s));
  if (to <= from) return;
  paint.fillStyle = colour[state.state] ?? colour[state.state === "failed" ? "backoff" : "stopped"];
  paint.fillRect(from, lane.y + HEAD - 4, Math.max(1, to - from), 3);
  if (state.state !== "ready" && state.state !== "draining") {
    paint.fillStyle = colour.down; // the worker gives no slots meanwhile
    paint.fillRect(from, lane.y + HEAD, Math.max(1, to - from), lane.height - HEAD);
  }
  if (state.state === "starting" && to - from > 60) {
    paint.fillStyle = colour.faint;
    paint.fillText(cut(`engine ${state.incarnation} starts`, to - from), from + 3, lane.y + HEAD / 2 - 2);
  }
}

// Draws the attempts of a row. Narrow ones are merged: of those that begin on one pixel the worst gives the colour, and
// a run of the same colour is one rectangle.
function drawRow(chart, row) {
  const { attempts } = chart.model;
  let run = null;
  const flush = () => {
    if (!run) return;
    chart.paint.fillStyle = chart.colour[run.name];
    chart.paint.fillRect(run.from, row.y + 2, run.to - run.from, ROW - 4);
    run = null;
  };
  let at = Math.max(0, above(row.starts, chart.view.from) - 1);
  while (at < row.spans.length && row.starts[at] < chart.view.to) {
    const from = Math.max(chart.label, chart.x(row.starts[at])), to = Math.min(chart.width, chart.x(row.ends[at]));
    if (to - from >= NARROW) {
      flush();
      drawSpan(chart, row, attempts[row.spans[at]], from, to);
      at++;
      continue;
    }
    const pixel = Math.floor(from), next = Math.max(at + 1, above(row.starts, chart.time(pixel + 1), at));
    if (row.ends[at] >= chart.view.from) {
      const isBad = row.bad[next] > row.bad[at], name = isBad ? "failed" : attempts[row.spans[at]].outcome;
      const end = Math.max(pixel + 1, Math.round(to));
      if (run && run.name === name && run.to >= pixel) run.to = Math.max(run.to, end);
      else {
        flush();
        run = { name, from: pixel, to: end };
      }
    }
    at = next;
  }
  flush();
}

function drawSpan(chart, row, span, from, to) {
  const { paint, colour } = chart, y = row.y + 2, tall = ROW - 4;
  const wide = Math.max(1, to - from - (to - from > 4 ? 1 : 0)); // a gap between neighbours
  paint.fillStyle = colour[span.outcome] ?? colour.completed;
  paint.fillRect(from, y, wide, tall);
  let read = from;
  if (span.first_token_s !== undefined && span.outcome !== "failed") {
    read = Math.min(from + wide, chart.x(span.first_token_s));
    if (read > from) {
      paint.fillStyle = colour.reading;
      paint.fillRect(from, y, read - from, tall);
    }
  }
  if (span.number > 1 && wide > 5) {
    paint.fillStyle = colour.queue;
    paint.fillRect(from, y, 3, tall); // marks a repeated attempt
  }
  const begin = Math.max(from, read), room = from + wide - begin; // words go after the part that reads the prompt
  if (room > 30) {
    paint.fillStyle = colour.over;
    paint.textAlign = "left";
    const again = span.number > 1 ? ` #${span.number}` : "";
    paint.fillText(cut(`${span.agent} ${span.round + 1}${again}`, room - 8), begin + 5, row.y + ROW / 2 + 0.5);
  }
}

// Draws a frame around the attempts under focus and pointer, and a line for their wait.
function drawChosen(chart) {
  for (const found of [chart.over, chart.chosen]) {
    if (!found) continue;
    const { paint, colour } = chart, { row, at } = found, span = chart.model.attempts[row.spans[at]];
    const from = Math.max(chart.label, chart.x(row.starts[at])), to = Math.min(chart.width, chart.x(row.ends[at]));
    paint.strokeStyle = colour.select;
    if (span.queued_s !== undefined && from >= chart.label) {
      const since = Math.max(chart.label, chart.x(span.queued_s)), middle = row.y + ROW / 2;
      paint.lineWidth = 2;
      paint.setLineDash([4, 3]);
      paint.beginPath();
      paint.moveTo(since, middle);
      paint.lineTo(from, middle);
      paint.stroke();
      paint.setLineDash([]);
      paint.beginPath();
      paint.moveTo(since, row.y + 4);
      paint.lineTo(since, row.y + ROW - 4);
      paint.stroke();
    }
    if (to < chart.label || from > chart.width) continue;
    paint.lineWidth = found === chart.chosen ? 2 : 1;
    paint.strokeRect(from - 1, row.y + 1, Math.max(3, to - from + 1), ROW - 2);
  }
}

// Cuts a text to fit, by an average letter width: measuring would cost more than drawing.
function cut(text, wide) {
  const most = Math.floor(wide / 6.2);
  return text.length <= most ? text : most > 1 ? `${text.slice(0, most - 1)}…` : "";
}

// Draws a timeline in place of an element's content; ``destroy()`` of the returned chart removes it.
export function drawTimeline(element, data) {
  return new Chart(element, data);
}
