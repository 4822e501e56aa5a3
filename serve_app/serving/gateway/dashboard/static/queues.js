// Length axis with the length queues, and the wait causes of their heads.

import { legend, table, widthOf } from "./charts.js";
import { h } from "./dom.js";
import { compact, counted, NONE, score, seconds, whole } from "./format.js";
import { REASONS } from "./tuner.js";

export const title = "Queues";

const HEIGHT = 220;
const BASE = 178;
const TOP = 48;
const SIDE = 10;

export function render(model, page) {
  const learned = model.queues;
  return h("div", { key: "queues" },
    h("div", { class: "card", id: "axis-card" },
      h("h2", null, "Length queues"),
      h("p", { class: "note" }, introduction(model, learned)),
      axis(model),
      legend([["queue", "requests in a length queue"], ["bubble", "requests in a bubble queue (for lengths in a gap)"],
        ["line border", "B_short: token budget up to which the first pool is the home pool"]])),
    h("div", { class: "card" }, subQueueTable(model, page)),
    model.programs.known ? h("div", { class: "card" }, programTable(model.programs)) : null);
}

function programTable(programs) {
  const columns = [["Program"], ["Tenant"], ["State"], ["Resident on"], ["Conversations", "figure"], ["Turns", "figure"], ["Context", "figure"], ["Tokens saved", "figure"], ["Queue", "figure"], ["thereof for KV cache", "figure"], ["Engine", "figure"], ["Gaps", "figure"]];
  const rows = programs.rows.map((each) => ({
    key: `${each.tenant} ${each.program}`,
    cells: [
      each.program, each.tenant, each.state, each.replicas.join(", ") || NONE, whole(each.conversations), whole(each.turns), compact(each.context_tokens), compact(each.saved_tokens), seconds(each.queued_s), seconds(each.waiting_s), seconds(each.engine_s), seconds(each.gap_s),
    ],
  }));
  const states = Object.entries(programs.recent_by_state).map(([state, count]) => `${whole(count)} ${state}`).join(", ");
  const shown = programs.known > rows.length ? `; the last ${rows.length} are shown` : "";
  return table(`Agent programs: ${states}${shown}`, columns, rows, "");
}

function introduction(model, learned) {
  const origin = learned.learned
    ? `${learned.learned} queues, learned ${seconds(learned.age_s)} ago from ${counted(learned.lengths, "prompt")}: ${REASONS[learned.reason] ?? learned.reason}.`
    : "No queues have been learned yet; the policy uses its initial ones.";
  const backoff = model.in_backoff ? ` ${counted(model.in_backoff, "more request is", "more requests are")} in backoff after a failure.` : "";
  const parked = model.programs.parked ? ` ${counted(model.programs.parked, "more request waits", "more requests wait")} for KV cache, see agent programs below.` : "";
  return `Model ${model.model}, policy ${model.policy}. ${origin} ${model.waiting_requests ? "Bars show queued requests" : "No request is queued"}; the limit is ${whole(model.max_waiting)} in total.${backoff}${parked}`;
}

function axis(model) {
  const bounded = model.length_queues.filter((queue) => queue.bounds);
  if (!bounded.length) return h("p", { class: "empty" }, `The queues of policy ${model.policy} have no length bounds. The table lists them.`);
  const width = widthOf("axis-card");
  // Powers of four, so that a new bubble queue rarely moves the others.
  const power = (tokens, round) => 4 ** round(Math.log(tokens) / Math.log(4));
  const shortest = power(Math.min(...bounded.map((queue) => queue.bounds.min_tokens)), Math.floor);
  const longest = power(Math.max(4 * shortest, model.b_short_tokens, ...bounded.map((queue) => queue.bounds.max_tokens)), Math.ceil);
  const x = (tokens) => SIDE + ((width - 2 * SIDE) * Math.log(Math.max(shortest, tokens) / shortest)) / Math.log((longest + 1) / shortest);
  const most = Math.max(1, ...bounded.map((queue) => queue.waiting));
  const height = (waiting) => (waiting ? Math.max(4, (BASE - TOP) * Math.log1p(waiting) / Math.log1p(Math.max(most, 8))) : 0);
  const middleOf = (queue) => (x(queue.bounds.min_tokens) + x(queue.bounds.max_tokens + 1)) / 2;
  const labels = roomFor(bounded, middleOf);
  const waiting = bounded.reduce((sum, queue) => sum + queue.waiting, 0);
  const label = `Length axis from ${whole(shortest)} to ${whole(longest)} prompt tokens with ${bounded.length} queues and ${counted(waiting, "queued request")}. The table below has the same data.`;
  return h("svg", { role: "img", "aria-label": label, width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, class: "axis" },
    bounded.map((queue) => {
      const { min_tokens: low, max_tokens: high, bubble } = queue.bounds;
      const left = x(low);
      const wide = Math.max(2, x(high + 1) - left - 1);
      const tall = height(queue.waiting);
      const text = queue.waiting
        ? `${queue.name} tokens${bubble ? " (bubble)" : ""}: ${counted(queue.waiting, "queued request")}, longest wait ${seconds(queue.longest_wait_s)}`
        : `${queue.name} tokens${bubble ? " (bubble)" : ""}: empty`;
      return h("g", { key: queue.name, class: bubble ? "queue bubble" : "queue" },
        h("title", null, text),
        h("rect", { class: "band", x: left, y: TOP, width: wide + 1, height: BASE - TOP }),
        h("rect", { class: "waiting", x: left, y: BASE - tall, width: wide, height: tall }),
        labels.has(queue.name) ? h("text", { x: middleOf(queue), y: BASE - tall - 5, "text-anchor": "middle" }, compact(queue.waiting)) : null);
    }),
    ticks(shortest, longest, x, width),
    border(model.b_short_tokens, x, width));
}

/** Return the queues whose labels fit next to each other, the longest queues first. */
function roomFor(queues, middleOf) {
  const placed = [];
  const found = new Set();
  for (const queue of queues.filter((each) => each.waiting).sort((one, other) => other.waiting - one.waiting)) {
    const half = 4 * compact(queue.waiting).length + 2;
    const middle = middleOf(queue);
    if (placed.some((each) => Math.abs(each.middle - middle) < each.half + half)) continue;
    placed.push({ middle, half });
    found.add(queue.name);
  }
  return found;
}

function ticks(shortest, longest, x, width) {
  const found = [];
  for (let tokens = shortest; tokens <= longest; tokens *= 4) {
    if (x(tokens) < width - 30) found.push(tokens);
  }
  const every = width < 500 ? 2 : 1;
  return h("g", { class: "grid", key: "ticks" },
    h("line", { x1: SIDE, x2: width - SIDE, y1: BASE + 0.5, y2: BASE + 0.5 }),
    found.filter((_, place) => place % every === 0).map((tokens) =>
      h("text", { x: x(tokens), y: BASE + 16, "text-anchor": tokens === shortest ? "start" : "middle" }, compact(tokens))),
    h("text", { x: width - SIDE, y: BASE + 34, "text-anchor": "end" }, "prompt tokens (logarithmic)"));
}

function border(tokens, x, width) {
  const at = x(tokens);
  const left = at > width / 2;
  return h("g", { key: "border" },
    h("title", null, `The first pool is the home pool up to a budget of ${whole(tokens)} tokens`),
    h("line", { class: "line border", x1: at, x2: at, y1: TOP - 44, y2: BASE }),
    h("text", { x: at + (left ? -6 : 6), y: TOP - 34, "text-anchor": left ? "end" : "start" }, `B_short ${whole(tokens)}`));
}

/** Return the table of what is queued, and why. */
export function queueTable(model) {
  const columns = [["Queue (tokens)"], ["Waiting", "figure"], ["Longest wait", "figure"], ["Most urgent head"], ["Wait", "figure"], ["Score", "figure"], ["Wait cause", "why"]];
  const filled = model.length_queues.filter((queue) => queue.waiting);
  const empty = model.length_queues.length - filled.length;
  const rows = filled.map((queue) => {
    const head = queue.head;
    const name = queue.bounds?.bubble ? [queue.name, " ", h("span", { class: "tag" }, "bubble")] : queue.name;
    return {
      key: queue.name,
      cells: head
        ? [name, whole(queue.waiting), seconds(queue.longest_wait_s), receiptOf(head, `${head.priority} · ${head.tenant}`), seconds(head.wait_s), score(head.score), reasons(head)]
        : [name, "0", NONE, NONE, NONE, NONE, "empty"],
    };
  });
  const caption = `Queued requests by length, with their most urgent heads${filled.length && empty ? ` (${counted(empty, "empty queue")} not shown)` : ""}`;
  return table(caption, columns, rows, empty > 1 ? `All ${empty} queues are empty.` : "The queue is empty.");
}

/** Link from a head to its receipt. */
const receiptOf = (head, text) => h("a", { href: `#request/${encodeURIComponent(head.head)}`, title: `receipt of ${head.head}` }, text);

/** The wait cause of a head, and the obstacle in each pool. */
const reasons = (head) => [h("b", null, head.cause.replaceAll("_", " ")), ` (${obstacles(head)})`];

/** Return "pool: reason; pool: reason", with pools of the same reason grouped. */
function obstacles(head) {
  const pieces = head.reason.split(/; (?=[^;: ]+: )/);
  const pools = new Map();
  for (const piece of pieces) {
    const [pool, ...reason] = piece.split(": ");
    if (!head.pools.includes(pool)) return head.reason;
    const text = reason.join(": ");
    pools.set(text, [...(pools.get(text) ?? []), pool]);
  }
  return [...pools].map(([text, names]) => `${names.join(", ")}: ${text}`).join("; ");
}

const FEW = 12;
let showsAll = false;

function subQueueTable(model, page) {
  const columns = [["Tenant"], ["Class"], ["Queue"], ["Waiting", "figure"], ["Wait of head", "figure"], ["Score", "figure"], ["Pools"], ["Wait cause", "why"]];
  const shown = showsAll ? model.sub_queues : model.sub_queues.slice(0, FEW);
  const rows = shown.map((each) => ({
    key: `${each.priority} ${each.tenant} ${each.length_queue} ${each.pools} ${each.prefill_class} ${each.head}`,
    cells: [
      each.tenant, each.priority, each.length_queue, whole(each.waiting), receiptOf(each, seconds(each.wait_s)), score(each.score), each.pools.join(", "), reasons(each),
    ],
  }));
  const all = model.sub_queues.length + model.sub_queues_omitted;
  const caption = `Sub-queues, the longest wait first${all > rows.length ? ` (${rows.length} of ${counted(all, "sub-queue")})` : ""}`;
  const toggle = () => {
    showsAll = !showsAll;
    page.render();
  };
  return [
    table(caption, columns, rows, "The queue is empty."),
    model.sub_queues.length > FEW
      ? h("button", { type: "button", key: "more", class: "more", "aria-expanded": String(showsAll), onclick: toggle }, showsAll ? "Show fewer" : `Show ${model.sub_queues.length}`)
      : null,
  ];
}
