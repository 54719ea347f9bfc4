/** A field below a conversation for each turn that waits for a caller. */

import { ask } from "./api.js";
import { h, keyed } from "./dom.js";
import { clock, roundOf } from "./format.js";
import { problemNode } from "./problem.js";

const placeOf = (turn) => `${turn.round} ${turn.agent}`;

/** Return the fields; `update` takes the turns that wait for a caller now; `path` is the conversation's. */
export function wordsOf(path) {
  const node = h("div", { "aria-label": "Awaited turns", role: "group" });
  return {
    node,
    update: (awaited) => keyed(node, awaited, placeOf, (turn) => field(turn, path)),
  };
}

function field({ agent, round, until }, path) {
  const name = `words-${round}-${agent}`;
  const faults = h("div", { id: `${name}-faults` });
  const text = h("textarea", { id: name, rows: "3", "aria-describedby": faults.id });
  const send = h("button", { class: "main" }, "Say it");
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  const form = h("form", { onsubmit: submit },
    h("label", { for: name }, `${agent} speaks in ${roundOf(round)}${until ? `, until ${clock(until)}` : ""}`), text,
    h("div", { class: "tools" }, send), faults);

  async function submit(event) {
    event.preventDefault();
    if (send.disabled) return;
    if (!text.value.trim()) {
      faults.replaceChildren(problemNode(new Error("The words are empty, and what is said cannot be taken back.")));
      text.focus();
      return;
    }
    send.disabled = true; // until the turn stops waiting
    faults.replaceChildren();
    try {
      const headers = { "Content-Type": "application/json" };
      const body = JSON.stringify({ text: text.value });
      await ask(`${path}/turns/${encodeURIComponent(agent)}/${round}`, { method: "POST", body, headers });
      text.disabled = true;
    } catch (error) {
      send.disabled = false;
      faults.replaceChildren(problemNode(error));
      text.focus();
    }
  }
  return { node: form, update() {} };
}
