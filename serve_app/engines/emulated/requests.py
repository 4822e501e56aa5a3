"""Requests to the emulated engine, and the text of its answers.

- `Generation`: a request from any endpoint, whose prompts are token counts and block hashes.
- `Call`, `ApiError`: an HTTP request, its response or event stream, and errors in vLLM's format.
- `PseudoTokenizer`: token counts and block hashes of prompts, and placeholder text, without a model.
- `GeneratedOutput`: an answer, which is determined completely before it runs.

Bodies have the fields that matter to an engine without a model. Two extensions make traces replayable:

- `ewsjf_prompt_tokens` states the length of the prompt, so that no text of that length needs to be sent. Such
  a prompt does not use the prefix cache.
- `ewsjf_output_tokens` states the length of the answer. `max_tokens` still limits it, with `finish_reason`
  "length".

Formats of the answer are rejected, because placeholder text has none. All other fields are ignored.

`PseudoTokenizer` cuts UTF-8 bytes at a fixed ratio. It is deterministic and takes microseconds. Its ratio
differs from the initial ratio of the scheduler's estimator, so that the estimator has something to learn.
"""

import itertools
import math
import uuid
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Annotated, Any, TypeVar

import msgspec

from serve_app.engines.engine import Receive, Scope, Send
from serve_app.errors import ServeAppError

encode = msgspec.json.encode

_EVENTS = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request whose body has been read."""

    scope: Scope
    body: bytes
    receive: Receive
    send: Send

    def request_id(self, prefix: str) -> str:
        """Return the client's `x-request-id` or a new id, prefixed with the kind of the answer."""
        for name, value in self.scope["headers"]:
            if name == b"x-request-id":
                return f"{prefix}-{value.decode('latin-1')}"
        return f"{prefix}-{uuid.uuid4().hex}"

    async def begin_events(self) -> None:
        """Start a stream of server-sent events."""
        headers = [(b"content-type", _EVENTS), (b"cache-control", b"no-cache")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send_events(self, body: bytes, *, more: bool) -> None:
        """Send the next events of a stream; `more` is False for the last."""
        await self.send({"type": "http.response.body", "body": body, "more_body": more})


class ApiError(ServeAppError):
    """An error response.

    Args:
        status: HTTP status, also the `code` of the error object, as in vLLM.
        kind: `type` of the error object.
    """

    def __init__(self, status: int, message: str, *, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.body = encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def invalid(message: str, *, param: str | None = None) -> ApiError:
    """Return the error 400 for an invalid request."""
    return ApiError(400, message, kind="BadRequestError", param=param)


def not_emulated(field: str) -> ApiError:
    """Return the error 400 for a field that would change the answer in a way that is not emulated."""
    return invalid(f"{field} is not supported by the emulated engine: use a real engine", param=field)


def no_such_route(status: int) -> ApiError:
    """Return the error 404 or 405 for a path or method that is not served."""
    phrase = HTTPStatus(status).phrase
    return ApiError(status, phrase, kind=phrase)


def engine_failed() -> ApiError:
    """Return the error 500 for an engine that stopped while it processed the request."""
    return ApiError(500, "EngineCore encountered an issue.", kind="InternalServerError")


# Tokens of placeholder answers.
_ANSWER = (
    "the request waits its turn while a batch of tokens moves through every layer and each step reads the "
    "weights once more then one word leaves for every sequence that decodes until the answer is long enough "
    "to stop"
)
_PIECES = tuple(f" {word}" for word in _ANSWER.split())
# With a vocabulary of 128,000 tokens, English has 4 or more, code 3, Chinese 2 to 3; this is in between.
_BYTES_PER_TOKEN = 3.7
_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in the form that the engine model needs.

    Attributes:
        block_hashes: one hash per full KV block; each covers the prompt up to the end of its block.
        seed: first word of the answer; equal for equal prompts, in any process.
        source: the text or token ids.
    """

    tokens: int
    block_hashes: Sequence[int]
    seed: int
    source: bytes | Sequence[int]

    @property
    def ids(self) -> Sequence[int]:
        """Token ids; those of a text are placeholders."""
        return token_ids(self.source) if isinstance(self.source, bytes) else self.source


class PseudoTokenizer:
    """Tokenizer that counts prompts and hashes their KV blocks of `block_size` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prompt_of_text(self, text: bytes, extra_tokens: int = 0) -> Prompt:
        """Return a prompt of UTF-8 text; `extra_tokens` (media) follow the text and are not hashed."""
        tokens = _count(text)
        full_blocks = tokens // self._block_size
        # Block boundaries fall on fractions of a byte. Equal prefixes are rounded equally.
        ends = [int(index * self._block_size * _BYTES_PER_TOKEN) for index in range(full_blocks + 1)]
        parts = (text[start:end] for start, end in itertools.pairwise(ends))
        return Prompt(max(1, tokens + extra_tokens), _chained_hashes(parts), zlib.crc32(text), text)

    def prompt_of_ids(self, ids: Sequence[int]) -> Prompt:
        """Return a prompt of token ids, whose length is exact. The answer continues its text."""
        size = self._block_size
        parts = (tuple(ids[index * size : (index + 1) * size]) for index in range(len(ids) // size))
        return Prompt(len(ids), _chained_hashes(parts), ids[-1] + 1, ids)


def token_ids(text: bytes) -> list[int]:
    """Return placeholder ids for the tokens of a text."""
    ends = [int(index * _BYTES_PER_TOKEN) for index in range(_count(text))] + [len(text)]
    return [zlib.crc32(text[start:end]) % _VOCABULARY for start, end in itertools.pairwise(ends)]


def _count(text: bytes) -> int:
    return math.ceil(len(text) / _BYTES_PER_TOKEN)


def _chained_hashes(parts: Iterable[Hashable]) -> list[int]:
    hashes: list[int] = []
    previous = 0
    for part in parts:
        previous = hash((previous, part))
        hashes.append(previous)
    return hashes


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedOutput:
    """One answer: words, or the arguments of a tool call.

    Attributes:
        seed: first word.
        tokens: all generated tokens, at least one.
        finish_reason: "stop" or "length".
    """

    seed: int
    tokens: Sequence[str]
    finish_reason: str

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.tokens)

    def added(self, start: int, count: int) -> str:
        """Return the text of some tokens."""
        return "".join(self.tokens[start : start + count])

    def ids(self, start: int, count: int) -> list[int]:
        """Return the ids of some words."""
        return [(self.seed + index) % len(_PIECES) for index in range(start, start + count)]


def words(prompt: Prompt, choice: int, count: int, finish_reason: str) -> GeneratedOutput:
    """Return an answer of so many words. The choices of one prompt differ."""
    seed = prompt.seed + choice
    tokens = [_PIECES[index % len(_PIECES)] for index in range(seed, seed + count)]
    if isinstance(prompt.source, bytes):
        tokens[0] = tokens[0].lstrip()
    return GeneratedOutput(seed=seed, tokens=tokens, finish_reason=finish_reason)


NO_ARGUMENTS = GeneratedOutput(seed=0, tokens=("{}",), finish_reason="stop")
"""Answer that consists of a tool call."""

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
    background: bool | None = False
    previous_response_id: str | None = None


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
_FIELDS = decoder_of(dict[str, Any])

# In the words of vLLM without its store.
_NO_BACKGROUND = (
    "This emulated engine does not support `store=True` and therefore does not support the background mode. "
    "Use a vLLM server with the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1`."
)


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
    if body.background:
        raise ApiError(400, _NO_BACKGROUND, kind="invalid_request_error", param="background")
    if body.previous_response_id is not None:
        missing = f"Response with id '{body.previous_response_id}' not found."
        raise ApiError(404, missing, kind="invalid_request_error", param="response_id")
    _check_format(body.text, "text.format")
    prompt = _conversation(body.tools, [body.instructions, body.input], tokenizer)
    generation = _generation(body, [prompt], body.max_output_tokens)
    # As in vLLM, the header `x-request-id` does not name a response.
    response_id = body.request_id or f"resp_{uuid.uuid4().hex}"
    return replace(generation, request_id=response_id, fields=decode(_FIELDS, raw))


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
