/** One turn: its words, and folded below them thoughts, tool calls, signals, attempts, and the prompt. */

import { ask } from "./api.js";
import { badge, facts, folded, h, keyed, setAttribute, setBadge, setText } from "./dom.js";
import { between, clock, plural, pretty, roundOf, seconds, to, whole } from "./format.js";
import { showMarkdown } from "./markdown.js";
import { problemNode } from "./problem.js";
import { failureOf } from "./reasons.js";

const MOST = 20_000; // shown characters of one text; a button shows the rest

const FINDINGS = {
  no_finish_reason: "the server did not say that the answer is whole",
  cut_off: "the answer was cut off at its limit of tokens",
  filtered: "the server's filter ended the answer",
  refusal: "the model declined to answer",
  nothing_said: "nothing was said",
  unread_call: "the words look like a tool's call, and none was made",
};

/** Return a turn's element; `list` says whether words are shown as Markdown, `hue` is its agent's. */
export function turnNode(first, hue, path, list) {
  const state = badge(first.state);
  const note = h("span", { class: "beside" });
  const fork = h("a", { class: "button quiet", href: forkOf(first, path), "aria-label": `Fork before ${first.agent} in ${roundOf(first.round)}` }, "Fork");
  const words = longText("div", "words", (text, shown) => (list.dataset.markdown === "true" ? showMarkdown(text, shown) : setPlain(text, shown)));
  const failure = h("p", { class: "fault" });
  const findings = h("p", { class: "beside" });
  const thinking = longText("pre");
  const thoughts = folded("Thoughts", thinking.node);
  const calls = listOf(callNode);
  const signals = listOf(signalNode);
  const attempts = listOf(attemptNode);
  const times = facts();
  const node = h("li", { class: "turn", "data-hue": hue },
    h("div", { class: "line" },
      h("h2", {}, h("span", { class: "agent" }, first.agent), h("span", { class: "beside" }, ` ${first.role}, ${roundOf(first.round)}${first.kind === "summary" ? ", summary" : ""}${first.by === "caller" && first.state === "completed" ? (first.detail ? `, ${first.detail}` : ", spoken by a person") : ""}`)),
      state, note, fork),
    failure, findings, words.node,
    h("div", { class: "folds" }, thoughts.node, calls.node, signals.node, attempts.node,
      folded("Times and tokens", times.node).node, promptNode(first, path)),
  );
  let seen = "";
  return {
    node,
    update(turn) {
      const now = `${list.dataset.markdown} ${JSON.stringify(turn)}`;
      if (now === seen) return;
      seen = now;
      setBadge(state, turn.state);
      setText(note, lineOf(turn));
      fork.hidden = turn.kind !== "turn" || !["completed", "failed"].includes(turn.state);
      setText(failure, turn.state === "cancelled" ? "" : failureOf(turn.reason, turn.detail));
      setText(findings, (turn.findings ?? []).map((each) => FINDINGS[each] ?? each).join("; "));
      findings.hidden = !turn.findings?.length;
      words.update(turn.text || (turn.state === "in_flight" ? "…" : ""));
      setAttribute(words.node, "data-open", turn.state === "in_flight");
      thoughts.node.hidden = turn.thinking === "";
      thoughts.setTitle(`Thoughts, ${plural(turn.thinking.length, "character")}`);
      thinking.update(turn.thinking);
      calls.update(turn.tool_calls, plural(turn.tool_calls.length, "tool call"));
      signals.update(turn.signals, plural(turn.signals.length, "signal"));
      const failed = turn.attempts.filter((attempt) => attempt.outcome !== "completed").length;
      attempts.update(failed || turn.attempts.length > 1 ? turn.attempts : [],
        `${plural(turn.attempts.length, "attempt")}${failed ? `, ${failed} of them failed` : ""}`);
      times.update(timesOf(turn));
    },
  };
}

/** Return the address of the form that forks before a turn. */
function forkOf(turn, path) {
  const [, , , job, , conversation] = path.split("/").map(decodeURIComponent);
  return to("post", job, conversation, `${turn.agent}:${turn.round}`);
}

function lineOf(turn) {
  const parts = [];
  if (turn.inherited) parts.push(`inherited of ${turn.inherited.job}/${turn.inherited.conversation}`);
  if (turn.worker) parts.push(turn.worker);
  if (turn.started_at) parts.push(between(turn.started_at, turn.finished_at));
  if (turn.usage.completion_tokens) parts.push(plural(turn.usage.completion_tokens, "token"));
  return parts.join(", ");
}

function timesOf(turn) {
  const { prompt_tokens: prompt, cached_tokens: cached, completion_tokens: answer } = turn.usage;
  return [
    ["Waited", turn.started_at && between(turn.queued_at, turn.started_at)],
    ["First token after", turn.first_token_at && between(turn.started_at, turn.first_token_at)],
    ["Took", turn.finished_at && between(turn.started_at, turn.finished_at)],
    ["Ended", clock(turn.finished_at)],
    ["Prompt", prompt !== null && plural(prompt, "token")],
    ["Cached", cached && plural(cached, "token")],
    ["Answer", answer !== null && plural(answer, "token")],
    ["Stopped for", turn.finish_reason],
    ["Worker", turn.worker && `${turn.worker}, incarnation ${turn.incarnation}`],
    ["Weights", turn.weight_version !== null && `version ${turn.weight_version}`],
  ].filter(([, value]) => value !== false);
}

function setPlain(node, text) {
  node.dataset.markdown = "false";
  if (node.firstElementChild) node.replaceChildren(text);
  else setText(node, text);
}

/** Return an element that cuts long text until the reader asks for all. */
function longText(tag, kind, show = setText) {
  const text = h(tag, { class: kind });
  const more = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => { isWhole = true; draw(); } });
  let isWhole = false;
  let all = "";
  function draw() {
    show(text, isWhole ? all : all.slice(0, MOST));
    more.hidden = isWhole || all.length <= MOST;
    setText(more, `Show all ${whole(all.length)} characters`);
  }
  return {
    node: h("div", { class: "text" }, text, more),
    update(value) {
      all = value;
      draw();
    },
  };
}

/** Return a folded list, hidden while empty. */
function listOf(make) {
  const list = h("ol", { class: "inner" });
  const shown = folded("", list);
  return {
    node: shown.node,
    update(rows, title) {
      shown.node.hidden = rows.length === 0;
      shown.setTitle(title);
      keyed(list, rows.map((row, place) => ({ ...row, place })), (row) => row.place, make);
    },
  };
}

function callNode() {
  const name = h("code");
  const note = h("span", { class: "beside" });
  const asked = longText("pre");
  const answered = longText("pre");
  const failure = h("p", { class: "fault" });
  return {
    node: h("li", {}, h("p", {}, name, " ", note), h("h3", {}, "Arguments"), asked.node, h("h3", {}, "Result"), failure, answered.node),
    update(call) {
      setText(name, call.name);
      setText(note, seconds(call.duration_s));
      asked.update(pretty(call.arguments));
      answered.update(pretty(call.result));
      setText(failure, failureOf(call.reason, call.detail));
    },
  };
}

function signalNode() {
  const name = h("code");
  const note = longText("pre");
  return {
    node: h("li", {}, h("p", {}, name), note.node),
    update(signal) {
      setText(name, signal.name);
      note.update(pretty(signal.arguments ?? signal.raw ?? ""));
    },
  };
}

function attemptNode() {
  const state = badge("completed");
  const note = h("span", { class: "beside" });
  const failure = h("p", { class: "fault" });
  const text = longText("pre");
  return {
    node: h("li", {}, h("p", { class: "line" }, state, note), failure, text.node),
    update(attempt) {
      setBadge(state, attempt.outcome);
      const held = attempt.constrained_by ? `, held by ${attempt.constrained_by}` : "";
      setText(note, `${attempt.worker}, incarnation ${attempt.incarnation}, ${between(attempt.started_at, attempt.finished_at)}${held}`);
      setText(failure, failureOf(attempt.reason, attempt.detail));
      text.update(attempt.text);
    },
  };
}

/** Return the folded prompt, which is loaded when it is unfolded. */
function promptNode(turn, path) {
  const place = h("div");
  const { node } = folded("What was asked", place);
  node.addEventListener("toggle", async () => {
    if (!node.open) return;
    try {
      const { attempts } = await ask(`${path}/turns/${encodeURIComponent(turn.agent)}/${turn.round}/prompt${turn.kind === "summary" ? "?kind=summary" : ""}`);
      const messages = attempts.at(-1)?.messages ?? [];
      place.replaceChildren(...messages.map((message) => {
        const text = longText("pre");
        text.update(message.content || pretty(message.tool_calls ?? ""));
        return h("div", {}, h("h3", {}, message.role), text.node);
      }), messages.length ? "" : "Nothing yet.");
    } catch (error) {
      place.replaceChildren(problemNode(error));
    }
  });
  return node;
}
