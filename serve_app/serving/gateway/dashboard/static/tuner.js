// The tuner's story: what it learned, what is in force, what it tries, and what it did.

import { table } from "./charts.js";
import { h } from "./dom.js";
import { counted, NONE, percent, score, seconds, whole } from "./format.js";

export const title = "Tuner";

export function render(model) {
  const { tuner } = model;
  return h("div", { key: "tuner" },
    h("div", { class: "card" }, h("h2", null, "Now"), facts([
      ["Mode", `${tuner.mode}: ${tuner.state}`],
      ["Frozen", tuner.frozen ? tuner.frozen : "no"],
      ["Scheduling", scheduling(model.mode)],
      ["Learned queues", partition(model.queues)],
      ["Digital twin", twin(tuner.twin)],
    ])),
    h("div", { class: "card" }, valueTable(tuner)),
    h("div", { class: "card" }, auditTable(tuner)));
}

const facts = (entries) =>
  h("dl", { class: "facts" }, entries.map(([name, text]) => h("div", { key: name }, h("dt", null, name), h("dd", null, text))));

const scheduling = (mode) => (mode.active_share === 1
  ? "every request is scheduled"
  : `${mode.mode}: ${percent(mode.active_share)} of the requests are scheduled, the others pass by`);

/** Why queues were learned again, in words. */
export const REASONS = {
  first: "the first ones",
  interval: "it was time",
  drift: "lengths have drifted",
  adjusted: "a part of them was adjusted",
  restored: "as they were before the scheduler was replaced",
};

const partition = (queues) => (queues.learned
  ? `${whole(queues.learned)} queues, learned ${seconds(queues.age_s)} ago from ${counted(queues.lengths, "prompt")}: ${REASONS[queues.reason] ?? queues.reason}`
  : "none yet: the policy's own are in force until enough prompts have come");

function twin(shown) {
  if (!shown) return "none: no values are tuned";
  if (!shown.error) return `step times ${shown.step_times}; its error is not known yet`;
  const { ttft_ratio: ttft, tpot_ratio: tpot, requests } = shown.error;
  return `step times ${shown.step_times}; mean TTFT ${signed(ttft)}, TPOT ${signed(tpot)} against the engines (${counted(requests, "request")}; limit ${percent(shown.max_error_ratio)})`;
}

const signed = (ratio) => (typeof ratio === "number" ? `${ratio > 0 ? "+" : ""}${percent(ratio)}` : NONE);

function valueTable(tuner) {
  const rows = Object.entries(tuner.values ?? {}).map(([name, value]) => ({ key: name, cells: [h("code", null, name), score(value)] }));
  return table("Tuned values in force, those on trial included", [["Setting"], ["Value", "figure"]], rows,
    "No tuned values: the configuration's own are in force.");
}

function auditTable(tuner) {
  const rows = (tuner.audit ?? []).map((each, place) => ({
    key: `${place} ${each.what} ${each.why}`,
    cells: [`${seconds(each.age_s)} ago`, each.what, each.why],
  }));
  return table("What the tuner did, the latest first", [["When", "figure"], ["What"], ["Why", "why"]], rows,
    "Nothing yet. Trials, promotions and withdrawals are noted here with their reasons.");
}
