/** The table of jobs, for the overview and the list of all. */

import { badge, bar, h, setBadge, setText } from "./dom.js";
import { between, clock, to, whole } from "./format.js";
import { link, table } from "./table.js";

const TURNS = ["completed", "failed", "cancelled", "in_flight"]; // waiting turns are no progress

/** Return a bar of a job's turns by state, with numbers. */
export function progress() {
  const shown = bar("Turns");
  const numbers = h("span", { class: "numbers" });
  return {
    node: h("div", { class: "progress" }, shown.node, numbers),
    update({ progress: { turns } }) {
      shown.update(Object.fromEntries(TURNS.map((kind) => [kind.replace("_", " "), turns[kind]])), turns.total);
      const ended = turns.completed + turns.failed + turns.cancelled;
      setText(numbers, `${whole(ended)} of ${whole(turns.total)}${failures(turns)}`);
    },
  };
}

const failures = ({ failed }) => (failed ? `, ${whole(failed)} failed` : "");

/** Return a cell with a state. */
export function stateCell(row) {
  const node = badge(row.state);
  return { node, update: ({ state }) => setBadge(node, state) };
}

/** Return a cell with a job's state and the number of its turns that wait for a person. */
function jobStateCell(row) {
  const node = badge(row.state);
  const awaited = h("span", { class: "awaits" });
  return {
    node: h("span", { class: "line" }, node, awaited),
    update({ state, progress: { turns } }) {
      setBadge(node, state);
      setText(awaited, turns.awaited ? `${whole(turns.awaited)} awaited` : "");
    },
  };
}

function conversations({ progress: { conversations: all } }) {
  return `${whole(all.completed + all.failed + all.cancelled)} of ${whole(all.total)}${failures(all)}`;
}

/** Return the table. */
export function jobsTable(caption) {
  return table({
    caption,
    empty: "No jobs yet. Post one, or run: roundhouse submit job.yaml",
    keyOf: (job) => job.id,
    columns: [
      { title: "Job", make: link((job) => to("jobs", job.id), (job) => job.name), kind: "name" },
      { title: "State", make: jobStateCell },
      { title: "Turns", make: progress },
      { title: "Conversations", text: conversations, kind: "number" },
      { title: "Took", text: (job) => between(job.started_at, job.finished_at), kind: "number" },
      { title: "Posted", text: (job) => clock(job.created_at), kind: "number" },
      { title: "Key", text: (job) => job.key ?? "", isOptional: true },
    ],
  });
}
