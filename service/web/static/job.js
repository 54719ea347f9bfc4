/** A job: its progress, and its conversations, a page at a time. */

import { ask, download, follow } from "./api.js";
import { badge, bar, facts, folded, h, keyed, setBadge, setText } from "./dom.js";
import { between, clock, plural, pretty, roundOf, seconds, short, to, whole } from "./format.js";
import { glossary } from "./glossary.js";
import { timelineNode } from "./job_timeline.js";
import { progress } from "./jobs_table.js";
import { subscribe } from "./live.js";
import { problemNode, showing } from "./problem.js";
import { failureOf } from "./reasons.js";
import { link, table } from "./table.js";

const STATES = ["queued", "running", "completed", "failed", "cancelled"];
const AWAITED = "awaited"; // not a state of the service: a person is to speak
const TYPING_MS = 300; // pause in typing before a filter is sent
const FIRST_DOWN = new Set(["turns", "took", "tokens"]); // these sort with the largest first
const MODES = {
  rounds: "in rounds, each agent after those that it waits for",
  free: "in the order in which models are free",
  led: "as the leader chooses",
};
const VIEWS = { own: "each turn as a message", shared: "the discussion as one text" };
const IS_OPEN = new Set(["queued", "running"]);

/** Show the view. */
export function open(root, [id], title) {
  const heading = h("h1", {}, "Job");
  const state = badge("queued");
  const cancel = h("button", { type: "button", class: "danger", hidden: true }, "Cancel the job");
  const head = headOf(id);
  const faults = h("div"); // errors of actions
  const trouble = h("div"); // errors of the followed stream
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  const saves = ["json", "jsonl", "csv"].map((kind) => h("button", { type: "button", disabled: true, onclick: () => showing(faults, () =>
    download(`${path}/result?format=${kind}`, `${heading.textContent}.${kind}`)) }, kind.toUpperCase()));
  const again = h("a", { class: "button", href: to("post", id) }, "Post as new");
  const failed = h("a", { class: "button", href: to("post", id, "failed"), hidden: true }, "Post the failed ones again");
  const definition = definitionNode(path);
  const timeline = timelineNode(`/v1/jobs/${encodeURIComponent(id)}`);
  const waits = h("ul", { class: "notes", "aria-label": "What it waits for", hidden: true });
  const pages = pager((query) => follow(
    `/v1/jobs/${encodeURIComponent(id)}/overview/events?${query}`, update, refuse,
  ));
  const conversations = conversationsTable(id, pages.sort);
  const shown = h("div", { hidden: true });
  cancel.addEventListener("click", () => window.confirm("Cancel this job? What was said is kept.")
    && showing(faults, () => ask(`/v1/jobs/${encodeURIComponent(id)}/cancel`, { method: "POST" })));
  root.append(
    h("nav", { class: "path", "aria-label": "Where this is" }, h("a", { href: "#/jobs" }, "Jobs")),
    h("div", { class: "head" }, heading, state, cancel), faults, trouble, shown,
  );
  shown.append(
    waits, h("div", { class: "tools" }, again, failed, h("span", { class: "beside" }, "Result"), ...saves),
    head.node, definition.node, timeline.node, pages.node, conversations.node,
    glossary("Awaited", "Ready", "Pending", "In flight"),
  );
  let newest = null;
  let heads = [];
  const leave = subscribe(({ status }) => {
    heads = status.heads.ready.filter((each) => each.job === id);
    tellWaits();
  });
  function tellWaits() {
    if (!newest) return;
    const isIdle = IS_OPEN.has(newest.state) && newest.progress.turns.in_flight === 0;
    const reasons = [
      ...newest.waits_for.map((text) => `It waits: ${text}.`),
      ...(isIdle ? heads.map((each) => `Its turns wait for ${each.waits_for}.`) : []),
      ...newest.given_up.map((each) => `${each.path} ran out of time too often, and is not tried from ${each.since.agent} in ${roundOf(each.since.round)} of ${each.since.conversation} on.`),
    ];
    waits.hidden = reasons.length === 0;
    keyed(waits, [...new Set(reasons)], (text) => text, (text) => ({ node: h("li", {}, text), update() {} }));
  }
  function refuse(problem) {
    if (problem.status === 404) {
      setText(heading, "There is no such job");
      state.hidden = true;
      shown.hidden = true;
    } else trouble.replaceChildren(problemNode(problem));
  }
  function update({ job, page }) {
    trouble.replaceChildren();
    shown.hidden = false;
    newest = job;
    tellWaits();
    setText(heading, job.name);
    title(job.name);
    setBadge(state, job.state);
    cancel.hidden = !IS_OPEN.has(job.state);
    failed.hidden = IS_OPEN.has(job.state) || !job.progress.conversations.failed;
    for (const save of saves) save.disabled = IS_OPEN.has(job.state);
    head.update(job);
    definition.update(page.until);
    conversations.update(page.lines);
    pages.update(page, conversations);
  }
  pages.turn(1);
  return () => {
    leave();
    pages.close();
    timeline.close();
  };
}

/** Return the agents and settings of a job as posted, which never change. */
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
  const overview = facts();
  let posted = [];
  let ends = "";
  const tell = () => overview.update([...posted, ["Ends early when", ends]]);
  const node = h("section", { "aria-label": "Definition" }, overview.node, agents.node);
  ask(`${path}/document?conversations=none`).then((job) => {
    posted = [
      ["Rounds", whole(job.rounds ?? 1)],
      ["Agents speak", MODES[job.mode ?? "rounds"] ?? job.mode], ["Leader", job.leader], ["Prompts show", VIEWS[job.view ?? "own"] ?? job.view],
      ["Priority", job.priority ? whole(job.priority) : null], ["Agents", plural(job.agents.length, "agent")],
    ];
    tell();
    agents.update(job.agents);
  }, () => {}); // the followed stream reports a missing job
  return {
    node,
    update(until) {
      ends = until.join("; or ");
      tell();
    },
  };
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
  const overview = facts();
  const metadata = h("pre");
  const more = folded("Metadata", metadata);
  return {
    node: h("section", { class: "summary", "aria-label": "Progress" },
      h("div", { class: "bars" }, h("span", {}, "Turns"), turns.node, h("span", {}, "Conversations"),
        h("div", { class: "progress" }, conversations.node, numbers)),
      overview.node, more.node),
    update(job) {
      const all = job.progress.conversations;
      const { pending, awaited, ready, in_flight: flying, failed, cancelled } = job.progress.turns;
      turns.update(job);
      conversations.update({ completed: all.completed, failed: all.failed, cancelled: all.cancelled }, all.total);
      setText(numbers, `${whole(all.completed + all.failed + all.cancelled)} of ${whole(all.total)}`);
      overview.update([
        ["Id", id], ["Key", job.key], ["Posted", clock(job.created_at)],
        ["Took", between(job.started_at, job.finished_at)], ["Ended", clock(job.finished_at)],
        ["In flight", whole(flying)], ["Ready", whole(ready)], ["Pending", whole(pending)], ["Awaited of a person", awaited ? whole(awaited) : null],
        ["Failed", failed ? whole(failed) : null], ["Cancelled", cancelled ? whole(cancelled) : null],
      ]);
      more.node.hidden = Object.keys(job.metadata).length === 0;
      setText(metadata, pretty(job.metadata));
    },
  };
}

function stateOf(row) {
  const node = badge(row.state);
  const awaited = h("span", { class: "awaits" });
  return {
    node: h("span", { class: "line" }, node, awaited),
    update({ state, awaits }) {
      setBadge(node, state);
      setText(awaited, awaits.length ? `awaits ${awaits.join(", ")}` : "");
    },
  };
}

function conversationsTable(id, sort) {
  return table({
    caption: "Conversations",
    empty: "None that fits.",
    keyOf: (row) => row.id,
    sort,
    columns: [
      { title: "Conversation", make: link((row) => to("jobs", id, row.id), (row) => row.id), kind: "name", order: "position" },
      { title: "State", make: stateOf, order: "state" },
      { title: "Prompt", text: (row) => row.prompt, kind: "prompt" },
      { title: "Last words", text: (row) => (row.words ? `${row.agent}: ${row.words}` : ""), kind: "prompt", order: "words" },
      { title: "Ended by", text: (row) => row.ended_by || failureOf(row.reason, row.detail), kind: "because" },
      { title: "Turns", text: (row) => whole(row.turns), kind: "number", order: "turns" },
      { title: "Took", text: (row) => seconds(row.took_s), kind: "number", order: "took" },
      { title: "Tokens", text: (row) => (row.tokens ? short(row.tokens) : ""), kind: "number", order: "tokens" },
    ],
  });
}

/** Return the filter of state, text, order and page; `watch(query)` follows it and returns a function to stop. */
function pager(watch) {
  let page = 1;
  let order = "position";
  let isDescending = false;
  let stop = () => {};
  let typing = 0;
  const state = h("select", { id: "conversation-state", onchange: () => turn(1) }, h("option", { value: "" }, "all"),
    ...[...STATES, AWAITED].map((each) => h("option", { value: each }, each)));
  const text = h("input", {
    id: "conversation-text", type: "search", placeholder: "words, or variable=value", maxlength: "200", oninput: () => {
      clearTimeout(typing);
      typing = setTimeout(() => turn(1), TYPING_MS);
    },
  });
  const before = h("button", { type: "button", disabled: true, onclick: () => turn(page - 1) }, "Previous");
  const after = h("button", { type: "button", disabled: true, onclick: () => turn(page + 1) }, "Next");
  const note = h("span", { class: "beside", role: "status" });
  function turn(number) {
    stop();
    page = number;
    const query = new URLSearchParams({ page, order, descending: isDescending });
    if (state.value === AWAITED) query.set("awaited", "true");
    else if (state.value) query.set("state", state.value);
    if (text.value.trim()) query.set("text", text.value.trim());
    stop = watch(query);
  }
  return {
    node: h("div", { class: "tools" }, h("label", { for: "conversation-text" }, "Find"), text,
      h("label", { for: "conversation-state" }, "State"), state, before, after, note),
    turn,
    sort(by) {
      isDescending = by === order ? !isDescending : FIRST_DOWN.has(by);
      order = by;
      turn(1);
    },
    update({ number, pages, found }, shown) {
      page = number;
      before.disabled = number <= 1;
      after.disabled = number >= pages;
      setText(note, `${plural(found, "conversation")}${pages > 1 ? `, page ${whole(number)} of ${whole(pages)}` : ""}`);
      shown.showOrder(order, isDescending);
    },
    close() {
      clearTimeout(typing);
      stop();
    },
  };
}
