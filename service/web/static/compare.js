/** Two conversations side by side, turn by turn: inherited turns, and the point where they differ. */

import { ask, poll } from "./api.js";
import { badge, h, keyed, setAttribute, setBadge, setText } from "./dom.js";
import { plural, roundOf, to } from "./format.js";
import { problemNode } from "./problem.js";
import { failureOf } from "./reasons.js";

const LOOK_MS = 1000;
const MOST = 5_000; // shown characters of a turn; its own page has all
const MOST_CELLS = 1_000_000; // bound of a comparison: words of one turn times words of the other
const ENDED = new Set(["completed", "failed", "cancelled"]);

/** Show the view. */
export function open(root, [jobId, id, otherJob, otherId], title) {
  title(`${id} and ${otherId}`);
  const places = [[jobId, id], [otherJob, otherId]];
  const heads = places.map(headOf);
  const names = id === otherId ? places.map((place) => place.join(" / ")) : [id, otherId];
  const faults = h("div");
  const note = h("p", { class: "beside", role: "status" });
  const list = h("ol", { class: "turns pairs" });
  root.append(
    h("h1", {}, "Side by side"), note, faults,
    h("div", { class: "pair" }, ...heads.map((head) => head.node)), list,
  );
  return poll(async () => {
    const both = await Promise.all(places.map(([job, name]) => ask(pathOf(job, name))));
    faults.replaceChildren();
    both.forEach((transcript, at) => heads[at].update(transcript));
    const rows = rowsOf(both, names);
    keyed(list, rows, (row) => row.place, rowNode);
    const same = rows.filter(isSame).length;
    setText(note, `${plural(rows.length, "turn")}, ${same} of them the same`);
    return both.every((transcript) => ENDED.has(transcript.state)) ? null : LOOK_MS;
  }, (problem) => faults.replaceChildren(problemNode(problem)));
}

const pathOf = (job, id) => `/v1/jobs/${encodeURIComponent(job)}/conversations/${encodeURIComponent(id)}`;

function headOf([job, id]) {
  const state = badge("queued");
  const name = h("span", {}, `${job} / ${id}`);
  ask(`/v1/jobs/${encodeURIComponent(job)}`).then((found) => setText(name, `${found.name} / ${id}`), () => {}); // the transcript's own error is shown
  return {
    node: h("div", { class: "head" }, h("h2", {}, h("a", { href: to("jobs", job, id) }, name)), state),
    update: (transcript) => setBadge(state, transcript.state),
  };
}

/** Return a row for each turn of either conversation, by round, in the order in which they became visible. */
function rowsOf(both, names) {
  const rows = new Map();
  both.forEach((transcript, at) => {
    for (const turn of transcript.turns.filter((each) => each.kind === "turn")) {
      const place = `${turn.round} ${turn.agent}`;
      if (!rows.has(place)) rows.set(place, { place, names, round: turn.round, agent: turn.agent, turns: [null, null] });
      rows.get(place).turns[at] = turn;
    }
  });
  return [...rows.values()].sort((one, other) => one.round - other.round);
}

const isSame = ({ turns: [one, other] }) => one !== null && other !== null && one.text === other.text && one.state === other.state;

function rowNode(first) {
  const cells = first.names.map(cellNode);
  const node = h("li", { class: "turn" },
    h("h2", {}, h("span", { class: "agent" }, first.agent), h("span", { class: "beside" }, ` ${roundOf(first.round)}`)),
    h("div", { class: "pair" }, ...cells.map((cell) => cell.node)));
  return {
    node,
    update(row) {
      setAttribute(node, "data-same", isSame(row) ? "true" : "false");
      const [one, other] = row.turns.map((turn) => (turn?.text ?? "").slice(0, MOST));
      const common = row.turns.every(Boolean) ? commonWords(wordsOf(one), wordsOf(other)) : null;
      row.turns.forEach((turn, at) => cells[at].update(turn, common?.[at], at ? one : other));
    },
  };
}

function cellNode(name) {
  let drawn = "";
  const note = h("p", { class: "beside" });
  const words = h("div", { class: "words" });
  return {
    node: h("div", {}, h("p", { class: "side" }, name), note, words),
    update(turn, common, others) {
      const { inherited } = turn ?? {};
      setText(note, turn === null ? "There is no such turn here." : [turn.state === "completed" ? "" : turn.state, failureOf(turn.reason, ""),
        inherited ? `inherited of ${inherited.job}/${inherited.conversation}` : ""].filter(Boolean).join(", "));
      const text = (turn?.text ?? "").slice(0, MOST);
      const rest = (turn?.text ?? "").length > MOST ? " …" : "";
      const seen = JSON.stringify([text, others]);
      if (seen === drawn) return;
      drawn = seen;
      words.replaceChildren(...marked(wordsOf(text), common), rest);
    },
  };
}

const wordsOf = (text) => text.match(/\s+|\S+/gu) ?? [];

/** Return words, with those that the other side lacks in marks; adjacent ones share a mark. */
function marked(words, common) {
  const parts = [];
  let own = "";
  const end = () => {
    if (own) parts.push(h("mark", {}, own));
    own = "";
  };
  words.forEach((word, at) => {
    if (common && !common.has(at)) own += word;
    else {
      end();
      parts.push(word);
    }
  });
  end();
  return parts;
}

/** Return the indexes of a longest common subsequence in both lists; null where they are too long to compare. */
function commonWords(one, other) {
  let begin = 0;
  while (begin < one.length && begin < other.length && one[begin] === other[begin]) begin += 1;
  let end = 0;
  while (end < one.length - begin && end < other.length - begin && one.at(-1 - end) === other.at(-1 - end)) end += 1;
  const [left, right] = [one.slice(begin, one.length - end), other.slice(begin, other.length - end)];
  if (left.length * right.length > MOST_CELLS) return null;
  const width = right.length + 1;
  const best = new Uint16Array((left.length + 1) * width);
  for (let i = left.length - 1; i >= 0; i -= 1) {
    for (let j = right.length - 1; j >= 0; j -= 1) {
      best[i * width + j] = left[i] === right[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const found = [new Set(), new Set()];
  const add = (i, j) => [i, j].forEach((place, side) => found[side].add(place));
  for (let at = 0; at < begin; at += 1) add(at, at);
  for (let at = 1; at <= end; at += 1) add(one.length - at, other.length - at);
  for (let i = 0, j = 0; i < left.length && j < right.length;) {
    if (left[i] === right[j]) add(begin + i++, begin + j++);
    else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return found;
}
