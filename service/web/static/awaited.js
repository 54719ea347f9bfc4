/** The turns that a person is to speak, the oldest first, each with the words before it. */

import { ask } from "./api.js";
import { h, setText } from "./dom.js";
import { clock, plural, roundOf, to, whole } from "./format.js";
import { subscribe } from "./live.js";
import { watching } from "./problem.js";
import { link, table } from "./table.js";

const LOOK_MS = 2000;

/** Show the view. */
export function open(root) {
  const faults = h("div");
  const note = h("p", { class: "beside", role: "status" });
  const turns = table({
    caption: "Turns that wait for a person, the oldest first",
    empty: "No turn waits for a caller.",
    keyOf: (turn) => JSON.stringify([turn.job, turn.conversation, turn.agent, turn.round]),
    columns: [
      { title: "Conversation", make: link((turn) => to("jobs", turn.job, turn.conversation), (turn) => `${turn.name} / ${turn.conversation}`), kind: "name" },
      { title: "Speaks", text: (turn) => `${turn.agent}, ${roundOf(turn.round)}` },
      { title: "Said last", text: (turn) => (turn.words ? `${turn.said_by}: ${turn.words}` : "nothing yet"), kind: "prompt" },
      { title: "Since", text: (turn) => clock(turn.since), kind: "number" },
      { title: "Until", text: (turn) => (turn.until ? clock(turn.until) : "for ever"), kind: "number" },
    ],
  });
  root.append(h("h1", {}, "Awaited"), note, faults, turns.node);
  let shown = 0;
  const leave = subscribe(({ status: { awaited } }) => setText(note, awaited > shown ? `The first ${plural(shown, "turn")} of ${whole(awaited)}.` : ""));
  const stop = watching(faults, LOOK_MS, () => ask("/v1/overview/awaited"), ({ turns: rows }) => {
    shown = rows.length;
    turns.update(rows);
  });
  return () => {
    leave();
    stop();
  };
}
