"""Anthropic's Messages as vLLM serves them: each request becomes a chat.

Thinking is accepted and has no effect, as in vLLM with a model that does not reason.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from serve_app.engines.emulated.bodies import ChatBody, ChatMessage, Part, StreamOptions
from serve_app.engines.emulated.errors import ApiError, engine_failed, unreadable

_BILLING = "x-anthropic-billing-header"
_NOTHING = msgspec.Raw()
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ImageSource(msgspec.Struct):
    """Where the bytes of an image are."""

    type: str = "base64"
    media_type: str = "image/png"
    data: str = ""
    url: str = ""

    @property
    def part(self) -> Part:
        """The image as a part of a chat's message."""
        url = self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"
        return Part(type="image_url", image_url=msgspec.Raw(msgspec.json.encode({"url": url})))


class Block(msgspec.Struct):
    """A block of a message."""

    type: Literal[
        "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"
    ]
    text: str | None = None
    thinking: str | None = None
    source: ImageSource | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None


Blocks = str | list[Block]


class Turn(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Tool(msgspec.Struct):
    """A tool that may be called."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class ToolChoice(msgspec.Struct):
    """Which tool is to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class OutputFormat(msgspec.Struct):
    """A JSON schema of the answer."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """The form of the answer."""

    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """`/v1/messages/count_tokens`."""

    model: str
    messages: list[Turn]
    system: Blocks | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None


class MessagesBody(CountBody, kw_only=True):
    """`/v1/messages`."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stream: bool | None = False
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: OutputConfig | None = None
    ewsjf_prompt_tokens: int | None = None
    ewsjf_output_tokens: int | None = None


_C = TypeVar("_C", bound=CountBody)
_COUNT = msgspec.json.Decoder(CountBody, strict=False)
_MESSAGES = msgspec.json.Decoder(MessagesBody, strict=False)


def chat_of(raw: bytes) -> ChatBody:
    """The chat that a request for a message is turned into."""
    body = _decode(_MESSAGES, raw)
    wanted = body.output_config.format if body.output_config is not None else None
    return ChatBody(
        **_conversation(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        response_format=_NOTHING if wanted is None or wanted.schema is None else _format(wanted.schema),
        ewsjf_prompt_tokens=body.ewsjf_prompt_tokens,
        ewsjf_output_tokens=body.ewsjf_output_tokens,
    )


def counted_chat(raw: bytes) -> ChatBody:
    """The chat whose tokens are to be counted."""
    return ChatBody(**_conversation(_decode(_COUNT, raw)))


def in_anthropic_shape(error: ApiError) -> ApiError:
    """An error as vLLM's route answers it: its own words, in Anthropic's shape."""
    detail = msgspec.json.decode(error.body)["error"]
    error.body = msgspec.json.encode(
        {"type": "error", "error": {"type": detail["type"], "message": detail["message"]}}
    )
    return error


def failed_event() -> bytes:
    """The event after which a stream of a dead engine ends."""
    detail = {"type": "internal_error", "message": str(engine_failed())}
    return b"event: error\ndata: %s\n\n" % msgspec.json.encode({"type": "error", "error": detail})


def _decode(decoder: "msgspec.json.Decoder[_C]", raw: bytes) -> _C:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(str(error)) from error


def _format(schema: dict[str, Any]) -> msgspec.Raw:
    wanted = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    return msgspec.Raw(msgspec.json.encode(wanted))


def _conversation(body: CountBody) -> dict[str, Any]:
    """Model, messages and tools of a chat."""
    system = "".join(_system_texts(body.system))
    messages = [ChatMessage(role="system", content=system)] if system else []
    for turn in body.messages:
        messages += _messages_of(turn)
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools is not None:
        chat["tools"] = msgspec.Raw(msgspec.json.encode([_function(tool) for tool in body.tools]))
    if body.tool_choice is not None:
        chat["tool_choice"] = msgspec.Raw(msgspec.json.encode(_choice(body.tool_choice)))
    return chat


def _system_texts(content: Blocks | None) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for block in content or ():
        if block.text and not block.text.startswith(_BILLING):
            yield block.text


def _messages_of(turn: Turn) -> Iterator[ChatMessage]:
    """The messages of a chat that one of Anthropic's becomes; results of tools come first."""
    if turn.role == "system":
        yield ChatMessage(role="system", content="".join(_system_texts(turn.content)))
        return
    if isinstance(turn.content, str):
        yield ChatMessage(role=turn.role, content=turn.content)
        return
    parts: list[Part] = []
    calls: list[dict[str, Any]] = []
    for block in turn.content:
        if block.text:
            parts.append(Part(text=block.text))
        elif block.source is not None:
            parts.append(block.source.part)
        elif block.type == "tool_use":
            calls.append(_call(block))
        elif block.type == "tool_result":
            yield from _result(block)
    if parts or calls:
        encoded = msgspec.Raw(msgspec.json.encode(calls)) if calls else _NOTHING
        yield ChatMessage(role=turn.role, content=parts or None, tool_calls=encoded)


def _result(block: Block) -> Iterator[ChatMessage]:
    found = block.content if isinstance(block.content, list) else []
    text = block.content if isinstance(block.content, str) else "\n".join(part.text or "" for part in found)
    yield ChatMessage(role="tool", content=text or "")
    images = [part.source.part for part in found if part.source is not None]
    if images:
        yield ChatMessage(role="user", content=images)


def _call(block: Block) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input or {}).decode()
    function = {"name": block.name or "", "arguments": arguments}
    return {"id": block.id or "call", "type": "function", "function": function}


def _function(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}
