"""Bodies of the kinds that clients send, of words that are drawn."""

import base64
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

_ENGLISH = """
the of and to in is that it for was on are as with they be at one have this from or had by but some what there
we can out other were all your when up use word how said each which their time will about if many then them
would write like so these her long make thing see him two has look more day could go come did
"""
_WORDS = _ENGLISH.split()
_JAPANESE = "これは日本語の文章であり、要求の本文として送られます。東京の天気は晴れでしょう。"
# As in ordinary text: a line has a dozen words, and one word of thirty stands in quotes.
_LINE_WORDS, _QUOTED = 12, 30


def body_of(kind: str, size: int) -> tuple[str, bytes]:
    """A path, and a body for it of about so many bytes; of each kind there is one."""
    path, fields = _KINDS[kind](random.Random(1), size)  # noqa: S311 - no secret
    escaped = kind == "escaped"
    separators = (", ", ": ") if escaped else (",", ":")
    whole = {"model": "m", "max_tokens": 256, "temperature": 0.7, "stream": True, **fields}
    return path, json.dumps(whole, ensure_ascii=escaped, separators=separators).encode()


def _text(rng: random.Random, size: int) -> str:
    words, length = [], 0
    while length < size:
        word = rng.choice(_WORDS)
        word = f'"{word}"' if rng.randrange(_QUOTED) == 0 else word
        words.append(word + ("\n" if rng.randrange(_LINE_WORDS) == 0 else " "))
        length += len(words[-1])
    return "".join(words)[:size]


def _japanese(rng: random.Random, characters: int) -> str:
    start = rng.randrange(len(_JAPANESE))
    return (_JAPANESE[start:] + _JAPANESE * (characters // len(_JAPANESE) + 1))[:characters]


def _said(role: str, content: object, **more: object) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _chat(messages: list[dict[str, Any]], **more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": messages, **more}


def _plain(rng: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    """Instructions and a question."""
    return _chat([_said("system", "You are a helpful assistant."), _said("user", _text(rng, size - 150))])


def _turns(rng: random.Random, size: int, length: int = 200) -> tuple[str, dict[str, Any]]:
    """A conversation of short turns."""
    roles = ("user", "assistant")
    count = max(1, size // (length + 40))
    return _chat([_said(roles[turn % 2], _text(rng, length)) for turn in range(count)])


def _agent(rng: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    """Calls of tools and their results, after the definitions of twenty tools."""
    tools = [_tool(rng, number) for number in range(20)]
    messages: list[dict[str, Any]] = []
    written = 0
    while written < size - 15_000:
        call = {"name": "read_file", "arguments": json.dumps({"path": f"src/{len(messages)}.py"})}
        calls = [{"id": f"call_{len(messages)}", "type": "function", "function": call}]
        result = _text(rng, 800)
        messages += [
            _said("assistant", None, tool_calls=calls),
            _said("tool", result, tool_call_id=calls[0]["id"]),
        ]
        written += len(result) + 250
    return _chat(messages or [_said("user", _text(rng, 100))], tools=tools)


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    fields = {f"field_{place}": {"type": "string", "description": _text(rng, 60)} for place in range(5)}
    function = {
        "name": f"tool_{number}",
        "description": _text(rng, 120),
        "parameters": {"type": "object", "properties": fields, "required": ["field_0"]},
    }
    return {"type": "function", "function": function}


def _image(rng: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    """A question about a picture that is sent along."""
    data = base64.b64encode(rng.randbytes(size * 3 // 4)).decode()
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return _chat([_said("user", [{"type": "text", "text": _text(rng, 200)}, picture])])


def _ids(rng: random.Random, size: int) -> tuple[str, dict[str, Any]]:
    """A prompt of token ids."""
    return COMPLETION, {"prompt": [rng.randrange(10_000, 100_000) for _ in range(size // 6)]}


_KINDS: Mapping[str, Callable[[random.Random, int], tuple[str, dict[str, Any]]]] = {
    "chat": _plain,
    "turns": _turns,
    "agent": _agent,
    "image": _image,
    "token ids": _ids,
    "japanese": lambda rng, size: _chat([_said("user", _japanese(rng, size // 3))]),
    "escaped": lambda rng, size: _chat([_said("user", _japanese(rng, size // 6))]),
}
