// Health at a glance: requests and times to first token of the last minutes, what is queued and why, and the
// slowest requests.

import { legend, line, table, timeChart, widthOf } from "./charts.js";
import { h } from "./dom.js";
import { NONE, percent, perSecond, seconds, whole } from "./format.js";
import { queueTable } from "./queues.js";

export const title = "Overview";

// Groups of outcomes, in the order of the stack.
const KINDS = [
  ["completed", "completed", (name) => name === "completed"],
  ["cancelled", "cancelled by the client", (name) => name === "cancelled"],
  ["rejected", "rejected", (name) => name.startsWith("rejected")],
  ["broken", "failed or expired", (name) => name === "failed" || name === "expired"],
];
const CLASSES = ["interactive", "default", "batch"];

export function render(model) {
  const activity = model.activity;
  return h("div", { key: "overview" },
    h("div", { class: "pair" },
      h("div", { class: "card", id: "rate-card" },
        h("h2", null, "Concluded requests per second"),
        endings(activity),
        legend(KINDS.map(([kind, name]) => [kind, name]))),
      h("div", { class: "card", id: "ttft-card" },
        h("h2", null, "Time to first token: P95, and P50 (thin)"),
        firstTokens(activity),
        legend(CLASSES.map((name) => [`line ${name}`, name])))),
    h("div", { class: "card" }, queueTable(model)),
    h("div", { class: "card" }, slowestTable(model)),
    h("div", { class: "card" }, classTable("The last minute", activity.last_minute, 60), h("p", { class: "note" }, known(activity))),
    h("div", { class: "card" }, classTable(`The last ${seconds(activity.known_s)}`, activity.last_minutes, activity.known_s)));
}

function known(activity) {
  const all = activity.slots * activity.slot_s;
  const since = activity.known_s < all ? ` The scheduler process started ${seconds(activity.known_s)} ago; there is no earlier data.` : "";
  return `Counted by the scheduler in slots of ${seconds(activity.slot_s)}. Requests that a gateway rejects, such as invalid ones, are not included.${since}`;
}

const ago = (activity, slot) => (activity.current - slot.number + 0.5) * activity.slot_s;

function endings(activity) {
  const span = activity.slots * activity.slot_s;
  const stacks = activity.series.map((slot) => {
    const counts = KINDS.map(([kind, , test]) => [kind, Object.entries(slot.outcomes).reduce((sum, [name, count]) => sum + (test(name) ? count : 0), 0) / activity.slot_s]);
    return { slot, counts, total: counts.reduce((sum, [, rate]) => sum + rate, 0) };
  });
  const most = Math.max(0, ...stacks.map((each) => each.total));
  const width = widthOf("rate-card");
  if (!most) return empty("No request has ended in this time.");
  return timeChart({
    label: `Concluded requests per second over the last ${seconds(span)}, at most ${perSecond(most)}. The tables below have the same data.`,
    width, span, most, unit: perSecond,
    draw: ({ x, y }) => stacks.map(({ slot, counts }) => {
      let below = 0;
      const from = ago(activity, slot);
      const wide = Math.max(1, x(from - activity.slot_s / 2) - x(from + activity.slot_s / 2) - 0.5);
      return h("g", { key: slot.number }, counts.filter(([, rate]) => rate).map(([kind, rate]) => {
        const top = y(below + rate);
        const tall = y(below) - top;
        below += rate;
        return h("rect", { class: `fill ${kind}`, x: x(from + activity.slot_s / 2), y: top, width: wide, height: tall });
      }));
    }),
  });
}

function firstTokens(activity) {
  const span = activity.slots * activity.slot_s;
  const values = activity.series.flatMap((slot) => Object.values(slot.ttft_p95_s));
  const width = widthOf("ttft-card");
  if (!values.length) return empty("No streamed answer has started in this time. Only streamed answers have a time to first token.");
  const byNumber = new Map(activity.series.map((slot) => [slot.number, slot]));
  const points = (figure, name) => {
    const found = [];
    for (let number = activity.current - activity.slots + 1; number <= activity.current; number++) {
      const slot = byNumber.get(number);
      found.push([ago(activity, { number }), slot?.[figure][name]]);
    }
    return found;
  };
  return timeChart({
    label: `Time to first token by class over the last ${seconds(span)}. The tables below have the same data.`,
    width, span, most: Math.max(...values), unit: seconds,
    draw: (scale) => CLASSES.map((name) => h("g", { key: name },
      line(points("ttft_p50_s", name), scale, `${name} thin`), line(points("ttft_p95_s", name), scale, name))),
  });
}

const empty = (text) => h("p", { class: "empty chart-space" }, text);

function slowestTable(model) {
  const columns = [["Request"], ["Class"], ["Tenant"], ["Outcome"], ["Queue time", "figure"], ["TTFT", "figure"], ["Total", "figure"], ["Ended", "figure"]];
  const rows = model.slowest.map((each) => ({
    key: each.request_id,
    cells: [
      h("a", { href: `#request/${encodeURIComponent(each.request_id)}` }, each.request_id), each.class, each.tenant, each.outcome.replaceAll("_", " "),
      seconds(each.queue_s), seconds(each.ttft_s), seconds(each.total_s), `${seconds(Math.max(0, each.ended_s_ago))} ago`,
    ],
  }));
  return table("Slowest first tokens of the last minute, with receipts", columns, rows, "No request has ended in the last minute.");
}

function classTable(caption, summary, span) {
  const columns = [["Class"], ["Ended", "figure"], ["Rate", "figure"], ["Completed", "figure"], ["Rejected", "figure"], ["Expired", "figure"], ["Failed", "figure"], ["Cancelled", "figure"], ["TTFT P50", "figure"], ["TTFT P95", "figure"], ["TTFT P99", "figure"]];
  const rows = CLASSES.filter((name) => name in summary).map((name) => {
    const { outcomes, ...figures } = summary[name];
    const all = Object.values(outcomes).reduce((sum, count) => sum + count, 0);
    const rejected = Object.entries(outcomes).filter(([each]) => each.startsWith("rejected"));
    const why = rejected.map(([each, count]) => `${count} ${each.slice("rejected_".length).replaceAll("_", " ")}`).join(", ");
    return {
      key: name,
      kind: all ? "" : "idle",
      cells: [
        name, whole(all), perSecond(span ? all / span : null), all ? percent((outcomes.completed ?? 0) / all) : NONE,
        h("span", { title: why }, whole(rejected.reduce((sum, [, count]) => sum + count, 0))),
        whole(outcomes.expired ?? 0), whole(outcomes.failed ?? 0), whole(outcomes.cancelled ?? 0),
        seconds(figures.ttft_p50_s), seconds(figures.ttft_p95_s), seconds(figures.ttft_p99_s),
      ],
    };
  });
  return table(caption, columns, rows, "No data yet.");
}
