/** Figures and times for people. */

const WHOLE = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const whole = (number) => WHOLE.format(number);
export const short = (number) => (number < 10000 ? WHOLE.format(Math.round(number)) : SHORT.format(number));
export const plural = (count, word) => `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
export const mib = (count) => (count === null || count === undefined ? "" : bytes(count * 1024 * 1024));

/** Return a round as people count: the first is 1; in the service it is 0. */
export const roundOf = (round) => `round ${round + 1}`;

/** Return a time of day, with the date unless it is today. */
export function clock(text) {
  if (!text) return "";
  const at = new Date(text);
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? at.toLocaleTimeString("en-GB") : `${at.toLocaleDateString("en-CA")} ${at.toLocaleTimeString("en-GB")}`;
}

/** Return the cause of a state, and the time of the next automatic try. */
export function causeOf({ because, next_at: next }) {
  return next ? `${because} (next at ${clock(next)})` : because;
}

/** Return a duration in one or two units. */
export function seconds(count) {
  if (count === null || count === undefined || Number.isNaN(count)) return "";
  if (count > 0 && count < 0.095) return `${Math.ceil(count * 1000)} ms`;
  if (count < 10) return `${count.toFixed(1)} s`;
  if (count < 120) return `${Math.round(count)} s`;
  if (count < 7200) return `${Math.floor(count / 60)} min ${Math.round(count % 60)} s`;
  return `${Math.floor(count / 3600)} h ${Math.round((count % 3600) / 60)} min`;
}

/** Return the duration from begin to end, or to now. */
export function between(begin, end) {
  if (!begin) return "";
  return seconds(((end ? new Date(end) : new Date()) - new Date(begin)) / 1000);
}

/** Return bytes in a suitable unit. */
export function bytes(count) {
  if (count === null || count === undefined) return "";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  for (; count >= 1024 && place < units.length - 1; place += 1) count /= 1024;
  return `${count.toFixed(count < 10 && place > 0 ? 1 : 0)} ${units[place]}`;
}

/** Return the address of a view. */
export const to = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

/** Return JSON for people. */
export const pretty = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));
