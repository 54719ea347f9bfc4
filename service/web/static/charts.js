/** The past hour as small charts, from the service's record, so that a newly opened page has it too. */

import { ask, poll } from "./api.js";
import { h, setAttribute, setText } from "./dom.js";
import { short } from "./format.js";

const WIDTH = 600;
const HEIGHT = 60;
const HOUR_S = 3600;
const LOOK_MS = 10_000;
const [AT, TOKENS, FLYING, READY, SLOTS] = [0, 1, 2, 3, 4]; // indexes into a point
const CHARTS = [
  { title: "Tokens per second", of: TOKENS },
  { title: "Turns in flight", of: FLYING, bound: SLOTS, boundTitle: "slots" },
  { title: "Turns that wait for a slot", of: READY },
];

/** Return the charts; `close` ends their updates. */
export function chartsOf() {
  const charts = CHARTS.map(chartOf);
  let points = [];
  const close = poll(async () => {
    const { now, points: fresh } = await ask(`/v1/overview/history?after=${points.at(-1)?.[AT] ?? 0}`);
    points = [...points, ...fresh].filter((point) => point[AT] > now - HOUR_S);
    for (const chart of charts) chart.update(points, now);
    return LOOK_MS;
  });
  return { node: h("section", { class: "charts", "aria-label": "The past hour" }, ...charts.map((chart) => chart.node)), close };
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  node.append(...children);
  return node;
}

function chartOf({ title, of, bound, boundTitle }) {
  const area = svg("polygon", { class: "area" });
  const line = svg("polyline", { class: "curve-line" });
  const limit = svg("polyline", { class: "limit" });
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, area, limit, line);
  const value = h("span", { class: "value" });
  const beside = h("span", { class: "beside" });
  const top = h("span");
  const since = h("span");
  return {
    node: h("figure", { class: "chart" },
      h("figcaption", {}, h("span", { class: "title" }, title), " ", value, " ", beside),
      h("div", { class: "plot" }, h("div", { class: "scale" }, top, h("span", {}, "0")), drawing),
      h("div", { class: "axis" }, since, h("span", {}, "now"))),
    update(points, now) {
      const values = points.map((point) => point[of]);
      const bounds = bound ? points.map((point) => point[bound]) : [];
      const most = Math.max(1, ...values, ...bounds);
      const began = now - HOUR_S;
      const x = (point) => (WIDTH * (point[AT] - began)) / HOUR_S;
      const y = (number) => HEIGHT - 1 - ((HEIGHT - 2) * number) / most;
      const places = points.map((point) => `${x(point).toFixed(1)},${y(point[of]).toFixed(1)}`);
      setAttribute(line, "points", places.join(" "));
      setAttribute(area, "points", points.length ? `${x(points[0]).toFixed(1)},${HEIGHT} ${places.join(" ")} ${x(points.at(-1)).toFixed(1)},${HEIGHT}` : "");
      setAttribute(limit, "points", bound ? points.map((point) => `${x(point).toFixed(1)},${y(point[bound]).toFixed(1)}`).join(" ") : "");
      setText(top, short(most));
      setText(since, new Date(1000 * began).toLocaleTimeString("en-GB", { timeStyle: "short" }));
      setText(value, points.length ? short(values.at(-1)) : "");
      setText(beside, points.length
        ? `${bound ? `of ${short(bounds.at(-1))} ${boundTitle}, ` : ""}at most ${short(Math.max(...values))} in the past hour`
        : "the first figures come within ten seconds");
    },
  };
}
