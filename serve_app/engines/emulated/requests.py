"""Request parsing: converts each body to a `Generation`, whose prompts are token counts and block hashes.

The bodies have the fields that matter to an engine without a model. Two extensions make traces replayable:

- `ewsjf_prompt_tokens` states the length of the prompt, so that no text of that length needs to be sent. Such
  a prompt does not use the prefix cache.
- `ewsjf_output_tokens` states the length of the answer. `max_tokens` still limits it, with `finish_reason`
  "length".

Formats of the answer are rejected, because placeholder text has none. All other fields are ignored.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import msgspec

from serve_app.engines.emulated.http import encode, invalid, not_emulated
from serve_app.engines.emulated.text import Prompt, PseudoTokenizer

# Prompt tokens per image or other medium. Vision models use about 85 to 1,600 tokens per image.
_MEDIA_TOKENS = 256
_MEDIA = ("image_url", "image", "input_image", "input_audio")
# The chat template's start of the answer.
_GENERATION_PROMPT = "assistant"
_NOTHING = msgspec.Raw()

Count = Annotated[int, msgspec.Meta(ge=1)]
# vLLM's limit.
Choices = Annotated[int, msgspec.Meta(ge=1, le=16_384)]
Ids = Annotated[list[int], msgspec.Meta(min_length=1)]
# Text or token ids, alone or in a list.
Inputs = str | Annotated[list[str | int | Ids], msgspec.Meta(min_length=1)]
Conversation = Annotated[list[Any], msgspec.Meta(min_length=1)]


class Body(msgspec.Struct, kw_only=True):
    """Fields common to all endpoints."""

    model: str | None = None
    priority: int = 0
    ewsjf_prompt_tokens: Count | None = None


class StreamOptions(msgspec.Struct):
    """Options for the content of a stream."""

    include_usage: bool | None = False


class Function(msgspec.Struct):
    """Name of a function."""

    name: str = ""


class Tool(msgspec.Struct):
    """A tool, or the choice of one. OpenAI's chats have its name in `function`."""

    type: str = "function"
    name: str = ""
    function: Function | None = None

    @property
    def called(self) -> str | None:
        """The name, if there is one."""
        return (self.name if self.function is None else self.function.name) or None


class AnswerFormat(msgspec.Struct):
    """Format of an answer."""

    type: str = "json_schema"


class FormatOptions(msgspec.Struct):
    """Field `text` of responses, and `output_config` of messages."""

    format: AnswerFormat | None = None


class GeneratingBody(Body, kw_only=True):
    """Fields common to the generating endpoints."""

    n: Choices | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    ewsjf_output_tokens: Count | None = None
    return_token_ids: bool | None = False
    tools: msgspec.Raw = _NOTHING
    tool_choice: str | Tool | None = None
    response_format: AnswerFormat | None = None
    structured_outputs: msgspec.Raw = _NOTHING


class TransferParams(msgspec.Struct):
    """Ids that replace the rendered messages, so that another engine's answer can be continued."""

    prompt_token_ids: Ids | None = None


class ChatBody(GeneratingBody, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: Conversation
    kv_transfer_params: TransferParams | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None


class CompletionBody(GeneratingBody, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: Inputs
    max_tokens: Count | None = 16


class ResponsesBody(GeneratingBody, kw_only=True):
    """Body of `/v1/responses`."""

    input: str | Conversation
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: FormatOptions | None = None
    request_id: str | None = None


class CountBody(Body, kw_only=True):
    """Body of `/v1/messages/count_tokens`."""

    messages: Conversation
    system: Any = None
    tools: msgspec.Raw = _NOTHING


class MessagesBody(GeneratingBody, kw_only=True):
    """Body of `/v1/messages`."""

    messages: Conversation
    system: Any = None
    max_tokens: Count
    output_config: FormatOptions | None = None


class EmbeddingsBody(Body, kw_only=True):
    """Body of `/v1/embeddings`. Each input has its own embedding."""

    input: Inputs
    encoding_format: str = "float"


class TokenizeBody(Body, kw_only=True):
    """Body of `/tokenize`: text or a conversation."""

    prompt: str | None = None
    messages: list[Any] = []
    tools: msgspec.Raw = _NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request to generate, from any endpoint.

    Attributes:
        prompts: one or more; each has `choices` answers.
        max_tokens: the client's limit per answer; None if not stated.
        call: name of the tool that the answer calls; None for text.
        request_id: id for the answer; None to generate one.
        fields: all fields of a request of the Responses API, whose answer repeats some of them.
    """

    body: GeneratingBody
    prompts: list[Prompt]
    max_tokens: int | None
    call: str | None
    request_id: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        """Number of answers per prompt."""
        return self.body.n or 1

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)


B = TypeVar("B")


def decoder_of(kind: type[B]) -> "msgspec.json.Decoder[B]":
    """Return a decoder that coerces types as vLLM does: it accepts 5.0 and "5" for 5."""
    return msgspec.json.Decoder(kind, strict=False)


def decode(decoder: "msgspec.json.Decoder[B]", raw: bytes | msgspec.Raw) -> B:
    """Decode a body, or raise `ApiError` if it does not match."""
    try:
        # The decoder does not validate UTF-8 in unknown fields and in `Raw` fields.
        bytes(raw).decode()
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"invalid body: {error}") from error


_CHAT = decoder_of(ChatBody)
_COMPLETION = decoder_of(CompletionBody)
_RESPONSES = decoder_of(ResponsesBody)
_MESSAGES = decoder_of(MessagesBody)
_COUNT = decoder_of(CountBody)
_EMBEDDINGS = decoder_of(EmbeddingsBody)
_TOKENIZE = decoder_of(TokenizeBody)
_TOOLS = decoder_of(list[Tool])
_ANYTHING = decoder_of(Any)
FIELDS = decoder_of(dict[str, Any])


def read_chat(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """Parse a chat completion request."""
    body = decode(_CHAT, raw)
    ids = None if body.kv_transfer_params is None else body.kv_transfer_params.prompt_token_ids
    if ids is None:
        prompt = _conversation(body.tools, [body.messages], tokenizer)
    else:
        prompt = tokenizer.prompt_of_ids(ids)
    return _generation(body, [prompt], body.max_completion_tokens or body.max_tokens)


def read_completion(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """Parse a text completion request."""
    body = decode(_COMPLETION, raw)
    return _generation(body, _inputs(body.prompt, tokenizer), body.max_tokens)


def read_responses(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """Parse a request of the Responses API."""
    body = decode(_RESPONSES, raw)
    _check_format(body.text, "text.format")
    prompt = _conversation(body.tools, [body.instructions, body.input], tokenizer)
    generation = _generation(body, [prompt], body.max_output_tokens)
    return replace(generation, request_id=body.request_id, fields=decode(FIELDS, raw))


def read_messages(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """Parse a request for a message."""
    body = decode(_MESSAGES, raw)
    _check_format(body.output_config, "output_config.format")
    prompt = _conversation(body.tools, [body.system, body.messages], tokenizer)
    return _generation(body, [prompt], body.max_tokens)


def read_count(raw: bytes, tokenizer: PseudoTokenizer) -> tuple[str | None, int]:
    """Parse a token count request and return its model and the tokens of its conversation."""
    body = decode(_COUNT, raw)
    return body.model, _conversation(body.tools, [body.system, body.messages], tokenizer).tokens


def read_embeddings(raw: bytes, tokenizer: PseudoTokenizer) -> tuple[EmbeddingsBody, list[Prompt]]:
    """Parse an embeddings request and its inputs."""
    body = decode(_EMBEDDINGS, raw)
    return body, _stated(body, _inputs(body.input, tokenizer))


def read_tokenize(raw: bytes, tokenizer: PseudoTokenizer) -> tuple[str | None, Prompt]:
    """Parse a tokenize request and return its model and prompt."""
    body = decode(_TOKENIZE, raw)
    if body.prompt is not None:
        return body.model, tokenizer.prompt_of_text(body.prompt.encode())
    return body.model, _conversation(body.tools, [body.messages], tokenizer)


def _generation(body: GeneratingBody, prompts: list[Prompt], max_tokens: int | None) -> Generation:
    _check_format(FormatOptions(body.response_format), "response_format")
    if _is_given(body.structured_outputs):
        raise not_emulated("structured_outputs")
    prompts = _stated(body, prompts)
    return Generation(body=body, prompts=prompts, max_tokens=max_tokens, call=_called(body))


def _check_format(options: FormatOptions | None, field: str) -> None:
    if options is not None and options.format is not None and options.format.type != "text":
        raise not_emulated(field)


def _called(body: GeneratingBody) -> str | None:
    """Return the tool that the request demands. If the model may decide, the answer is text."""
    choice = body.tool_choice
    if isinstance(choice, Tool) and choice.called:
        return choice.called
    if not (choice == "required" or (isinstance(choice, Tool) and choice.type == "any")):
        return None
    tools = decode(_TOOLS, body.tools) if _is_given(body.tools) else []
    return tools[0].called if tools else None


def _is_given(raw: msgspec.Raw) -> bool:
    return bool(raw) and bytes(raw) != b"null"


# -- prompts ----------------------------------------------------------------------------------------------


def _stated(body: Body, prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts, with the length that the body states."""
    tokens = body.ewsjf_prompt_tokens
    if tokens is None:
        return prompts
    return [replace(prompt, tokens=tokens, block_hashes=()) for prompt in prompts]


def _inputs(value: Inputs, tokenizer: PseudoTokenizer) -> list[Prompt]:
    """Return prompts from text or token ids, alone or in a list."""
    if isinstance(value, str):
        return [tokenizer.prompt_of_text(value.encode())]
    ids = [item for item in value if isinstance(item, int)]
    if len(ids) == len(value):
        return [tokenizer.prompt_of_ids(ids)]
    if ids:
        raise invalid("a list must hold either texts or token ids, not both")
    return [
        tokenizer.prompt_of_text(item.encode()) if isinstance(item, str) else tokenizer.prompt_of_ids(item)
        for item in value
        if not isinstance(item, int)
    ]


def _conversation(tools: msgspec.Raw, parts: Sequence[Any], tokenizer: PseudoTokenizer) -> Prompt:
    """Return the prompt of a conversation: all names and texts of its tools and messages, in order.

    A medium is represented by a checksum, so that equal ones share cached blocks, and different ones do not.
    """
    lines: list[str] = []
    media = 0
    left = [*reversed(parts), decode(_ANYTHING, tools) if _is_given(tools) else None]
    while left:
        item = left.pop()
        if isinstance(item, str):
            lines.append(item)
        elif isinstance(item, list):
            left += reversed(item)
        elif isinstance(item, dict):
            if item.get("type") in _MEDIA:
                lines.append(f"{zlib.crc32(encode(item)):08x}")
                media += 1
            else:
                left += [part for pair in reversed(item.items()) for part in reversed(pair)]
    lines.append(_GENERATION_PROMPT)
    return tokenizer.prompt_of_text("\n".join(lines).encode(), media * _MEDIA_TOKENS)
