/** A table that keeps its rows by key. On a phone each row is a card whose cells show their column's title. */

import { h, keyed, setAttribute, setText } from "./dom.js";

let tables = 0;

/**
 * Return a table. A column has a `title`, and `text(row)` or `make(row)`, which returns `{node, update}`; `kind` is a
 * class of its cells, and `says` explains its title. The first column names its row. A column with an `order` can be
 * sorted by: it calls `sort(order)`, and `showOrder` marks the shown order. One that `isOptional` is hidden unless a row
 * has text for it.
 */
export function table({ caption, columns, keyOf, empty, sort }) {
  const id = `table-${(tables += 1)}`;
  const body = h("tbody", { role: "rowgroup" });
  const heads = columns.map((column) => h("th", { scope: "col", role: "columnheader", class: column.kind, title: column.says },
    column.order ? h("button", { type: "button", class: "sort", onclick: () => sort(column.order) }, column.title) : column.title));
  const none = h("p", { class: "empty" }, empty);
  const head = h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...heads));
  // Shown as cards, browsers do not expose them as a table: the roles keep it one.
  const inner = h("table", { role: "table" }, h("caption", { id }, caption), head, body);
  const node = h("div", { class: "scroll", role: "region", "aria-labelledby": id, tabindex: "0" }, inner, none);
  return {
    node,
    showOrder(order, isDescending) {
      columns.forEach((column, at) => column.order
        && setAttribute(heads[at], "aria-sort", column.order !== order ? "none" : isDescending ? "descending" : "ascending"));
    },
    update(rows) {
      columns.forEach((column, at) => {
        if (column.isOptional) column.isHidden = heads[at].hidden = !rows.some(column.text);
      });
      keyed(body, rows, keyOf, (row) => rowOf(columns, row));
      none.hidden = rows.length > 0;
      head.hidden = rows.length === 0;
      setAttribute(inner, "role", rows.length ? "table" : "none"); // without rows only the caption is left
      setAttribute(body, "role", rows.length ? "rowgroup" : "none");
    },
  };
}

function rowOf(columns, first) {
  const cells = columns.map((column, place) => {
    const attributes = { class: column.kind, "data-title": place === 0 ? null : column.title };
    const cell = place === 0 ? h("th", { scope: "row", role: "rowheader", ...attributes }) : h("td", { role: "cell", ...attributes });
    if (!column.make) {
      return { cell, update: (row) => {
        setText(cell, column.text(row));
        cell.hidden = Boolean(column.isHidden);
      } };
    }
    const made = column.make(first);
    cell.append(made.node);
    return { cell, update: made.update };
  });
  return {
    node: h("tr", { role: "row" }, ...cells.map(({ cell }) => cell)),
    update: (row) => cells.forEach(({ update }) => update(row)),
  };
}

/** Return a maker of cells that are links. */
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
