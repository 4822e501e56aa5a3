"""Anthropic's Messages API as vLLM serves it: converts requests to chats, and answers to messages or events.

As in vLLM, a message begins with its first token, and its first and last events have the token counts.
Thinking is accepted without effect, as in vLLM with a model that does not reason.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from serve_app.engines.emulated.completions import AnswerContent, EmulatedAnswer
from serve_app.engines.emulated.http import ApiError, Call, encode, engine_failed
from serve_app.engines.emulated.requests import (
    ChatBody,
    ChatMessage,
    Generation,
    Part,
    StreamOptions,
    as_raw,
    chat_generation,
    conversation,
    decode,
    decoder_of,
)
from serve_app.engines.emulated.text import PseudoTokenizer

_BILLING = "x-anthropic-billing-header"
_NOTHING = msgspec.Raw()
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


# -- requests ----------------------------------------------------------------------------------------------


class ImageSource(msgspec.Struct):
    """Source of an image: inline data or a URL."""

    type: str = "base64"
    media_type: str = "image/png"
    data: str = ""
    url: str = ""

    @property
    def part(self) -> Part:
        """The image as a part of a chat message."""
        url = self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"
        return Part(type="image_url", image_url=as_raw({"url": url}))


class Block(msgspec.Struct):
    """A content block of a message."""

    type: Literal[
        "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"
    ]
    text: str | None = None
    source: ImageSource | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: "str | list[Block] | None" = None


Blocks = str | list[Block]


class AnthropicMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None


class ToolChoice(msgspec.Struct):
    """Tool choice: the tool that the model must or may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class OutputFormat(msgspec.Struct):
    """JSON schema of the answer."""

    type: Literal["json_schema"] = "json_schema"
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    """Format of the answer."""

    format: OutputFormat | None = None


class CountBody(msgspec.Struct, kw_only=True):
    """Body of `/v1/messages/count_tokens`."""

    model: str
    messages: list[AnthropicMessage]
    system: Blocks | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None


class MessagesBody(CountBody, kw_only=True):
    """Body of `/v1/messages`."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    stream: bool | None = False
    stop_sequences: Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: OutputConfig | None = None
    ewsjf_prompt_tokens: int | None = None
    ewsjf_output_tokens: int | None = None


_COUNT = decoder_of(CountBody)
_MESSAGES = decoder_of(MessagesBody)


def read_messages(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """Parse a request for a message."""
    body = decode(_MESSAGES, raw)
    wanted = body.output_config.format if body.output_config is not None else None
    response_format = _NOTHING
    if wanted is not None and wanted.schema is not None:
        named = {"name": "json_schema", "schema": wanted.schema}
        response_format = as_raw({"type": "json_schema", "json_schema": named})
    chat = ChatBody(
        **_chat(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        response_format=response_format,
        ewsjf_prompt_tokens=body.ewsjf_prompt_tokens,
        ewsjf_output_tokens=body.ewsjf_output_tokens,
    )
    return chat_generation(chat, tokenizer)


def read_count(raw: bytes, tokenizer: PseudoTokenizer) -> tuple[str | None, int]:
    """Parse a token count request and return its model and the tokens of its conversation."""
    chat = ChatBody(**_chat(decode(_COUNT, raw)))
    return chat.model, conversation(chat.messages, chat.tools, tokenizer).tokens


def _chat(body: CountBody) -> dict[str, Any]:
    """Return the model, messages and tools of the equivalent chat."""
    system = "".join(_system_texts(body.system))
    messages = [ChatMessage(role="system", content=system)] if system else []
    for turn in body.messages:
        messages += _messages_of(turn)
    chat: dict[str, Any] = {"model": body.model, "messages": messages}
    if body.tools is not None:
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            for tool in body.tools
        ]
        chat["tools"] = as_raw([{"type": "function", "function": function} for function in functions])
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = as_raw(named if choice.type == "tool" else _CHOICES[choice.type])
    return chat


def _system_texts(content: Blocks | None) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for block in content or ():
        if block.text and not block.text.startswith(_BILLING):
            yield block.text


def _messages_of(turn: AnthropicMessage) -> Iterator[ChatMessage]:
    """Convert one of Anthropic's messages to chat messages. Tool results come first."""
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
            function = {"name": block.name or "", "arguments": encode(block.input or {}).decode()}
            calls.append({"id": block.id or "call", "type": "function", "function": function})
        elif block.type == "tool_result":
            yield from _result(block)
    if parts or calls:
        yield ChatMessage(
            role=turn.role, content=parts or None, tool_calls=as_raw(calls) if calls else _NOTHING
        )


def _result(block: Block) -> Iterator[ChatMessage]:
    found = block.content if isinstance(block.content, list) else []
    text = block.content if isinstance(block.content, str) else "\n".join(part.text or "" for part in found)
    yield ChatMessage(role="tool", content=text)
    images = [part.source.part for part in found if part.source is not None]
    if images:
        yield ChatMessage(role="user", content=images)


# -- answers -----------------------------------------------------------------------------------------------


class MessageAnswer(EmulatedAnswer):
    """Answer of `/v1/messages`: one block with text or with a tool call."""

    def __init__(self, answer: AnswerContent) -> None:
        super().__init__(answer)
        self._block: dict[str, Any] = {"type": "text", "text": ""}
        if answer.call is not None:
            call_id = f"chatcmpl-tool-{answer.call_id(0)}"
            self._block = {"type": "tool_use", "id": call_id, "name": answer.call.name, "input": {}}

    def first_token_events(self) -> bytes:
        """Return the start events of the message and its block."""
        usage = {**self._usage(), "output_tokens": 0}
        message = self._message([], None, None, usage)
        start = _event("message_start", message=message)
        return start + _event("content_block_start", content_block=self._block, index=0)

    # `ends` is unused: `ending` sends the end as separate events.
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """Return the text of some tokens as a delta; no bytes for tokens that the client does not see."""
        text = self._answer.outputs[0].added(start, count)
        if not text:
            return b""
        delta = {"type": "text_delta", "text": text}
        if self._answer.call is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", delta=delta, index=0)

    def final_events(self) -> bytes:
        """Return the end of the block, the stop reason, and the end of the message."""
        reason, stop = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        end = _event("content_block_stop", index=0)
        return end + _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def full_body(self) -> bytes:
        """Return a message object."""
        output = self._answer.outputs[0]
        block = {"type": "text", "text": output.text}
        # As in vLLM, a truncated call is text.
        if self._answer.call is not None and output.is_complete:
            block = {**self._block, "input": msgspec.json.decode(output.text)}
        return encode(self._message([block], *self._reason(), self._usage()))

    def _reason(self) -> tuple[str, str | None]:
        """Return the stop reason, and the stop string if there is one."""
        output = self._answer.outputs[0]
        if output.finish_reason == "length":
            return "max_tokens", None
        if self._answer.call is not None and output.is_complete:
            return "tool_use", None
        stop = output.stop_reason
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    def _usage(self) -> dict[str, int]:
        """Return Anthropic's usage object, in which `input_tokens` excludes cached tokens."""
        answer = self._answer
        return {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "output_tokens": answer.output_tokens,
            "cache_read_input_tokens": answer.cached_tokens,
        }

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._answer.request_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._answer.model,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def failed_event() -> bytes:
    """Return the event that ends a stream whose engine has failed."""
    detail = {"type": "internal_error", "message": str(engine_failed())}
    return b"event: error\ndata: %s\n\n" % encode({"type": "error", "error": detail})


def anthropic_errors(handler: Callable[[Call], Awaitable[None]]) -> Callable[[Call], Awaitable[None]]:
    """Wrap a handler so that its errors have Anthropic's shape with vLLM's messages, as vLLM's route does."""

    async def answered(call: Call) -> None:
        try:
            await handler(call)
        except ApiError as error:
            detail = msgspec.json.decode(error.body)["error"]
            shape = {"type": detail["type"], "message": detail["message"]}
            error.body = encode({"type": "error", "error": shape})
            raise

    return answered


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **content}))
