/** A job: how far it is, and its conversations, a page at a time. */

import { ask, follow } from "./api.js";
import { bar, badge, facts, folded, h, setBadge, setText } from "./dom.js";
import { between, clock, pretty, to, whole } from "./format.js";
import { timelineNode } from "./job_timeline.js";
import { progress, stateCell } from "./jobs_table.js";
import { problemNode, showing } from "./problem.js";
import { link, table } from "./table.js";

const STATES = ["queued", "running", "completed", "failed", "cancelled"];
const IS_OPEN = new Set(["queued", "running"]);

/** Show it. */
export function open(root, [id], title) {
  const heading = h("h1", {}, "Job");
  const state = badge("queued");
  const cancel = h("button", { type: "button", class: "danger", hidden: true }, "Cancel the job");
  const head = headOf(id);
  const faults = h("div"); // of what was asked of the job
  const trouble = h("div"); // of what is followed
  const timeline = timelineNode(`/v1/jobs/${encodeURIComponent(id)}`);
  const conversations = conversationsTable(id);
  const pages = pager((query) => follow(
    `/v1/jobs/${encodeURIComponent(id)}/overview/events?${query}`, update, (problem) => trouble.replaceChildren(problemNode(problem)),
  ));
  cancel.addEventListener("click", () => window.confirm("Cancel this job? What was said is kept.")
    && showing(faults, () => ask(`/v1/jobs/${encodeURIComponent(id)}/cancel`, { method: "POST" })));
  root.append(
    h("nav", { class: "path", "aria-label": "Where this is" }, h("a", { href: "#/jobs" }, "Jobs")),
    h("div", { class: "head" }, heading, state, cancel), faults, trouble, head.node, timeline.node, pages.node, conversations.node,
  );
  function update({ job, conversations: rows, next_after: next }) {
    trouble.replaceChildren();
    setText(heading, job.name);
    title(job.name);
    setBadge(state, job.state);
    cancel.hidden = !IS_OPEN.has(job.state);
    head.update(job);
    conversations.update(rows);
    pages.update(next);
  }
  pages.turn([-1]);
  return () => {
    pages.close();
    timeline.close();
  };
}

function headOf(id) {
  const turns = progress();
  const conversations = bar("Conversations");
  const numbers = h("span", { class: "numbers" });
  const told = facts();
  const metadata = h("pre");
  const more = folded("Metadata", metadata);
  return {
    node: h("section", { class: "summary", "aria-label": "Progress" },
      h("div", { class: "bars" }, h("span", {}, "Turns"), turns.node, h("span", {}, "Conversations"),
        h("div", { class: "progress" }, conversations.node, numbers)),
      told.node, more.node),
    update(job) {
      const all = job.progress.conversations;
      const { pending, ready, in_flight: flying, failed, cancelled } = job.progress.turns;
      turns.update(job);
      conversations.update({ completed: all.completed, failed: all.failed, cancelled: all.cancelled }, all.total);
      setText(numbers, `${whole(all.completed + all.failed + all.cancelled)} of ${whole(all.total)}`);
      told.update([
        ["Id", id], ["Key", job.key], ["Posted", clock(job.created_at)],
        ["Took", between(job.started_at, job.finished_at)], ["Ended", clock(job.finished_at)],
        ["In flight", whole(flying)], ["Ready", whole(ready)], ["Pending", whole(pending)],
        ["Failed", failed ? whole(failed) : null], ["Cancelled", cancelled ? whole(cancelled) : null],
      ]);
      more.node.hidden = Object.keys(job.metadata).length === 0;
      setText(metadata, pretty(job.metadata));
    },
  };
}

function conversationsTable(id) {
  return table({
    caption: "Conversations",
    empty: "None in this state.",
    keyOf: (row) => row.id,
    columns: [
      { title: "Conversation", make: link((row) => to("jobs", id, row.id), (row) => row.id), kind: "name" },
      { title: "State", make: stateCell },
      { title: "Ended turns", text: (row) => whole(row.turns), kind: "number" },
      { title: "Reason", text: (row) => row.reason ?? "" },
    ],
  });
}

/** Return the choice of a state and of a page; `watch(query)` begins to follow one and returns how to end that. */
function pager(watch) {
  let places = [-1];
  let next = null;
  let stop = () => {};
  const state = h("select", { id: "conversation-state", onchange: () => turn([-1]) }, h("option", { value: "" }, "all"),
    ...STATES.map((each) => h("option", { value: each }, each)));
  const before = h("button", { type: "button", onclick: () => turn(places.slice(0, -1)) }, "Previous");
  const after = h("button", { type: "button", onclick: () => turn([...places, next]) }, "Next");
  const told = h("span", { class: "beside" });
  function turn(kept) {
    stop();
    places = kept;
    const query = new URLSearchParams({ after: places.at(-1) });
    if (state.value) query.set("state", state.value);
    setText(told, `page ${places.length}`);
    before.disabled = places.length === 1;
    after.disabled = true;
    stop = watch(query);
  }
  return {
    node: h("div", { class: "tools" }, h("label", { for: "conversation-state" }, "State"), state, before, after, told),
    turn,
    update(following) {
      next = following;
      after.disabled = next === null;
    },
    close: () => stop(),
  };
}
