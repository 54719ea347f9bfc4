/** A table whose rows are kept by their keys, in a frame that scrolls sideways where the screen is narrow. */

import { h, keyed, setText } from "./dom.js";

let tables = 0;

/**
 * Return a table. A column has a `title`, and `text(row)` or `make(row)`, which returns `{node, update}`; `kind` is a
 * class of its cells: `number`, or `wide` for what a phone leaves out. The first column names its row.
 */
export function table({ caption, columns, keyOf, empty }) {
  const id = `table-${(tables += 1)}`;
  const body = h("tbody");
  const heads = columns.map((column) => h("th", { scope: "col", class: column.kind }, column.title));
  const none = h("p", { class: "empty" }, empty);
  const head = h("thead", {}, h("tr", {}, ...heads));
  const inner = h("table", {}, h("caption", { id }, caption), head, body);
  const node = h("div", { class: "scroll", role: "region", "aria-labelledby": id, tabindex: "0" }, inner, none);
  return {
    node,
    update(rows) {
      keyed(body, rows, keyOf, (row) => rowOf(columns, row));
      none.hidden = rows.length > 0;
      head.hidden = rows.length === 0;
    },
  };
}

function rowOf(columns, first) {
  const cells = columns.map((column, place) => {
    const cell = place === 0 ? h("th", { scope: "row", class: column.kind }) : h("td", { class: column.kind });
    if (!column.make) return { cell, update: (row) => setText(cell, column.text(row)) };
    const made = column.make(first);
    cell.append(made.node);
    return { cell, update: made.update };
  });
  return {
    node: h("tr", {}, ...cells.map(({ cell }) => cell)),
    update: (row) => cells.forEach(({ update }) => update(row)),
  };
}

/** Return a column's cell that leads somewhere. */
export function link(href, text) {
  return (first) => {
    const node = h("a", { href: href(first) }, text(first));
    return {
      node,
      update(row) {
        setText(node, text(row));
        if (node.getAttribute("href") !== href(row)) node.setAttribute("href", href(row));
      },
    };
  };
}
