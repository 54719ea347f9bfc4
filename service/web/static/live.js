/** The snapshot that all views share: one stream for the page, told to whoever has subscribed. */

import { follow, listener } from "./api.js";

const KEPT = 120; // points of the curve: two minutes
const subscribers = new Set();
let newest = null;
let stop = null;
export const tokensPerSecond = [];

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
    tokensPerSecond.push(frame.status.workers.reduce((sum, worker) => sum + worker.tokens_per_s, 0));
    if (tokensPerSecond.length > KEPT) tokensPerSecond.shift();
    for (const tell of subscribers) tell(frame);
  }, (problem) => problem.status !== 401 && listener.down(problem.message, null));
}
