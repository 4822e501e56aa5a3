"""Request bodies made of real texts: JSON as a client would send it, each with its true length in tokens.

A body passes the gateway's own parser. Its true length is what the tokenizer makes of the model's chat
template.
"""

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from experiments.estimator.texts import tool_definitions
from experiments.estimator.tokenizers import Tokenizer
from serve_app.request import PromptShape
from serve_app.serving.gateway.routes.table import SCHEDULED

Messages = list[dict[str, Any]]

# What a template says about tools differs from model to model; this is of the usual length.
_TOOL_PREAMBLE = (
    "# Tools\n\nYou can call functions to help with the request. Their signatures stand between the tags "
    "below, one JSON object to a line.\n<tools>\n{tools}\n</tools>\n\nTo call one, answer with its name and "
    'its arguments as JSON: <tool_call>\n{{"name": ..., "arguments": ...}}\n</tool_call>'
)
_SYSTEM = {"role": "system", "content": "You are a careful assistant. Answer in one paragraph."}
_KINDS = ("completion", "completion", "chat", "chat", "turns", "tools")
_IMAGE_TOKENS = 576  # LLaVA 1.5: 24 x 24 patches, whatever the size
_SHORTEST_BYTES = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt as the gateway sees it, with its true length in tokens."""

    source: str
    kind: str
    shape: PromptShape
    tokens: int


class Bodies:
    """Draws request bodies of all kinds and sizes, with pieces of the first or the second half of each text.

    Args:
        longest_bytes: of the text in one body; sizes are log-uniform from 100 bytes.
    """

    def __init__(
        self, texts: Mapping[str, str], tokenizer: Tokenizer, rng: Random, longest_bytes: int
    ) -> None:
        self._texts, self._tokenizer, self._rng = texts, tokenizer, rng
        self._longest_bytes = longest_bytes
        self._tools = tool_definitions()

    def draw(self, *, half: int) -> list[Sample]:
        """One body of the first half (0) or the second (1); several, in order, where a chat goes on."""
        rng = self._rng
        source = rng.choice([*self._texts, "two"])
        size = int(math.exp(rng.uniform(math.log(_SHORTEST_BYTES), math.log(self._longest_bytes))))
        kind = rng.choice(_KINDS)
        if kind == "completion":
            text = self._text(source, size, half)
            shape = SCHEDULED["/v1/completions"].parse(_body(prompt=text)).spec.shape
            return [Sample(source, kind, shape, self._tokenizer.count(text) + 1)]
        if kind == "turns":
            return self._conversation(source, size, half)
        system = [_SYSTEM] if rng.random() < 0.5 else []
        messages = [*system, {"role": "user", "content": self._text(source, size, half)}]
        tools = rng.sample(self._tools, rng.randint(1, 12)) if kind == "tools" else []
        return [self._chat(source, kind, messages, tools)]

    def with_image(self, *, half: int, image_bytes: int) -> Sample:
        """A chat about an image: its address, or, with a number of bytes, a data URI that holds it."""
        encoded = base64.b64encode(self._rng.randbytes(image_bytes)).decode()
        url = f"data:image/png;base64,{encoded}" if image_bytes else "https://example.org/cat.png"
        text = self._text("mt_bench", 200, half)
        content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
        parsed = SCHEDULED["/v1/chat/completions"].parse(
            _body(messages=[{"role": "user", "content": content}])
        )
        tokenizer = self._tokenizer
        tokens = tokenizer.count(text) + tokenizer.per_chat + tokenizer.per_message + _IMAGE_TOKENS
        return Sample("mt_bench", "data URI" if image_bytes else "image URL", parsed.spec.shape, tokens)

    def _conversation(self, source: str, size: int, half: int) -> list[Sample]:
        """Every request repeats what was said before, as chat clients do."""
        turns = self._rng.randint(2, 6)
        messages: Messages = []
        samples = []
        for _ in range(turns):
            messages.append({"role": "user", "content": self._text(source, size // (3 * turns) + 1, half)})
            samples.append(self._chat(source, "turns", messages, []))
            answer = self._text(source, 2 * size // (3 * turns) + 1, half)
            messages.append({"role": "assistant", "content": answer})
        return samples

    def _chat(self, source: str, kind: str, messages: Messages, tools: list[Mapping[str, Any]]) -> Sample:
        body = _body(messages=messages, **({"tools": tools} if tools else {}))
        shape = SCHEDULED["/v1/chat/completions"].parse(body).spec.shape
        tokenizer = self._tokenizer
        tokens = tokenizer.per_chat + sum(
            tokenizer.per_message + tokenizer.count(message["content"]) for message in messages
        )
        if tools:
            lines = "\n".join(json.dumps(tool) for tool in tools)
            tokens += tokenizer.count(_TOOL_PREAMBLE.format(tools=lines))
        return Sample(source, kind, shape, tokens)

    def _text(self, source: str, size: int, half: int) -> str:
        if source != "two":
            return self._piece(source, size, half)
        # A question about some data, a comment beside code.
        names = self._rng.sample(sorted(self._texts), 2)
        return "\n\n".join(self._piece(name, size // 2, half) for name in names)

    def _piece(self, name: str, size_bytes: int, half: int) -> str:
        text = self._texts[name]
        middle = len(text) // 2
        text = text[middle:] if half else text[:middle]
        characters = max(1, round(size_bytes * len(text) / len(text.encode())))
        while len(text) < 2 * characters:  # a short text goes round
            text += text
        start = self._rng.randrange(len(text) - characters)
        return text[start : start + characters]


def _body(**fields: Any) -> bytes:
    """As OpenAI's client writes it: UTF-8, no blanks."""
    return json.dumps(
        {"model": "m", "max_tokens": 256, **fields}, ensure_ascii=False, separators=(",", ":")
    ).encode()
