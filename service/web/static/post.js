/** Posting a job: its document, which the service judges, and every fault that it finds. */

import { ask } from "./api.js";
import { h } from "./dom.js";
import { to } from "./format.js";
import { problemNode } from "./problem.js";

const debate = (model) => ({
  name: "debate",
  rounds: 3,
  agents: [
    { id: "pro", model, system: "You argue for the motion, in two sentences." },
    { id: "con", model, system: "You argue against the motion, in two sentences." },
    { id: "chair", model, role: "moderator", system: "You sum up in one sentence.", speak_after_within_round: ["pro", "con"] },
  ],
  conversations: [{ id: "cars", prompt: "Should towns ban cars?" }, { id: "bikes", prompt: "Should bicycles have plates?" }],
});
const prompt = (model) => ({
  name: "question",
  agents: [{ id: "a", model, params: { max_tokens: 64 } }],
  conversations: [{ id: "q1", prompt: "Why is the sky blue?" }],
});

/** Show the form; with a job's document, of all its conversations or of those in a state. */
export function open(root, [jobId, only] = []) {
  let model = "MODEL";
  let sent = { text: null, key: null };
  const faults = h("div", { id: "job-faults" });
  const text = h("textarea", { id: "job", rows: "24", spellcheck: "false", "aria-describedby": "job-help job-faults" });
  const send = h("button", { class: "main" }, "Post the job");
  const write = (make) => {
    text.value = JSON.stringify(make(model), null, 2);
    faults.replaceChildren();
  };
  const form = h("form", { onsubmit: submit },
    h("div", { class: "tools" },
      h("button", { type: "button", onclick: () => write(debate) }, "Example: a debate"),
      h("button", { type: "button", onclick: () => write(prompt) }, "Example: one question")),
    h("label", { for: "job" }, "Job document, JSON or YAML"),
    h("p", { id: "job-help", class: "beside" }, "Agents name a model of this Roundhouse. All faults are told at once, and nothing is stored then."),
    text, faults, send,
  );
  root.append(h("h1", {}, "Post a job"), form);
  write(debate);
  if (jobId) {
    text.value = "";
    ask(`/v1/jobs/${encodeURIComponent(jobId)}/document?conversations=${encodeURIComponent(only ?? "all")}`)
      .then((document) => (text.value = JSON.stringify(document, null, 2)), refuse);
  }
  const before = text.value;
  ask("/v1/models").then(({ data }) => {
    model = data[0]?.id ?? model;
    if (!jobId && text.value === before && document.activeElement !== text) write(debate); // whoever writes is not disturbed
  }, () => {}); // the post itself says what is wrong

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
    // The same words again are the same job: who presses twice, or whose connection breaks, gets one.
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

function randomKey() {
  return `page-${[...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
