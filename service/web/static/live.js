/** The snapshot that all views share: one stream for the page, told to whoever has subscribed. */

import { follow, listener } from "./api.js";

const subscribers = new Set();
let newest = null;
let stop = null;

/** Tell a view each snapshot, the last one at once; the function that is returned ends that. */
export function subscribe(tell) {
  subscribers.add(tell);
  if (newest) tell(newest);
  return () => subscribers.delete(tell);
}

/** Begin to follow, or begin anew: with another key there is another snapshot. */
export function start() {
  stop?.();
  newest = null;
  stop = follow("/v1/overview/events", (frame) => {
    newest = frame;
    for (const tell of subscribers) tell(frame);
  }, (problem) => problem.status !== 401 && listener.down(problem.message, null));
}
