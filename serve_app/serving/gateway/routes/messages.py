"""Anthropic's Messages: what they ask of an engine.

vLLM makes a chat of them: the system text first, tool results as messages of their own, thinking as
reasoning. A system text that begins with `x-anthropic-billing-header` differs from request to request. vLLM
leaves it out, and so do the sizes and the hashes of prefixes here.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from serve_app.request import PromptShape, RequestSpec
from serve_app.serving.gateway.request.bodies import ABSENT, BodyFields, Content, ModelOnly, PartFields
from serve_app.serving.gateway.request.parse import ParsedBody
from serve_app.serving.gateway.request.prefix import Opening, OpeningPieces
from serve_app.serving.gateway.request.shape import PromptMeasure
from serve_app.serving.gateway.request.utf8 import Utf8

_BILLING = "x-anthropic-billing-header"
_MEDIA = frozenset({"image", "document"})
_MAY_BE_EMPTY = frozenset({"redacted_thinking", "tool_result", "tool_reference"})


class BlockFields(msgspec.Struct, gc=False):
    """A block of a message: text, thinking, a tool's call or its result. Others are media."""

    type: str | None = None
    name: str | None = None
    text: str | None = None
    thinking: str | None = None
    content: Content = None
    input: msgspec.Raw = ABSENT
    tool: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT


Blocks = str | list[BlockFields]


class TurnFields(msgspec.Struct, gc=False):
    """One message of a conversation."""

    role: str
    content: Blocks


class MetadataFields(msgspec.Struct):
    """What a client says of whom it works for."""

    user_id: str | None = None


class MessagesFields(BodyFields, kw_only=True):
    """`/v1/messages`."""

    messages: list[TurnFields]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    system: Blocks | None = None
    stream: bool | None = None
    metadata: MetadataFields | None = None
    cache_salt: str | None = None
    tools: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT


class CountTokensFields(ModelOnly):
    """`/v1/messages/count_tokens`: only the model is needed to find a replica."""


def read_messages(body: MessagesFields) -> ParsedBody:
    """What a message asks for."""
    measure = PromptMeasure()
    return ParsedBody(
        spec=RequestSpec(
            model=body.model,
            shape=_shape(body, measure),
            max_output_tokens=body.max_tokens,
            streamed=bool(body.stream),
        ),
        service_tier=body.service_tier,
        priority=body.priority,
        user=body.metadata.user_id if body.metadata is not None else None,
        opening=_opening(body, measure.utf8),
        measure=measure,
    )


def _shape(body: MessagesFields, measure: PromptMeasure) -> PromptShape:
    results = 0
    for block in _blocks(body.system):
        _add(measure, block)
    for message in body.messages:
        for block in _blocks(message.content):
            results += block.type == "tool_result"
            _add(measure, block)
    measure.add_raw(body.tools, body.output_config)
    return measure.shape(messages=len(body.messages) + results + (body.system is not None))


def _add(measure: PromptMeasure, block: BlockFields) -> None:
    """All that is there: which of it an engine reads depends on a type that clients choose."""
    texts = [text for text in (block.text, block.thinking) if text is not None]
    measure.texts += texts
    measure.add_content(block.content)
    measure.add_raw(block.input, block.tool)
    is_empty = not texts and block.content is None and block.input is ABSENT and block.tool is ABSENT
    if block.type in _MEDIA or (is_empty and block.type not in _MAY_BE_EMPTY):
        measure.media_items += 1
        measure.media_bytes += len(memoryview(block.source))


def _opening(body: MessagesFields, utf8: Utf8) -> Opening:
    pieces = OpeningPieces(utf8)
    pieces.add_raw(body.tools)
    pieces.add("system", _content(_blocks(body.system)))
    for message in body.messages:
        pieces.add(message.role, "")
        for block in _blocks(message.content):
            pieces.add_raw(block.input)
            content = _content([block]) if block.content is None else block.content
            pieces.add(block.name or block.type or "", content)
    return Opening(b"messages", tuple(pieces.found), salt=body.cache_salt or "")


def _blocks(content: Blocks | None) -> Iterator[BlockFields]:
    if isinstance(content, str):
        content = [BlockFields(type="text", text=content)]
    for block in content or ():
        if block.text is None or not block.text.startswith(_BILLING):
            yield block


def _content(blocks: Iterable[BlockFields]) -> Content:
    """Blocks as parts of a chat's message; what has no text is media, which ends a comparison."""
    return [PartFields(text=block.text, thinking=block.thinking) for block in blocks if block.input is ABSENT]
