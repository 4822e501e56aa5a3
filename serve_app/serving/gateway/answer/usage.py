"""The reader of token counts in an engine's answer, and of nothing else in it.

Chat and plain completions count `prompt_tokens` and `completion_tokens`, Responses count `input_tokens` and
`output_tokens`, embeddings only `prompt_tokens`.
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

    def counted(self) -> Usage | None:
        """The counts in one form; None when the engine gave none."""
        prompt = self.prompt_tokens if self.prompt_tokens is not None else self.input_tokens
        if prompt is None:
            return None
        output = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else None
        return Usage(prompt_tokens=prompt, output_tokens=output or 0, cached_tokens=cached or 0)


class _UsageEnvelope(msgspec.Struct):
    usage: RawUsage | None = None


_decoder = msgspec.json.Decoder(_UsageEnvelope)


def usage_of(body: bytes) -> Usage | None:
    """The usage in a whole answer; None when it has none, or is not JSON (audio, text formats)."""
    try:
        usage = _decoder.decode(body).usage
    except (ValueError, RecursionError):
        return None
    return usage.counted() if usage is not None else None
