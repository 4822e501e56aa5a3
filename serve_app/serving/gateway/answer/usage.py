"""The reader of token counts and times in an engine's answer, and of nothing else in it.

| answers to           | prompt          | output              | of the prompt, from a cache           |
|----------------------|-----------------|---------------------|---------------------------------------|
| chats, completions   | `prompt_tokens` | `completion_tokens` | `prompt_tokens_details.cached_tokens` |
| Responses            | `input_tokens`  | `output_tokens`     | `input_tokens_details.cached_tokens`  |
| Messages             | `input_tokens`  | `output_tokens`     | `cache_read_input_tokens`             |
| embeddings, scores   | `prompt_tokens` |                     |                                       |
| Cohere's embeddings  | `input_tokens`  |                     |                                       |

Messages count what was read from a cache, and what was written to one, beside `input_tokens`.
Cohere's have no `usage`: their count is among the units billed, in `meta`.
The times are vLLM's `metrics`, which it tells when it is started with `enable_per_request_metrics`.
"""

import msgspec

from serve_app.request import Usage
from serve_app.serving.channel.scheduler_client import EngineTimes

NO_TIMES = msgspec.Raw()
# What is longer is no time of a request.
_LONGEST_MS = 1e9


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class RawUsage(msgspec.Struct, gc=False):
    """The `usage` object of any endpoint."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def counted(self, before: Usage | None = None) -> Usage | None:
        """The counts in one form; None when the engine gave none.

        Args:
            before: what an earlier event said; Anthropic's last one may count the output alone.
        """
        prompt = self.prompt_tokens if self.prompt_tokens is not None else self.input_tokens
        output = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        if prompt is None:
            if before is None or output is None:
                return None
            return Usage(
                prompt_tokens=before.prompt_tokens, output_tokens=output, cached_tokens=before.cached_tokens
            )
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else None
        beside = self.cache_read_input_tokens or 0
        prompt += beside + (self.cache_creation_input_tokens or 0)
        return Usage(prompt_tokens=prompt, output_tokens=output or 0, cached_tokens=cached or beside)


class _RawTimes(msgspec.Struct, gc=False):
    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None


_times_decoder = msgspec.json.Decoder(_RawTimes)


def engine_times_of(metrics: msgspec.Raw) -> EngineTimes | None:
    """What a `metrics` object says; None where there is none, or it is another engine's."""
    if metrics is NO_TIMES:
        return None
    try:
        told = _times_decoder.decode(metrics)
    except (ValueError, RecursionError):
        return None
    # vLLM's first token counts from the turn of the request, without its wait.
    found = (told.queue_time_ms, told.time_to_first_token_ms, told.generation_time_ms)
    times = EngineTimes(*(ms / 1e3 if ms is not None and 0 <= ms < _LONGEST_MS else None for ms in found))
    return None if times == EngineTimes() else times


class _Meta(msgspec.Struct):
    billed_units: RawUsage | None = None


class _Envelope(msgspec.Struct):
    usage: RawUsage | None = None
    meta: _Meta | None = None
    metrics: msgspec.Raw = NO_TIMES


_decoder = msgspec.json.Decoder(_Envelope)


def counts_of(body: bytes) -> tuple[Usage | None, EngineTimes | None]:
    """Usage and times in a whole answer; None for what it has not, or when it is not JSON (audio, text)."""
    try:
        found = _decoder.decode(body)
    except (ValueError, RecursionError):
        return None, None
    usage = found.usage if found.meta is None else found.meta.billed_units
    return usage.counted() if usage is not None else None, engine_times_of(found.metrics)


def usage_of(body: bytes) -> Usage | None:
    """The usage in a whole answer; None when it has none."""
    return counts_of(body)[0]
