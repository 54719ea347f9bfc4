/** Problems: engines, the store, tool servers, and conversations that no node has claimed. */

import { h, keyed, setText } from "./dom.js";
import { causeOf } from "./format.js";

const BROKEN = new Set(["failed", "backoff"]);

/** Whether an engine is gone or an attached server is missing; our own engines take time to start. */
function isDown({ state, engine, because }) {
  return BROKEN.has(state) || (state === "starting" && engine === "attached" && because.includes("; not ready: "));
}

/** Return the list; it is hidden while all is well. */
export function notesOf() {
  const node = h("ul", { class: "notes", "aria-label": "What is amiss" });
  return {
    node,
    update({ status }) {
      const notes = [
        ...(status.store.trouble ? [`The store: ${status.store.trouble}`] : []),
        ...status.workers.filter(isDown)
          .map((worker) => `${worker.id} of ${worker.model} is ${worker.state}: ${causeOf(worker)}`),
        ...status.tool_servers.filter((server) => server.trouble)
          .map((server) => `The tool server ${server.name} of ${server.model}: ${server.trouble}`),
        ...Object.values(status.unclaimed).map((text) => `Claimed by no node, ${text}`),
        ...status.lanes.filter((lane) => lane.sick).map((lane) => `${lane.lane} is left alone: ${lane.sick}`),
      ];
      node.hidden = notes.length === 0;
      keyed(node, notes, (note) => note, (note) => {
        const line = h("li", {}, note);
        return { node: line, update: (text) => setText(line, text) };
      });
    },
  };
}
