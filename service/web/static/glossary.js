/** Meanings of a view's words, folded at its end. */

import { folded, h } from "./dom.js";

const MEANINGS = {
  "Awaited": "Turns that wait for a person or a program to speak: by: caller in the job.",
  "Because": "The reason for the state of a worker, with the time of the next automatic try, if there is one.",
  "Incarnation": "The number of the engine of a worker: each start counts one more.",
  "In flight": "Turns on a slot: an engine is asked, or its tools run.",
  "Lane": "A place on a device that holds one model at a time.",
  "Pending": "Turns that wait for other agents to speak.",
  "Ready": "Turns that wait only for a slot. A worker is ready when its engine takes requests.",
  "Round": "Counted from 1 here, as prompts do. The interface for programs and the command line count from 0.",
  "Slot": "The place of one request among those that an engine works on at the same time.",
  "Verdict": "What the evidence says about a request: it reads, it writes, it is silent, or it stalls.",
};

/** Return the meanings of some words. */
export function glossary(...words) {
  const list = h("dl", { class: "glossary" }, ...words.flatMap((word) => [h("dt", {}, word), h("dd", {}, MEANINGS[word])]));
  return folded("What the words mean", list).node;
}
