/** Posting a job: its document, and every fault that the service finds in it. */

import { ask, textOf } from "./api.js";
import { h } from "./dom.js";
import { roundOf, to } from "./format.js";
import { problemNode } from "./problem.js";

const EXAMPLES = { debate: "a debate", translation: "a translation chain", committee: "a committee", jury: "a jury", negotiation: "a negotiation", werewolf: "a night of werewolf", tools: "MCP tools" }; // names in the gallery
const prompt = (model) => JSON.stringify({
  name: "question",
  agents: [{ id: "a", model, params: { max_tokens: 64 } }],
  conversations: [{ id: "q1", prompt: "Why is the sky blue?" }],
}, null, 2);

/** Show the form; with a job, its document with all conversations, those in a state, or one forked before a turn. */
export function open(root, [jobId, only, turn] = []) {
  let model = "MODEL";
  let sent = { text: null, key: null };
  const faults = h("div", { id: "job-faults" });
  const text = h("textarea", { id: "job", rows: "24", spellcheck: "false", "aria-describedby": "job-help job-faults" });
  const send = h("button", { class: "main" }, "Post the job");
  const heading = turn === undefined ? (jobId ? "Post a job again" : "Post a job") : "Fork a conversation";
  const fork = forkForm(turn === undefined ? null : { jobId, conversation: only, turn }, text);
  let wanted = 0; // number of the newest example: answers may come out of order
  const write = async (name, isAsked = true) => {
    const mine = ++wanted;
    faults.replaceChildren();
    try {
      const example = await ask(`/web/gallery/${name}.yaml`, { read: textOf });
      const isFree = !text.value && document.activeElement !== text; // do not overwrite typed text
      if (mine === wanted && (isAsked || isFree)) text.value = example.replaceAll("model: small\n", `model: ${model}\n`);
    } catch (error) {
      refuse(error);
    }
  };
  const form = h("form", { onsubmit: submit },
    h("div", { class: "tools", hidden: Boolean(jobId) },
      h("button", { type: "button", onclick: () => { wanted++; faults.replaceChildren(); text.value = prompt(model); } }, "Example: one question"),
      ...Object.entries(EXAMPLES).map(([name, title]) => h("button", { type: "button", onclick: () => write(name) }, `Example: ${title}`))),
    fork.node,
    h("div", { class: "field" }, h("label", { for: "job" }, "Job document, JSON or YAML"),
      h("p", { id: "job-help", class: "beside" }, "Agents name a model of this Roundhouse. If it has faults, all of them are shown and nothing is stored."),
      text), faults, send,
  );
  root.append(h("h1", {}, heading), form);
  if (jobId) {
    const which = turn === undefined ? only ?? "all" : "all";
    ask(`/v1/jobs/${encodeURIComponent(jobId)}/document?conversations=${encodeURIComponent(which)}`)
      .then((document) => (turn === undefined ? document : forkOf(document, jobId, only, turn)))
      .then((document) => {
        text.value = JSON.stringify(document, null, 2);
        fork.take(document);
      }, refuse);
  }
  ask("/v1/models").then(({ data }) => {
    model = data[0]?.id ?? model;
  }, () => {}) // posting reports the error
    .then(() => !jobId && write("debate", false));

  async function submit(event) {
    event.preventDefault();
    text.removeAttribute("aria-invalid");
    const isJson = /^\s*[{[]/.test(text.value);
    try {
      if (isJson) JSON.parse(text.value);
    } catch (error) {
      return refuse(new Error(`This is not JSON: ${error.message}`));
    }
    const kind = isJson ? "application/json" : "application/yaml";
    // The same text has the same key: a double click or a broken connection makes one job.
    if (sent.text !== text.value) sent = { text: text.value, key: randomKey() };
    send.disabled = true;
    try {
      const job = await ask("/v1/jobs", { method: "POST", body: text.value, headers: { "Idempotency-Key": sent.key, "Content-Type": kind } });
      location.hash = to("jobs", job.id);
    } catch (error) {
      refuse(error);
    } finally {
      send.disabled = false;
    }
    return undefined;
  }
  function refuse(error) {
    text.setAttribute("aria-invalid", "true");
    faults.replaceChildren(problemNode(error));
    text.focus();
  }
}

/** Return the form of a fork: its fork point and changes, which it writes into the document. */
function forkForm(place, text) {
  const node = h("fieldset", { class: "fork", hidden: !place }, h("legend", {}, "This fork"));
  if (!place) return { node, take() {} };
  const at = place.turn.lastIndexOf(":");
  const agent = place.turn.slice(0, at);
  const origin = h("p", {}, "It begins with the words before ", h("strong", {}, `${agent} in ${roundOf(Number(place.turn.slice(at + 1)))}`),
    " of ", h("a", { href: to("jobs", place.jobId, place.conversation) }, place.conversation), ". That turn and all later ones are spoken again.");
  const system = h("textarea", { id: "fork-system", rows: "3", oninput: () => change((document) => {
    for (const speaker of speakersOf(document, agent)) speaker.system = system.value;
  }) });
  const ofModel = h("div", { class: "field" }, h("label", { for: "fork-system" }, `System prompt of ${agent}`), system);
  const times = h("input", { id: "fork-times", type: "number", min: "1", max: "1000", value: "1", oninput: () => change((document) => {
    const [first] = document.conversations;
    const base = first.id.replace(/-\d+$/, "");
    const count = Math.min(1000, Math.max(1, Math.round(Number(times.value)) || 1));
    document.conversations = count === 1 ? [{ ...first, id: base }]
      : Array.from({ length: count }, (_, number) => ({ ...structuredClone(first), id: `${base}-${number}` }));
  }) });
  node.append(origin, ofModel,
    h("label", { for: "fork-times" }, "How many times"), times,
    h("p", { class: "beside" }, "Everything else of the job is below, and may be changed as well."));
  function change(act) {
    try {
      const document = JSON.parse(text.value);
      act(document);
      text.value = JSON.stringify(document, null, 2);
    } catch {
      // the document is being edited: posting reports its faults
    }
  }
  return {
    node,
    take(document) {
      const [speaker] = speakersOf(document, agent);
      ofModel.hidden = !speaker || document.agents.find((each) => each.id === agent)?.by === "caller";
      system.value = speaker?.system ?? document.agents.find((each) => each.id === agent)?.system ?? "";
    },
  };
}

/** Return the parts of a document that hold an agent's system prompt: the conversations' casts, else the agent. */
function speakersOf(document, agent) {
  const casts = document.conversations.map((each) => each.agents?.[agent]).filter((each) => each && "system" in each);
  return casts.length ? casts : document.agents.filter((each) => each.id === agent);
}

/** Return a job of one conversation that begins with the words before a turn. */
function forkOf(document, job, conversation, turn) {
  const found = document.conversations.find((each, place) => (each.id ?? `c${place}`) === conversation);
  const { prompt, variables, ...kept } = found;
  const at = turn.lastIndexOf(":");
  const before = { agent: turn.slice(0, at), round: Number(turn.slice(at + 1)) };
  return { ...document, conversations: [{ ...kept, id: conversation, from: { job, conversation, before } }] };
}

function randomKey() {
  return `page-${[...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
