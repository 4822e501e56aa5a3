// API keys: their limits and usage, creation and revocation. The secret of a new key is shown once.

import { bar, table } from "./charts.js";
import { h, made, show } from "./dom.js";
import { NONE, compact, percent, whole } from "./format.js";
import { messageOf } from "./stream.js";

export const title = "Keys";

const KEYS = "/admin/keys";
const MAX_DAYS = 50;
const CLASSES = ["interactive", "default", "batch"];
// Limits that a form can set, with their labels.
const LIMITS = [
  ["cost_per_day", "Cost per day"],
  ["cost_per_month", "Cost per month"],
  ["tokens_per_day", "Tokens per day"],
  ["tokens_per_month", "Tokens per month"],
  ["tokens_per_minute", "Tokens per minute, per model"],
  ["requests_per_minute", "Requests per minute, per model"],
  ["concurrent", "Concurrent requests, per model"],
];

let parts = null;
let known = { keys: [], usage: [], notice: "", secret: null };
/** Key whose limits the form changes; null creates one. */
let edited = null;

export function mount(panel, page) {
  const form = made(h("form", { class: "card", autocomplete: "off" },
    h("h2", null, "New key"),
    h("div", { class: "fields" },
      field("Tenant", h("input", { name: "tenant", required: true, maxlength: 128, spellcheck: "false" })),
      field("Description", h("input", { name: "name" })),
      field("Highest class", h("select", { name: "highest_class" }, CLASSES.map((name) => h("option", { value: name }, name)))),
      field("Models (separated by commas; empty: all)", h("input", { name: "models", spellcheck: "false" })),
      LIMITS.map(([name, label]) => field(label, h("input", { name, type: "number", min: 0, step: name.startsWith("cost") ? "any" : 1, inputmode: "decimal" })))),
    h("div", { class: "row" },
      h("label", { class: "check" }, h("input", { type: "checkbox", name: "admin" }), " Admin"),
      h("button", { type: "submit" }, "Create"),
      h("button", { type: "button", name: "stop", hidden: true }, "Do not change it"))));
  const list = made(h("div"));
  panel.append(list, form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    save(page);
  });
  form.stop.addEventListener("click", () => edit(page, null));
  parts = { form, list };
}

const field = (label, input) => {
  input.attributes.id = `keys-${input.attributes.name}`;
  return h("div", { class: "field" }, h("label", { for: input.attributes.id }, label), input);
};

async function call(page, path, options = {}) {
  const answer = await fetch(page.address(path), {
    headers: { authorization: `Bearer ${page.key}`, "content-type": "application/json" },
    cache: "no-store", credentials: "omit", ...options,
  });
  if (!answer.ok) throw new Error(await messageOf(answer));
  return answer.json();
}

async function load(page) {
  try {
    const [{ keys }, { models }] = await Promise.all([call(page, KEYS), call(page, "/debug/usage")]);
    known = { ...known, keys, usage: models.flatMap((model) => model.rows ?? []), notice: "" };
  } catch (error) {
    known = { ...known, keys: [], usage: [], notice: error.message };
  }
  draw(page);
}

export { load as opened };

async function save(page) {
  const { form } = parts;
  const permissions = {
    tenant: form.tenant.value.trim(),
    name: form.name.value.trim(),
    highest_class: form.highest_class.value,
    models: form.models.value.split(",").map((each) => each.trim()).filter(Boolean),
    admin: form.admin.checked,
  };
  for (const [name] of LIMITS) permissions[name] = form[name].value === "" ? null : Number(form[name].value);
  try {
    const path = edited ? `${KEYS}/${encodeURIComponent(edited)}` : KEYS;
    const saved = await call(page, path, { method: "POST", body: JSON.stringify(permissions) });
    edit(page, null);
    known.secret = saved.secret ? saved : null;
    await load(page);
  } catch (error) {
    known = { ...known, notice: error.message };
    draw(page);
  }
}

async function revoke(page, key) {
  if (!confirm(`Revoke key ${key.id} of tenant ${key.tenant}? Its requests are rejected within seconds.`)) return;
  try {
    await call(page, `${KEYS}/${encodeURIComponent(key.id)}`, { method: "DELETE" });
    await load(page);
  } catch (error) {
    known = { ...known, notice: error.message };
    draw(page);
  }
}

function edit(page, key) {
  const { form } = parts;
  edited = key?.id ?? null;
  form.reset();
  if (key) {
    for (const name of ["tenant", "name", "highest_class"]) form[name].value = key[name] ?? form[name].value;
    form.models.value = (key.models ?? []).join(", ");
    form.admin.checked = Boolean(key.admin);
    for (const [name] of LIMITS) form[name].value = key[name] ?? "";
    form.tenant.focus();
  }
  form.querySelector("h2").textContent = key ? `Change key ${key.id}` : "New key";
  form.querySelector("button[type=submit]").textContent = key ? "Save" : "Create";
  form.stop.hidden = !key;
  draw(page);
}

function draw(page) {
  show(parts.list,
    known.notice ? h("p", { class: "notice warning", key: "notice", role: "alert" }, known.notice) : null,
    known.secret ? secretCard(page, known.secret) : null,
    known.notice ? null : [
      h("div", { class: "card", key: "list" }, keyTable(page)),
      h("div", { class: "card", key: "usage" }, usageTable()),
    ]);
}

/** Return the usage by day, key and model, the latest day first. */
function usageTable() {
  const columns = [["Day (UTC)"], ["Key"], ["Model"], ["Requests", "figure"], ["Prompt", "figure"], ["Cached", "figure"], ["Generated", "figure"], ["Cost", "figure"]];
  const rows = [...known.usage].sort((one, other) => (one.day < other.day ? 1 : one.day > other.day ? -1 : 0)).slice(0, MAX_DAYS).map((each) => ({
    key: `${each.day} ${each.key} ${each.model}`,
    cells: [
      each.day, each.key, each.model, whole(each.requests), compact(each.prompt_tokens), compact(each.cached_tokens),
      compact(each.generated_tokens), each.cost === null ? NONE : each.cost.toFixed(2),
    ],
  }));
  const more = known.usage.length > rows.length ? ` (${rows.length} of ${known.usage.length}; the tab Tenants has the table as CSV)` : "";
  return table(`Tokens by day, key and model${more}`, columns, rows, "No request with a key has completed yet.");
}

function secretCard(page, { id, tenant, secret }) {
  const done = () => {
    known.secret = null;
    draw(page);
  };
  return h("div", { class: "card", key: "secret", role: "status" },
    h("h2", null, `Secret of key ${id} for tenant ${tenant}`),
    h("p", { class: "note" }, "It is shown only now and stored nowhere. Copy it before you leave this page."),
    h("code", { class: "secret" }, secret),
    h("button", { type: "button", onclick: done }, "Done"));
}

function keyTable(page) {
  const columns = [["Key"], ["Tenant"], ["Status"], ["Highest class"], ["Today", "figure"], ["This month", "figure"], ["Budget used", "meters"], ["Actions"]];
  const rows = known.keys.map((key) => ({
    key: key.id,
    kind: key.status === "valid" ? "" : "idle",
    cells: [
      key.name ? `${key.id} (${key.name})` : key.id, key.tenant, key.admin ? `${key.status}, admin` : key.status, key.highest_class ?? "interactive",
      used(key.used.day), used(key.used.month), budget(key),
      key.status === "valid" ? [
        h("button", { type: "button", onclick: () => edit(page, key), "aria-label": `Change key ${key.id}` }, "Change"), " ",
        h("button", { type: "button", onclick: () => revoke(page, key), "aria-label": `Revoke key ${key.id}` }, "Revoke"),
      ] : NONE,
    ],
  }));
  return table("API keys of the file, with what they have used (UTC)", columns, rows, "The file has no keys yet.");
}

const used = ({ tokens, cost }) => (cost ? `${compact(tokens)} tokens, ${cost.toFixed(2)}` : `${compact(tokens)} tokens`);

/** Return the share of the budget that is closest to its end. */
function budget(key) {
  const shares = ["day", "month"].flatMap((period) => ["tokens", "cost"].map((unit) => {
    const limit = key[`${unit}_per_${period}`];
    return limit ? { share: key.used[period][unit] / limit, text: `${unit === "tokens" ? `${compact(limit)} tokens` : limit} per ${period}` } : null;
  })).filter(Boolean);
  if (!shares.length) return NONE;
  const most = shares.reduce((one, other) => (other.share > one.share ? other : one));
  return h("span", { class: "meter" }, bar(most.share), `${percent(most.share)} of ${most.text}`);
}
