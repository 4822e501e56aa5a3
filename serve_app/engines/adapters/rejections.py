"""Parsing of engine errors that reject a request as too long, and of the context limit in their text.

| engine | error text |
|---|---|
| vLLM | `maximum context length is N tokens`, `maximum model length of N`, `max_model_len=N` |
| SGLang | `longer than the model's context length (N tokens)`, `maximum context length of N tokens` |
| llama.cpp | `exceeds the available context size (N tokens)`; older releases: N in the field `n_ctx` only |
| llama-cpp-python | `exceed context window of N` |
| TGI | `inputs must have less than N tokens`, `max_new_tokens must be <= N` |
| TensorRT-LLM | `not exceed max_num_tokens (N)`, `max_seq_len (N)`, `exceeds maximum input length (N)` |
| Ollama | `the input length exceeds the context length`: without the limit; usually it truncates instead |

Some of these limits apply to the prompt only. Used as limits on prompt and output they are too low, never
too high.
"""

import re

TYPE_OF_LLAMA_CPP = "exceed_context_size_error"

_COUNT = r"(\d{1,3}(?:,\d{3})+|\d+)"
# Each alternative captures the limit in one group.
_WITH_LIMIT = re.compile(
    "|".join(
        (
            rf"maximum context length(?: is| of)? \(?{_COUNT}",
            rf"maximum model length of {_COUNT}",
            rf"cannot be greater than `?max_(?:model_len|total_tokens)`?\s*(?:=|of|:)?\s*\(?{_COUNT}",
            rf"model's context length \({_COUNT} tokens\)",
            rf"exceeds the available context size \({_COUNT} tokens\)",
            rf"\bn_ctx={_COUNT}",
            rf"exceed context window of {_COUNT}",
            rf"`?inputs`? must have less than {_COUNT} tokens",
            rf"`?max_new_tokens`? must be <= {_COUNT}",
            rf"should not exceed max_(?:num_tokens|seq_len|input_len) \({_COUNT}\)",
            rf"default_max_tokens`? \(-?\d+\) = max_seq_len \({_COUNT}\)",
            rf"[Pp]rompt length \(\d+\) exceeds maximum (?:input|sequence) length \({_COUNT}\)",
        )
    )
)
# Errors that do not state the limit, or may state it elsewhere in a future release.
_WITHOUT_LIMIT = re.compile(
    r"maximum context length|longer than the maximum model length"
    r"|cannot be greater than `?max_(?:model_len|total_tokens)"
    r"|longer than the model's context length"
    r"|exceeds the available context size"
    r"|input length exceeds the context length"
)


def is_too_long(message: str) -> bool:
    """Return whether an engine's error message says that the request exceeds its context limit."""
    return _WITHOUT_LIMIT.search(message) is not None or _WITH_LIMIT.search(message) is not None


def reported_context_limit(message: str) -> int | None:
    """Return the context limit in such an error message, in tokens, or None if it has none."""
    match = _WITH_LIMIT.search(message)
    if match is None:
        return None
    limit = next(int(group.replace(",", "")) for group in match.groups() if group is not None)
    return limit or None
