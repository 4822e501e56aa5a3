// One request's receipt: where its time went, stage by stage, and what it waited for.

import { bar, table } from "./charts.js";
import { h, made, show } from "./dom.js";
import { NONE, percent, seconds, whole } from "./format.js";
import { messageOf } from "./stream.js";

export const title = "Request";

let parts = null;

export function mount(panel, page) {
  const id = made(h("input", { id: "request-id", type: "text", autocomplete: "off", spellcheck: "false" }));
  const form = made(h("form", { class: "card", autocomplete: "off" },
    h("h2", null, "A request's receipt"),
    h("p", { class: "note" }, "Each answer names its request in the header x-request-id. The heads under Queues and the playground lead here."),
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
  const told = (text) => show(parts.result, h("p", { class: "notice", key: "notice" }, text));
  if (!page.key) {
    told("Give an admin's key above, then ask again.");
    return;
  }
  told("Looking …");
  try {
    const answer = await fetch(page.address(`/debug/requests/${encodeURIComponent(id)}`), {
      headers: { authorization: `Bearer ${page.key}` }, cache: "no-store", credentials: "omit",
    });
    if (answer.ok) withReplays(page, await answer.json());
    else told(await messageOf(answer));
  } catch (error) {
    told(`The gateway does not answer (${error.message}).`);
  }
}

/** Show a receipt, and what would have helped once somebody asks. */
function withReplays(page, shown) {
  const shows = (told) => show(parts.result, receipt(shown), shown.outcome ? helped(told, ask) : null);
  async function ask() {
    shows({ notice: "Replaying the minutes around it; this takes some seconds …" });
    const asked = parts.id.value;
    const isLeft = () => parts.id.value !== asked;
    try {
      const answer = await fetch(page.address(`/debug/requests/${encodeURIComponent(shown.request_id)}/what-if`), {
        headers: { authorization: `Bearer ${page.key}` }, cache: "no-store", credentials: "omit",
      });
      const told = answer.ok ? { result: await answer.json() } : { notice: await messageOf(answer) };
      if (!isLeft()) shows(told);
    } catch (error) {
      if (!isLeft()) shows({ notice: `The gateway does not answer (${error.message}).` });
    }
  }
  shows({});
}

const NAMES = {
  gateway: "in the gateway",
  channel: "to the scheduler and back",
  queue: "in the queue",
  engine: "in the engine",
  until_first_token: "until the first token",
  generation: "generation",
};

const PARTS = {
  network: "to the engine and back",
  engine_queue: "waiting in the engine",
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
      shown.outcome ? null : h("p", { class: "note" }, "It has not ended: this is how it stood a moment ago. Show asks again."),
      shown.message ? h("p", { class: "error" }, shown.message) : null,
      facts([
        ["Client's id", shown.client_request_id],
        ["Model, endpoint", [shown.model, shown.endpoint].filter(Boolean).join(", ")],
        ["Tenant, class", `${shown.tenant}, ${shown.class}`],
        ["Arrived", new Date(1000 * shown.arrived_at).toLocaleString()],
        [shown.outcome ? "Time in all" : "Time so far", ms(total)],
        ["Wait predicted", ms(shown.queue.predicted_ms)],
        ...(shown.state === "waiting" ? place(shown.queue) : []),
        ["Prompt tokens", tokens(shown.tokens.prompt, shown.tokens.expected_prompt)],
        ["Of these cached", whole(shown.tokens.cached)],
        ["Answer's tokens", tokens(shown.tokens.output, shown.tokens.expected_output)],
      ])),
    h("div", { class: "card" }, waterfall(stages, total)),
    h("div", { class: "card" }, causes(shown.queue)),
    shown.queue.served ? h("div", { class: "card" }, served(shown.queue.served)) : null,
    h("div", { class: "card" }, attempts(shown.attempts)));
}

const place = (queue) => [
  ["Waits because", queue.meaning],
  ["Its place", queue.position ? `${whole(queue.position)} of ${whole(queue.waiting)} in pool ${queue.pool}` : null],
  ["Expected to start", expectedStart(queue)],
  ["Gives up", `in ${ms(queue.expires_in_ms)}`],
  ["In its way", queue.obstacles],
];

function expectedStart({ expected_ms: middle, expected_between_ms: between }) {
  if (middle === null) return "not known yet";
  return between ? `in ${ms(middle)}, likely between ${ms(between[0])} and ${ms(between[1])}` : `in ${ms(middle)}`;
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
      const name = `of this: ${PARTS[part.part] ?? part.part}${part.estimated ? " (estimated)" : ""}`;
      return row(`${stage} ${part.part}`, `part ${stage}`, name, at - part.ms, part.ms);
    })];
  });
  return table("Where its time went", [["Stage"], ["Took", "figure"], ["Share", "figure"], ["From its arrival to its end", "meters"]], rows,
    "Nothing was measured: it ended at once.");
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
  return table("What it waited for", [["Cause"], ["Time", "figure"], ["Share of the wait", "meters"], ["Went ahead", "figure"], ["That is", "why"]], rows,
    "It did not wait: an engine took it at once.");
}

function served(told) {
  const share = (count) => h("span", { class: "meter" }, bar(told.requests ? count / told.requests : 0), told.requests ? percent(count / told.requests) : NONE);
  const rows = told.by.map((each) => ({
    key: `${each.class} ${each.tenant}`, cells: [each.tenant, each.class, whole(each.requests), share(each.requests)],
  }));
  if (told.others) rows.push({ key: "others", cells: ["others", NONE, whole(told.others), share(told.others)] });
  const more = told.is_complete ? "" : ", as far as receipts go back";
  return table(`Who was sent to pool ${told.pool} while it waited${more}`,
    [["Tenant"], ["Class"], ["Requests", "figure"], ["Share", "meters"]], rows, "Nobody was.");
}

function helped({ notice, result }, ask) {
  return h("div", { class: "card", key: "what-if" },
    h("h2", null, "What would have helped"),
    h("p", { class: "note" }, "The minutes around it are replayed with one thing changed each. Nine in ten waits fall between the two values."),
    result ? null : h("button", { type: "button", onclick: ask }, "Replay"),
    notice ? h("p", { class: "notice" }, notice) : null,
    result ? changes(result) : null);
}

function changes(result) {
  const { replay } = result;
  const rows = result.changes.map((each) => ({
    key: each.label,
    cells: each.wait
      ? [each.label, ms(each.wait.ms), `${ms(each.wait.low_ms)} to ${ms(each.wait.high_ms)}`, each.ttft ? ms(each.ttft.ms) : NONE, each.note]
      : [each.label, NONE, NONE, NONE, each.note],
  }));
  return [
    h("p", { class: "note" }, replay.reproduces
      ? `Unchanged, the replay has a wait of ${ms(replay.wait_ms)}; really it was ${ms(result.recorded.wait_ms)}.`
      : `The replay does not reproduce this wait: it has ${ms(replay.wait_ms)}, really it was ${ms(result.recorded.wait_ms)}.`),
    table("Its wait, had one thing been different", [["Change"], ["Wait", "figure"], ["Nine in ten", "figure"], ["First token", "figure"], ["Note", "why"]], rows, "Nothing could be changed."),
    h("p", null, result.best ? `Most would have helped: ${result.best}.` : "Nothing of this would have helped by more than the replay's own error."),
  ];
}

function attempts(all) {
  const rows = all.map((each, place) => ({
    key: place,
    cells: [
      whole(place + 1), `+${ms(each.after_first_ms)}`, each.pool === each.home_pool ? each.pool : `${each.pool} (at home in ${each.home_pool})`,
      each.replica, each.passed ? "not scheduled, it passed by" : each.length_queue, ms(each.expected_prefill_ms),
    ],
  }));
  return table("Where it was sent", [["Attempt"], ["After the first", "figure"], ["Pool"], ["Replica"], ["Length queue"], ["Prefill expected", "figure"]], rows,
    "It was never sent to a replica.");
}
