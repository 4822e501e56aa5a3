"""Malformed bodies: valid ones with flipped, cut and repeated bytes, or values of other types."""

import json
import random
from collections.abc import Iterator
from typing import Any

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Grüße \U0001f600 \u2028"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "max_tokens": 5,
        "n": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "priority": 3,
    },
    "/v1/completions": {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 5, "stop": ["\n"]},
    "/v1/responses": {"model": "tiny", "input": [{"role": "user", "content": "hi"}], "instructions": "x"},
    "/v1/embeddings": {"model": "tiny", "input": [[1, 2], [3]]},
    "/tokenize": {"model": "tiny", "prompt": "hello"},
}
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 5.0, 0.5, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400),
    *("", "x", "\x00", "\ud800", "null", "9" * 5_000, [], {}, [[]], [None], [[1], "a"], {"": ""}),
    *(["a"] * 3_000, {"a": {"b": {"c": [{}] * 50}}}),
)
ODD_TEXTS = (
    *(b"", b" ", b"null", b"[]", b"{}", b'""', b"0", b"{", b"}", b'{"', b"nan", b"\xff", b"\xef\xbb\xbf{}"),
    *(b"[" * 5_000, b'{"a":' * 5_000, b'{"model":"tiny","model":2}', "{}".encode("utf-16"), b"\x1f\x8b\x08"),
    *(b'{"model":"tiny","messages":[],"x":NaN}', b'{"model":"tiny","messages":[],"x":1e99999}'),
    *(b'{"model":"tiny","messages":[],}', b"{'model':'tiny'}", b'{"model":"ti\nny"}', b'{"model":"\\ud800"}'),
)


def malformed(seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield paths and bodies without end; deterministic for a seed."""
    chance = random.Random(seed)
    paths = list(VALID)
    while True:
        for text in ODD_TEXTS:
            yield chance.choice(paths), text
        for _ in range(200):
            path = chance.choice(paths)
            document = VALID[path]
            if chance.random() < 0.5:
                yield path, _written(_with_odd_value(document, chance))
            else:
                yield path, _damaged(_written(document), chance)


def _written(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=True).encode()


def _with_odd_value(node: Any, chance: random.Random) -> Any:
    """Return a copy in which one value is replaced or missing."""
    if not node or not isinstance(node, dict | list) or chance.random() < 0.15:
        return chance.choice(ODD_VALUES)
    place = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
    copy = dict(node) if isinstance(node, dict) else list(node)
    if chance.random() < 0.15:
        del copy[place]
    else:
        copy[place] = _with_odd_value(node[place], chance)
    return copy


def _damaged(text: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        at, end = sorted(chance.randrange(len(damaged) + 1) for _ in range(2))
        match chance.randrange(5):
            case 0:
                del damaged[at:end]
            case 1:
                damaged[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
            case 2:
                damaged[at:at] = damaged[at:end] * chance.randint(1, 20)
            case 3 if at < len(damaged):
                damaged[at] ^= 1 << chance.randrange(8)
            case _:
                damaged = damaged[:end]
    return bytes(damaged)
