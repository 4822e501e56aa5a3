// Stream of frames from the gateway. EventSource cannot send headers, and proxies would log a key in the URL. The
// stream is therefore read with fetch, with the key in `Authorization`.

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 10000;

/**
 * Reads frames until `stop`: calls `onFrame(frame)` for each, and `onState(name, message)` with "connecting",
 * "live", "rejected" (the key is invalid; no retries), "busy" or "lost" (it retries with backoff).
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
      this.retry("lost", "the gateway closed the stream");
    } catch (error) {
      this.retry("lost", `the gateway does not respond (${error.message})`);
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
      // A suspended tab receives several frames at once; only the last one matters.
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
      this.retry(status === 429 ? "busy" : "lost", message || `the gateway returned ${status}`);
    }
  }

  retry(state, message) {
    if (this.stopped) return;
    this.onState(state, `${message}; retrying in ${Math.round(this.wait / 1000)} s`);
    this.timer = setTimeout(() => this.run(), this.wait);
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT_MS);
  }
}

/** Return the error message of a response. */
export async function messageOf(answer) {
  const text = await answer.text();
  try {
    const { error } = JSON.parse(text);
    return error.message ?? text;
  } catch {
    return text.slice(0, 300);
  }
}
