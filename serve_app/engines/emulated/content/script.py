"""The tokens of one answer, decided before it runs: where it ends, why, and what a stream has sent when."""

import re
from dataclasses import dataclass

from serve_app.engines.emulated.content.spec import OutputSpec, RawText
from serve_app.engines.emulated.lengths import OutputLength
from serve_app.engines.emulated.text import PIECES

# Words with their space, short numbers, runs of punctuation, anything else: about what a tokenizer does.
_TOKEN = re.compile(r" ?[^\W\d_]{1,8}|\d{1,3}|[^\w\s]{1,3}|\s+|.", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One answer.

    Attributes:
        tokens: all that are generated, at least one.
        ends: characters up to the end of each token.
        text: what the client gets: the tokens, less what a stop string cuts off.
        is_whole: whether neither a limit nor a stop string cut it.
        finish_reason: "stop" or "length".
        stop_reason: the stop string that ended it.
        held_back: last characters that a stream keeps until it ends, because a stop string may begin there.
        arguments: where the arguments of a tool call begin and end in the uncut text.
    """

    tokens: tuple[str, ...]
    ends: tuple[int, ...]
    text: str
    is_whole: bool
    finish_reason: str
    stop_reason: str | None = None
    held_back: int = 0
    arguments: tuple[int, int] | None = None

    def sent(self, tokens: int) -> int:
        """Characters that a stream has sent after so many tokens."""
        if tokens >= len(self.tokens):
            return len(self.text)
        return max(0, self.ends[tokens - 1] - self.held_back) if tokens else 0


def tokens_of(text: str) -> list[str]:
    """The text in tokens; an empty text is one empty token, the end mark."""
    return _TOKEN.findall(text) or [""]


def placeholder_tokens(seed: int, count: int) -> list[str]:
    """Tokens of an answer that follows no constraint."""
    words = [PIECES[(seed + index) % len(PIECES)].decode() for index in range(count)]
    return [words[0].lstrip(), *words[1:]]


def write_script(
    spec: OutputSpec, raw: RawText | None, choice: int, length: OutputLength, limit: int
) -> Script:
    """The tokens of one answer.

    Args:
        spec: what the request asks for.
        raw: the text of a constrained answer, None for placeholder text.
        choice: number of the answer in its request.
        length: of placeholder text.
        limit: most tokens.
    """
    if raw is None:
        tokens, reason = placeholder_tokens(spec.seed + choice, length.tokens), length.finish_reason
    else:
        tokens = tokens_of(raw.text)
        reason = "length" if len(tokens) > limit else "stop"
        tokens = tokens[:limit]
    whole = "".join(tokens)
    ends: list[int] = []
    for token in tokens:
        ends.append((ends[-1] if ends else 0) + len(token))
    found = _first_stop(whole, ends, spec)
    text, stop_reason = whole, None
    if found is not None:
        stop_reason, last, end = found
        tokens, ends, text, reason = tokens[: last + 1], ends[: last + 1], whole[:end], "stop"
    return Script(
        tokens=tuple(tokens),
        ends=tuple(ends),
        text=text,
        is_whole=found is None and (raw is None or len(whole) == len(raw.text)),
        finish_reason=reason,
        stop_reason=stop_reason,
        held_back=0 if spec.include_stop or not spec.stop else max(map(len, spec.stop)) - 1,
        arguments=None if raw is None else raw.arguments,
    )


def _first_stop(text: str, ends: list[int], spec: OutputSpec) -> tuple[str, int, int] | None:
    """The stop string that is complete first, the token that completes it, and the length of what remains."""
    # As in vLLM, a string that ends within the first `min_tokens` tokens does not count.
    ignored = ends[min(spec.min_tokens, len(ends)) - 1] if spec.min_tokens else 0
    best: tuple[str, int, int] | None = None
    for stop in spec.stop:
        start = text.find(stop, max(0, ignored - len(stop) + 1))
        if start < 0:
            continue
        last = next(index for index, end in enumerate(ends) if end >= start + len(stop))
        if best is None or last < best[1]:
            best = stop, last, start + (len(stop) if spec.include_stop else 0)
    return best
