"""Measured sizes depend on a body's JSON value, not on its encoding."""

import json
from collections.abc import Iterator
from typing import Any

from blake3 import blake3
from hypothesis import example, given
from hypothesis import strategies as st

from serve_app.core.routing.estimation.byte_classes import measure_text
from serve_app.core.routing.prefix import BLOCK_ENDS
from serve_app.serving.gateway.request.endpoints import SCHEDULED, ParsedBody
from serve_app.serving.gateway.request.measure import Prompt, escape_bytes

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

# Characters of every length in UTF-8 and in JSON: escapes, control characters, surrogate pairs.
characters = st.sampled_from(' abcXYZ019_{}[],:"\\/\n\t\0\x7f\u00e9\u0416\u6570\u2028\U0001f600')
texts = st.builds(
    lambda text, times: text * times, st.text(characters, max_size=8), st.sampled_from([1, 1, 400])
)
parts = st.one_of(
    texts,
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries({"type": st.just("refusal"), "refusal": texts}),
    st.just({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}),
)
contents = st.none() | texts | st.lists(parts, max_size=4)
roles = st.sampled_from(["system", "user", "assistant", "tool", "r\u00f4le"])
plain = st.fixed_dictionaries({"role": roles, "content": contents})
reasoned = st.fixed_dictionaries({"role": roles, "content": contents, "reasoning": texts})
# The last of several equal keys in a JSON object counts.
Pairs = list[tuple[str, Any]]
fields: st.SearchStrategy[Pairs] = st.lists(
    st.tuples(st.just("messages"), st.lists(plain | reasoned, max_size=5))
)


class Repeated(dict[str, Any]):
    """Object with repeated keys in its JSON."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__(pairs)
        self._pairs = pairs

    def items(self) -> Any:
        return self._pairs


def written(pairs: Pairs, *, escaped: bool, indent: int | None) -> bytes:
    return json.dumps(Repeated(pairs), ensure_ascii=escaped, indent=indent).encode()


def texts_of(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        for part in [content] if isinstance(content, str) else content or []:
            if isinstance(part, str):
                yield part
            else:
                yield from (part[name] for name in ("text", "refusal") if name in part)
        if "reasoning" in message:
            yield message["reasoning"]


@given(fields, st.lists(plain | reasoned, max_size=5), st.booleans(), st.sampled_from([None, 1]))
@example([], [{"role": "user", "content": "\u6570\\\n" * 5_000}], True, None)
@example([], [{"role": "user", "content": "a\u2019s text" * 5_000}] * 2, False, None)
def test_the_size_and_kind_of_a_chat_are_those_of_its_texts(
    before: Pairs, messages: list[dict[str, Any]], escaped: bool, indent: int | None
) -> None:
    body = written([("model", "m"), *before, ("messages", messages)], escaped=escaped, indent=indent)
    shape = SCHEDULED[CHAT].parse(body).spec.shape
    text = "".join(texts_of(messages)).encode()
    assert shape.text_bytes == len(text)
    assert (shape.byte_classes, shape.category) == measure_text(text)
    assert shape.messages == len(messages)
    assert shape.tool_bytes == 0


def hashes_of(text: bytes, prompt: Prompt) -> tuple[int, ...]:
    """Compute the hashes by definition: over everything before each block end, keyed by the prompt."""
    names = (prompt.kind, b"m", (prompt.salt or "").encode(), b"tenant")
    key = blake3(b"".join(len(name).to_bytes(4, "big") + name for name in names)).digest()
    ends = [4 * end for end in BLOCK_ENDS if 4 * end <= len(text)]
    return tuple(int.from_bytes(blake3(text[:end], key=key).digest(8), "big") for end in ends)


def hashes(parsed: ParsedBody) -> tuple[int, ...]:
    return parsed.prompt.prefix_hashes(model="m", tenant="tenant")


role_texts = st.lists(st.tuples(roles, texts), max_size=6)


@given(role_texts, st.booleans())
@example([("user", "\u6570" * 600_000)], True)
@example([("user", "word " * 300_000), ("user", "more")], False)
def test_the_hashes_of_a_chat_are_those_of_its_roles_and_texts(
    turns: list[tuple[str, str]], escaped: bool
) -> None:
    messages = [{"role": role, "content": text} for role, text in turns]
    parsed = SCHEDULED[CHAT].parse(
        written([("model", "m"), ("messages", messages)], escaped=escaped, indent=None)
    )
    text = "".join(f"\0{role}\0{text}" for role, text in turns).encode()
    assert hashes(parsed) == hashes_of(text, parsed.prompt)


@given(role_texts, texts, st.booleans())
def test_other_apis_hash_their_texts_alike(turns: list[tuple[str, str]], system: str, escaped: bool) -> None:
    items = [{"role": role, "content": text} for role, text in turns]
    pairs: Pairs = [("model", "m"), ("instructions", system), ("input", items)]
    parsed = SCHEDULED[RESPONSES].parse(written(pairs, escaped=escaped, indent=None))
    text = f"\0system\0{system}" + "".join(f"\0{role}\0{text}" for role, text in turns)
    assert hashes(parsed) == hashes_of(text.encode(), parsed.prompt)
    pairs = [("model", "m"), ("max_tokens", 5), ("system", system), ("messages", items)]
    parsed = SCHEDULED[MESSAGES].parse(written(pairs, escaped=escaped, indent=None))
    text = f"\0system\0{system}" + "".join(f"\0{role}\0\0text\0{text}" for role, text in turns)
    assert hashes(parsed) == hashes_of(text.encode(), parsed.prompt)


@given(st.lists(texts, max_size=4))
def test_escapes_are_not_overrated(strings: list[str]) -> None:
    longer = [len(json.dumps(text)) - len(json.dumps(text, ensure_ascii=False).encode()) for text in strings]
    assert 0 <= escape_bytes("".join(strings).encode()) <= sum(longer)
