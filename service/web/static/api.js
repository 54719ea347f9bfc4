/** The page's requests: with its key, a limit on every wait, and retries after growing pauses. */

const KEY = "roundhouse.key"; // kept in the tab's session storage
const LIMIT_MS = 20_000;
const SILENCE_MS = 40_000; // longest silence of a stream, which sends something every 15 s
const ANSWER_MS = 600_000; // longest silence of an answer: an engine may read a long prompt for minutes
const FIRST_PAUSE_MS = 500;
const MOST_PAUSE_MS = 15_000;

export const keys = {
  get: () => sessionStorage.getItem(KEY),
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

/** A refusal by the service, with its own words. */
export class Problem extends Error {
  constructor(status, document) {
    super(document.detail || document.error?.message || document.title || `the service answered ${status}`);
    this.status = status;
    this.code = document.code ?? "";
    this.title = document.title ?? "";
    this.errors = document.errors ?? [];
  }
}

/** The service cannot be reached. */
export class Unreachable extends Error {}

/** Callbacks about the page's connection: `up()`, `down(why, pause)`, `needsKey(isWrong)`. */
export const listener = { up() {}, down() {}, needsKey() {} };
const waiting = new Set(); // functions that end the pauses of waiting loops

/** End all pauses, so that every loop tries at once. */
export function tryNow() {
  for (const wake of [...waiting]) wake();
}
window.addEventListener("online", tryNow);
document.addEventListener("visibilitychange", tryNow);

async function answerTo(path, { method = "GET", body, headers = {}, signal } = {}) {
  const key = keys.get();
  const sent = { ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined && !sent["Content-Type"]) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, body, headers: sent, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    throw new Unreachable("Roundhouse cannot be reached", { cause: error });
  }
  if (answer.ok) return answer;
  const document = await answer.json().catch(() => ({}));
  if (answer.status === 401) listener.needsKey(key !== null);
  throw new Problem(answer.status, document);
}

/** Return the JSON of an answer; for very long ones `read` takes the stream. */
export async function ask(path, { read = null, ...options } = {}) {
  const limit = new AbortController();
  const timer = setTimeout(() => limit.abort("late"), LIMIT_MS);
  try {
    const answer = await answerTo(path, { ...options, signal: limit.signal });
    if (read) return await read(answer.body);
    return answer.status === 204 ? null : await answer.json();
  } catch (error) {
    if (error instanceof Problem || error instanceof Unreachable) throw error;
    throw new Unreachable("the answer of Roundhouse broke off", { cause: error });
  } finally {
    clearTimeout(timer);
  }
}

/** Read a whole stream as text. */
export const textOf = (stream) => new Response(stream).text();

/**
 * Post a body and pass on the events of the answering stream, comments too, each as its lines.
 *
 * It ends with the stream, or with `signal`; a stream that is silent for too long is dropped.
 */
export async function converse(path, { body, headers, signal, onEvent }) {
  const silence = new AbortController();
  const stop = () => silence.abort("stopped");
  signal.addEventListener("abort", stop);
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort("silent"), ANSWER_MS);
  };
  try {
    heard();
    const answer = await answerTo(path, { method: "POST", body, headers, signal: silence.signal });
    onEvent([], answer.headers);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ; ) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) onEvent(event.split("\n"), answer.headers);
    }
  } catch (error) {
    if (signal.aborted) return;
    if (error instanceof Problem || error instanceof Unreachable) throw error;
    throw new Unreachable("the answer of Roundhouse broke off", { cause: error });
  } finally {
    clearTimeout(timer);
    signal.removeEventListener("abort", stop);
    silence.abort("over");
  }
}

/** Save an answer as a file; a plain link cannot send the key. */
export async function download(path, name) {
  const answer = await answerTo(path);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), LIMIT_MS);
}

/**
 * Follow the frames of a stream to the last, or until the returned function is called.
 *
 * The stream is closed while the page is hidden: a browser has six connections for all tabs of a service.
 */
export function follow(path, onFrame, onProblem = () => {}) {
  return again(async (closing, succeeded) => {
    const silence = new AbortController();
    const close = () => silence.abort("closed");
    closing.addEventListener("abort", close);
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort("silent"), SILENCE_MS);
    };
    const hide = () => document.hidden && silence.abort("closed");
    document.addEventListener("visibilitychange", hide);
    try {
      heard();
      const answer = await answerTo(path, { signal: silence.signal });
      return (await readEvents(answer.body, heard, (frame) => {
        succeeded();
        onFrame(frame);
      })) ? null : 0;
    } finally {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", hide);
      closing.removeEventListener("abort", close);
      silence.abort("over"); // an open stream would keep one of the browser's six connections
    }
  }, onProblem);
}

/** Read a stream's events; return true after its "end" event. */
async function readEvents(stream, heard, onFrame) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) throw new Unreachable("the stream of Roundhouse broke off");
    heard();
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const kind = fieldOf(event, "event: ");
      if (kind === "end") return true;
      if (kind === "stopping") throw new Unreachable("Roundhouse is stopping");
      if (kind !== "frame") continue;
      listener.up();
      const frame = parsed(fieldOf(event, "data: "));
      if (frame !== undefined) onFrame(frame);
    }
  }
}

/** Return a field of an event. Lines end only at line feeds: in a pattern, U+2028 in a text would end one too. */
function fieldOf(event, name) {
  return event.split("\n").find((line) => line.startsWith(name))?.slice(name.length);
}

/** Return the document of a frame; an unreadable one is skipped, since the next has the whole state. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    console.warn("a frame cannot be read", error);
    return undefined;
  }
}

/**
 * Poll: `look(closing)` returns the milliseconds until its next call, or null to stop.
 *
 * Results after `closing.aborted` must be dropped: the page may show another view by then.
 */
export function poll(look, onProblem = () => {}) {
  return again(async (closing) => {
    const pause = await look(closing);
    listener.up();
    return pause;
  }, onProblem);
}

/** Repeat `act` until it is stopped; failures are retried after a growing pause. */
function again(act, onProblem) {
  const closing = new AbortController();
  (async () => {
    for (let failures = 0; !closing.signal.aborted; ) {
      let pause;
      try {
        if (document.hidden) await seen(closing.signal);
        pause = await act(closing.signal, () => (failures = 0));
        if (pause === null) return;
        failures = 0;
      } catch (error) {
        if (closing.signal.aborted) return;
        if (document.hidden) continue;
        pause = Math.min(MOST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** failures) * (0.8 + 0.4 * Math.random());
        failures += 1;
        if (error instanceof Problem) {
          onProblem(error);
          if (error.status < 500 && error.status !== 429) return;
        }
        listener.down(error.message, pause);
      }
      await nap(pause, closing.signal);
    }
  })();
  return () => closing.abort("closed");
}

function nap(milliseconds, signal) {
  return new Promise((wake) => {
    const done = () => {
      clearTimeout(timer);
      waiting.delete(done);
      signal.removeEventListener("abort", done);
      wake();
    };
    const timer = setTimeout(done, milliseconds);
    waiting.add(done);
    signal.addEventListener("abort", done);
  });
}

async function seen(signal) {
  while (document.hidden && !signal.aborted) await nap(3_600_000, signal);
}
