"""Anthropic's Messages as vLLM serves them: each request becomes a chat, its answer a message or its events.

As in vLLM, the message begins with its first token, and the counts stand in its first and last events.
Thinking is accepted and has no effect, as in vLLM with a model that does not reason.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec

from serve_app.engines.emulated.completions import AnswerHead, EmulatedAnswer
from serve_app.engines.emulated.http import ApiError, Call, encode, engine_failed
from serve_app.engines.emulated.requests import (
    ChatBody,
    ChatMessage,
    Generation,
    Part,
    StreamOptions,
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
    """Where the bytes of an image are."""

    type: str = "base64"
    media_type: str = "image/png"
    data: str = ""
    url: str = ""

    @property
    def part(self) -> Part:
        """The image as a part of a chat's message."""
        url = self.url if self.type == "url" else f"data:{self.media_type};base64,{self.data}"
        return Part(type="image_url", image_url=_raw({"url": url}))


class Block(msgspec.Struct):
    """A block of a message."""

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
    """The tool to be called."""

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


_COUNT = decoder_of(CountBody)
_MESSAGES = decoder_of(MessagesBody)


def read_messages(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """A request for a message."""
    body = decode(_MESSAGES, raw)
    wanted = body.output_config.format if body.output_config is not None else None
    response_format = _NOTHING
    if wanted is not None and wanted.schema is not None:
        named = {"name": "json_schema", "schema": wanted.schema}
        response_format = _raw({"type": "json_schema", "json_schema": named})
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
    return chat_generation(chat, raw, tokenizer)


def read_count(raw: bytes, tokenizer: PseudoTokenizer) -> tuple[str | None, int]:
    """A conversation to be counted: its model and its tokens."""
    chat = ChatBody(**_chat(decode(_COUNT, raw)))
    return chat.model, conversation(chat.messages, chat.tools, tokenizer).tokens


def _chat(body: CountBody) -> dict[str, Any]:
    """Model, messages and tools of a chat."""
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
        chat["tools"] = _raw([{"type": "function", "function": function} for function in functions])
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = _raw(named if choice.type == "tool" else _CHOICES[choice.type])
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
            function = {"name": block.name or "", "arguments": encode(block.input or {}).decode()}
            calls.append({"id": block.id or "call", "type": "function", "function": function})
        elif block.type == "tool_result":
            yield from _result(block)
    if parts or calls:
        yield ChatMessage(
            role=turn.role, content=parts or None, tool_calls=_raw(calls) if calls else _NOTHING
        )


def _result(block: Block) -> Iterator[ChatMessage]:
    found = block.content if isinstance(block.content, list) else []
    text = block.content if isinstance(block.content, str) else "\n".join(part.text or "" for part in found)
    yield ChatMessage(role="tool", content=text)
    images = [part.source.part for part in found if part.source is not None]
    if images:
        yield ChatMessage(role="user", content=images)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


# -- answers -----------------------------------------------------------------------------------------------


class MessageAnswer(EmulatedAnswer):
    """An answer of `/v1/messages`: text."""

    def opening(self) -> bytes:
        """The message without content, and its block of text."""
        return self._message_start() + _block_start({"type": "text", "text": ""})

    # `EmulatedAnswer` marks the last token; here the end is an event of its own.
    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """One text delta; none for tokens that the client does not see."""
        if self._head.spec is None:
            return (
                b"event: content_block_delta\n"
                b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"%s"},'
                b'"index":0}\n\n' % self._head.text(choice, start, count)
            )
        text = self._head.scripts[0].added(start, count)
        return _delta({"type": "text_delta", "text": text}) if text else b""

    def ending(self) -> bytes:
        """The end of the block, why the message ended, and the end of the message."""
        return _event("content_block_stop", index=0) + self._message_end()

    def whole(self) -> bytes:
        """A message object."""
        return encode(self._message(self._content(), *self._reason(), self._usage()))

    def _content(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self._head.whole_text(0)}]

    def _reason(self) -> tuple[str, str | None]:
        """Why it ended, and the stop string that ended it."""
        if self._head.finish_reasons[0] == "length":
            return "max_tokens", None
        stop = self._head.scripts[0].stop_reason if self._head.scripts else None
        return ("end_turn", None) if stop is None else ("stop_sequence", stop)

    def _usage(self) -> dict[str, int]:
        """Anthropic counts cached tokens beside the others."""
        head = self._head
        return {
            "input_tokens": head.prompt_tokens - head.cached_tokens,
            "output_tokens": head.output_tokens,
            "cache_read_input_tokens": head.cached_tokens,
        }

    def _message_start(self) -> bytes:
        usage = {**self._usage(), "output_tokens": 0}
        return _event("message_start", message=self._message([], None, None, usage))

    def _message_end(self) -> bytes:
        reason, stop = self._reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        return _event("message_delta", delta=delta, usage=self._usage()) + _event("message_stop")

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._head.request_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._head.model,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


class ToolUseAnswer(MessageAnswer):
    """A message that calls a tool."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        assert head.call is not None, "only the answer that is a call has one"
        self._block = {"type": "tool_use", "id": f"chatcmpl-tool-{head.call_id(0)}", "name": head.call.name}
        self._called = False

    def opening(self) -> bytes:
        """The message without content; its block begins with the arguments."""
        return self._message_start()

    def delta(self, choice: int, start: int, count: int, *, ends: bool) -> bytes:  # noqa: ARG002
        """The arguments that some tokens add."""
        added = self._head.scripts[0].added_arguments(start, count)
        if added is None:
            return b""
        text, is_first = added
        self._called = True
        begin = _block_start({**self._block, "input": {}}) if is_first else b""
        return begin + _delta({"type": "input_json_delta", "partial_json": text})

    def ending(self) -> bytes:
        """The end of the block, if it began, and of the message."""
        return super().ending() if self._called else self._message_end()

    def _content(self) -> list[dict[str, Any]]:
        """As in vLLM, a call that is cut is text."""
        script = self._head.scripts[0]
        if not script.is_whole or script.arguments is None:
            return super()._content()
        begin, end = script.arguments
        return [{**self._block, "input": msgspec.json.decode(script.text[begin:end])}]

    def _reason(self) -> tuple[str, str | None]:
        return ("tool_use", None) if self._head.scripts[0].is_whole else super()._reason()


def message_answer(head: AnswerHead) -> MessageAnswer:
    """The answer that the request asks for."""
    return MessageAnswer(head) if head.call is None else ToolUseAnswer(head)


def failed_event() -> bytes:
    """The event after which a stream of a dead engine ends."""
    detail = {"type": "internal_error", "message": str(engine_failed())}
    return b"event: error\ndata: %s\n\n" % encode({"type": "error", "error": detail})


def anthropic_errors(handler: Callable[[Call], Awaitable[None]]) -> Callable[[Call], Awaitable[None]]:
    """The handler, with its errors as vLLM's route answers them: its own words, in Anthropic's shape."""

    async def answered(call: Call) -> None:
        try:
            await handler(call)
        except ApiError as error:
            detail = msgspec.json.decode(error.body)["error"]
            shape = {"type": detail["type"], "message": detail["message"]}
            error.body = encode({"type": "error", "error": shape})
            raise

    return answered


def _block_start(block: dict[str, Any]) -> bytes:
    return _event("content_block_start", content_block=block, index=0)


def _delta(delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", delta=delta, index=0)


def _event(kind: str, **content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode({"type": kind, **content}))
