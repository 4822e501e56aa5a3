// Receipt of one request: the time of each stage, and the causes of its queue time.

import { bar, table } from "./charts.js";
import { h, made, show } from "./dom.js";
import { NONE, percent, seconds, whole } from "./format.js";
import { messageOf } from "./stream.js";

export const title = "Request";

let parts = null;

export function mount(panel, page) {
  const id = made(h("input", { id: "request-id", type: "text", autocomplete: "off", spellcheck: "false" }));
  const form = made(h("form", { class: "card", autocomplete: "off" },
    h("h2", null, "Receipt of a request"),
    h("p", { class: "note" }, "Each response has its request id in the header x-request-id. Heads in the Queues view and the playground link to their receipts."),
    h("div", { class: "row" }, h("label", { for: "request-id" }, "Request id"), h("button", { type: "submit" }, "Show"))));
  form.querySelector("button").before(id);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = id.value.trim();
    if (!wanted) return;
    if (location.hash === `#request/${encodeURIComponent(wanted)}`) opened(page, wanted);
    else page.open("request", wanted);
  });
  const result = made(h("div", { "aria-live": "polite" }));
  panel.append(form, result);
  parts = { id, result };
}

export async function opened(page, id) {
  if (!id) return;
  parts.id.value = id;
  const notice = (text) => show(parts.result, h("p", { class: "notice", key: "notice" }, text));
  notice("Loading …");
  try {
    const answer = await fetch(page.address(`/debug/requests/${encodeURIComponent(id)}`), {
      headers: { authorization: `Bearer ${page.key}` }, cache: "no-store", credentials: "omit",
    });
    if (answer.ok) show(parts.result, receipt(await answer.json()));
    else notice(await messageOf(answer));
  } catch (error) {
    notice(`The gateway does not respond (${error.message}).`);
  }
}

const NAMES = {
  gateway: "gateway",
  earlier_models: "at earlier models of the route",
  channel: "round trip to the scheduler",
  queue: "queue",
  engine: "engine",
  until_first_token: "until the first token",
  generation: "generation",
};

const PARTS = {
  network: "network to the engine and back",
  engine_queue: "engine queue",
  prefill: "prefill",
  generation: "generation",
};

const ms = (value) => (value === null || value === undefined ? NONE : seconds(value / 1000));

function receipt(shown) {
  const stages = shown.stages.filter((each) => each.ms !== null);
  const total = stages.reduce((sum, each) => sum + each.ms, 0);
  return h("div", { key: "receipt" },
    h("div", { class: "card" },
      h("h2", null, `${shown.request_id}: ${shown.outcome ?? shown.state}`),
      shown.outcome ? null : h("p", { class: "note" }, "The request has not ended. Press Show to refresh."),
      shown.message ? h("p", { class: "error" }, shown.message) : null,
      facts([
        ["Client request id", shown.client_request_id],
        ["Model, endpoint", [shown.model, shown.endpoint].filter(Boolean).join(", ")],
        ["Tenant, class", `${shown.tenant}, ${shown.class}`],
        ["Arrived", new Date(1000 * shown.arrived_at).toLocaleString()],
        [shown.outcome ? "Total time" : "Time so far", ms(total)],
        ["Predicted wait", ms(shown.queue.predicted_ms)],
        ...(shown.latency_target ? target(shown.latency_target) : []),
        ...(shown.longest_gap ? [["Longest gap", gap(shown.longest_gap)]] : []),
        ...(shown.state === "waiting" ? place(shown.queue) : []),
        ["Prompt tokens", tokens(shown.tokens.prompt, shown.tokens.expected_prompt)],
        ["Cached prompt tokens", whole(shown.tokens.cached)],
        ["Output tokens", tokens(shown.tokens.output, shown.tokens.expected_output)],
      ])),
    h("div", { class: "card" }, waterfall(stages, total)),
    h("div", { class: "card" }, causes(shown.queue)),
    shown.queue.served ? h("div", { class: "card" }, served(shown.queue.served)) : null,
    h("div", { class: "card" }, attempts(shown.attempts)));
}

const verdicts = new Map([[true, "met"], [false, "missed"]]);

const target = (shown) => [
  ["Target, first token", shown.ttft_ms === null ? null : [
    ms(shown.ttft_ms),
    verdicts.get(shown.ttft_met),
    shown.expected_ttft_ms === null ? null : `${ms(shown.expected_ttft_ms)} expected`,
  ].filter(Boolean).join(", ")],
  ["Target, per token", shown.tpot_ms === null ? null : ms(shown.tpot_ms)],
];

const gap = (shown) => {
  const beside = shown.prefill_tokens ? `beside a prefill of ${whole(shown.prefill_tokens)} tokens` : shown.cause;
  return `${ms(shown.ms)}, ${beside.replace("_", " ")}`;
};

const place = (queue) => [
  ["Wait cause", queue.meaning],
  ["Position", queue.position ? `${whole(queue.position)} of ${whole(queue.waiting)} in pool ${queue.pool}` : null],
  ["Expected start", expectedStart(queue)],
  ["Queue timeout", `in ${ms(queue.expires_in_ms)}`],
  ["Obstacles", queue.obstacles],
];

function expectedStart({ expected_ms: middle, expected_between_ms: between }) {
  if (middle === null) return "unknown";
  return between ? `in ${ms(middle)} (80 % interval: ${ms(between[0])} to ${ms(between[1])})` : `in ${ms(middle)}`;
}

const tokens = (counted, expected) => `${whole(counted)} (${whole(expected)} expected)`;

const facts = (entries) =>
  h("dl", { class: "facts" }, entries.map(([name, text]) => h("div", { key: name }, h("dt", null, name), h("dd", null, text || NONE))));

function waterfall(stages, total) {
  let from = 0;
  const row = (key, kind, name, at, took) => {
    const span = h("span", { class: `span ${kind}`, "aria-hidden": "true" },
      h("span", { vars: { "--from": `${total ? (100 * at) / total : 0}%`, "--share": `${total ? (100 * took) / total : 0}%` } }));
    return { key, cells: [name, ms(took), total ? percent(took / total) : NONE, span] };
  };
  const rows = stages.flatMap(({ stage, ms: took, parts }) => {
    const begin = from;
    let at = begin;
    from += Math.max(0, took);
    return [row(stage, stage, NAMES[stage] ?? stage, begin, took), ...(parts ?? []).map((part) => {
      at += part.ms;
      const name = `of which: ${PARTS[part.part] ?? part.part}${part.estimated ? " (estimated)" : ""}`;
      return row(`${stage} ${part.part}`, `part ${stage}`, name, at - part.ms, part.ms);
    })];
  });
  return table("Time by stage", [["Stage"], ["Time", "figure"], ["Share", "figure"], ["From arrival to end", "meters"]], rows,
    "No times: the request ended immediately.");
}

function causes(queue) {
  const rows = queue.causes.map((each) => ({
    key: each.cause,
    cells: [
      each.cause.replaceAll("_", " "), ms(each.ms),
      h("span", { class: "meter" }, bar(queue.ms ? each.ms / queue.ms : 0), queue.ms ? percent(each.ms / queue.ms) : NONE),
      queue.ahead?.[each.cause] ? whole(queue.ahead[each.cause]) : NONE, each.meaning,
    ],
  }));
  return table("Queue time by cause", [["Cause"], ["Time", "figure"], ["Share", "meters"], ["Dispatched ahead", "figure"], ["Meaning", "why"]], rows,
    "No queue time: the request was dispatched immediately.");
}

function served(during) {
  const share = (count) => h("span", { class: "meter" }, bar(during.requests ? count / during.requests : 0), during.requests ? percent(count / during.requests) : NONE);
  const rows = during.by.map((each) => ({
    key: `${each.class} ${each.tenant}`, cells: [each.tenant, each.class, whole(each.requests), share(each.requests)],
  }));
  if (during.others) rows.push({ key: "others", cells: ["others", NONE, whole(during.others), share(during.others)] });
  const more = during.is_complete ? "" : " (incomplete: older receipts are gone)";
  return table(`Requests dispatched to pool ${during.pool} during its wait${more}`,
    [["Tenant"], ["Class"], ["Requests", "figure"], ["Share", "meters"]], rows, "None.");
}

function attempts(all) {
  const rows = all.map((each, place) => ({
    key: place,
    cells: [
      whole(place + 1), `+${ms(each.after_first_ms)}`, each.pool === each.home_pool ? each.pool : `${each.pool} (home pool ${each.home_pool})`,
      each.replica, each.bypassed ? "not scheduled" : each.length_queue, ms(each.expected_prefill_ms),
    ],
  }));
  return table("Dispatches", [["Attempt"], ["After the first", "figure"], ["Pool"], ["Replica"], ["Length queue"], ["Expected prefill", "figure"]], rows,
    "The request was not dispatched.");
}
