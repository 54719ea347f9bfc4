/** The three pools: turns that wait for others, turns that wait for a slot and why, and turns on a slot. */

import { badge, h, keyed, setBadge, setText } from "./dom.js";
import { causeOf, plural, roundOf, seconds, to, whole } from "./format.js";
import { glossary } from "./glossary.js";
import { subscribe } from "./live.js";

/** Show the view. */
export function open(root) {
  const pending = pool("Pending", "wait for other turns");
  const ready = pool("Ready", "wait for a slot");
  const flying = pool("In flight", "on a slot");
  const people = h("a", { href: "#/awaited" });
  const awaited = h("p", { hidden: true }, people);
  root.append(h("h1", {}, "Pools"), awaited, h("div", { class: "pools" }, pending.node, ready.node, flying.node), glossary("Pending", "Ready", "In flight"));
  return subscribe(({ turns, status: { pools, heads, workers, awaited: count } }) => {
    awaited.hidden = !count;
    setText(people, `${plural(count, "turn")} awaited of a person`);
    pending.update(pools.pending, "", heads.pending, headOf, keyOfHead);
    ready.update(pools.ready, "", heads.ready, headOf, keyOfHead);
    const requests = workers.flatMap((worker) => worker.requests.map((request) => ({ worker: worker.id, turn: turns[request.job_name], ...request })));
    const capacity = `, of ${plural(pools.capacity, "slot")}`;
    flying.update(pools.in_flight, capacity, requests, requestOf, (each) => `${each.worker} ${each.id}`);
  });
}

const keyOfHead = (head) => JSON.stringify([head.job, head.conversation, head.agent, head.round]);

function pool(title, what) {
  const count = h("span", { class: "value" });
  const beside = h("span", { class: "beside" });
  const list = h("ol");
  const rest = h("p", { class: "empty" });
  const id = `pool-${title.replaceAll(" ", "-")}`;
  return {
    node: h("section", { "aria-labelledby": id }, h("h2", { id }, title), h("p", {}, count, " ", beside), list, rest),
    update(total, more, rows, make, keyOf) {
      setText(count, whole(total));
      setText(beside, `${what}${more}`);
      keyed(list, rows, keyOf, make);
      setText(rest, total > rows.length ? `and ${whole(total - rows.length)} more` : "");
    },
  };
}

function headOf(first) {
  const waits = h("span", { class: "waits" });
  const name = h("a", { href: to("jobs", first.job, first.conversation) }, `${first.name} / ${first.conversation}`);
  const who = h("span", { class: "who" }, `${first.agent}, ${roundOf(first.round)}, ${first.model}`);
  return {
    node: h("li", {}, name, who, waits),
    update: (head) => setText(waits, `waits for ${causeOf({ because: countedFromOne(head.waits_for), next_at: head.next_at })}`),
  };
}

function requestOf(first) {
  const state = badge(first.verdict);
  const note = h("span", { class: "waits" });
  const worker = h("a", { href: to("workers", first.worker) }, first.worker);
  return {
    node: h("li", {}, turnLink(first), h("span", { class: "who" }, worker, " ", state), note),
    update(request) {
      setBadge(state, request.verdict);
      setText(note, `${evidenceOf(request.evidence)}, on its slot for ${seconds(request.held_s)}`);
    },
  };
}

/** Return the name of a request, as a link to its conversation if it is a turn of a job. */
export function turnLink({ id, job_name: name, turn }) {
  if (!turn) return h("span", { class: "name" }, name || `request ${id}`);
  const [job, conversation, agent, round] = turn;
  const jobName = name.slice(0, -`/${conversation}/${agent}/${round}`.length);
  return h("a", { class: "name", href: to("jobs", job, conversation) }, `${jobName} / ${conversation}: ${agent}, ${roundOf(round)}`);
}

/** Return the evidence of a verdict from the request itself. */
export function evidenceOf(evidence) {
  const parts = [];
  if (evidence.output_tokens) parts.push(plural(evidence.output_tokens, "token"));
  else if (evidence.prompt_tokens) parts.push(`reads ${whole(evidence.prompt_tokens_done ?? 0)} of ${plural(evidence.prompt_tokens, "token")}`);
  else parts.push("reads its prompt");
  parts.push(`silent ${seconds(evidence.silent_s)}${evidence.limit_s === null ? "" : ` of ${seconds(evidence.limit_s)}`}`);
  return parts.join(", ");
}

/** Return the evidence from the whole engine: counters, processes and log. */
export function engineEvidenceOf(evidence) {
  const ago = (at) => (at === null ? "never" : `${seconds(at)} ago`);
  return [
    ["Counters", evidence.counters], ["Counters rose", evidence.counters && ago(evidence.counters_rose_s)],
    ["CPU", evidence.cpu_percent === null ? null : `${Math.round(evidence.cpu_percent)} %`], ["Log grew", ago(evidence.log_grew_s)],
  ];
}

/** Return the service's words with the round counted from 1. */
const countedFromOne = (text) => text.replace(/\bround (\d+)$/, (_, round) => roundOf(Number(round)));
