/** The three pools: what waits for others, what waits for a slot and for what, and what is on a slot. */

import { badge, h, keyed, setBadge, setText } from "./dom.js";
import { causeOf, seconds, to, whole } from "./format.js";
import { glossary } from "./glossary.js";
import { subscribe } from "./live.js";

/** Show them. */
export function open(root) {
  const pending = pool("Pending", "wait for other turns");
  const ready = pool("Ready", "wait for a slot");
  const flying = pool("In flight", "on one");
  root.append(h("h1", {}, "Pools"), h("div", { class: "pools" }, pending.node, ready.node, flying.node), glossary("Pending", "Ready", "In flight"));
  return subscribe(({ status: { pools, heads, workers } }) => {
    pending.update(pools.pending, "", heads.pending, headOf, keyOfHead);
    ready.update(pools.ready, "", heads.ready, headOf, keyOfHead);
    const requests = workers.flatMap((worker) => worker.requests.map((request) => ({ worker: worker.id, ...request })));
    const capacity = ` of ${whole(pools.capacity)} slots`;
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
  const who = h("span", { class: "who" }, `${first.agent}, round ${first.round}, ${first.model}`);
  return {
    node: h("li", {}, name, who, waits),
    update: (head) => setText(waits, `waits for ${causeOf({ because: head.waits_for, next_at: head.next_at })}`),
  };
}

function requestOf(first) {
  const state = badge(first.verdict);
  const told = h("span", { class: "waits" });
  const worker = h("a", { href: to("workers", first.worker) }, first.worker);
  return {
    node: h("li", {}, h("span", { class: "name" }, first.job_name || `request ${first.id}`), h("span", { class: "who" }, worker, " ", state), told),
    update(request) {
      setBadge(state, request.verdict);
      setText(told, `${evidenceOf(request.evidence)}, for ${seconds(request.held_s)}`);
    },
  };
}

/** Say what a verdict rests on. */
export function evidenceOf(evidence) {
  const parts = [];
  if (evidence.output_tokens) parts.push(`${whole(evidence.output_tokens)} tokens`);
  else if (evidence.prompt_tokens) parts.push(`reads ${whole(evidence.prompt_tokens_done ?? 0)} of ${whole(evidence.prompt_tokens)} tokens`);
  else parts.push("reads");
  const limit = evidence.limit_s === null ? "" : ` of at most ${seconds(evidence.limit_s)}`;
  parts.push(`silent for ${seconds(evidence.silent_s)}${limit}`);
  if (evidence.counters) parts.push(evidence.counters);
  if (evidence.cpu_percent !== null) parts.push(`CPU ${Math.round(evidence.cpu_percent)} %`);
  if (evidence.log_grew_s !== null) parts.push(`log grew ${seconds(evidence.log_grew_s)} ago`);
  return parts.join(", ");
}
