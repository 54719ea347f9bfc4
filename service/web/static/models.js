/** Models: the engines, memory, weights and adapters of each. */

import { ask, poll, Problem } from "./api.js";
import { badge, facts, h, keyed, setBadge, setText } from "./dom.js";
import { bytes, clock, mib, plural, seconds, to, whole } from "./format.js";
import { subscribe } from "./live.js";
import { problemNode, showing } from "./problem.js";
import { link, table } from "./table.js";

const LOOK_MS = 5000;
const CHANGING_MS = 1000; // while weights or adapters change
const UPDATES = 5; // newest weight updates shown of a model

/** Show the view. */
export function open(root) {
  const list = h("div", { class: "models" });
  const faults = h("div");
  root.append(h("h1", {}, "Models"), faults, list);
  let can = null; // the frame that lists models with changeable weights or adapters
  let close = null;
  const leave = subscribe((frame) => {
    can = frame;
    close ??= poll(look, (problem) => faults.replaceChildren(problemNode(problem))); // without a frame no model would seem changeable
  });
  async function look() {
    const { models: seen } = await ask("/v1/overview/models");
    const models = await Promise.all(seen.map(async (model) => {
      const [weights, adapters] = await Promise.all([
        can.updatable.includes(model.name) ? partOf(model.name, "weights") : null,
        can.adaptable.includes(model.name) ? partOf(model.name, "adapters") : null,
      ]);
      return { ...model, weights, adapters };
    }));
    faults.replaceChildren();
    keyed(list, models, (model) => model.name, modelNode);
    return models.some(isChanging) ? CHANGING_MS : LOOK_MS;
  }
  return () => {
    leave();
    close?.();
  };
}

const SETTLED = new Set(["ready", "stopped", "failed"]);
const isChanging = ({ engines, weights, adapters }) => Boolean(
  weights?.update?.state === "running" || adapters?.changing || engines.some((each) => !SETTLED.has(each.state)));

/** Return a model's weights or adapters; null if a reload has just removed the model. */
async function partOf(name, kind) {
  try {
    return await ask(`/v1/models/${encodeURIComponent(name)}/${kind}`);
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  }
}

function modelNode({ name }) {
  const overview = facts();
  const state = badge("stopped");
  const faults = h("div");
  const engines = enginesTable(name);
  const updates = updatesTable(name);
  const adapters = adaptersTable(name);
  const changing = h("p", { class: "beside" });
  const behind = h("p", { class: "beside" });
  const act = (verb, question) => h("button", { type: "button", onclick: () => {
    if (question && !window.confirm(question)) return;
    showing(faults, () => ask(`/v1/models/${encodeURIComponent(name)}/${verb}`, { method: "POST" }));
  } }, verb[0].toUpperCase() + verb.slice(1));
  const load = act("load");
  const unload = act("unload", `End the engines of ${name} after their requests? Turns that need it wait until it is loaded.`);
  return {
    node: h("section", { "aria-label": name }, h("div", { class: "head" }, h("h2", {}, name), state, h("div", { class: "tools acts" }, load, unload)),
      faults, overview.node, engines.node, behind, updates.node, changing, adapters.node),
    update(model) {
      const { weights, adapters: loaded } = model;
      setBadge(state, stateOf(model));
      const isAway = model.engines.every((each) => each.state === "stopped");
      load.hidden = !model.is_ours || !(isAway || model.engines.some((each) => ["stopped", "failed", "draining"].includes(each.state)));
      unload.hidden = !model.is_ours || isAway;
      overview.update(factsOf(model));
      engines.node.hidden = model.engines.length === 0;
      engines.update(model.engines);
      setText(behind, weights ? behindOf(weights) : "");
      updates.node.hidden = !weights;
      if (weights) updates.update(weights.updates.slice(-UPDATES).reverse());
      adapters.node.hidden = !loaded?.adapters.length;
      setText(changing, loaded?.changing ?? "");
      if (loaded) adapters.update(loaded.adapters);
    },
  };
}

/** Return the best state of a model's engines; without engines it is not loaded. */
function stateOf({ engines }) {
  const states = new Set(engines.map((each) => each.state));
  for (const state of ["ready", "draining", "starting", "stopping", "backoff", "failed"]) if (states.has(state)) return state;
  return "not loaded";
}

const ENGINES = { "llama-server": "llama.cpp", embedded: "llama.cpp, embedded", vllm: "vLLM", attached: "attached" };

function factsOf({ engine, file, context, slots, replicas, on_lanes: isOnLanes, is_ours: isOurs, engines, weights }) {
  const sum = (part) => engines.reduce((total, each) => total + (each[part] ?? 0), 0);
  const [host, device] = [sum("host_mib"), sum("device_mib")];
  return [
    ["Engine", ENGINES[engine] ?? engine], [isOurs ? "File" : "Server", file],
    ["Context", context ? plural(context, "token") : null], ["Slots", isOnLanes ? `${whole(slots)} a lane` : `${whole(slots)}${replicas > 1 ? ` on each of ${whole(replicas)} workers` : ""}`],
    ["Placement", isOnLanes ? "lanes: loaded when turns need it" : null],
    ["Memory", [host && `${mib(host)} of the host`, device && `${mib(device)} of devices`].filter(Boolean).join(", ")],
    ...(weights ? weightsOf(weights) : []),
  ];
}

function enginesTable(name) {
  return table({
    caption: `Engines of ${name}`,
    empty: "",
    keyOf: (each) => each.worker,
    columns: [
      { title: "Worker", make: link((each) => to("workers", each.worker), (each) => each.worker), kind: "name" },
      { title: "State", make: (first) => {
        const node = badge(first.state);
        return { node, update: (each) => setBadge(node, each.state) };
      } },
      { title: "Slots", text: (each) => `${whole(each.in_use)} of ${whole(each.slots)}`, kind: "number" },
      { title: "Memory", text: (each) => mib(each.host_mib), kind: "number", says: "of the host: what its processes have resident" },
      { title: "On devices", text: (each) => mib(each.device_mib), kind: "number" },
      { title: "Because", text: (each) => each.because, kind: "because" },
    ],
  });
}

const isBehind = (version) => (worker) => worker.version !== version || worker.waits_for;

function weightsOf({ version, checkpoint, group, workers }) {
  const behind = workers.filter(isBehind(version)).length;
  return [
    ["Version", String(version)], ["Checkpoint", checkpoint],
    ["On workers", workers.length ? `${workers.length - behind} of ${workers.length}` : "none is loaded"],
    ["Trainer's group", group && `${group.number}, ${group.state}${group.error ? `: ${group.error}` : ""}`],
  ];
}

function behindOf({ version, workers }) {
  const texts = workers.filter(isBehind(version)).map((each) => `${each.worker} has version ${each.version}${each.waits_for ? ` (${each.waits_for})` : ""}`);
  return texts.join("; ");
}

function took({ state, phase_s: phases }) {
  return state === "running" ? "" : seconds(Object.values(phases).reduce((sum, s) => sum + s, 0)); // sum of the finished phases
}

function updatesTable(name) {
  return table({
    caption: `Weight updates of ${name}`,
    empty: "No update since the service started.",
    keyOf: (update) => update.number,
    columns: [
      { title: "Version", text: (update) => String(update.version), kind: "number" },
      { title: "State", make: (first) => {
        const node = badge(first.state);
        return { node, update: (update) => setBadge(node, update.state) };
      } },
      { title: "Mode", text: (update) => update.mode },
      { title: "Phase", text: (update) => (update.state === "completed" ? "" : update.phase) },
      { title: "Took", text: took, kind: "number" },
      { title: "From", text: (update) => update.checkpoint ?? `${update.tensors} tensors` },
      { title: "Error", text: (update) => update.error ?? "", kind: "because" },
    ],
  });
}

function adaptersTable(name) {
  return table({
    caption: `Adapters of ${name}`,
    empty: "No adapters.",
    keyOf: (adapter) => adapter.name,
    columns: [
      { title: "Adapter", text: (adapter) => adapter.name },
      { title: "Loaded", text: (adapter) => (adapter.is_configured ? "configured" : clock(adapter.loaded_at)) },
      { title: "Size", text: (adapter) => bytes(adapter.size), kind: "number" },
      { title: "Workers", text: (adapter) => adapter.workers.join(", ") },
      { title: "Source", text: (adapter) => adapter.source, kind: "because" },
    ],
  });
}
