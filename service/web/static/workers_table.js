/** The table of workers. */

import { badge, bar, h, setBadge, setText } from "./dom.js";
import { causeOf, short, to, whole } from "./format.js";
import { stateCell } from "./jobs_table.js";
import { link, table } from "./table.js";

function slots() {
  const shown = bar("Slots");
  const numbers = h("span", { class: "numbers" });
  return {
    node: h("div", { class: "progress" }, shown.node, numbers),
    update({ slots: { in_use: used, total } }) {
      shown.update({ used }, total);
      setText(numbers, `${whole(used)} of ${whole(total)}`);
    },
  };
}

/** Return the verdict on a worker's requests; an engine that takes no requests is not idle. */
export const verdictOf = ({ verdict, state }) => verdict ?? (["ready", "draining"].includes(state) ? "idle" : "none");

function verdict(row) {
  const node = badge(verdictOf(row));
  return { node, update: (worker) => setBadge(node, verdictOf(worker)) };
}

/** Return the table. */
export function workersTable(caption) {
  return table({
    caption,
    empty: "No workers.",
    keyOf: (worker) => worker.id,
    columns: [
      { title: "Worker", make: link((worker) => to("workers", worker.id), (worker) => worker.id), kind: "name" },
      { title: "State", make: stateCell },
      { title: "Slots", make: slots },
      { title: "Tokens/s", text: (worker) => short(worker.tokens_per_s), kind: "number" },
      { title: "Verdict", make: verdict },
      { title: "Restarts", text: (worker) => whole(worker.restarts), kind: "number" },
      { title: "Model", text: (worker) => worker.model },
      { title: "Because", text: causeOf, kind: "because" },
    ],
  });
}
