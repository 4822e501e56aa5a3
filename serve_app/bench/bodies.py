"""HTTP requests for the requests of a trace, with text of the right size and without a tokenizer.

The text consists of common words and has `prompt_tokens * bytes_per_token` bytes, so that a gateway that
estimates tokens from bytes has realistic input. No two prompts begin alike, unless the trace says that they
share a prefix. Bodies are joined from bytes; no JSON is encoded when a request is sent.
"""

import enum
import json
from typing import Annotated

import numpy as np

from serve_app.request import PriorityClass
from serve_app.settings_base import NOT_NEGATIVE, between, settings
from serve_app.workloads.streams import stream
from serve_app.workloads.trace import PREFIX_BLOCK_TOKENS, TraceRequest

# Common words, split once when the module is loaded.
_WORDS = " ".join(
    (
        "the of and to in a is that for it as was with be by on not he his but at are this have from or had",
        "an they which one you were all her she there would their we him been has when who will no more if",
        "out so up said what its about than into them can only other time new some could these two may",
        "first then do any like my now over such our man even most made after also did many before must",
        "through years where much your way well down should because long each just state people those too",
        "little good world make very year still see own work men day get here between both life being under",
        "never same another know while last might us great old off come since go against right came take",
        "used himself few house use place during high without again home around small however found part",
        "once general school every question number system water family different company public service",
        "market history morning language",
    )
).split()
_TEXT_BYTES = 1 << 20


class BodyKind(enum.StrEnum):
    """How an engine gets the token counts of a request."""

    EMULATED = "emulated"
    """By the extra fields of emulated engines: exact counts, whatever the text."""
    TEXT = "text"
    """By the text itself and `max_tokens`: for real engines."""


class BenchEndpoint(enum.StrEnum):
    """The OpenAI endpoint under test."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@settings
class BodySettings:
    """How bodies and headers are made.

    Attributes:
        bytes_per_token: bytes of text per prompt token. Common English words have about 5 with current
            tokenizers. An emulated engine gets exact counts, so there it sets the initial error of a
            gateway's estimate.
        max_tokens: limit in the request; None states the true length of the answer, 0 states none.
        ignore_eos: ask a real engine for answers of exactly `max_tokens` (an extension of vLLM).
        api_key: sent as a bearer token.
    """

    model: str
    kind: BodyKind = BodyKind.EMULATED
    endpoint: BenchEndpoint = BenchEndpoint.CHAT
    stream: bool = True
    bytes_per_token: Annotated[float, between(0.25, 64)] = 5.0
    max_tokens: Annotated[int | None, NOT_NEGATIVE.hint("0 states no limit")] = None
    ignore_eos: bool = False
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.ignore_eos and self.kind is BodyKind.EMULATED:
            raise ValueError(
                "ignore_eos is for real engines (body kind text): emulated ones give exact lengths"
            )


class BodyFactory:
    """Makes the bytes of each HTTP request.

    Args:
        host: value of the Host header.
        path_prefix: path before `/v1`, without a slash at its end.
    """

    def __init__(self, settings: BodySettings, host: str, path_prefix: str = "") -> None:
        self._settings = settings
        self._text = _words(_TEXT_BYTES)
        key = f"Authorization: Bearer {settings.api_key}\r\n" if settings.api_key else ""
        self._head = (
            f"POST {path_prefix}{settings.endpoint} HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nAccept: */*\r\n{key}"
        ).encode("latin-1")
        opening: dict[str, object] = {"model": settings.model}
        if settings.stream:
            opening |= {"stream": True, "stream_options": {"include_usage": True}}
        if settings.ignore_eos:
            opening |= {"ignore_eos": True}
        chat = settings.endpoint is BenchEndpoint.CHAT
        self._opening = json.dumps(opening).encode()[:-1]
        self._before_text = b',"messages":[{"role":"user","content":"' if chat else b',"prompt":"'
        self._after_text = b'"}]}' if chat else b'"}'

    def make(self, number: int, request: TraceRequest) -> bytes:
        """The HTTP request of the `number`-th trace request."""
        body = b"".join(
            (
                self._opening,
                self._limits(request),
                self._before_text,
                self.text(number, request),
                self._after_text,
            )
        )
        lines = [b"x-request-id: bench-%d\r\n" % number]
        if request.tenant != "default":
            lines.append(b"x-tenant: %s\r\n" % request.tenant.encode("latin-1", "replace"))
        if request.priority is not PriorityClass.DEFAULT:
            lines.append(b"x-priority: %s\r\n" % request.priority.encode())
        return b"%s%sContent-Length: %d\r\n\r\n%s" % (self._head, b"".join(lines), len(body), body)

    def text(self, number: int, request: TraceRequest) -> bytes:
        """The prompt: blocks that it shares according to the trace, then words of its own."""
        wanted = max(1, round(request.prompt_tokens * self._settings.bytes_per_token))
        block_bytes = round(PREFIX_BLOCK_TOKENS * self._settings.bytes_per_token)
        shared = b"".join(self._slice(block, block_bytes) for block in request.prefix)[:wanted]
        own = wanted - len(shared)
        return shared + (_name(number) + self._slice(number, own))[:own] if own > 0 else shared

    def _limits(self, request: TraceRequest) -> bytes:
        limit = request.output_tokens if self._settings.max_tokens is None else self._settings.max_tokens
        stated = b',"max_tokens":%d' % limit if limit else b""
        if self._settings.kind is BodyKind.TEXT:
            return stated
        stated += b',"ewsjf_output_tokens":%d' % request.output_tokens
        # A prompt of stated length does not use the prefix cache, so one with a shared prefix states none.
        return stated if request.prefix else stated + b',"ewsjf_prompt_tokens":%d' % request.prompt_tokens

    def _slice(self, number: int, length: int) -> bytes:
        """Words from a different position for each number; the stride is prime to the text's length."""
        start = number * 7919 % len(self._text)
        piece = self._text[start : start + length]
        while len(piece) < length:
            piece += self._text[: length - len(piece)]
        return piece


def _name(number: int) -> bytes:
    """Words that are unique to a number, so that prompts do not share their first block."""
    words = []
    for _ in range(4):
        number, index = divmod(number, len(_WORDS))
        words.append(_WORDS[index])
    return " ".join(words).encode() + b" "


def _words(length: int) -> bytes:
    drawn = stream(0, "filler text").choice(np.array(_WORDS), length // 4)
    return " ".join(drawn.tolist()).encode()[:length]
