// The frames of the gateway. EventSource can send no header, and a key in an address would be written into logs
// of proxies; so the stream is read by fetch, with the key in `Authorization`.

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 10000;

/**
 * Watches until it is stopped: calls `onFrame(frame)` for each, and `onState(name, message)` with "connecting",
 * "live", "rejected" (another key is needed; it gives up), "busy" or "lost" (it tries again by itself).
 */
export class Watcher {
  constructor(address, key, { onFrame, onState }) {
    Object.assign(this, { address, key, onFrame, onState });
    this.wait = FIRST_WAIT_MS;
    this.stopped = false;
    this.run();
  }

  stop() {
    this.stopped = true;
    this.abort?.abort();
    clearTimeout(this.timer);
  }

  async run() {
    this.onState("connecting", "connecting …");
    this.abort = new AbortController();
    try {
      const answer = await fetch(this.address, {
        headers: this.key ? { authorization: `Bearer ${this.key}` } : {},
        signal: this.abort.signal,
        cache: "no-store",
        credentials: "omit",
      });
      if (!answer.ok) return this.onRejection(answer.status, await messageOf(answer));
      await this.read(answer.body.getReader());
      this.again("lost", "the gateway has ended the stream");
    } catch (error) {
      this.again("lost", `the gateway does not answer (${error.message})`);
    }
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done || this.stopped) return;
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop();
      // A tab that was asleep finds several: only the last one is of interest.
      const latest = events.filter((each) => each.startsWith("data: ")).pop();
      if (!latest) continue;
      this.wait = FIRST_WAIT_MS;
      this.onState("live", "");
      this.onFrame(JSON.parse(latest.slice("data: ".length)));
    }
  }

  onRejection(status, message) {
    if (this.stopped) return;
    if (status === 401 || status === 403) {
      this.stopped = true;
      this.onState("rejected", message);
    } else {
      this.again(status === 429 ? "busy" : "lost", message || `the gateway answered ${status}`);
    }
  }

  again(state, message) {
    if (this.stopped) return;
    this.onState(state, `${message}; trying again in ${Math.round(this.wait / 1000)} s`);
    this.timer = setTimeout(() => this.run(), this.wait);
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT_MS);
  }
}

/** What an answer that is no success says of itself. */
export async function messageOf(answer) {
  const text = await answer.text();
  try {
    const { error } = JSON.parse(text);
    return error.message ?? text;
  } catch {
    return text.slice(0, 300);
  }
}
