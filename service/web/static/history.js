/** All jobs, a page at a time, by their states. */

import { ask } from "./api.js";
import { h } from "./dom.js";
import { jobsTable } from "./jobs_table.js";
import { watching } from "./problem.js";

const STATES = ["queued", "running", "completed", "completed_with_failures", "failed", "cancelled"];
const A_PAGE = 50;
const LOOK_MS = 30_000; // a page of 50 jobs costs the service some 10 ms

/** Show the view. */
export function open(root) {
  const jobs = jobsTable("Jobs, the newest first");
  const state = h("select", { id: "state", onchange: () => turn([null]) }, h("option", { value: "" }, "all"),
    ...STATES.map((each) => h("option", { value: each }, each.replaceAll("_", " "))));
  const newer = h("button", { type: "button", onclick: () => turn(cursors.slice(0, -2)) }, "Newer");
  const older = h("button", { type: "button", onclick: () => turn(cursors) }, "Older");
  const faults = h("div");
  let cursors = [null]; // cursors of the pages up to the shown one, and of the next
  let stop = () => {};

  function turn(kept) {
    stop();
    const query = new URLSearchParams({ limit: A_PAGE });
    if (state.value) query.set("state", state.value);
    if (kept.at(-1)) query.set("cursor", kept.at(-1));
    stop = watching(faults, LOOK_MS, () => ask(`/v1/jobs?${query}`), (page) => {
      jobs.update(page.jobs);
      cursors = [...kept, page.next_cursor];
      newer.disabled = cursors.length <= 2;
      older.disabled = page.next_cursor === null;
    });
  }

  root.append(h("h1", {}, "Jobs"),
    h("div", { class: "tools" }, h("label", { for: "state" }, "State"), state, newer, older), faults, jobs.node);
  turn([null]);
  return () => stop();
}
