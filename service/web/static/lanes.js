/** Devices and lanes: which model is on each, which comes, and what loads took. */

import { badge, bar, h, setBadge, setText } from "./dom.js";
import { seconds, to, whole } from "./format.js";
import { subscribe } from "./live.js";
import { link, table } from "./table.js";

const mib = (count) => (count === null || count === undefined ? "" : `${whole(count)} MiB`);

function memory() {
  const shown = bar("Memory of the device, MiB");
  const numbers = h("span", { class: "numbers" });
  return {
    node: h("div", { class: "progress" }, shown.node, numbers),
    update({ device_memory: seen, memory_mib: part }) {
      shown.node.hidden = !seen;
      if (seen) shown.update({ used: seen.used_mib }, seen.total_mib);
      setText(numbers, seen ? `${whole(seen.used_mib)} of ${mib(seen.total_mib)}` : mib(part));
    },
  };
}

function phase(row) {
  const node = badge(row.sick ? "sick" : row.phase);
  return { node, update: (lane) => setBadge(node, lane.sick ? "sick" : lane.phase) };
}

/** Show them. */
export function open(root) {
  const lanes = table({
    caption: "Lanes, device by device",
    empty: "No model is placed on lanes: each worker has its engine for good.",
    keyOf: (lane) => lane.lane,
    columns: [
      { title: "Lane", make: link((lane) => to("workers", lane.lane), (lane) => lane.lane), kind: "name" },
      { title: "Phase", make: phase },
      { title: "Model", text: (lane) => lane.resident.join(", ") || "none" },
      { title: "Next", text: (lane) => lane.next ?? "" },
      { title: "Swaps", text: (lane) => whole(lane.swaps), kind: "number" },
      { title: "Last loads", text: (lane) => Object.entries(lane.load_s).map(([model, s]) => `${model} ${seconds(s)}`).join(", ") },
      { title: "Memory", make: memory },
      { title: "Device", text: (lane) => lane.device, kind: "wide id" },
      { title: "Measured", text: (lane) => Object.entries(lane.measured_mib).map(([model, n]) => `${model} ${mib(n)}`).join(", "), kind: "wide" },
      { title: "Because", text: (lane) => [lane.sick ?? lane.because, lane.barred.length ? `barred: ${lane.barred.join(", ")}` : ""].filter(Boolean).join("; "), kind: "because" },
    ],
  });
  root.append(h("h1", {}, "Devices and lanes"), lanes.node);
  return subscribe((frame) => lanes.update(frame.status.lanes));
}
