/** A worker: its engine, its requests with evidence, its log, and its incidents. */

import { ask, poll } from "./api.js";
import { badge, facts, folded, h, keyed, setBadge, setText } from "./dom.js";
import { bytes, causeOf, clock, plural, pretty, seconds, short, whole } from "./format.js";
import { glossary } from "./glossary.js";
import { subscribe } from "./live.js";
import { logNode } from "./log.js";
import { engineEvidenceOf, evidenceOf, turnLink } from "./pools.js";
import { showing } from "./problem.js";
import { table } from "./table.js";
import { verdictOf } from "./workers_table.js";

const LOOK_MS = 5000;

/** Show the view. */
export function open(root, [id], title) {
  title(id);
  const path = `/v1/workers/${encodeURIComponent(id)}`;
  const state = badge("starting");
  const because = h("p", { class: "beside" });
  const faults = h("div");
  const absent = h("p", { class: "problem", role: "alert", hidden: true }, "There is no such worker.");
  const overview = facts();
  const requests = requestsTable();
  const seen = facts();
  const engine = folded("Measurements of the engine", seen.node);
  const incidents = incidentsNode(path);
  const log = logNode(path);
  const act = (verb, question) => h("button", { type: "button", class: verb === "restart" ? "danger" : "", onclick: () => {
    if (!question || window.confirm(question)) showing(faults, () => ask(`${path}/${verb}`, { method: "POST" }));
  } }, verb[0].toUpperCase() + verb.slice(1));
  root.append(
    h("nav", { class: "path", "aria-label": "Where this is" }, h("a", { href: "#/workers" }, "Workers")),
    h("div", { class: "head" }, h("h1", {}, id), state), because,
    h("div", { class: "tools" }, act("restart", "Replace the engine now? Its turns run again."), act("drain"), act("resume")),
    faults, absent, overview.node, requests.node, engine.node, incidents.node, log.node, glossary("Because", "Incarnation", "Ready", "Slot", "Verdict"),
  );
  const leave = subscribe(({ turns, status: { workers, lanes } }) => {
    const worker = workers.find((each) => each.id === id);
    absent.hidden = Boolean(worker);
    if (!worker) return;
    setBadge(state, worker.state);
    setText(because, causeOf(worker));
    overview.update(factsOf(worker, lanes.find((each) => each.lane === id)));
    requests.update(worker.requests.map((request) => ({ turn: turns[request.job_name], ...request })));
    engine.node.hidden = worker.requests.length === 0;
    if (worker.requests.length) seen.update(engineEvidenceOf(worker.requests[0].evidence));
  });
  return () => {
    leave();
    incidents.close();
    log.close();
  };
}

function factsOf(worker, lane) {
  const ms = (count) => count.toFixed(count < 1 ? 2 : 1);
  const pace = (spread) => spread && `${ms(spread.middle)} ms a token (${ms(spread.least)} to ${ms(spread.most)})`;
  const { kv, pace: { prefill_ms: prefill, decode_ms: decode } } = worker;
  return [
    ["Model", worker.model], ["Engine", worker.engine],
    ["Slots", `${whole(worker.slots.in_use)} of ${whole(worker.slots.total)}${worker.slots.held ? `, ${whole(worker.slots.held)} held for agents that come back` : ""}`], ["Fewer slots", worker.slots_because],
    ["Tokens/s", short(worker.tokens_per_s)], ["Verdict", verdictOf(worker)],
    ["Incarnation", worker.incarnation], lane ? ["Swaps", whole(lane.swaps)] : ["Restarts", whole(worker.restarts)],
    ["Process", worker.pid], ["Port", worker.port], ["Last exit", worker.last_exit?.text],
    ["Reads", pace(prefill)], ["Writes", pace(decode)],
    ["KV cache", kv && `${short(kv.used)} used, ${short(kv.reserved)} reserved of ${short(kv.budget)} tokens`],
    ["Ignores", worker.ignored?.length ? worker.ignored.join(", ") : null],
    ["Weights", worker.weight_version === null ? null : `version ${worker.weight_version}`],
  ];
}

function requestsTable() {
  return table({
    caption: "Requests in flight, the longest silence first",
    empty: "Nothing is in flight.",
    keyOf: (request) => request.id,
    columns: [
      { title: "Turn", make: (first) => ({ node: turnLink(first), update() {} }) },
      { title: "Verdict", make: (first) => {
        const node = badge(first.verdict);
        return { node, update: (request) => setBadge(node, request.verdict) };
      } },
      { title: "Evidence", text: (request) => evidenceOf(request.evidence), kind: "because" },
      { title: "Held", text: (request) => seconds(request.held_s), kind: "number" },
    ],
  });
}

function incidentsNode(path) {
  const list = h("ol", { class: "incidents" });
  const note = h("p", { class: "empty" });
  const close = poll(async () => {
    const { incidents } = await ask(`${path}/incidents`);
    setText(note, incidents.length ? "" : "No engine of this worker has broken.");
    keyed(list, incidents, (each) => `${each.incarnation} ${each.at}`, incidentNode);
    return LOOK_MS;
  }, (problem) => setText(note, problem.message));
  return { node: h("section", { "aria-labelledby": "incidents" }, h("h2", { id: "incidents" }, "Incidents"), list, note), close };
}

function incidentNode(first) {
  const reason = badge(first.reason);
  const note = h("span", { class: "beside" });
  const finding = h("p");
  const more = facts();
  const tail = h("pre", { tabindex: "0", "aria-label": "Last lines" });
  return {
    node: h("li", {}, h("p", { class: "line" }, reason, note), finding, folded("Evidence", more.node, tail).node),
    update(incident) {
      setBadge(reason, incident.reason);
      setText(note, `${clock(incident.at)}, incarnation ${incident.incarnation}`);
      setText(finding, [incident.because, incident.finding].filter(Boolean).join("; "));
      more.update([
        ["Exit", incident.exit?.text], ["Peak memory", bytes(incident.exit?.max_rss_bytes)], ["Verdict", incident.verdict],
        ["Model", incident.model], ["Device", incident.device],
        ["In flight", incident.in_flight.length ? incident.in_flight.map((each) => each.job_name || each.id).join(", ") : null],
        ["Processes", incident.kernel.processes.map((each) => `${each.name} ${each.pid} (${each.state})`).join(", ")],
        ["Pools", incident.pools && pretty(incident.pools)],
        ["Lines", plural(incident.stderr_tail.length + incident.stdout_tail.length, "line")],
      ]);
      setText(tail, [...incident.stdout_tail, ...incident.stderr_tail].join("\n"));
    },
  };
}
