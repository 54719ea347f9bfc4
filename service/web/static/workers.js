/** All workers. */

import { h } from "./dom.js";
import { subscribe } from "./live.js";
import { workersTable } from "./workers_table.js";

/** Show the view. */
export function open(root) {
  const workers = workersTable("All workers, in the order of the configuration");
  root.append(h("h1", {}, "Workers"), workers.node);
  return subscribe((frame) => workers.update(frame.status.workers));
}
