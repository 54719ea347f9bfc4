/** The first view: what runs, how fast, and the newest jobs. */

import { h, keyed, setAttribute, setText } from "./dom.js";
import { short, whole } from "./format.js";
import { glossary } from "./glossary.js";
import { jobsTable } from "./jobs_table.js";
import { subscribe, tokensPerSecond } from "./live.js";
import { notesOf } from "./notes.js";
import { workersTable } from "./workers_table.js";

const WIDTH = 240;
const HEIGHT = 36;

/** Show it. */
export function open(root) {
  const tiles = h("dl", { class: "tiles" });
  const curve = curveOf();
  const notes = notesOf();
  const workers = workersTable("Workers");
  const jobs = jobsTable("Newest jobs");
  root.append(
    h("div", { class: "head" }, h("h1", {}, "Overview"), h("a", { class: "button main", href: "#/post" }, "Post a job")),
    notes.node, h("div", { class: "now" }, tiles, curve.node), jobs.node,
    h("p", {}, h("a", { href: "#/jobs" }, "All jobs")), workers.node,
    glossary("Ready", "Pending", "In flight", "Slot", "Verdict", "Because"),
  );
  return subscribe((frame) => {
    keyed(tiles, tilesOf(frame), ([title]) => title, tile);
    curve.update(tokensPerSecond);
    notes.update(frame);
    if (frame.jobs) jobs.update(frame.jobs);
    workers.update(frame.status.workers);
  });
}

function tilesOf({ status: { jobs, conversations, pools, workers }, sees_all: seesAll }) {
  const ofAll = seesAll ? "" : "of all keys"; // the tables show the own ones alone
  const ready = workers.filter((worker) => worker.state === "ready").length;
  return [
    ["Jobs under way", whole(jobs), ofAll],
    ["Conversations", short(conversations.finished), `of ${short(conversations.total)} since the start${seesAll ? "" : ", of all keys"}`],
    ["In flight", whole(pools.in_flight), `turns, of ${whole(pools.capacity)} slots`],
    ["Ready", short(pools.ready), "turns wait for a slot"],
    ["Pending", short(pools.pending), "turns wait for others"],
    ["Workers", whole(ready), `of ${whole(workers.length)} ready`],
  ];
}

function tile([title]) {
  const value = h("span", { class: "value" });
  const beside = h("span", { class: "beside" });
  return {
    node: h("div", {}, h("dt", {}, title), h("dd", {}, value, " ", beside)),
    update([, text, more]) {
      setText(value, text);
      setText(beside, more);
    },
  };
}

function curveOf() {
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  setAttribute(drawing, "viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  setAttribute(drawing, "preserveAspectRatio", "none");
  setAttribute(drawing, "aria-hidden", "true");
  drawing.append(line);
  const told = h("figcaption");
  const top = h("span");
  return {
    node: h("figure", { class: "curve" },
      h("div", { class: "axis" }, top, h("span", {}, "tokens/s")), drawing,
      h("div", { class: "axis" }, h("span", {}, "2 min ago"), h("span", {}, "now")), told),
    update(points) {
      const most = Math.max(1, ...points);
      const step = WIDTH / 119;
      const begin = WIDTH - step * (points.length - 1);
      const places = points.map((value, place) => `${(begin + place * step).toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 4) * (value / most)).toFixed(1)}`);
      setAttribute(line, "points", places.join(" "));
      setText(top, short(most));
      setText(told, `${short(points.at(-1) ?? 0)} tokens/s, at most ${short(Math.max(0, ...points))} in the last two minutes`);
    },
  };
}
