// Sends one chat request through the real endpoint, and shows its way.

import { h, made, show } from "./dom.js";
import { counted, NONE, seconds, whole } from "./format.js";
import { messageOf } from "./stream.js";

export const title = "Playground";

// Everyday words of one token each in most vocabularies, so that a length in tokens can be asked for.
const WORDS = "the time of day and a way to see how long it can be in this line or that one when we are near the end".split(" ");
const SHOWN_CHARACTERS = 4000;

let form = null;
let result = null;
let busy = null;
let way = {};

export function mount(panel, page) {
  form = made(h("form", { class: "card", autocomplete: "off" },
    h("h2", null, "Send a chat request"),
    h("p", { class: "note" }, "It is a real request: it waits, runs on an engine and counts for its key's tenant."),
    h("div", { class: "fields" },
      field("Model", h("select", { name: "model" }), "model"),
      field("Prompt (tokens, about)", h("input", { name: "tokens", type: "number", min: 1, max: 1000000, value: 200, required: true, inputmode: "numeric" }), "tokens"),
      field("Answer (tokens, at most)", h("input", { name: "output", type: "number", min: 1, max: 100000, value: 64, required: true, inputmode: "numeric" }), "output"),
      field("Class", h("select", { name: "priority" }, ["interactive", "default", "batch"].map((name) => h("option", { value: name }, name))), "priority"),
      field("API key (else the one above)", h("input", { name: "key", type: "password", autocomplete: "off" }), "key")),
    h("div", { class: "row" },
      h("label", { class: "check" }, h("input", { type: "checkbox", name: "stream", checked: true }), " stream the answer"),
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

const field = (label, input, name) => {
  input.attributes.id = `playground-${name}`;
  return h("div", { class: "field" }, h("label", { for: input.attributes.id }, label), input);
};

export async function opened(page) {
  const chosen = form.model.value;
  let names = [...page.models.keys()];
  try {
    const answer = await fetch(page.address("/v1/models"), { headers: headersOf(page), credentials: "omit" });
    if (answer.ok) names = (await answer.json()).data.map((model) => model.id);
  } catch {
    // The names that the schedulers told will do.
  }
  show(form.model, names.map((name) => h("option", { key: name, value: name }, name)));
  if (names.includes(chosen)) form.model.value = chosen;
}

export function update(page, model) {
  if (busy && way.state === "waiting" && model) {
    way.ahead = model.waiting_requests;
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
  way = { state: "waiting", began: performance.now(), text: "", events: 0, stream: form.stream.checked };
  draw(page);
  const ticking = setInterval(() => draw(page), 100);
  try {
    await ask(page);
  } catch (error) {
    way.state = error.name === "AbortError" ? "cancelled" : "failed";
    way.error = error.name === "AbortError" ? "cancelled here" : String(error.message);
  }
  clearInterval(ticking);
  way.ended = performance.now();
  busy = null;
  form.stop.disabled = true;
  draw(page);
}

async function ask(page) {
  const document = {
    model: form.model.value,
    messages: [{ role: "user", content: prompt(Number(form.tokens.value)) }],
    max_tokens: Number(form.output.value),
    stream: way.stream,
    ...(way.stream ? { stream_options: { include_usage: true } } : {}),
  };
  const answer = await fetch(page.address("/v1/chat/completions"), {
    method: "POST",
    headers: { ...headersOf(page), "content-type": "application/json", "x-priority": form.priority.value },
    body: JSON.stringify(document),
    signal: busy.signal,
    credentials: "omit",
  });
  way.status = answer.status;
  way.headers = answer.headers;
  if (!answer.ok) {
    way.state = "rejected";
    way.error = await messageOf(answer);
    return;
  }
  if (way.stream) await readStream(answer.body.getReader());
  else readWhole(await answer.json());
}

function readWhole(document) {
  way.usage = document.usage;
  way.text = document.choices?.[0]?.message?.content ?? "";
  way.state = "completed";
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
  if (way.state !== "failed") way.state = way.done ? "completed" : "cut";
}

function onEvent(data) {
  if (data === "[DONE]") {
    way.done = true;
    return;
  }
  const event = JSON.parse(data);
  if (event.error) {
    way.state = "failed";
    way.error = event.error.message;
    return;
  }
  const content = event.choices?.[0]?.delta?.content;
  if (content) {
    way.first ??= performance.now();
    way.last = performance.now();
    way.state = "streaming";
    way.events += 1;
    if (way.text.length < SHOWN_CHARACTERS) way.text += content;
  }
  if (event.usage) way.usage = event.usage;
}

const WORDS_OF_STATE = {
  waiting: "waiting for its answer to begin",
  streaming: "the answer is coming",
  completed: "completed",
  rejected: "rejected",
  failed: "failed",
  cancelled: "cancelled",
  cut: "the stream ended without its last event",
};

function draw(page) {
  const header = (name) => way.headers?.get(name) ?? "";
  const id = header("x-request-id");
  const wait = header("x-queue-wait-ms");
  const now = way.ended ?? performance.now();
  const tokens = way.usage?.completion_tokens;
  const tpot = way.first && tokens > 1 ? (way.last - way.first) / 1000 / (tokens - 1) : null;
  const facts = [
    ["State", WORDS_OF_STATE[way.state] + (way.status ? ` (${way.status})` : "")],
    [way.ended ? "Time in all" : "Time so far", seconds((now - way.began) / 1000)],
    ["Waiting beside it", way.ahead === undefined ? NONE : `${counted(way.ahead, "request")} in the queue, when it was last looked`],
    ["In the queue", wait ? seconds(Number(wait) / 1000) : NONE],
    ["Pool, replica", id && header("x-pool") ? `${header("x-pool")}, ${header("x-replica")}` : NONE],
    ["Length queue", header("x-length-queue") ? `${header("x-length-queue")} tokens` : NONE],
    ["Estimated tokens", header("x-estimated-tokens") ? whole(Number(header("x-estimated-tokens"))) : NONE],
    ["Time to first token", way.first ? `${seconds((way.first - way.began) / 1000)}, as this browser saw it` : way.stream ? NONE : "only streams have one"],
    ["Time per token", tpot === null ? NONE : seconds(tpot)],
    ["Tokens counted", way.usage ? `${whole(way.usage.prompt_tokens)} of the prompt, ${whole(tokens)} of the answer` : NONE],
    ["Come again in", header("retry-after") ? `${header("retry-after")} s` : NONE],
  ];
  show(result,
    h("div", { class: "card", key: "way" },
      h("h2", null, "Its way"),
      h("p", { role: "status", class: "sr" }, WORDS_OF_STATE[way.state]),
      way.error ? h("p", { class: "error" }, way.error) : null,
      h("dl", { class: "facts" }, facts.map(([name, text]) => h("div", { key: name }, h("dt", null, name), h("dd", null, text)))),
      id ? h("p", { class: "note" }, h("a", { href: `#request/${encodeURIComponent(id)}` }, `Receipt of ${id}`)) : null),
    h("div", { class: "card", key: "text" }, h("h2", null, "The answer"), h("pre", { tabindex: "0", "aria-label": "The answer's text" }, way.text || "nothing yet")));
}
