/** Asks for a key if the service needs one. */

import { keys } from "./api.js";
import { h, setText } from "./dom.js";

let dialog = null;

/** Ask for a key, in one dialog at a time; `isWrong` says that the last one is not known. */
export function askForKey(isWrong, onKey) {
  keys.forget();
  if (!dialog) dialog = dialogFor(onKey);
  if (isWrong || !dialog.node.open) setText(dialog.fault, isWrong ? "Roundhouse does not know this key." : "");
  if (dialog.node.open) return; // several requests were refused: do not disturb the typing
  dialog.node.showModal();
  dialog.input.setAttribute("aria-invalid", isWrong ? "true" : "false");
  dialog.input.value = "";
  dialog.input.focus();
}

function dialogFor(onKey) {
  const fault = h("p", { class: "fault", role: "alert", id: "key-fault" });
  const input = h("input", {
    id: "key", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "key-fault",
  });
  const form = h("form", { onsubmit: (event) => {
    event.preventDefault();
    if (!input.value.trim()) return;
    keys.set(input.value.trim());
    node.close();
    onKey();
  } },
    h("h1", { id: "key-title" }, "A key is needed"),
    h("p", {}, "This Roundhouse only answers requests with a key. The key stays in this tab, and is deleted when the tab is closed."),
    h("label", { for: "key" }, "Key"), input, fault,
    h("button", { class: "main" }, "Go on"),
  );
  const node = h("dialog", { "aria-labelledby": "key-title", class: "key", oncancel: (event) => event.preventDefault() }, form);
  document.body.append(node);
  return { node, input, fault };
}
