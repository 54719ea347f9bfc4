/** Models: the versions of their weights, and their adapters. */

import { ask, poll, Problem } from "./api.js";
import { badge, facts, h, keyed, setBadge, setText } from "./dom.js";
import { bytes, clock, seconds } from "./format.js";
import { subscribe } from "./live.js";
import { problemNode } from "./problem.js";
import { table } from "./table.js";

const LOOK_MS = 5000;
const CHANGING_MS = 1000; // while weights or adapters change
const UPDATES = 5; // of a model, the newest

/** Show them. */
export function open(root) {
  const list = h("div", { class: "models" });
  const faults = h("div");
  root.append(h("h1", {}, "Models"), faults, list);
  let can = null; // which models may get other weights or adapters, loaded or not
  let close = null;
  const leave = subscribe((frame) => {
    can = frame;
    close ??= poll(look, (problem) => faults.replaceChildren(problemNode(problem))); // before that, all would seem fixed
  });
  async function look() {
    const { data } = await ask("/v1/models");
    const names = [...new Set(data.map((entry) => entry.root))];
    const models = await Promise.all(names.map(async (name) => {
      const [weights, adapters] = await Promise.all([
        can.updatable.includes(name) ? partOf(name, "weights") : null,
        can.adaptable.includes(name) ? partOf(name, "adapters") : null,
      ]);
      return { name, weights, adapters };
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

const isChanging = ({ weights, adapters }) => Boolean(weights?.update?.state === "running" || adapters?.changing);

/** Return what a model has of a kind, null where a new configuration has just taken the model away. */
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
  const behind = h("p", { class: "beside" });
  return {
    node: h("section", { "aria-label": name }, h("h2", {}, name), told.node, behind, updates.node, changing, adapters.node),
    update({ weights, adapters: loaded }) {
      told.update([
        ...(weights ? weightsOf(weights) : [["Weights", "fixed"]]),
        ["Adapters", loaded && loaded.adapters.length ? null : "none"],
      ]);
      setText(behind, weights ? behindOf(weights) : "");
      updates.node.hidden = !weights;
      if (weights) updates.update(weights.updates.slice(-UPDATES).reverse());
      adapters.node.hidden = !loaded?.adapters.length;
      setText(changing, loaded?.changing ?? "");
      if (loaded) adapters.update(loaded.adapters);
    },
  };
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
  const told = workers.filter(isBehind(version)).map((each) => `${each.worker} has version ${each.version}${each.waits_for ? ` (${each.waits_for})` : ""}`);
  return told.join("; ");
}

function took({ state, phase_s: phases }) {
  return state === "running" ? "" : seconds(Object.values(phases).reduce((sum, s) => sum + s, 0)); // of phases that are over
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
