/**
 * Markdown as elements: the parser's tokens become a few kinds of elements, and everything else stays text.
 *
 * Words of models and tools are not trusted. HTML in them is text. Nothing is loaded from elsewhere: a picture is a
 * link. Links lead only to http, https and mailto.
 */

import { h } from "./dom.js";

const MOST = 20_000; // longest parsed text in characters; longer ones stay plain
const DEEPEST = 20; // nested lists and quotes
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const TAGS = new Set([
  "p", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td",
  "strong", "em", "s", "hr", "br",
]);
const HEADINGS = { h1: "h3", h2: "h4", h3: "h5", h4: "h6", h5: "h6", h6: "h6" }; // below the page's own headings
let parser = null;
let loading = null;

/** Load the parser; until then text is plain. */
export function loadMarkdown() {
  loading ??= import("./vendor/markdown-it.js").then(({ default: Parser }) => {
    parser = new Parser("default", { html: false, linkify: false, maxNesting: DEEPEST });
  });
  return loading;
}

/** Show a text in an element as Markdown, or plain if it is too long or the parser is missing. */
export function showMarkdown(node, text) {
  const tokens = parser && text.length <= MOST ? parsed(text) : null;
  node.dataset.markdown = tokens ? "true" : "false";
  if (!tokens) {
    if (node.textContent !== text || node.firstElementChild) node.textContent = text;
    return;
  }
  node.replaceChildren(...elementsOf(tokens));
}

function parsed(text) {
  try {
    return parser.parse(text, {});
  } catch {
    return null;
  }
}

/** Return the elements of a flat list of opening and closing tokens. */
function elementsOf(tokens) {
  const root = { node: document.createDocumentFragment(), tag: "" };
  const open = [root];
  for (const token of tokens) {
    const top = open.at(-1).node;
    if (token.nesting === -1) {
      if (open.length > 1) open.pop();
    } else if (token.type === "inline") {
      top.append(...elementsOf(token.children ?? []));
    } else if (token.nesting === 1) {
      const node = opened(token);
      top.append(node);
      open.push({ node });
    } else {
      top.append(single(token));
    }
  }
  return [...root.node.childNodes];
}

function opened(token) {
  if (token.type === "link_open") return linkTo(token.attrGet("href") ?? "");
  if (token.type === "paragraph_open" && token.hidden) return h("span");
  if (!TAGS.has(token.tag)) return h("span");
  const start = token.tag === "ol" ? token.attrGet("start") : null;
  return h(HEADINGS[token.tag] ?? token.tag, { start });
}

function single(token) {
  switch (token.type) {
    case "text": return token.content;
    case "softbreak": // models break lines on purpose
    case "hardbreak": return h("br");
    case "hr": return h("hr");
    case "code_inline": return h("code", {}, token.content);
    case "fence":
    case "code_block": return codeOf(token.content, token.info?.trim().split(/\s+/)[0] ?? "");
    case "image": {
      const link = linkTo(token.attrGet("src") ?? "");
      link.append(token.content || "picture");
      return link;
    }
    default: return token.content ?? ""; // the text of an unknown kind
  }
}

function linkTo(address) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // relative addresses are refused: models must not link into this page
  }
  if (!url || !SCHEMES.has(url.protocol)) return h("span", { title: address });
  return h("a", { href: url.href, rel: "noreferrer noopener nofollow", target: "_blank", title: url.href });
}

/** Return a button that copies a text; browsers allow this over https or on localhost. */
export function copyButton(textNow) {
  const node = h("button", { type: "button", class: "quiet copy", onclick: async () => {
    try {
      await navigator.clipboard.writeText(textNow());
      node.textContent = "Copied";
    } catch {
      node.textContent = "Not allowed here";
    }
  } }, "Copy");
  return node;
}

function codeOf(text, language) {
  return h("div", { class: "code" }, h("div", { class: "line" }, h("span", { class: "beside" }, language), copyButton(() => text)),
    h("pre", { tabindex: "0" }, h("code", {}, text)));
}
