/** Models: the versions of their weights, and their adapters. */

import { ask, poll, Problem } from "./api.js";
import { badge, facts, h, keyed, setBadge, setText } from "./dom.js";
import { bytes, clock, seconds } from "./format.js";
import { subscribe } from "./live.js";
import { problemNode } from "./problem.js";
import { table } from "./table.js";

const LOOK_MS = 5000;
const UPDATES = 5; // of a model, the newest

/** Show them. */
export function open(root) {
  const list = h("div", { class: "models" });
  const faults = h("div");
  root.append(h("h1", {}, "Models"), faults, list);
  let updatable = new Set(); // models whose weights may change: those of vLLM
  const leave = subscribe(({ status: { workers } }) => {
    updatable = new Set(workers.filter((worker) => worker.engine === "vllm").map((worker) => worker.model));
  });
  const close = poll(async () => {
    const { data } = await ask("/v1/models");
    const names = [...new Set(data.map((entry) => entry.root))];
    const models = [];
    for (const name of names) models.push({ name, weights: updatable.has(name) ? await partOf(name, "weights") : null, adapters: await partOf(name, "adapters") });
    faults.replaceChildren();
    keyed(list, models, (model) => model.name, modelNode);
    return LOOK_MS;
  }, (problem) => faults.replaceChildren(problemNode(problem)));
  return () => {
    leave();
    close();
  };
}

/** Return what a model has of a kind, null where its engine knows no such thing. */
async function partOf(name, kind) {
  try {
    return await ask(`/v1/models/${encodeURIComponent(name)}/${kind}`);
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  }
}

function modelNode({ name }) {
  const told = facts();
  const updates = updatesTable(name);
  const adapters = adaptersTable(name);
  const changing = h("p", { class: "beside" });
  return {
    node: h("section", { "aria-label": name }, h("h2", {}, name), told.node, updates.node, changing, adapters.node),
    update({ weights, adapters: loaded }) {
      const workers = weights?.workers.map((each) => `${each.worker} ${each.version}${each.waits_for ? ` (${each.waits_for})` : ""}`);
      told.update(weights ? [
        ["Version", String(weights.version)], ["Checkpoint", weights.checkpoint], ["On workers", workers.join(", ")],
        ["Trainer's group", weights.group && `${weights.group.number}, ${weights.group.state}${weights.group.error ? `: ${weights.group.error}` : ""}`],
      ] : [["Weights", "fixed"]]);
      updates.node.hidden = !weights;
      if (weights) updates.update(weights.updates.slice(-UPDATES).reverse());
      adapters.node.hidden = !loaded;
      setText(changing, loaded?.changing ?? "");
      if (loaded) adapters.update(loaded.adapters);
    },
  };
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
      { title: "Phase", text: (update) => update.phase },
      { title: "Took", text: (update) => seconds(Object.values(update.phase_s).reduce((sum, s) => sum + s, 0)), kind: "number" },
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
      { title: "Source", text: (adapter) => adapter.source, kind: "wide because" },
    ],
  });
}
