"""The emulated engine: real timing, limits and metrics of vLLM, with placeholder text.

Read `engine` (settings and composition), then `app` (HTTP routes, over `http`), and follow a request:

- `requests` reads it, over `text` (token counts, block hashes, prescribed answers) and `structured` (JSON by
  `smallest`, tool calls);
- `admission` applies vLLM's limits and draws the length of each answer;
- `driver` runs the engine model of `serve_app.engines.model` in real time;
- `completions`, `responses` and `messages` write answers in the formats of OpenAI and Anthropic;
- `metrics` is vLLM's `/metrics`.
"""
