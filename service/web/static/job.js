/** A job: how far it is, and its conversations, a page at a time. */

import { ask, download, follow } from "./api.js";
import { bar, badge, facts, folded, h, setBadge, setText } from "./dom.js";
import { between, clock, plural, pretty, to, whole } from "./format.js";
import { glossary } from "./glossary.js";
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
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  const saves = ["json", "jsonl", "csv"].map((kind) => h("button", { type: "button", disabled: true, onclick: () => showing(faults, () =>
    download(`${path}/result?format=${kind}`, `${heading.textContent}.${kind}`)) }, kind.toUpperCase()));
  const again = h("a", { class: "button", href: to("post", id) }, "Post as new");
  const failed = h("a", { class: "button", href: to("post", id, "failed"), hidden: true }, "Post the failed ones again");
  const definition = definitionNode(path);
  const timeline = timelineNode(`/v1/jobs/${encodeURIComponent(id)}`);
  const conversations = conversationsTable(id);
  const pages = pager((query) => follow(
    `/v1/jobs/${encodeURIComponent(id)}/overview/events?${query}`, update, (problem) => trouble.replaceChildren(problemNode(problem)),
  ));
  cancel.addEventListener("click", () => window.confirm("Cancel this job? What was said is kept.")
    && showing(faults, () => ask(`/v1/jobs/${encodeURIComponent(id)}/cancel`, { method: "POST" })));
  root.append(
    h("nav", { class: "path", "aria-label": "Where this is" }, h("a", { href: "#/jobs" }, "Jobs")),
    h("div", { class: "head" }, heading, state, cancel), faults, trouble,
    h("div", { class: "tools" }, again, failed, h("span", { class: "beside" }, "Result"), ...saves),
    head.node, definition.node, timeline.node, pages.node, conversations.node,
    glossary("Ready", "Pending", "In flight"),
  );
  function update({ job, conversations: rows, next_after: next }) {
    trouble.replaceChildren();
    setText(heading, job.name);
    title(job.name);
    setBadge(state, job.state);
    cancel.hidden = !IS_OPEN.has(job.state);
    failed.hidden = IS_OPEN.has(job.state) || !job.progress.conversations.failed;
    for (const save of saves) save.disabled = IS_OPEN.has(job.state);
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

/** Return who speaks in a job, and how: as it was posted, which never changes. */
function definitionNode(path) {
  const agents = table({
    caption: "Agents",
    empty: "",
    keyOf: (agent) => agent.id,
    columns: [
      { title: "Agent", text: (agent) => agent.id, kind: "name" },
      { title: "Model", text: (agent) => agent.model },
      { title: "System prompt", text: (agent) => agent.system ?? "", kind: "prompt" },
      { title: "Speaks after", text: (agent) => (agent.speak_after_within_round ?? []).join(", "), says: "those of its round that it waits for, and hears" },
      { title: "Parameters", text: (agent) => settingsOf(agent), kind: "prompt" },
    ],
  });
  const told = facts();
  const node = h("section", { "aria-label": "Definition" }, told.node, agents.node);
  ask(`${path}/document?conversations=none`).then((job) => {
    told.update([
      ["Rounds", whole(job.rounds ?? 1)], ["Mode", job.mode ?? "rounds"], ["View", job.view ?? "turns"],
      ["Priority", job.priority ? whole(job.priority) : null], ["Agents", plural(job.agents.length, "agent")],
    ]);
    agents.update(job.agents);
  }, (problem) => node.replaceChildren(problemNode(problem)));
  return { node };
}

function settingsOf({ params, tools, validation }) {
  const parts = Object.entries(params ?? {}).map(([name, value]) => `${name}: ${JSON.stringify(value)}`);
  if (tools?.length) parts.push(plural(tools.length, "tool"));
  if (validation) parts.push(`answers held by ${Object.keys(validation)[0]}`);
  return parts.join(", ");
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
      const { pending, awaited, ready, in_flight: flying, failed, cancelled } = job.progress.turns;
      turns.update(job);
      conversations.update({ completed: all.completed, failed: all.failed, cancelled: all.cancelled }, all.total);
      setText(numbers, `${whole(all.completed + all.failed + all.cancelled)} of ${whole(all.total)}`);
      told.update([
        ["Id", id], ["Key", job.key], ["Posted", clock(job.created_at)],
        ["Took", between(job.started_at, job.finished_at)], ["Ended", clock(job.finished_at)],
        ["In flight", whole(flying)], ["Ready", whole(ready)], ["Pending", whole(pending)], ["Awaited of callers", awaited ? whole(awaited) : null],
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
      { title: "Prompt", text: (row) => row.prompt ?? "", kind: "prompt" },
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
