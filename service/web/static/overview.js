/** The first view: running work, its speed, and the newest jobs. */

import { chartsOf } from "./charts.js";
import { h, keyed, setText } from "./dom.js";
import { short, whole } from "./format.js";
import { glossary } from "./glossary.js";
import { jobsTable } from "./jobs_table.js";
import { subscribe } from "./live.js";
import { notesOf } from "./notes.js";
import { workersTable } from "./workers_table.js";

/** Show the view. */
export function open(root) {
  const tiles = h("dl", { class: "tiles" });
  const charts = chartsOf();
  const notes = notesOf();
  const workers = workersTable("Workers");
  const jobs = jobsTable("Newest jobs");
  root.append(
    h("div", { class: "head" }, h("h1", {}, "Overview"), h("a", { class: "button main", href: "#/post" }, "Post a job")),
    notes.node, tiles, charts.node, jobs.node,
    h("p", {}, h("a", { href: "#/jobs" }, "All jobs")), workers.node,
    glossary("Awaited", "Ready", "Pending", "In flight", "Slot", "Verdict", "Because"),
  );
  const leave = subscribe((frame) => {
    keyed(tiles, tilesOf(frame), ([title]) => title, tile);
    notes.update(frame);
    if (frame.jobs) jobs.update(frame.jobs);
    workers.update(frame.status.workers);
  });
  return () => {
    leave();
    charts.close();
  };
}

function tilesOf({ status: { jobs, conversations, pools, workers, awaited }, sees_all: seesAll }) {
  const ofAll = seesAll ? "" : "of all keys"; // the tables show only the key's own
  const ready = workers.filter((worker) => worker.state === "ready").length;
  return [
    ["Jobs under way", whole(jobs), ofAll],
    ["Conversations", short(conversations.finished), `of ${short(conversations.total)} since the start${seesAll ? "" : ", of all keys"}`],
    ["In flight", whole(pools.in_flight), `turns, of ${whole(pools.capacity)} slots`],
    ["Ready", short(pools.ready), "turns wait for a slot"],
    ["Pending", short(pools.pending), "turns wait for others"],
    ["Awaited", short(awaited), "turns wait for a person", "#/awaited"],
    ["Workers", whole(ready), `of ${whole(workers.length)} ready`],
  ];
}

function tile([title, , , href]) {
  const value = h("span", { class: "value" });
  const beside = h("span", { class: "beside" });
  return {
    node: h("div", {}, h("dt", {}, href ? h("a", { href }, title) : title), h("dd", {}, value, " ", beside)),
    update([, text, more]) {
      setText(value, text);
      setText(beside, more);
    },
  };
}
