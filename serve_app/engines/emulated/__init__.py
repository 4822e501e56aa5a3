"""Emulated engine: vLLM's timing, context limits and metrics with placeholder text.

Read `engine` (settings and composition), then `app` (HTTP routes, and answers in the formats of the APIs of
OpenAI and Anthropic), then follow a request: `requests` parses it and generates its text (token counts, block
hashes, predetermined answers), and `driver` applies vLLM's limits, runs the engine model of
`serve_app.engines.model` in real time, and exposes the metrics of vLLM that the application reads.
"""
