/** Errors of the service, where they belong. */

import { poll, Problem } from "./api.js";
import { h } from "./dom.js";

/** Return what was refused and why, each fault by its path. */
export function problemNode(error) {
  const faults = error instanceof Problem ? error.errors : [];
  const told = faults.length ? "" : ` ${error.message}`; // which would tell all of them once more
  return h("div", { class: "problem", role: "alert" },
    h("p", {}, h("strong", {}, error.title || "That did not work"), told),
    faults.length ? h("ul", {}, ...faults.map((fault) => h("li", {}, fault.line ? `Line ${fault.line}: ` : "", h("code", {}, fault.path || "(all)"), ` ${fault.message}`))) : null,
  );
}

/** Do something; show in `place` what was refused, or nothing. */
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

/** Ask again and again, every `pause` milliseconds; show what has come, or in `place` what was refused. */
export function watching(place, pause, asked, update) {
  return poll(async (closing) => {
    const told = await asked();
    if (closing.aborted) return null;
    place.replaceChildren();
    update(told);
    return pause;
  }, (problem) => problem.status !== 401 && place.replaceChildren(problemNode(problem)));
}
