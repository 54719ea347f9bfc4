/** All jobs, a page at a time, by their states. */

import { ask } from "./api.js";
import { h } from "./dom.js";
import { jobsTable } from "./jobs_table.js";
import { showing } from "./problem.js";

const STATES = ["queued", "running", "completed", "completed_with_failures", "failed", "cancelled"];
const A_PAGE = 50;

/** Show them. */
export function open(root) {
  const jobs = jobsTable("Jobs, the newest first");
  const state = h("select", { id: "state", onchange: () => turn([null]) }, h("option", { value: "" }, "all"),
    ...STATES.map((each) => h("option", { value: each }, each.replaceAll("_", " "))));
  const newer = h("button", { type: "button", onclick: () => turn(cursors.slice(0, -2)) }, "Newer");
  const older = h("button", { type: "button", onclick: () => turn(cursors) }, "Older");
  const again = h("button", { type: "button", onclick: () => turn(cursors.slice(0, -1)) }, "Look again");
  const faults = h("div");
  let cursors = [null]; // of the pages up to the one that is shown, and of the next
  async function turn(kept) {
    const query = new URLSearchParams({ limit: A_PAGE });
    if (state.value) query.set("state", state.value);
    if (kept.at(-1)) query.set("cursor", kept.at(-1));
    await showing(faults, async () => {
      const page = await ask(`/v1/jobs?${query}`);
      jobs.update(page.jobs);
      cursors = [...kept, page.next_cursor];
      newer.disabled = cursors.length <= 2;
      older.disabled = page.next_cursor === null;
    });
  }
  root.append(h("h1", {}, "Jobs"),
    h("div", { class: "tools" }, h("label", { for: "state" }, "State"), state, again, newer, older), faults, jobs.node);
  turn([null]);
}
