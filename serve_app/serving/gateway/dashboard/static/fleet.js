// Pools and replicas: in-flight requests, reserved tokens and KV cache.

import { bar, table } from "./charts.js";
import { h } from "./dom.js";
import { compact, NONE, percent, seconds, shortId, whole } from "./format.js";

export const title = "Fleet";

export function render(model) {
  return h("div", { key: "fleet" },
    h("div", { class: "card" }, poolTable(model)),
    h("div", { class: "card" }, replicaTable(model)));
}

function reserved({ peak_tokens: peak, budget_tokens: budget }) {
  if (budget === null) return `${compact(peak)}, limit not reported`;
  if (!budget) return NONE;
  return h("span", { class: "meter" }, bar(peak / budget), `${compact(peak)} of ${compact(budget)} (${percent(peak / budget)})`);
}

const used = (ratio) => (ratio === null || ratio === undefined
  ? NONE
  : h("span", { class: "meter" }, bar(ratio, "kv"), percent(ratio)));

function poolTable(model) {
  const scaling = model.scaling?.pools ?? {};
  const columns = [["Pool"], ["Ready", "figure"], ["Desired", "figure"], ["In flight", "figure"], ["Running", "figure"], ["Waiting in engines", "figure"], ["KV peak", "meters"], ["KV cache used (mean)", "meters short"]];
  const rows = model.pools.map((pool) => ({
    key: pool.pool,
    kind: pool.ready < pool.replicas || !pool.replicas ? "attention" : "",
    cells: [
      pool.pool, `${whole(pool.ready)} of ${whole(pool.replicas)}`, desired(scaling[pool.pool]), whole(pool.in_flight), whole(pool.running),
      whole(pool.waiting_in_engine), reserved(pool), used(pool.kv_usage_ratio),
    ],
  }));
  return table("Pools", columns, rows, "No pools are configured.");
}

const desired = (decision) => decision
  ? h("span", { title: decision.reason }, whole(decision.desired_replicas))
  : NONE;

function replicaTable(model) {
  const columns = [["Replica"], ["Pool"], ["State"], ["Limit"], ["In flight", "figure"], ["Running", "figure"], ["Waiting in engine", "figure"], ["KV peak", "meters"], ["KV cache used", "meters short"], ["TPOT", "figure"]];
  const rows = model.replicas.map((each) => ({
    key: each.replica,
    kind: each.state === "ready" ? "" : "attention",
    cells: [
      h("span", { title: each.replica }, shortId(each.replica)), each.pool, state(each.state), each.limit ?? NONE, whole(each.in_flight),
      each.running === null ? NONE : `${whole(each.running)}${each.max_num_seqs ? ` of ${whole(each.max_num_seqs)}` : ""}`,
      whole(each.waiting_in_engine), reserved(each), used(each.kv_usage_ratio), seconds(each.tpot_s),
    ],
  }));
  const omitted = model.replicas_omitted;
  const caption = `Replicas, those with problems first${omitted ? ` (${whole(omitted)} more not shown)` : ""}`;
  const empty = "No replica is connected. Requests are queued, and rejected after a grace period. See the logs of the pools.";
  return table(caption, columns, rows, empty);
}

const MEANING = {
  ready: "receives requests up to its capacity",
  gated: "TPOT or KV cache usage is above the limit of backpressure; receives no requests until it falls",
  stale: "its last report is too old; counts as saturated",
  draining: "receives no new requests, and stops when the last one ends",
  suspended: "its requests failed; receives no requests until a later report",
  hangs: "does not answer its requests; receives no more than one at a time until it answers",
  down: "cannot be used",
  "no report yet": "registered, but has not reported its load yet",
};

const state = (name) => h("span", { class: `tag state-${name.replaceAll(" ", "-")}`, title: MEANING[name] }, name);
