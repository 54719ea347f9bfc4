/** Sentences for the codes of failures. */

const SENTENCES = {
  engine_died: "The engine died while it answered.",
  engine_unreachable: "The engine could not be reached.",
  engine_rejected: "The engine refused the request.",
  stalled_prefill: "The engine stopped while it read the prompt.",
  stalled_decode: "The engine stopped in the middle of the answer.",
  repeated_line_loop: "The model repeated itself without an end.",
  context_overflow: "The prompt and its answer do not fit the model's context.",
  cache_full: "The engine's cache had no room; the turn runs again.",
  slot_lost: "The slot was lost while tools ran; the turn runs again.",
  tool_timeout: "A tool did not answer in time.",
  tool_exception: "A tool failed.",
  tool_arguments: "The model's arguments for a tool were not valid.",
  tool_result: "A tool's result cannot be used.",
  tool_unknown: "The model called a tool that does not exist.",
  tool_budget: "The model called more tools than it may.",
  invalid_answer: "The answer was not valid; the turn is asked again.",
  validation_exhausted: "No answer was valid, over all retries.",
  deadline: "The turn took longer than it may.",
  poisoned: "The turn brought down every engine that tried it.",
  weights_changed: "The weights changed while the turn ran.",
  not_said: "No caller spoke in time.",
  adapter_unloaded: "The adapter was unloaded.",
  cancelled: "It was cancelled.",
  shutdown: "The service stopped.",
  internal: "A defect of Roundhouse; its log says more.",
};

/** Return the sentence of a code, or the code itself without one. */
export const sentenceOf = (code) => (code ? SENTENCES[code] ?? code.replaceAll("_", " ") : "");

/** Return the sentence of a failure with its detail. */
export const failureOf = (code, detail) => [sentenceOf(code), detail].filter(Boolean).join(" ");
