// Tuner: learned queues, tuned values, trials and history.

import { table } from "./charts.js";
import { h } from "./dom.js";
import { counted, NONE, percent, score, seconds, whole } from "./format.js";

export const title = "Tuner";

export function render(model) {
  const { tuner } = model;
  return h("div", { key: "tuner" },
    h("div", { class: "card" }, h("h2", null, "Tuner"), facts([
      ["Mode", tuner.mode],
      ["State", tuner.state],
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
  : `${mode.mode}: ${percent(mode.active_share)} of the requests are scheduled, the others are passed through`);

/** Reasons for learning the queues. */
export const REASONS = {
  learned: "learned from the traffic",
  restored: "restored after a restart of the scheduler",
};

const partition = (queues) => (queues.learned
  ? `${whole(queues.learned)} queues, learned ${seconds(queues.age_s)} ago from ${counted(queues.lengths, "prompt")}: ${REASONS[queues.reason] ?? queues.reason}`
  : "none yet: the policy uses its initial ones until it has enough prompts");

function twin(shown) {
  if (!shown) return "off: no values are tuned";
  if (!shown.error) return `step times ${shown.step_times}; error not measured yet`;
  const { ttft_ratio: ttft, tpot_ratio: tpot, requests } = shown.error;
  return `step times ${shown.step_times}; error of the mean TTFT ${signed(ttft)}, of TPOT ${signed(tpot)} (${counted(requests, "request")}; limit ${percent(shown.max_error_ratio)})`;
}

const signed = (ratio) => (typeof ratio === "number" ? `${ratio > 0 ? "+" : ""}${percent(ratio)}` : NONE);

function valueTable(tuner) {
  const rows = Object.entries(tuner.values ?? {}).map(([name, value]) => ({ key: name, cells: [h("code", null, name), score(value)] }));
  return table("Current values of tuned settings, including trials", [["Setting"], ["Value", "figure"]], rows,
    "No tuned values: the configured ones apply.");
}

function auditTable(tuner) {
  const rows = (tuner.audit ?? []).map((each, place) => ({
    key: `${place} ${each.what} ${each.why}`,
    cells: [`${seconds(each.age_s)} ago`, each.what, each.why],
  }));
  return table("History, the latest first", [["Time", "figure"], ["Action"], ["Reason", "why"]], rows,
    "No actions yet. Trials, adoptions and rollbacks are listed here with their reasons.");
}
