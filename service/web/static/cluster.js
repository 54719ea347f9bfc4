/** The nodes that share the store, and the engines that span several of them. */

import { ask } from "./api.js";
import { h } from "./dom.js";
import { seconds } from "./format.js";
import { watching } from "./problem.js";
import { table } from "./table.js";

const LOOK_MS = 2_000;
const LATE_S = 5; // nodes are seen twice a second

/** Show the view. */
export function open(root) {
  const nodes = nodesTable();
  const spans = spansTable();
  const faults = h("div");
  root.append(h("h1", {}, "Cluster"), faults, nodes.node, spans.node);
  return watching(faults, LOOK_MS, look, (seen) => {
    nodes.update(seen.nodes);
    spans.node.hidden = seen.spans.length === 0;
    spans.update(seen.spans);
  });
}

async function look() {
  const [{ nodes }, { spans }] = await Promise.all([ask("/v1/nodes"), ask("/v1/spans")]);
  const names = new Map(nodes.map((node) => [node.id, placeOf(node)]));
  const parts = (node) => spans.filter((span) => span.is_running && span.members.some((member) => member.node === node.id));
  return {
    nodes: nodes.map((node) => ({ ...node, parts: parts(node) })),
    spans: spans.map((span) => ({ ...span, places: span.members.map((member) => ({ ...member, place: names.get(member.node) ?? member.address })) })),
  };
}

function placeOf(node) {
  if (node.address === null) return "this machine";
  return `${node.address.includes(":") ? `[${node.address}]` : node.address}:${node.port}`;
}

function devicesOf(node) {
  return node.parts.flatMap((span) => span.members.filter((member) => member.node === node.id))
    .flatMap((member) => member.devices).join(", ");
}

function nodesTable() {
  return table({
    caption: "Nodes",
    empty: "No node is known.",
    keyOf: (node) => node.id,
    columns: [
      { title: "Node", text: (node) => placeOf(node) + (node.is_this ? " (this)" : ""), kind: "name" },
      { title: "State", text: (node) => (node.seen_s <= LATE_S ? "seen" : `not seen for ${seconds(node.seen_s)}`) },
      { title: "Serves", text: (node) => node.models.join(", ") || "nothing" },
      { title: "Parts of", text: (node) => node.parts.map((span) => span.worker).join(", ") },
      { title: "Devices of parts", text: devicesOf },
    ],
  });
}

function spansTable() {
  return table({
    caption: "Engines over several nodes",
    empty: "No engine spans nodes.",
    keyOf: (span) => span.worker,
    columns: [
      { title: "Worker", text: (span) => span.worker, kind: "name" },
      { title: "Generation", text: (span) => String(span.generation), kind: "number" },
      { title: "State", text: (span) => (span.is_running ? "runs" : "ended") },
      { title: "Parts, the leader first", text: (span) => span.places.map((each) => each.place).join(", ") },
      { title: "Because", text: (span) => span.because ?? "", kind: "because" },
    ],
  });
}
