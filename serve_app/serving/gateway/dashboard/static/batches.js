// Batches of all tenants: their progress, their rate, and when they are expected to end.

import { bar, table } from "./charts.js";
import { h } from "./dom.js";
import { NONE, percent, perSecond, shortId, whole } from "./format.js";

export const title = "Batches";

const SHORT = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" };
const time = (at) => (at ? new Date(1000 * at).toLocaleString([], SHORT) : NONE);

export function render(_, page) {
  const { rows, error } = page.batches;
  const columns = [["Batch"], ["Tenant"], ["State"], ["Done", "meters short"], ["Requests", "figure"], ["Failed", "figure"], ["Rate", "figure"], ["Created"], ["Expected end"], ["Window ends"]];
  const cells = ({ batch, tenant, rate_per_s: rate }) => {
    const { total, completed, failed } = batch.request_counts;
    const share = total ? (completed + failed) / total : 1;
    const isRunning = batch.status === "in_progress";
    return [
      h("span", { title: batch.id }, shortId(batch.id)), tenant, batch.status.replaceAll("_", " "), [bar(share), " ", percent(share)], whole(total), whole(failed), isRunning ? perSecond(rate) : NONE, time(batch.created_at), time(batch.expected_end_at), time(batch.expires_at),
    ];
  };
  return h("div", { key: "batches", class: "card" },
    error ? h("p", { class: "notice warning", key: "error" }, `The storage of batches does not answer: ${error}`) : null,
    table("The last batches, the newest first", columns, rows.map((row) => ({ key: row.batch.id, cells: cells(row) })), "There are no batches."));
}
