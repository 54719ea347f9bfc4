/** A worker's log, which follows what its engine prints until its reader scrolls away from the end. */

import { ask, poll } from "./api.js";
import { h, setText } from "./dom.js";
import { clock } from "./format.js";

const LOOK_MS = 1000;
const MOST = 500; // lines on the page

/** Return the log of the worker at `path`. */
export function logNode(path) {
  const lines = h("div", { class: "log", role: "log", "aria-label": "Log", "aria-live": "off", tabindex: "0" });
  const told = h("p", { class: "empty" });
  const follows = h("input", { type: "checkbox", id: "follows", checked: true });
  let after = 0;
  const close = poll(async () => {
    const { lines: fresh } = await ask(`${path}/logs?tail=${MOST}&after=${after}`);
    if (fresh.length) {
      after = fresh.at(-1).number;
      lines.append(...fresh.map(lineNode));
      while (lines.children.length > MOST) lines.firstElementChild.remove();
      if (follows.checked) lines.scrollTop = lines.scrollHeight;
    }
    setText(told, lines.children.length ? "" : "The engine has printed nothing.");
    return LOOK_MS;
  }, (problem) => setText(told, problem.message));
  return {
    node: h("section", { "aria-labelledby": "log-title" },
      h("div", { class: "head" }, h("h2", { id: "log-title" }, "Log"), h("label", { for: "follows" }, follows, " follow")), lines, told),
    close,
  };
}

function lineNode(line) {
  return h("div", { "data-stream": line.stream },
    h("span", { class: "at" }, `${clock(line.at)} #${line.incarnation} `), h("span", {}, line.text));
}
