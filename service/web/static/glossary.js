/** Meanings of a view's words, folded at its end. */

import { folded, h } from "./dom.js";

const MEANINGS = {
  "Awaited": "Turns that a person or a program is to speak: by: caller in the job.",
  "Because": "Why a worker is in its state. Where it is tried again of itself, the time stands behind it.",
  "Incarnation": "Which engine of the worker it is: each that was started counts one more.",
  "In flight": "Turns on a slot: an engine is asked, or its tools run.",
  "Lane": "A place on a device that holds one model at a time.",
  "Pending": "Turns that wait for what others say first.",
  "Ready": "Turns that wait for a slot and nothing else. A worker is ready when its engine takes requests.",
  "Round": "Counted from 1 here, as prompts do. The interface for programs and the command line count from 0.",
  "Slot": "One request at a time that an engine works on beside others.",
  "Verdict": "What the evidence says of a request: it reads, it writes, it is silent, or it stalls.",
};

/** Return the meanings of some words. */
export function glossary(...words) {
  const list = h("dl", { class: "glossary" }, ...words.flatMap((word) => [h("dt", {}, word), h("dd", {}, MEANINGS[word])]));
  return folded("What the words mean", list).node;
}
