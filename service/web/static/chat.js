/** A chat with a model, through the same API and queue as every other request. */

import { ask, converse } from "./api.js";
import { h, setText } from "./dom.js";
import { plural } from "./format.js";
import { copyButton, loadMarkdown, showMarkdown } from "./markdown.js";
import { problemNode } from "./problem.js";

const NUMBERS = { max_tokens: "Most tokens", temperature: "Temperature", top_p: "Top p" };
const DEFAULTS = { max_tokens: "512" };
// Kept outside the view, so that the conversation survives a look at another view.
const talk = { model: "", system: "", params: { ...DEFAULTS }, messages: [], session: "" };

/** Show the chat; the returned function ends a running answer. */
export function open(root) {
  let stopping = null;
  const log = h("div", { class: "chat", role: "log", "aria-live": "polite", "aria-label": "Conversation" });
  const faults = h("div", {});
  const model = h("select", { id: "chat-model", onchange: () => (talk.model = model.value) });
  const system = h("textarea", { id: "chat-system", rows: "2", oninput: () => (talk.system = system.value) });
  const numbers = Object.entries(NUMBERS).map(([name, title]) => numberField(name, title));
  const text = h("textarea", { id: "chat-text", rows: "3", placeholder: "Ask something", onkeydown: sendOnEnter });
  const send = h("button", { class: "main" }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => stopping?.abort() }, "Stop");
  const clear = h("button", { type: "button", onclick: forget }, "New conversation");
  system.value = talk.system;
  root.append(
    h("h1", {}, "Chat"),
    h("div", { class: "tools" }, h("label", { for: "chat-model" }, "Model"), model, clear),
    h("details", {}, h("summary", {}, "System text and parameters"),
      h("label", { for: "chat-system" }, "System text"), system, h("div", { class: "tools" }, ...numbers)),
    log, faults,
    h("form", { onsubmit: submit }, h("label", { for: "chat-text" }, "Your words"), text, h("div", { class: "tools" }, send, stop)),
  );
  drawAll();
  loadMarkdown().then(() => stopping || drawAll(), () => {}); // without it text stays plain
  ask("/v1/models").then(({ data }) => {
    model.replaceChildren(...data.map(({ id }) => h("option", { value: id }, id)));
    if (!data.some(({ id }) => id === talk.model)) talk.model = data[0]?.id ?? "";
    model.value = talk.model;
  }, refuse);
  return () => stopping?.abort();

  function sendOnEnter(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  }
  function drawAll() {
    log.replaceChildren();
    talk.messages.forEach(({ role, content, cost, model: by }) => say(role, content, cost, by));
  }
  /** Move a message back into the field, and drop all messages after it. */
  function edit(content, node) {
    if (stopping) return;
    const place = [...log.children].indexOf(node);
    talk.messages.splice(place);
    talk.session = ""; // its engine has another conversation in its cache
    drawAll();
    text.value = content;
    text.focus();
  }
  function forget() {
    stopping?.abort();
    Object.assign(talk, { messages: [], session: "" });
    log.replaceChildren();
    faults.replaceChildren();
    text.focus();
  }
  async function submit(event) {
    event.preventDefault();
    const words = text.value.trim();
    if (!words || stopping) return;
    text.value = "";
    faults.replaceChildren();
    const { messages } = talk; // a new conversation replaces this list
    const asked = say("user", words);
    const answer = say("assistant", "");
    messages.push({ role: "user", content: words });
    stopping = new AbortController();
    [send.disabled, stop.disabled] = [true, false];
    try {
      const by = talk.model;
      const said = await answerOf(messages, answer, stopping.signal);
      if (!said.content && stopping.signal.aborted) throw new Error("It was stopped before an answer came.");
      messages.push({ role: "assistant", model: by, ...said });
    } catch (error) {
      messages.pop();
      asked.node.remove();
      answer.node.remove();
      text.value ||= words; // kept for another try
      refuse(error);
    } finally {
      stopping = null;
      [send.disabled, stop.disabled] = [false, true];
    }
  }
  function say(role, content, cost = "", by = talk.model) {
    const words = h("div", { class: "words" });
    if (role === "user") words.textContent = content;
    else showMarkdown(words, content);
    const note = h("p", { class: "beside" }, cost);
    const acts = role === "user"
      ? h("button", { type: "button", class: "quiet", onclick: () => edit(words.textContent, node) }, "Edit")
      : copyButton(() => talk.messages[[...log.children].indexOf(node)]?.content ?? "");
    const node = h("section", {}, h("div", { class: "line" }, h("h2", {}, role === "user" ? "You" : by || "Model"), acts), words, note);
    log.append(node);
    return { node, words, note };
  }
  function refuse(error) {
    faults.replaceChildren(problemNode(error));
  }
}

function numberField(name, title) {
  const id = `chat-${name}`;
  const field = h("input", { id, type: "number", min: "0", step: "any", oninput: () => (talk.params[name] = field.value) });
  field.value = talk.params[name] ?? "";
  return h("span", {}, h("label", { for: id }, title), " ", field);
}

/** Show an answer as it comes; return its words and its cost. */
async function answerOf(messages, shown, signal) {
  const answer = { content: "", thought: "", worker: "", waited: null, usage: null, fault: null, isCut: false, beganAt: 0, lastAt: 0 };
  talk.session ||= `chat-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  await converse("/v1/chat/completions", {
    body: JSON.stringify(bodyOf(messages)),
    headers: { "X-Session-Id": talk.session },
    signal,
    onEvent: (lines, headers) => {
      answer.worker ||= headers.get("X-Roundhouse-Worker") ?? "";
      answer.waited ??= headers.get("X-Roundhouse-Wait-Ms");
      for (const line of lines) take(answer, line, shown);
      showMarkdown(shown.words, answer.content || answer.thought);
    },
  });
  if (answer.fault) throw new Error(answer.fault);
  const cost = costOf(answer) + (answer.isCut ? " · cut off: “Most tokens” is reached" : "") + (signal.aborted ? " · stopped" : "");
  setText(shown.note, cost);
  return { content: answer.content, cost };
}

function bodyOf(messages) {
  const system = talk.system.trim() ? [{ role: "system", content: talk.system }] : [];
  const said = messages.map(({ role, content }) => ({ role, content }));
  const params = Object.fromEntries(Object.entries(talk.params).filter(([, value]) => value !== "").map(([name, value]) => [name, Number(value)]));
  return { ...params, model: talk.model, messages: [...system, ...said], stream: true, stream_options: { include_usage: true } };
}

function take(answer, line, shown) {
  if (line.startsWith(": roundhouse ")) {
    answer.worker = /worker=(\S+)/.exec(line)?.[1] ?? answer.worker;
    answer.waited = /wait_ms=(\d+)/.exec(line)?.[1] ?? answer.waited;
    setText(shown.note, "");
  } else if (line.startsWith(":")) {
    setText(shown.note, line.slice(2)); // the reason for the wait
  } else if (line.startsWith("data: ") && line !== "data: [DONE]") {
    takeFrame(answer, JSON.parse(line.slice(6)));
  }
}

function takeFrame(answer, { choices = [], usage, error }) {
  if (error) answer.fault = error.message ?? "the answer broke off";
  if (usage) answer.usage = usage;
  answer.isCut ||= choices[0]?.finish_reason === "length";
  const delta = choices[0]?.delta ?? {};
  if (!delta.content && !delta.reasoning_content && !delta.reasoning) return;
  answer.beganAt ||= performance.now();
  answer.lastAt = performance.now();
  answer.content += delta.content ?? "";
  answer.thought += delta.reasoning_content ?? delta.reasoning ?? "";
}

function costOf({ usage, worker, waited, beganAt, lastAt }) {
  const parts = [];
  if (usage) {
    parts.push(`${plural(usage.completion_tokens, "token")} in ${((lastAt - beganAt) / 1000).toFixed(1)} s`);
    parts.push(`${usage.prompt_tokens} read, ${usage.prompt_tokens_details?.cached_tokens ?? 0} of them from the cache`);
  }
  if (waited !== null) parts.push(`waited ${(waited / 1000).toFixed(1)} s`);
  if (worker) parts.push(worker);
  return parts.join(" · ");
}
