// Sends one chat request through the public endpoint, and shows its progress.

import { h, made, show } from "./dom.js";
import { counted, NONE, seconds, whole } from "./format.js";
import { messageOf } from "./stream.js";

export const title = "Playground";

// Common words of one token each in most vocabularies, so that the form can take a length in tokens.
const WORDS = "the time of day and a way to see how long it can be in this line or that one when we are near the end".split(" ");
const SHOWN_CHARACTERS = 4000;

let form = null;
let result = null;
let busy = null;
let progress = {};

export function mount(panel, page) {
  form = made(h("form", { class: "card", autocomplete: "off" },
    h("h2", null, "Send a chat request"),
    h("p", { class: "note" }, "This is a real request: it is queued, runs on an engine and counts for the tenant of its key."),
    h("div", { class: "fields" },
      field("Model", h("select", { name: "model" }), "model"),
      field("Prompt (empty: generated text of the length below)", h("textarea", { name: "text", rows: 3 }), "text", "wide"),
      field("Prompt tokens (approximate)", h("input", { name: "tokens", type: "number", min: 1, max: 1000000, value: 200, required: true, inputmode: "numeric" }), "tokens"),
      field("Output tokens (maximum)", h("input", { name: "output", type: "number", min: 1, max: 100000, value: 64, required: true, inputmode: "numeric" }), "output"),
      field("Class", h("select", { name: "priority" }, ["interactive", "default", "batch"].map((name) => h("option", { value: name }, name))), "priority"),
      field("API key (default: admin key)", h("input", { name: "key", type: "password", autocomplete: "off" }), "key")),
    h("div", { class: "row" },
      h("label", { class: "check" }, h("input", { type: "checkbox", name: "stream", checked: true }), " Stream the answer"),
      h("button", { type: "submit" }, "Send"),
      h("button", { type: "button", name: "stop", disabled: true }, "Cancel"))));
  form.priority.value = "default";
  form.stream.checked = true;
  result = made(h("div"));
  panel.append(form, result);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!busy) send(page);
  });
  form.stop.addEventListener("click", () => busy?.abort());
}

const field = (label, input, name, kind = "") => {
  input.attributes.id = `playground-${name}`;
  return h("div", { class: `field ${kind}` }, h("label", { for: input.attributes.id }, label), input);
};

export async function opened(page) {
  const chosen = form.model.value;
  let names = [...page.models.keys()];
  try {
    const answer = await fetch(page.address("/v1/models"), { headers: headersOf(page), credentials: "omit" });
    if (answer.ok) names = (await answer.json()).data.map((model) => model.id);
  } catch {
    // The models of the latest frame remain.
  }
  show(form.model, names.map((name) => h("option", { key: name, value: name }, name)));
  if (names.includes(chosen)) form.model.value = chosen;
}

export function update(page, model) {
  if (busy && progress.state === "waiting" && model) {
    progress.queued = model.waiting_requests;
    draw(page);
  }
}

const headersOf = (page) => {
  const key = form.key.value.trim() || page.key;
  return key ? { authorization: `Bearer ${key}` } : {};
};

function prompt(tokens) {
  const words = [];
  for (let number = 0; number < tokens; number++) words.push(WORDS[number % WORDS.length]);
  return words.join(" ");
}

async function send(page) {
  busy = new AbortController();
  form.stop.disabled = false;
  progress = { state: "waiting", began: performance.now(), text: "", events: 0, stream: form.stream.checked };
  draw(page);
  const timer = setInterval(() => draw(page), 100);
  try {
    await request(page);
  } catch (error) {
    progress.state = error.name === "AbortError" ? "cancelled" : "failed";
    progress.error = error.name === "AbortError" ? "cancelled by the user" : String(error.message);
  }
  clearInterval(timer);
  progress.ended = performance.now();
  busy = null;
  form.stop.disabled = true;
  draw(page);
}

async function request(page) {
  const document = {
    model: form.model.value,
    messages: [{ role: "user", content: form.text.value.trim() || prompt(Number(form.tokens.value)) }],
    max_tokens: Number(form.output.value),
    stream: progress.stream,
    ...(progress.stream ? { stream_options: { include_usage: true } } : {}),
  };
  const answer = await fetch(page.address("/v1/chat/completions"), {
    method: "POST",
    headers: { ...headersOf(page), "content-type": "application/json", "x-priority": form.priority.value },
    body: JSON.stringify(document),
    signal: busy.signal,
    credentials: "omit",
  });
  progress.status = answer.status;
  progress.headers = answer.headers;
  if (!answer.ok) {
    progress.state = "rejected";
    progress.error = await messageOf(answer);
    return;
  }
  if (progress.stream) await readStream(answer.body.getReader());
  else readWhole(await answer.json());
}

function readWhole(document) {
  progress.usage = document.usage;
  progress.text = document.choices?.[0]?.message?.content ?? "";
  progress.state = "completed";
}

async function readStream(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) onEvent(line.slice("data: ".length).trim());
  }
  if (progress.state !== "failed") progress.state = progress.done ? "completed" : "cut";
}

function onEvent(data) {
  if (data === "[DONE]") {
    progress.done = true;
    return;
  }
  const event = JSON.parse(data);
  if (event.error) {
    progress.state = "failed";
    progress.error = event.error.message;
    return;
  }
  const content = event.choices?.[0]?.delta?.content;
  if (content) {
    progress.first ??= performance.now();
    progress.last = performance.now();
    progress.state = "streaming";
    progress.events += 1;
    if (progress.text.length < SHOWN_CHARACTERS) progress.text += content;
  }
  if (event.usage) progress.usage = event.usage;
}

const STATES = {
  waiting: "waiting for the first byte",
  streaming: "streaming",
  completed: "completed",
  rejected: "rejected",
  failed: "failed",
  cancelled: "cancelled",
  cut: "stream ended without its last event",
};

function draw(page) {
  const header = (name) => progress.headers?.get(name) ?? "";
  const id = header("x-request-id");
  const wait = header("x-queue-wait-ms");
  const now = progress.ended ?? performance.now();
  const tokens = progress.usage?.completion_tokens;
  const tpot = progress.first && tokens > 1 ? (progress.last - progress.first) / 1000 / (tokens - 1) : null;
  const facts = [
    ["State", STATES[progress.state] + (progress.status ? ` (${progress.status})` : "")],
    [progress.ended ? "Total time" : "Time so far", seconds((now - progress.began) / 1000)],
    ["Queue length", progress.queued === undefined ? NONE : counted(progress.queued, "request")],
    ["Queue time", wait ? seconds(Number(wait) / 1000) : NONE],
    ...(header("x-served-model") ? [["Served by model", header("x-served-model")]] : []),
    ["Pool, replica", id && header("x-pool") ? `${header("x-pool")}, ${header("x-replica")}` : NONE],
    ["Length queue", header("x-length-queue") ? `${header("x-length-queue")} tokens` : NONE],
    ["Estimated tokens", header("x-estimated-tokens") ? whole(Number(header("x-estimated-tokens"))) : NONE],
    ["Time to first token", progress.first ? `${seconds((progress.first - progress.began) / 1000)}, measured in this browser` : progress.stream ? NONE : "only for streams"],
    ["Time per output token", tpot === null ? NONE : seconds(tpot)],
    ["Tokens", progress.usage ? `${whole(progress.usage.prompt_tokens)} prompt, ${whole(tokens)} output` : NONE],
    ["Retry after", header("retry-after") ? `${header("retry-after")} s` : NONE],
  ];
  show(result,
    h("div", { class: "card", key: "progress" },
      h("h2", null, "Progress"),
      h("p", { role: "status", class: "sr" }, STATES[progress.state]),
      progress.error ? h("p", { class: "error" }, progress.error) : null,
      h("dl", { class: "facts" }, facts.map(([name, text]) => h("div", { key: name }, h("dt", null, name), h("dd", null, text)))),
      id ? h("p", { class: "note" }, h("a", { href: `#request/${encodeURIComponent(id)}` }, `Receipt of ${id}`)) : null),
    h("div", { class: "card", key: "text" }, h("h2", null, "Answer"), h("pre", { tabindex: "0", "aria-label": "Text of the answer" }, progress.text || "No text yet.")));
}
