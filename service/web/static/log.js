/** A worker's log, which follows its engine's output while "follow" is checked. */

import { ask, poll } from "./api.js";
import { h, setText } from "./dom.js";
import { clock } from "./format.js";

const LOOK_MS = 1000;
const MOST = 500; // most lines on the page

/** Whether a line is the last known one, or a later one. */
const isNext = (line, last) => line && (line.number > last.number || (line.at === last.at && line.text === last.text));

/** Return the log of the worker at `path`. */
export function logNode(path) {
  const lines = h("div", { class: "log", role: "log", "aria-label": "Log", "aria-live": "off", tabindex: "0" });
  const note = h("p", { class: "empty" });
  const isFollowing = h("input", { type: "checkbox", id: "follows", checked: true });
  let last = null;
  const read = async (after) => (await ask(`${path}/logs?tail=${MOST}&after=${after}`)).lines;
  const close = poll(async () => {
    // The last line is requested again: if it differs, the service has restarted and counts from the start.
    let fresh = await read(last ? last.number - 1 : 0);
    if (last && !isNext(fresh[0], last)) {
      lines.replaceChildren();
      fresh = await read(0);
    } else if (last && fresh[0].number === last.number) fresh.shift();
    if (fresh.length) {
      last = fresh.at(-1);
      lines.append(...fresh.map(lineNode));
      while (lines.children.length > MOST) lines.firstElementChild.remove();
      if (isFollowing.checked) lines.scrollTop = lines.scrollHeight;
    }
    setText(note, lines.children.length ? "" : "The engine has printed nothing.");
    return LOOK_MS;
  }, (problem) => setText(note, problem.message));
  return {
    node: h("section", { "aria-labelledby": "log-title" },
      h("div", { class: "head" }, h("h2", { id: "log-title" }, "Log"), h("label", { for: "follows" }, isFollowing, " follow")), lines, note),
    close,
  };
}

function lineNode(line) {
  return h("div", { "data-stream": line.stream },
    h("span", { class: "at" }, `${clock(line.at)} #${line.incarnation} `), h("span", {}, line.text));
}
