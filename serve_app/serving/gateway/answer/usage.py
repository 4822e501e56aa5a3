"""The reader of token counts in an engine's answer, and of nothing else in it.

| answers to           | prompt          | output              | of the prompt, from a cache           |
|----------------------|-----------------|---------------------|---------------------------------------|
| chats, completions   | `prompt_tokens` | `completion_tokens` | `prompt_tokens_details.cached_tokens` |
| Responses            | `input_tokens`  | `output_tokens`     | `input_tokens_details.cached_tokens`  |
| Messages             | `input_tokens`  | `output_tokens`     | `cache_read_input_tokens`             |
| embeddings, scores   | `prompt_tokens` |                     |                                       |
| Cohere's embeddings  | `input_tokens`  |                     |                                       |

Messages count what was read from a cache, and what was written to one, beside `input_tokens`.
Cohere's have no `usage`: their count is among the units billed, in `meta`.
"""

import msgspec

from serve_app.request import Usage


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


class _Meta(msgspec.Struct):
    billed_units: RawUsage | None = None


class _UsageEnvelope(msgspec.Struct):
    usage: RawUsage | None = None
    meta: _Meta | None = None


_decoder = msgspec.json.Decoder(_UsageEnvelope)


def usage_of(body: bytes) -> Usage | None:
    """The usage in a whole answer; None when it has none, or is not JSON (audio, text formats)."""
    try:
        found = _decoder.decode(body)
    except (ValueError, RecursionError):
        return None
    usage = found.usage if found.meta is None else found.meta.billed_units
    return usage.counted() if usage is not None else None
