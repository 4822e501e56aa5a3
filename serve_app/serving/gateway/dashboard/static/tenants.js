// Tenants: tokens served, engine time and imposed delay, as totals that unfold by class.

import { bar, table } from "./charts.js";
import { h } from "./dom.js";
import { NONE, compact, counted, percent, seconds, whole } from "./format.js";
import { messageOf } from "./stream.js";

export const title = "Tenants";

/** Reason why the last download failed; empty if it did not. */
let failure = "";
const unfolded = new Set();

export function render(model, page) {
  return h("div", { key: "tenants" },
    h("div", { class: "card" }, totals(model, page),
      h("p", { class: "note" }, "Engine time: working time of replicas, divided among their requests. Imposed delay: time that requests of other tenants waited while this tenant's requests took slots that they could have used."),
      h("div", { class: "row" },
        h("button", { type: "button", onclick: () => download(page, "costs") }, "Download engine time as CSV"),
        h("button", { type: "button", onclick: () => download(page, "usage") }, "Download usage of keys as CSV"),
        h("span", { role: "status" }, failure))),
    h("div", { class: "card" }, standingTable(model)));
}

function totals(model, page) {
  const { rows: served, omitted: omittedServed, tokens: allTokens } = model.activity.tenants;
  const { rows: costs, omitted: omittedCosts, since, engine_seconds: allSeconds } = model.costs;
  const tenants = new Map();
  const part = (tenant, name, figures) => {
    if (!tenants.has(tenant)) tenants.set(tenant, new Map());
    const parts = tenants.get(tenant);
    parts.set(name, sum([parts.get(name) ?? {}, figures]));
  };
  for (const each of served) part(each.tenant, each.priority, { tokens: each.tokens });
  for (const each of model.sub_queues) part(each.tenant, each.priority, { queued: each.waiting });
  for (const each of costs) {
    part(each.tenant, each.class, { engine: each.engine_seconds, gpu: each.gpu_seconds, imposed: each.imposed_delay_seconds });
  }
  const some = model.sub_queues_omitted > 0;
  const cells = (name, { tokens, queued, engine, gpu, imposed }) => [
    name, tokens === undefined ? NONE : compact(tokens), meter(tokens, allTokens),
    queued === undefined ? NONE : `${whole(queued)}${some ? " or more" : ""}`,
    seconds(engine), meter(engine, allSeconds), seconds(gpu), seconds(imposed),
  ];
  const ordered = [...tenants].map(([tenant, parts]) => [tenant, parts, sum([...parts.values()])])
    .sort(([, , one], [, , other]) => (other.engine ?? 0) - (one.engine ?? 0) || (other.tokens ?? 0) - (one.tokens ?? 0));
  const rows = ordered.flatMap(([tenant, parts, all]) => {
    const isOpen = unfolded.has(tenant);
    const toggle = () => {
      if (!unfolded.delete(tenant)) unfolded.add(tenant);
      page.render();
    };
    const button = h("button", { type: "button", class: "unfold", "aria-expanded": String(isOpen), "aria-label": `Classes of ${tenant}`, onclick: toggle }, isOpen ? "−" : "+");
    const below = isOpen ? [...parts].map(([name, figures]) => ({ key: `${tenant} ${name}`, kind: "part", cells: cells(name, figures) })) : [];
    return [{ key: tenant, cells: cells([button, tenant], all) }, ...below];
  });
  const columns = [["Tenant"], ["Tokens", "figure"], ["Share", "meters short"], ["Queued now", "figure"], ["Engine time", "figure"], ["Share of it", "meters short"], ["GPU time", "figure"], ["Imposed delay", "figure"]];
  const omitted = omittedServed + omittedCosts;
  const more = omitted ? ` (${counted(omitted, "further row")} of classes and pools not shown)` : "";
  const caption = `Tokens of the last ${seconds(model.activity.known_s)}, and engine time since ${new Date(1000 * since).toLocaleString()}${more}`;
  return table(caption, columns, rows, "No request has completed yet. Tokens and engine time are counted when an answer ends.");
}

/** Return sums of figures; a figure that none has stays undefined. */
function sum(all) {
  const total = {};
  for (const figures of all) {
    for (const [name, value] of Object.entries(figures)) {
      if (value !== null && value !== undefined) total[name] = (total[name] ?? 0) + value;
    }
  }
  return total;
}

const meter = (value, all) => (value === undefined || !all ? NONE : h("span", { class: "meter" }, bar(value / all), percent(value / all)));

async function download(page, name) {
  failure = "";
  try {
    const answer = await fetch(page.address(`/debug/${name}.csv`), {
      headers: { authorization: `Bearer ${page.key}` }, cache: "no-store", credentials: "omit",
    });
    if (!answer.ok) throw new Error(await messageOf(answer));
    const file = URL.createObjectURL(await answer.blob());
    const link = document.createElement("a");
    Object.assign(link, { href: file, download: `${name}.csv` });
    link.click();
    URL.revokeObjectURL(file);
  } catch (error) {
    failure = `Download failed: ${error.message}`;
  }
  page.render();
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
