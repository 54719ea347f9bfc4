/**
 * Elements, and lists of them that are updated.
 *
 * Text is inserted as text, never as markup: names of jobs and words of models and tools are not trusted.
 */

/** Return an element; attributes that begin with "on" are listeners, those that are false or null are left out. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Set an element's text only if it differs, which keeps a selection and a screen reader's place. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set or remove an attribute, only if it changes. */
export function setAttribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

const lists = new WeakMap();

/**
 * Update a parent's children to match a list, by key: `make(item)` returns `{node, update}`.
 *
 * Items that stay keep their elements, and so focus, selection and unfolded parts.
 */
export function keyed(parent, items, keyOf, make) {
  const known = lists.get(parent) ?? new Map();
  lists.set(parent, known);
  const wanted = new Set(items.map((item) => String(keyOf(item))));
  for (const [key, row] of known) {
    if (!wanted.has(key)) {
      row.node.remove();
      known.delete(key);
    }
  }
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let row = known.get(key);
    if (!row) known.set(key, (row = make(item)));
    row.update(item);
    if (row.node === place) place = place.nextElementSibling;
    else parent.insertBefore(row.node, place);
  }
}

/** Return a word with its colour: a state is never shown by colour alone. */
export function badge(word) {
  const node = h("span", { class: "state" });
  setBadge(node, word);
  return node;
}

/** Change a badge's word. */
export function setBadge(node, word) {
  const text = word ?? "none";
  setAttribute(node, "data-state", text);
  setText(node, text.replaceAll("_", " "));
}

/** Return a bar of parts; `update` takes counts by kind and their total. */
export function bar(label) {
  const node = h("div", { class: "bar", role: "img", "aria-label": label });
  const parts = new Map();
  return {
    node,
    update(counts, total) {
      const counted = Object.entries(counts).filter(([, count]) => count > 0);
      setAttribute(node, "aria-label", `${label}: ${counted.map(([kind, n]) => `${n} ${kind}`).join(", ") || "none"} of ${total}`);
      for (const [kind, count] of Object.entries(counts)) {
        let part = parts.get(kind);
        if (!part) {
          parts.set(kind, (part = h("span", { "data-kind": kind })));
          node.append(part);
        }
        part.style.width = `${total > 0 ? (100 * count) / total : 0}%`;
      }
    },
  };
}

/** Return a list of terms and values; `update` takes pairs, and leaves out those without a value. */
export function facts() {
  const node = h("dl", { class: "facts" });
  return {
    node,
    update(pairs) {
      const given = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
      keyed(node, given, ([term]) => term, ([term]) => {
        const value = h("dd");
        return { node: h("div", {}, h("dt", {}, term), value), update: ([, text]) => setText(value, String(text)) };
      });
    },
  };
}

/** Return a folded section with a title. */
export function folded(title, ...children) {
  const summary = h("summary", {}, title);
  return { node: h("details", {}, summary, ...children), setTitle: (text) => setText(summary, text) };
}
