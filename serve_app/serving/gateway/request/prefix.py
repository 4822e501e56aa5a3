"""Prefix hashes: identify prompts with a common beginning by leading blocks, without a tokenizer.

The text of a prompt is joined in the order of chat templates: tool definitions, then the messages with their
roles, instructions first. It is cut at the ends of `core.routing.prefix`, and each hash covers all text
before its end. A request that continues another one has the hashes of that one and more. A partial last block
has no hash, because only a repetition would match it.

A hash also covers the model's name (an adapter has its own cache), the kind of prompt, the client's
`cache_salt`, and the tenant if configured. An image or audio ends the comparison, because its content is not
read. All gateways compute the same hashes, and a hash reveals nothing of the text.
"""

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated

import msgspec
from blake3 import blake3

from serve_app.core.routing.prefix import BLOCK_ENDS, BYTES_PER_TOKEN
from serve_app.core.settings_base import INTERNAL, settings
from serve_app.serving.gateway.request.fields import (
    ABSENT,
    BlockFields,
    ChatFields,
    CompletionFields,
    Content,
    MessageFields,
    MessagesFields,
    PartFields,
    ResponsesFields,
)
from serve_app.serving.gateway.request.measure import Utf8, blocks_of

_ID_BYTES = 8
_MIN_BYTES, _MAX_BYTES = (end * BYTES_PER_TOKEN for end in (BLOCK_ENDS[0], BLOCK_ENDS[-1]))
_NULL = b"null"
# Separators before messages of the common roles.
_HEADS = {role: f"\0{role}\0".encode() for role in ("system", "developer", "user", "assistant", "tool")}


@settings
class PrefixSettings:
    """Prefix hashes that the gateway sends to the scheduler."""

    # Send hashes of prompt prefixes to the scheduler. Costs about 20 microseconds per 10 kB of text; without
    # it, requests are placed by load alone.
    enabled: Annotated[bool, INTERNAL] = True
    # Isolate tenants in prefix caches. Clients that share a cache can infer from the time to first token
    # whether another one has sent a text before. With this setting tenants share nothing, neither here nor in
    # the engines, which receive a `cache_salt` (supported by vLLM, maybe rejected by other servers). It costs
    # the cache hits on text that tenants have in common.
    per_tenant: bool = False


class Opening(msgspec.Struct, frozen=True):
    """Beginning of a prompt, as references into its parsed body; copied only when it is hashed.

    Attributes:
        kind: prompts of different kinds never match.
        pieces: texts in the order in which the model reads them.
        ids: the prompt as token ids, instead of text.
        salt: the client's `cache_salt`.
    """

    kind: bytes
    pieces: tuple[str | bytes, ...] = ()
    ids: Sequence[int] = ()
    salt: str = ""


NO_OPENING = Opening(b"")


def prefix_hashes(opening: Opening, *, model: str, tenant: str = "") -> tuple[int, ...]:
    """Return the 64-bit hashes of the leading blocks, longest last; empty if no block is full.

    Hashes are isolated by tenant, unless it is empty.
    """
    if opening.ids:
        try:
            data = array("q", opening.ids).tobytes()
        except (OverflowError, TypeError):  # ids outside any vocabulary; the engine will reject them
            return ()
        return _block_hashes(data, _ID_BYTES, _key(opening.kind, model, opening.salt, tenant))
    data = _joined(opening.pieces)
    if len(data) < _MIN_BYTES:
        return ()
    return _block_hashes(data, BYTES_PER_TOKEN, _key(opening.kind, model, opening.salt, tenant))


# Most requests repeat the arguments of a recent one.
@lru_cache(maxsize=256)
def _key(kind: bytes, *names: str) -> bytes:
    """Return the key that separates the hashes of different kinds, models, salts and tenants."""
    return blake3(_length_prefixed(kind, *(name.encode() for name in names))).digest()


def _length_prefixed(*parts: bytes) -> bytes:
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def engine_salt(tenant: str, client_salt: str) -> str:
    """Return the `cache_salt` that isolates a tenant in an engine; clients cannot reproduce another's."""
    both = _length_prefixed(tenant.encode(), client_salt.encode())
    return blake2b(both, digest_size=16).hexdigest()


def chat_opening(body: ChatFields, utf8: Utf8 | None = None) -> Opening:
    """Return the beginning of a chat."""
    pieces = OpeningPieces(utf8)
    pieces.add_raw(body.tools, body.functions, body.documents)
    pieces.add_messages(body.messages)
    return Opening(b"chat", tuple(pieces.found), salt=body.cache_salt or "")


def completion_opening(body: CompletionFields) -> Opening:
    """Return the beginning of a completion's prompt; several prompts have none in common."""
    prompt: object = body.prompt
    salt = body.cache_salt or ""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Opening(b"text", (prompt,), salt=salt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return Opening(b"ids", ids=prompt[: BLOCK_ENDS[-1]], salt=salt)
    return Opening(b"several", salt=salt)


def responses_opening(body: ResponsesFields, utf8: Utf8 | None = None) -> Opening:
    """Return the beginning of a Responses request's input."""
    if body.previous_response_id:
        # It begins with the conversation stored by the engine, which is unknown here.
        return Opening(b"responses", salt=body.cache_salt or "")
    pieces = OpeningPieces(utf8)
    pieces.add_raw(body.tools)
    pieces.add("system", body.instructions)
    if isinstance(body.input, str):
        pieces.add("user", body.input)
    else:
        for item in body.input:
            pieces.add(item.role or "", item.content)
            pieces.add("call", item.arguments)
            pieces.add("output", [item.output] if isinstance(item.output, PartFields) else item.output)
    return Opening(b"responses", tuple(pieces.found), salt=body.cache_salt or "")


def messages_opening(body: MessagesFields, utf8: Utf8) -> Opening:
    """Return the beginning of a conversation in Anthropic's Messages API."""
    pieces = OpeningPieces(utf8)
    pieces.add_raw(body.tools)
    pieces.add("system", _parts_of(blocks_of(body.system)))
    for message in body.messages:
        pieces.add(message.role, "")
        for block in blocks_of(message.content):
            pieces.add_raw(block.input)
            content = _parts_of([block]) if block.content is None else block.content
            pieces.add(block.name or block.type or "", content)
    return Opening(b"messages", tuple(pieces.found), salt=body.cache_salt or "")


def _parts_of(blocks: Iterable[BlockFields]) -> Content:
    """Convert blocks to the parts of a chat message; blocks without text end the comparison as media."""
    return [PartFields(text=block.text, thinking=block.thinking) for block in blocks if block.input is ABSENT]


class OpeningPieces:
    """Accumulator for the text of a prompt, up to the first part that is not text."""

    __slots__ = ("_ended", "_utf8", "found")

    def __init__(self, utf8: Utf8 | None = None) -> None:
        self.found: list[str | bytes] = []
        self._utf8 = utf8 or Utf8()
        self._ended = False

    def add_messages(self, messages: Iterable[MessageFields]) -> None:
        """Add the messages of a chat."""
        for message in messages:
            if message.is_plain:
                self.add(message.role or "", message.content)
            else:
                self.add_raw(message.reasoning, message.reasoning_content)
                self.add(message.role or "", message.content)
                self.add_raw(message.tool_calls, message.function_call)
            if self._ended:
                return

    def add(self, role: str, content: Content) -> None:
        """Add a message; its role also marks the end of the previous one."""
        if content is None or self._ended:
            return
        self.found.append(_HEADS.get(role) or f"\0{role}\0")
        for part in [content] if isinstance(content, str) else content:
            text = part if isinstance(part, str) else _text_of(part)
            if text is None:
                self._ended = True
                return
            self.found.append(self._utf8.known(text))

    def add_raw(self, *values: msgspec.Raw) -> None:
        """Add definitions by the bytes of their JSON."""
        for value in values:
            if value is ABSENT:
                continue
            piece = bytes(value)
            if piece and piece != _NULL and not self._ended:
                self.found += ("\0", piece)


def _text_of(part: PartFields) -> str | None:
    return part.text if part.text is not None else part.refusal or part.thinking


def _joined(pieces: Iterable[str | bytes]) -> bytes:
    """Return the UTF-8 of the pieces, at least up to the last block end."""
    encoded: list[bytes] = []
    size = 0
    for piece in pieces:
        # A character has at least one byte.
        data = piece if isinstance(piece, bytes) else piece[:_MAX_BYTES].encode()
        encoded.append(data)
        size += len(data)
        if size >= _MAX_BYTES:
            break
    return b"".join(encoded)


def _block_hashes(data: bytes, bytes_per_token: int, key: bytes) -> tuple[int, ...]:
    hasher = blake3(key=key)
    view = memoryview(data)
    hashes, start = [], 0
    for tokens in BLOCK_ENDS:
        end = tokens * bytes_per_token
        if end > len(data):
            break
        hasher.update(view[start:end])
        hashes.append(int.from_bytes(hasher.digest(8), "big"))
        start = end
    return tuple(hashes)
