/** The usage of keys, jobs, agents and models. */

import { ask } from "./api.js";
import { h, setText } from "./dom.js";
import { plural, seconds, whole } from "./format.js";
import { watching } from "./problem.js";
import { table } from "./table.js";

const BY = ["key", "model", "day", "job", "agent"];
const FIRST = new Set(["key", "model", "day"]);
const MOST = 300; // most rows on the page
const LOOK_MS = 30_000; // each request sums up again
const COUNTS = [
  ["Turns", "turns"], ["Attempts", "attempts"], ["Prompt tokens", "prompt_tokens"], ["Cached", "cached_tokens"],
  ["Answer tokens", "answer_tokens"], ["Wasted", "wasted_tokens"],
];

/** Show the view. */
export function open(root) {
  const boxes = BY.map((name) => h("input", { type: "checkbox", id: `by-${name}`, checked: FIRST.has(name), onchange: look }));
  const since = h("input", { type: "date", id: "since", onchange: look });
  const place = h("div");
  const faults = h("div");
  const note = h("p", { class: "beside", role: "status" });
  root.append(h("h1", {}, "Usage"),
    h("div", { class: "tools" },
      h("fieldset", {}, h("legend", {}, "By"), ...boxes.map((box, at) => h("label", { for: box.id }, box, ` ${BY[at]}`))),
      h("label", { for: "since" }, "Since"), since), faults, note, place);
  let stop = () => {};

  function look() {
    stop();
    const by = BY.filter((_, at) => boxes[at].checked);
    const query = new URLSearchParams({ by: by.join(","), limit: MOST });
    if (since.value) query.set("since", since.value);
    const shown = usageTable(by);
    stop = watching(faults, LOOK_MS, () => ask(`/v1/usage?${query}`), ({ usage, is_cut: isCut }) => {
      shown.update(usage);
      if (shown.node.parentNode !== place) place.replaceChildren(shown.node);
      setText(note, isCut ? `The first ${MOST} rows; choose fewer columns, or a later day.` : plural(usage.length, "row"));
    });
  }

  look();
  return () => stop();
}

function usageTable(by) {
  const none = { key: "no key", job: "no job", agent: "no agent" };
  return table({
    caption: "Usage",
    empty: "Nothing was used.",
    keyOf: (row) => JSON.stringify(by.map((name) => row[name])),
    columns: [
      ...(by.length ? by.map((name) => ({ title: name[0].toUpperCase() + name.slice(1), text: (row) => row[name] ?? none[name] ?? "" }))
        : [{ title: "Of", text: () => "all" }]),
      ...COUNTS.map(([title, name]) => ({ title, text: (row) => whole(row[name]), kind: "number" })),
      { title: "Slot time", text: (row) => seconds(row.slot_s), kind: "number" },
    ],
  });
}
