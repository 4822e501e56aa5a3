// The page: connection, selected view, and state shared by all views.

import { h, show } from "./dom.js";
import { compact, counted, percent, seconds, whole } from "./format.js";
import { Watcher } from "./stream.js";
import * as batches from "./batches.js";
import * as fleet from "./fleet.js";
import * as keys from "./keys.js";
import * as overview from "./overview.js";
import * as playground from "./playground.js";
import * as queues from "./queues.js";
import * as receipt from "./receipt.js";
import * as tenants from "./tenants.js";
import * as tuner from "./tuner.js";

const VIEWS = { overview, queues, fleet, tenants, batches, keys, tuner, request: receipt, playground };
const KEY = "ewsjf.admin-key";
// Without a frame for this long, the page reports that its data is stale.
const SILENT_AFTER_MS = 4000;

const byId = (id) => document.getElementById(id);
/** Return an address of the gateway, under the path prefix of this page. */
const address = (path) => new URL(`..${path}`, import.meta.url).href;

const page = {
  key: sessionStorage.getItem(KEY) ?? "",
  /** The latest document of each model, with the time of its frame. */
  models: new Map(),
  batches: { rows: [], error: "" },
  model: "",
  view: "overview",
  paused: false,
  state: "locked",
  address,
  /** Open another view, with an id if the view takes one. */
  open(view, id) {
    location.hash = id ? `#${view}/${encodeURIComponent(id)}` : `#${view}`;
  },
};

page.render = render;

let watcher = null;
let lastFrameAt = 0;

function watch() {
  watcher?.stop();
  watcher = new Watcher(address("/dashboard/events"), page.key, { onFrame, onState });
}

function onFrame(frame) {
  lastFrameAt = performance.now();
  page.batches = frame.batches;
  for (const model of frame.models) {
    const known = page.models.get(model.model);
    if (model.error) page.models.set(model.model, { ...known, error: model.error });
    else page.models.set(model.model, { shown: model, at: frame.at, error: "" });
  }
  const names = new Set(frame.models.map((each) => each.model));
  for (const name of page.models.keys()) if (!names.has(name)) page.models.delete(name);
  if (!page.models.has(page.model)) page.model = frame.models[0]?.model ?? "";
  if (!page.paused) render();
}

function onState(state, message) {
  const was = page.state;
  page.state = state;
  const isSignedIn = page.models.size > 0 && state !== "rejected";
  if (state === "rejected") {
    page.models.clear();
    sessionStorage.removeItem(KEY);
    byId("door-error").textContent = message;
  } else if (state === "live") {
    sessionStorage.setItem(KEY, page.key);
    byId("door-error").textContent = "";
  }
  admit(isSignedIn || state === "live");
  if (state === "rejected") byId("key").focus();
  if (was !== state || message) showState(message);
  if (state !== "live") render();
}

function showState(message) {
  const texts = { live: page.paused ? "paused" : "live", locked: "not connected", rejected: "key rejected" };
  const line = byId("state");
  const text = texts[page.state] ?? message;
  if (line.textContent !== text) line.textContent = text;
  line.dataset.state = page.paused && page.state === "live" ? "paused" : page.state;
}

/** Show the views, or the form in front of them. */
function admit(isSignedIn) {
  if (byId("door").hidden === isSignedIn) return;
  byId("door").hidden = isSignedIn;
  for (const id of ["pause", "leave", "tabs", "panels"]) byId(id).hidden = !isSignedIn;
  if (isSignedIn) followAddress();
}

function leave() {
  sessionStorage.removeItem(KEY);
  // Nothing that an admin has seen remains in the page.
  location.reload();
}

// Rendering.

function render() {
  const known = page.models.get(page.model);
  renderModels();
  renderFindings();
  renderTiles(known?.shown);
  const panel = byId(`panel-${page.view}`);
  const view = VIEWS[page.view];
  if (view.update) view.update(page, known?.shown);
  if (!view.render) return;
  show(panel, notice(known), known?.shown ? view.render(known.shown, page) : null);
}

function notice(known) {
  if (!known) return h("p", { class: "notice", key: "notice" }, "Waiting for data …");
  if (!known.error) return null;
  const old = known.shown ? ` Data shown is from ${new Date(1000 * known.at).toLocaleTimeString()}.` : "";
  return h("p", { class: "notice warning", key: "notice" }, `${page.model}: ${known.error}.${old}`);
}

function renderModels() {
  const select = byId("model");
  select.closest("label").hidden = page.models.size < 2;
  show(select, [...page.models.keys()].map((name) => h("option", { key: name, value: name }, name)));
  if (select.value !== page.model) select.value = page.model;
}

/** Show what is wrong with any of the models, as `ewsjf status` finds it. */
function renderFindings() {
  const known = [...page.models.values()].filter((each) => each.shown && !each.error);
  const findings = known.flatMap((each) => each.shown.findings ?? []);
  const section = byId("findings");
  section.hidden = !known.length;
  const shown = findings.slice(0, MAX_FINDINGS);
  const waiting = known.reduce((sum, each) => sum + each.shown.waiting_requests, 0);
  const more = findings.length - shown.length;
  show(
    section,
    shown.map((each) => h("div", { class: `finding ${each.severity}`, key: each.what },
      h("p", null, h("b", null, each.severity), ` ${each.what}`), h("p", { class: "step" }, `Next: ${each.next_step}`))),
    more > 0 ? h("p", { class: "note", key: "more" }, `${counted(more, "more finding")}: ewsjf status lists them`) : null,
    findings.length || known.length < page.models.size ? null : h("p", { class: "note", key: "none" }, `No problems found${waiting ? `; ${counted(waiting, "request")} queued` : ""}.`),
  );
}

const MAX_FINDINGS = 6;
const CLASSES = ["interactive", "default", "batch"];
const REJECTED = (name) => name.startsWith("rejected");

function renderTiles(model) {
  const tiles = byId("tiles");
  tiles.hidden = !model;
  if (!model) return;
  const waiting = CLASSES.map((name) => [name, model.waiting[name]]).filter(([, count]) => count);
  const pools = model.pools;
  const sum = (figure) => pools.reduce((total, pool) => total + pool[figure], 0);
  const minute = Object.entries(model.activity.last_minute);
  const ended = minute.flatMap(([, each]) => Object.entries(each.outcomes));
  const number = (test) => ended.reduce((total, [name, count]) => total + (test(name) ? count : 0), 0);
  const all = number(() => true);
  const failed = number((name) => name === "failed" || name === "expired");
  const rejected = number(REJECTED);
  const lost = ended.filter(([name, count]) => count && name !== "completed" && name !== "cancelled").map(([name]) => name);
  const kinds = [...new Set(lost)].map((name) => `${whole(number((each) => each === name))} ${name.replace(/^rejected_/, "").replaceAll("_", " ")}`);
  const started = minute.filter(([, each]) => each.first_tokens);
  const [slowest, slow] = started.reduce((most, each) => (most && most[1].ttft_p95_s >= each[1].ttft_p95_s ? most : each), null) ?? [];
  show(
    tiles,
    tile("Waiting", whole(model.waiting_requests), waiting.map(([name, count]) => `${compact(count)} ${name}`).join(", ") || "queue is empty"),
    tile("In flight", whole(sum("in_flight")), `on ${counted(sum("replicas"), "replica")}`),
    tile("Replicas ready", `${sum("ready")} of ${sum("replicas")}`, pools.map((pool) => `${pool.pool} ${pool.ready}/${pool.replicas}`).join(", "),
      sum("ready") < sum("replicas") ? "warn" : ""),
    tile("TTFT P95", seconds(slow?.ttft_p95_s),
      slow ? `class ${slowest}, the slowest of the last minute` : "no streamed answer in the last minute"),
    tile("Completed", all ? percent(number((name) => name === "completed") / all) : "–",
      all ? `of ${counted(all, "request")} in the last minute` : "no request ended in the last minute"),
    tile("Rejected / failed", `${whole(rejected)} / ${whole(failed)}`, kinds.join(", ") || "in the last minute", failed ? "bad" : rejected ? "warn" : ""),
  );
}

const tile = (name, figure, more, kind = "") =>
  h("div", { class: `tile ${kind}`, key: name }, h("h2", null, name), h("p", { class: "figure" }, figure), h("p", { class: "more", title: more }, more));

// Tabs.

function makeTabs() {
  const tabs = byId("tabs");
  const panels = byId("panels");
  show(tabs, Object.entries(VIEWS).map(([name, view]) =>
    h("button", { key: name, type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => page.open(name) }, view.title)));
  show(panels, Object.keys(VIEWS).map((name) =>
    h("section", { key: name, role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, tabindex: "0", hidden: true })));
  tabs.addEventListener("keydown", onTabKey);
  for (const [name, view] of Object.entries(VIEWS)) view.mount?.(byId(`panel-${name}`), page);
}

function onTabKey(event) {
  const names = Object.keys(VIEWS);
  const now = names.indexOf(page.view);
  const wanted = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: names.length - 1 }[event.key];
  if (wanted === undefined) return;
  event.preventDefault();
  const name = names[(wanted + names.length) % names.length];
  page.open(name);
  byId(`tab-${name}`).focus();
}

function followAddress() {
  const [name, id] = location.hash.slice(1).split("/", 2);
  page.view = name in VIEWS ? name : "overview";
  for (const each of Object.keys(VIEWS)) {
    const chosen = each === page.view;
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    byId(`panel-${each}`).hidden = !chosen;
  }
  if (byId("panels").hidden) return;
  VIEWS[page.view].opened?.(page, id ? decodeURIComponent(id) : "");
  render();
}

function start() {
  byId("where").textContent = byId("where").textContent.replace("8000", location.port || "8000");
  makeTabs();
  byId("door").addEventListener("submit", (event) => {
    event.preventDefault();
    page.key = byId("key").value.trim();
    byId("key").value = "";
    byId("door-error").textContent = "";
    watch();
  });
  byId("model").addEventListener("change", (event) => {
    page.model = event.target.value;
    render();
  });
  byId("leave").addEventListener("click", leave);
  byId("pause").addEventListener("click", () => {
    page.paused = !page.paused;
    byId("pause").setAttribute("aria-pressed", page.paused);
    showState("");
    if (!page.paused) render();
  });
  addEventListener("hashchange", followAddress);
  setInterval(() => {
    const silent = page.state === "live" && performance.now() - lastFrameAt > SILENT_AFTER_MS;
    if (silent) onState("lost", "no data for some seconds");
  }, 1000);
  followAddress();
  if (page.key) watch();
}

start();
