/** A conversation as it grows: the words of each turn, with its details folded. */

import { ask, download, poll } from "./api.js";
import { badge, h, keyed, setAttribute, setBadge, setText } from "./dom.js";
import { plural, roundOf, to } from "./format.js";
import { loadMarkdown } from "./markdown.js";
import { problemNode, showing } from "./problem.js";
import { sentenceOf } from "./reasons.js";
import { turnNode } from "./turn.js";
import { wordsOf } from "./words.js";

const LOOK_MS = 1000;
const A_PAGE = 40; // turns per page
const HUES = 8;
const ENDED = new Set(["completed", "failed", "cancelled"]);

/** Show the view. */
export function open(root, [jobId, id], title) {
  title(id);
  const path = `/v1/jobs/${encodeURIComponent(jobId)}/conversations/${encodeURIComponent(id)}`;
  const state = badge("queued");
  const reason = h("span", { class: "beside" });
  const faults = h("div");
  const turns = turnsOf(path);
  let until = []; // end conditions in words
  let newest = null;
  const words = wordsOf(path);
  const question = h("div", { class: "question", "aria-label": "Prompt", role: "group" });
  const before = h("a", { class: "button", hidden: true }, "Previous");
  const after = h("a", { class: "button", hidden: true }, "Next");
  const where = h("span", { class: "beside" });
  const source = h("a", { class: "button", hidden: true }, "Compare with its source");
  const save = h("button", { type: "button", onclick: () => showing(faults, () => download(path, `${id}.json`)) }, "Download");
  ask(`${path}/place`).then((place) => {
    setText(question, place.prompt);
    until = place.until;
    tellReason();
    if (place.source) {
      source.hidden = false;
      setAttribute(source, "href", to("compare", place.source.job, place.source.conversation, jobId, id));
    }
    setText(where, `${place.number} of ${place.total}, ${plural(place.rounds, "round")}`);
    for (const [link, other] of [[before, place.previous], [after, place.next]]) {
      link.hidden = other === null;
      if (other !== null) link.setAttribute("href", to("jobs", jobId, other));
    }
  }, (problem) => question.replaceChildren(problemNode(problem)));
  const jobLink = h("a", { href: to("jobs", jobId) }, jobId);
  ask(`/v1/jobs/${encodeURIComponent(jobId)}`).then((job) => setText(jobLink, job.name), () => {}); // the transcript's own error is shown
  function tellReason() {
    if (!newest) return;
    const end = newest.reason ? sentenceOf(newest.reason) : earlyEnd(newest.ended_by, until);
    setText(reason, [end, ...newest.left.map((agent) => `${agent} has left`)].filter(Boolean).join("; "));
  }
  let ended = []; // ended turns do not change, so only later ones are requested
  root.append(
    h("nav", { class: "path", "aria-label": "Where this is" },
      h("a", { href: "#/jobs" }, "Jobs"), " / ", jobLink),
    h("div", { class: "head" }, h("h1", {}, id), state, reason),
    h("div", { class: "tools" }, before, after, where, save, source), faults, question, turns.node, words.node,
  );
  return poll(async () => {
    const transcript = await ask(`${path}?after=${ended.length}`);
    faults.replaceChildren();
    setBadge(state, transcript.state);
    newest = transcript;
    tellReason();
    const places = new Map(ended.map((turn) => [placeOf(turn), turn]));
    const fresh = transcript.turns.filter((turn) => !places.has(placeOf(turn)));
    const isOver = ENDED.has(transcript.state);
    // Only ended turns are counted: one in flight may have ended before the next request, which must get it again.
    ended = [...ended, ...fresh.filter((turn) => ENDED.has(turn.state))];
    turns.update([...ended, ...fresh.filter((turn) => !ENDED.has(turn.state))], transcript.state);
    const asked = `/v1/jobs/${encodeURIComponent(jobId)}/awaited?conversation=${encodeURIComponent(id)}`;
    words.update(isOver ? [] : (await ask(asked)).awaited);
    return isOver ? null : LOOK_MS;
  }, (problem) => faults.replaceChildren(problemNode(problem)));
}

/** Return the condition or leader that ended a conversation before its rounds were over, or "". */
function earlyEnd(by, until) {
  if (by?.leader !== undefined) return `ended by ${by.leader} in ${roundOf(by.round)}`;
  return by?.until === undefined ? "" : `ended early, in ${roundOf(by.round)}: ${until[by.until] ?? `until[${by.until}]`}`;
}

const placeOf = (turn) => `${turn.round} ${turn.agent} ${turn.kind}`;

function turnsOf(path) {
  const agents = new Map(); // number of each agent, for its colour
  let all = [];
  let state = "queued";
  let last = null; // end of the shown range; null follows the newest turn
  const chosen = h("select", { id: "agent", onchange: () => { last = null; draw(); } }, h("option", { value: "" }, "all"));
  const earlier = h("button", { type: "button", onclick: () => move(-A_PAGE) }, "Earlier");
  const later = h("button", { type: "button", onclick: () => move(A_PAGE) }, "Later");
  const note = h("span", { class: "beside", role: "status" });
  const asMarkdown = h("input", { type: "checkbox", id: "as-markdown", checked: true, onchange: drawAnew });
  const list = h("ol", { class: "turns" });
  const nothing = h("p", { class: "empty" });

  function move(by) {
    const rows = matching();
    last = Math.min(Math.max((last ?? rows.length) + by, A_PAGE), rows.length);
    if (last === rows.length) last = null;
    draw();
  }
  let hasParser = false; // without the parser text stays plain
  loadMarkdown().then(() => {
    hasParser = true;
    drawAnew();
  }, () => {});
  function drawAnew() {
    setAttribute(list, "data-markdown", asMarkdown.checked && hasParser ? "true" : "false");
    draw();
  }
  const matching = () => (chosen.value ? all.filter((turn) => turn.agent === chosen.value) : all);
  function draw() {
    const rows = matching();
    const end = last ?? rows.length;
    const begin = Math.max(0, end - A_PAGE);
    keyed(list, rows.slice(begin, end), placeOf, (turn) => turnNode(turn, agents.get(turn.agent) % HUES, path, list));
    earlier.disabled = begin === 0;
    later.disabled = end >= rows.length;
    setText(note, rows.length > A_PAGE ? `turns ${begin + 1} to ${end} of ${rows.length}` : plural(rows.length, "turn"));
    setText(nothing, rows.length ? "" : (ENDED.has(state) ? "Nothing was said." : "Nothing has been said yet."));
  }
  return {
    node: h("div", {}, h("div", { class: "tools" }, h("label", { for: "agent" }, "Agent"), chosen, earlier, later, note,
      h("label", { for: "as-markdown" }, asMarkdown, " Markdown")), list, nothing),
    update(turns, now) {
      all = turns;
      state = now;
      for (const { agent } of turns) {
        if (agents.has(agent)) continue;
        agents.set(agent, agents.size);
        chosen.append(h("option", { value: agent }, agent));
      }
      setAttribute(list, "aria-busy", ENDED.has(state) ? "false" : "true");
      draw();
    },
  };
}
