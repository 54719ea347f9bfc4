/** Two conversations side by side, turn by turn: what one has inherited of the other, and where they part. */

import { ask, poll } from "./api.js";
import { badge, h, keyed, setAttribute, setBadge, setText } from "./dom.js";
import { plural, to } from "./format.js";
import { problemNode } from "./problem.js";

const LOOK_MS = 1000;
const MOST = 5_000; // characters of a turn; its own page has them all
const ENDED = new Set(["completed", "failed", "cancelled"]);

/** Show them. */
export function open(root, [jobId, id, otherJob, otherId], title) {
  title(`${id} and ${otherId}`);
  const places = [[jobId, id], [otherJob, otherId]];
  const heads = places.map(headOf);
  const faults = h("div");
  const told = h("p", { class: "beside", role: "status" });
  const list = h("ol", { class: "turns pairs" });
  root.append(
    h("h1", {}, "Side by side"), told, faults,
    h("div", { class: "pair" }, ...heads.map((head) => head.node)), list,
  );
  return poll(async () => {
    const both = await Promise.all(places.map(([job, name]) => ask(pathOf(job, name))));
    faults.replaceChildren();
    both.forEach((transcript, at) => heads[at].update(transcript));
    const rows = rowsOf(both);
    keyed(list, rows, (row) => row.place, rowNode);
    const same = rows.filter(isSame).length;
    setText(told, `${plural(rows.length, "turn")}, ${same} of them the same`);
    return both.every((transcript) => ENDED.has(transcript.state)) ? null : LOOK_MS;
  }, (problem) => faults.replaceChildren(problemNode(problem)));
}

const pathOf = (job, id) => `/v1/jobs/${encodeURIComponent(job)}/conversations/${encodeURIComponent(id)}`;

function headOf([job, id]) {
  const state = badge("queued");
  return {
    node: h("div", { class: "head" }, h("h2", {}, h("a", { href: to("jobs", job, id) }, `${job}/${id}`)), state),
    update: (transcript) => setBadge(state, transcript.state),
  };
}

/** Return a row for each turn that either has, by round, in the order in which they became visible. */
function rowsOf(both) {
  const rows = new Map();
  both.forEach((transcript, at) => {
    for (const turn of transcript.turns.filter((each) => each.kind === "turn")) {
      const place = `${turn.round} ${turn.agent}`;
      if (!rows.has(place)) rows.set(place, { place, round: turn.round, agent: turn.agent, turns: [null, null] });
      rows.get(place).turns[at] = turn;
    }
  });
  return [...rows.values()].sort((one, other) => one.round - other.round);
}

const isSame = ({ turns: [one, other] }) => one !== null && other !== null && one.text === other.text && one.state === other.state;

function rowNode(first) {
  const cells = [cellNode(), cellNode()];
  const node = h("li", { class: "turn" },
    h("h2", {}, h("span", { class: "agent" }, first.agent), h("span", { class: "beside" }, ` round ${first.round}`)),
    h("div", { class: "pair" }, ...cells.map((cell) => cell.node)));
  return {
    node,
    update(row) {
      setAttribute(node, "data-same", isSame(row) ? "true" : "false");
      row.turns.forEach((turn, at) => cells[at].update(turn));
    },
  };
}

function cellNode() {
  const told = h("p", { class: "beside" });
  const words = h("div", { class: "words" });
  return {
    node: h("div", {}, told, words),
    update(turn) {
      const { inherited } = turn ?? {};
      setText(told, turn === null ? "has no such turn" : [turn.state === "completed" ? "" : turn.state, turn.reason ?? "",
        inherited ? `inherited of ${inherited.job}/${inherited.conversation}` : ""].filter(Boolean).join(", "));
      setText(words, (turn?.text ?? "").slice(0, MOST) + ((turn?.text ?? "").length > MOST ? " …" : ""));
    },
  };
}
