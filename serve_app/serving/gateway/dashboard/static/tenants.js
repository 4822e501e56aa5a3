// What tenants were served, and how they stand among each other.

import { bar, table } from "./charts.js";
import { h } from "./dom.js";
import { compact, counted, percent, seconds, whole } from "./format.js";
import { messageOf } from "./stream.js";

export const title = "Tenants";

/** Why the last download failed; "" where none did. */
let failure = "";

export function render(model, page) {
  return h("div", { key: "tenants" },
    h("div", { class: "card" }, servedTable(model)),
    h("div", { class: "card" }, costTable(model.costs),
      h("p", { class: "note" }, "Engine time is the time that replicas worked, divided among the requests on them. Delay is what others waited while a tenant's requests took places that they could have had."),
      h("div", { class: "row" },
        h("button", { type: "button", onclick: () => download(page) }, "Download as CSV"),
        h("span", { role: "status" }, failure))),
    h("div", { class: "card" }, standingTable(model)));
}

function costTable({ rows: costs, left_out: left, since, engine_seconds: all }) {
  const columns = [["Tenant"], ["Class"], ["Pool"], ["Engine time", "figure"], ["Share", "meters"], ["GPU time", "figure"], ["Delay of others", "figure"]];
  const rows = costs.map((each) => ({
    key: `${each.pool} ${each.class} ${each.tenant}`,
    cells: [
      each.tenant, each.class, each.pool, seconds(each.engine_seconds),
      h("span", { class: "meter" }, bar(each.share), percent(each.share)),
      seconds(each.gpu_seconds), seconds(each.imposed_delay_seconds),
    ],
  }));
  const more = left ? ` (${counted(left, "further row")} in the file)` : "";
  const caption = `Who used the engines: ${seconds(all)} of work since ${new Date(1000 * since).toLocaleString()}${more}`;
  return table(caption, columns, rows, "No request has left an engine yet.");
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
    failure = `No file: ${error.message}`;
  }
  page.render();
}

function servedTable(model) {
  const { rows: served, left_out: left, tokens } = model.activity.tenants;
  const waiting = waitingOf(model);
  const columns = [["Tenant"], ["Class"], ["Tokens", "figure"], ["Share of all", "meters"], ["Waiting now", "figure"]];
  const rows = served.map((each) => ({
    key: `${each.priority} ${each.tenant}`,
    cells: [
      each.tenant, each.priority, compact(each.tokens),
      h("span", { class: "meter" }, bar(tokens ? each.tokens / tokens : 0), percent(tokens ? each.tokens / tokens : null)),
      waiting.get(`${each.priority} ${each.tenant}`) ?? "0",
    ],
  }));
  const more = left ? ` (${counted(left, "further one")} not shown)` : "";
  const caption = `Tokens of prompts and answers in the last ${seconds(model.activity.known_s)}, as engines counted them${more}`;
  return table(caption, columns, rows, "No request has completed in this time. Tokens are counted when an answer ends.");
}

function standingTable(model) {
  const rows = Object.entries(model.served).flatMap(([priority, counters]) => {
    const least = Math.min(...Object.values(counters));
    return Object.entries(counters).map(([tenant, counter]) => ({
      key: `${priority} ${tenant}`,
      cells: [tenant, priority, whole(counter), counter === least ? "next in turn" : `+${whole(counter - least)}`],
    }));
  });
  const columns = [["Tenant"], ["Class"], ["Service over weight", "figure"], ["Ahead of the least served", "figure"]];
  const caption = "The counters of fair sharing: the least goes first. One that comes back from idle is lifted to the others";
  return table(caption, columns, rows, "Nobody has been served yet.");
}

/** Waiting requests by class and tenant, as far as their sub-queues are shown. */
function waitingOf(model) {
  const found = new Map();
  for (const each of model.sub_queues) {
    const key = `${each.priority} ${each.tenant}`;
    found.set(key, (found.get(key) ?? 0) + each.waiting);
  }
  const some = model.sub_queues_left_out > 0;
  return new Map([...found].map(([key, count]) => [key, some ? `${whole(count)} or more` : whole(count)]));
}
