/** The snapshot that all views share: one stream for the page, passed to all subscribers. */

import { follow, listener } from "./api.js";

const subscribers = new Set();
let newest = null;
let stop = null;

/** Call `tell` with each snapshot, the latest at once; the returned function unsubscribes. */
export function subscribe(tell) {
  subscribers.add(tell);
  if (newest) tell(newest);
  return () => subscribers.delete(tell);
}

/** Start or restart following: another key gets another snapshot. */
export function start() {
  stop?.();
  newest = null;
  stop = follow("/v1/overview/events", (frame) => {
    newest = frame;
    for (const tell of subscribers) tell(frame);
  }, (problem) => problem.status !== 401 && listener.down(problem.message, null));
}
