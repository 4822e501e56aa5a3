"""The emulated engine: real timing, limits and metrics of vLLM, with placeholder text.

Read `engine` (settings and composition), then `app` (HTTP routes, over `http`), and follow a request:

- `bodies` and `requests`: what is read of an OpenAI request, over `text` (token counts and block hashes),
  `sampling` (ranges of parameters) and `specs` (what is asked of the text);
- `content`: text, tool calls, stop strings and logprobs where a request prescribes them;
- `admission`: vLLM's limits and refusals (`errors`), and the length of each answer (`lengths`);
- `driver`: the engine model of `serve_app.engine_model` in real time;
- `answers`: OpenAI's response formats;
- `metrics`: vLLM's `/metrics`.
"""
