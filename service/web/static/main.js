/** The frame around the views: navigation, the state of the connection, and the key. */

import { keys, listener, tryNow } from "./api.js";
import { askForKey } from "./key.js";
import { h, setAttribute, setBadge, setText } from "./dom.js";
import { clock } from "./format.js";
import { start, subscribe } from "./live.js";
import * as awaited from "./awaited.js";
import * as chat from "./chat.js";
import * as cluster from "./cluster.js";
import * as compare from "./compare.js";
import * as conversation from "./conversation.js";
import * as history from "./history.js";
import * as job from "./job.js";
import * as lanes from "./lanes.js";
import * as models from "./models.js";
import * as overview from "./overview.js";
import * as pools from "./pools.js";
import * as post from "./post.js";
import * as usage from "./usage.js";
import * as worker from "./worker.js";
import * as workers from "./workers.js";

const VIEWS = [
  { at: "", title: "Overview", view: overview },
  { at: "jobs", title: "Jobs", view: history, inner: [job, conversation] },
  { at: "post", title: "Post a job", view: post, inner: [post, post, post] },
  { at: "awaited", title: "Awaited", view: awaited },
  { at: "chat", title: "Chat", view: chat },
  { at: "pools", title: "Pools", view: pools },
  { at: "workers", title: "Workers", view: workers, inner: [worker] },
  { at: "lanes", title: "Lanes", view: lanes },
  { at: "models", title: "Models", view: models },
  { at: "cluster", title: "Cluster", view: cluster },
  { at: "usage", title: "Usage", view: usage },
  { at: "compare", title: "Side by side", inner: [null, null, null, compare], isApart: true },
];
const by = (id) => document.getElementById(id);
let close = () => {};
let heardAt = null;

function placeNow() {
  const [at, ...parts] = location.hash.replace(/^#\/?/, "").split("/");
  try {
    return { at, parts: parts.map(decodeURIComponent) };
  } catch {
    return { at: "nowhere", parts: [] }; // a malformed percent escape
  }
}

function show(isFirst = false) {
  close();
  const { at, parts } = placeNow();
  const found = VIEWS.find((each) => each.at === at);
  const view = parts.length ? found?.inner?.[parts.length - 1] : found?.view;
  for (const each of by("nav").children) setAttribute(each, "aria-current", each.dataset.at === at ? "page" : null);
  const root = h("div", { class: "view" });
  by("main").replaceChildren(root);
  const title = (text) => (document.title = `${text} · Roundhouse`);
  if (view) {
    title(found.title);
    close = view.open(root, parts, title) ?? (() => {});
  } else {
    close = () => {};
    title("Not found");
    root.append(h("h1", {}, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "Overview")));
  }
  if (!isFirst) by("main").focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

listener.up = () => {
  heardAt = new Date();
  by("banner").hidden = true;
  setBadge(by("link").firstElementChild, "live");
};
listener.down = (why, pause) => {
  const since = heardAt ? ` What you see is from ${clock(heardAt.toISOString())}.` : "";
  const next = pause === null ? "" : ` The next try is in ${Math.max(1, Math.round(pause / 1000))} s.`;
  setText(by("banner-text"), `No connection: ${why}.${since}${next}`);
  by("banner").hidden = false;
  setBadge(by("link").firstElementChild, "no connection");
};
listener.needsKey = (isWrong) => {
  setBadge(by("link").firstElementChild, "no key");
  askForKey(isWrong, begin);
};

function begin() {
  by("forget").hidden = keys.get() === null;
  by("banner").hidden = true;
  start();
  show(true);
}

by("nav").append(...VIEWS.filter((each) => !each.isApart).map((each) => h("a", { href: `#/${each.at}`, "data-at": each.at }, each.title)));
by("retry").addEventListener("click", tryNow);
by("forget").addEventListener("click", () => {
  keys.forget();
  begin();
});
window.addEventListener("hashchange", () => show());
subscribe(({ status: { awaited: count, lanes: all }, has_others: hasOthers }) => {
  for (const link of by("nav").children) {
    if (link.dataset.at === "lanes") link.hidden = all.length === 0;
    if (link.dataset.at === "cluster") link.hidden = !hasOthers;
    if (link.dataset.at === "awaited") setText(link, count ? `Awaited ${count}` : "Awaited");
    setAttribute(link, "data-count", link.dataset.at === "awaited" && count > 0 ? "true" : null);
  }
});
begin();
