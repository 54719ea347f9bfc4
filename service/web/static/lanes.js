/** Devices and lanes: memory in use, the model on each lane, the next one, and the times of loads. */

import { badge, bar, facts, h, setBadge, setText } from "./dom.js";
import { causeOf, seconds, to, whole } from "./format.js";
import { subscribe } from "./live.js";
import { link, table } from "./table.js";

const mib = (count) => (count === null || count === undefined ? "" : `${whole(count)} MiB`);

/** Show the view. */
export function open(root) {
  const devices = devicesTable();
  const lanes = lanesTable();
  const measured = facts();
  const taken = h("section", { "aria-labelledby": "taken" }, h("h2", { id: "taken" }, "Most that an engine was seen to take"), measured.node);
  root.append(h("h1", {}, "Devices and lanes"), devices.node, lanes.node, taken);
  return subscribe(({ status: { lanes: all } }) => {
    devices.node.hidden = all.length === 0;
    devices.update(devicesOf(all));
    lanes.update(all);
    const models = Object.entries(all[0]?.measured_mib ?? {}); // the same in every lane
    taken.hidden = models.length === 0;
    measured.update(models.map(([model, count]) => [model, mib(count)]));
  });
}

/** Return each device once, with its lanes. */
function devicesOf(lanes) {
  const devices = new Map();
  for (const lane of lanes) {
    const known = devices.get(lane.device);
    if (known) known.lanes.push(lane);
    else devices.set(lane.device, { device: lane.device, memory: lane.device_memory, sick: lane.sick, lanes: [lane] });
  }
  return [...devices.values()];
}

function devicesTable() {
  return table({
    caption: "Devices",
    empty: "No device.",
    keyOf: (row) => row.device,
    columns: [
      { title: "Device", text: (row) => row.device, kind: "name" },
      { title: "Memory", make: memory },
      { title: "State", make: (first) => stateOf(first, (row) => (row.sick ? "sick" : "in use")) },
      { title: "Models", text: (row) => row.lanes.flatMap((lane) => lane.resident).join(", ") || "none" },
      { title: "Lanes", text: (row) => whole(row.lanes.length), kind: "number" },
      { title: "Because", text: (row) => row.sick ?? "", kind: "because" },
    ],
  });
}

function lanesTable() {
  return table({
    caption: "Lanes, device by device",
    empty: "No model is placed on lanes: each worker keeps its engine.",
    keyOf: (lane) => lane.lane,
    columns: [
      { title: "Lane", make: link((lane) => to("workers", lane.lane), (lane) => lane.lane), kind: "name" },
      { title: "Phase", make: (first) => stateOf(first, (lane) => (lane.sick ? "sick" : lane.phase)) },
      { title: "Model", text: (lane) => lane.resident.join(", ") || "none" },
      { title: "Next", text: (lane) => lane.next ?? "" },
      { title: "Swaps", text: (lane) => whole(lane.swaps), kind: "number" },
      { title: "Because", text: because, kind: "because" },
      { title: "Last loads", text: (lane) => Object.entries(lane.load_s).map(([model, s]) => `${model} ${seconds(s)}`).join(", "), kind: "because" },
      { title: "Part", text: (lane) => mib(lane.memory_mib), kind: "number" },
      { title: "Device", text: (lane) => lane.device, kind: "id" },
    ],
  });
}

function because(lane) {
  const barred = lane.barred.length ? `barred: ${lane.barred.join(", ")}` : "";
  return [causeOf({ ...lane, because: lane.sick ?? lane.because }), barred].filter(Boolean).join("; ");
}

function stateOf(first, read) {
  const node = badge(read(first));
  return { node, update: (row) => setBadge(node, read(row)) };
}

function memory() {
  const shown = bar("Memory of the device, MiB");
  const numbers = h("span", { class: "numbers" });
  return {
    node: h("div", { class: "progress" }, shown.node, numbers),
    update({ memory: seen }) {
      shown.node.hidden = !seen;
      if (seen) shown.update({ used: seen.used_mib }, seen.total_mib);
      setText(numbers, seen ? `${whole(seen.used_mib)} of ${mib(seen.total_mib)}` : "cannot be looked at");
    },
  };
}
