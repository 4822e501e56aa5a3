"""Emulated engine: vLLM's timing, context limits and metrics with placeholder text.

Read `engine` (settings and composition), then `app` (HTTP routes, on top of `http`), then follow a request:

- `requests` parses it, using `text` (token counts, block hashes, predetermined answers).
- `admission` applies vLLM's limits and samples the length of each answer.
- `driver` runs the engine model of `serve_app.engines.model` in real time.
- `completions`, `responses` and `messages` format answers for the APIs of OpenAI and Anthropic.
- `metrics` exposes the metrics of vLLM that the application and its dashboards read.
"""
