// Tenants: tokens served, engine time, and fair-sharing counters.

import { bar, table } from "./charts.js";
import { h } from "./dom.js";
import { compact, counted, percent, seconds, whole } from "./format.js";
import { messageOf } from "./stream.js";

export const title = "Tenants";

/** Reason why the last download failed; empty if it did not. */
let failure = "";

export function render(model, page) {
  return h("div", { key: "tenants" },
    h("div", { class: "card" }, servedTable(model)),
    h("div", { class: "card" }, costTable(model.costs),
      h("p", { class: "note" }, "Engine time: working time of replicas, divided among their requests. Imposed delay: time that requests of other tenants waited while this tenant's requests took slots that they could have used."),
      h("div", { class: "row" },
        h("button", { type: "button", onclick: () => download(page) }, "Download as CSV"),
        h("span", { role: "status" }, failure))),
    h("div", { class: "card" }, standingTable(model)));
}

function costTable({ rows: costs, omitted, since, engine_seconds: all }) {
  const columns = [["Tenant"], ["Class"], ["Pool"], ["Engine time", "figure"], ["Share", "meters"], ["GPU time", "figure"], ["Imposed delay", "figure"]];
  const rows = costs.map((each) => ({
    key: `${each.pool} ${each.class} ${each.tenant}`,
    cells: [
      each.tenant, each.class, each.pool, seconds(each.engine_seconds),
      h("span", { class: "meter" }, bar(each.share), percent(each.share)),
      seconds(each.gpu_seconds), seconds(each.imposed_delay_seconds),
    ],
  }));
  const more = omitted ? ` (${counted(omitted, "further row")} in the CSV file)` : "";
  const caption = `Engine time by tenant: ${seconds(all)} since ${new Date(1000 * since).toLocaleString()}${more}`;
  return table(caption, columns, rows, "No request has ended in an engine yet.");
}

async function download(page) {
  failure = "";
  try {
    const answer = await fetch(page.address("/debug/costs.csv"), {
      headers: { authorization: `Bearer ${page.key}` }, cache: "no-store", credentials: "omit",
    });
    if (!answer.ok) throw new Error(await messageOf(answer));
    const file = URL.createObjectURL(await answer.blob());
    const link = document.createElement("a");
    Object.assign(link, { href: file, download: "costs.csv" });
    link.click();
    URL.revokeObjectURL(file);
  } catch (error) {
    failure = `Download failed: ${error.message}`;
  }
  page.render();
}

function servedTable(model) {
  const { rows: served, omitted, tokens } = model.activity.tenants;
  const waiting = waitingOf(model);
  const columns = [["Tenant"], ["Class"], ["Tokens", "figure"], ["Share", "meters"], ["Queued now", "figure"]];
  const rows = served.map((each) => ({
    key: `${each.priority} ${each.tenant}`,
    cells: [
      each.tenant, each.priority, compact(each.tokens),
      h("span", { class: "meter" }, bar(tokens ? each.tokens / tokens : 0), percent(tokens ? each.tokens / tokens : null)),
      waiting.get(`${each.priority} ${each.tenant}`) ?? "0",
    ],
  }));
  const more = omitted ? ` (${counted(omitted, "further one")} not shown)` : "";
  const caption = `Prompt and output tokens of the last ${seconds(model.activity.known_s)}, as counted by the engines${more}`;
  return table(caption, columns, rows, "No request has completed in this time. Tokens are counted when an answer ends.");
}

function standingTable(model) {
  const rows = Object.entries(model.served).flatMap(([priority, counters]) => {
    const least = Math.min(...Object.values(counters));
    return Object.entries(counters).map(([tenant, counter]) => ({
      key: `${priority} ${tenant}`,
      cells: [tenant, priority, whole(counter), counter === least ? "served next" : `+${whole(counter - least)}`],
    }));
  });
  const columns = [["Tenant"], ["Class"], ["Service / weight", "figure"], ["Lead over the lowest", "figure"]];
  const caption = "Fair-sharing counters: the lowest is served first. An idle tenant is lifted to the lowest active one";
  return table(caption, columns, rows, "No tenant has been served yet.");
}

/** Queued requests by class and tenant, of the sub-queues in the frame. */
function waitingOf(model) {
  const found = new Map();
  for (const each of model.sub_queues) {
    const key = `${each.priority} ${each.tenant}`;
    found.set(key, (found.get(key) ?? 0) + each.waiting);
  }
  const some = model.sub_queues_omitted > 0;
  return new Map([...found].map(([key, count]) => [key, some ? `${whole(count)} or more` : whole(count)]));
}
