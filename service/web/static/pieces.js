/** Incremental reading of a long list at the end of a JSON answer: parsed at once, it would block the page. */

const AT_ONCE_MS = 8; // longest work before painting and input get a turn

/**
 * Return the document of a stream whose last field is the list `name` of objects whose first field is `first`.
 *
 * No string can contain `},{"`, that field's name and a colon: the quotation mark would be escaped within a string, and
 * no field name follows its end.
 */
export async function readPieces(stream, name, first) {
  const begin = `"${name}":[`;
  const between = `},{"${first}":`;
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  const items = [];
  let head = null;
  let rest = "";
  let since = performance.now();
  for (;;) {
    const { done, value } = await reader.read();
    rest += value ?? "";
    if (head === null && rest.includes(begin)) {
      head = rest.slice(0, rest.indexOf(begin));
      rest = rest.slice(head.length + begin.length);
    }
    if (done) break;
    const end = head === null ? -1 : rest.lastIndexOf(between);
    if (end >= 0) {
      items.push(...JSON.parse(`[${rest.slice(0, end + 1)}]`));
      rest = rest.slice(end + 2);
    }
    if (performance.now() - since > AT_ONCE_MS) {
      await new Promise((go) => setTimeout(go));
      since = performance.now();
    }
  }
  items.push(...JSON.parse(`[${rest.slice(0, rest.lastIndexOf("]}"))}]`));
  return { ...JSON.parse(`${head}"${name}":[]}`), [name]: items };
}
