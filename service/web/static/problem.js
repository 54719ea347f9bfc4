/** The display of the service's errors. */

import { poll, Problem } from "./api.js";
import { h } from "./dom.js";

/** Return an error's title and text, with each fault by its path. */
export function problemNode(error) {
  const faults = error instanceof Problem ? error.errors : [];
  const detail = faults.length ? "" : ` ${error.message}`; // the message would repeat the faults
  return h("div", { class: "problem", role: "alert" },
    h("p", {}, h("strong", {}, error.title || "That did not work"), detail),
    faults.length ? h("ul", {}, ...faults.map((fault) => h("li", {}, fault.line ? `Line ${fault.line}: ` : "", h("code", {}, fault.path || "(all)"), ` ${fault.message}`))) : null,
  );
}

/** Run `act`; show its error in `place`, or clear it. */
export async function showing(place, act) {
  try {
    const value = await act();
    place.replaceChildren();
    return value;
  } catch (error) {
    if (error.status !== 401) place.replaceChildren(problemNode(error));
    return undefined;
  }
}

/** Poll every `pause` milliseconds; pass the answer to `update`, or show its error in `place`. */
export function watching(place, pause, asked, update) {
  return poll(async (closing) => {
    const answer = await asked();
    if (closing.aborted) return null;
    place.replaceChildren();
    update(answer);
    return pause;
  }, (problem) => problem.status !== 401 && place.replaceChildren(problemNode(problem)));
}
