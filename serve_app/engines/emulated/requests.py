"""Request parsing: converts each body to a `Generation`, whose prompts are token counts and block hashes.

The bodies have the fields that matter to an engine without a model. Two extensions make traces replayable:

- `ewsjf_prompt_tokens` states the length of the prompt, so that no text of that length needs to be sent. Such
  a prompt does not use the prefix cache.
- `ewsjf_output_tokens` states the length of the answer. `max_tokens` still limits it, with `finish_reason`
  "length".

Messages and responses are converted to chats. Fields of type `Raw` are decoded on use, so that requests
without them pay nothing. Answers are placeholder text, so most sampling parameters have no effect; their
ranges are checked as in vLLM. Fields that would visibly change the answer and are not emulated are rejected.
All other fields are ignored.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from serve_app.engines.emulated.http import encode, invalid, not_emulated, unreadable
from serve_app.engines.emulated.structured import chat_call, is_given, read_constraint
from serve_app.engines.emulated.text import (
    VOCABULARY,
    Constraint,
    OutputSpec,
    Prompt,
    PseudoTokenizer,
    ToolCall,
)

# Prompt tokens per image or other medium. Vision models use about 85 to 1,600 tokens per image.
_MEDIA_TOKENS = 256
# vLLM's limit of `n`.
_MAX_CHOICES = 16_384
# vLLM's default for `--max-logprobs`.
_MAX_LOGPROBS = 20
# More dimensions than any embedding model has.
_MAX_DIMENSIONS = 16_384
# vLLM samples greedily below this temperature.
_GREEDY = 1e-5
# The chat template's start of the answer.
_GENERATION_PROMPT = "<|assistant|>\n"
_NOTHING = msgspec.Raw()

# Text or token ids, alone or in a list. `_inputs` rejects a list that mixes them.
Inputs = str | list[str | int | list[int]]


class Body(msgspec.Struct, kw_only=True):
    """Fields common to all endpoints."""

    model: str | None = None
    priority: int = 0
    ewsjf_prompt_tokens: int | None = None


class StreamOptions(msgspec.Struct):
    """Options for the content of a stream."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GeneratingBody(Body, kw_only=True):
    """Fields common to the generating endpoints."""

    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    ewsjf_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    # vLLM's limit on stop strings.
    stop: str | Annotated[list[str], msgspec.Meta(max_length=4)] | None = None
    include_stop_str_in_output: bool = False
    structured_outputs: msgspec.Raw = _NOTHING
    return_token_ids: bool | None = False
    # Rejected, see `_NOT_EMULATED`.
    use_beam_search: msgspec.Raw = _NOTHING
    return_tokens_as_token_ids: msgspec.Raw = _NOTHING
    prompt_logprobs: msgspec.Raw = _NOTHING
    logprob_token_ids: msgspec.Raw = _NOTHING
    truncate_prompt_tokens: msgspec.Raw = _NOTHING
    prompt_embeds: msgspec.Raw = _NOTHING
    suffix: msgspec.Raw = _NOTHING
    echo: msgspec.Raw = _NOTHING


class Part(msgspec.Struct):
    """A part of a message: text, or media that are distinguished by their bytes."""

    type: str = "text"
    text: str | None = None
    image_url: msgspec.Raw = _NOTHING
    input_audio: msgspec.Raw = _NOTHING


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str = "user"
    content: str | list[Part] | None = None
    tool_calls: msgspec.Raw = _NOTHING


class TransferParams(msgspec.Struct):
    """Ids that replace the rendered messages, so that another engine's answer can be continued."""

    prompt_token_ids: Annotated[list[int], msgspec.Meta(min_length=1)] | None = None


class ChatBody(GeneratingBody, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage]
    kv_transfer_params: TransferParams | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = _NOTHING
    tool_choice: msgspec.Raw = _NOTHING
    response_format: msgspec.Raw = _NOTHING
    logprobs: bool | None = False
    top_logprobs: int | None = 0


class CompletionBody(GeneratingBody, kw_only=True):
    """Body of `/v1/completions`. A prompt is text or token ids, alone or in a list."""

    prompt: Inputs
    max_tokens: int | None = 16
    response_format: msgspec.Raw = _NOTHING
    logprobs: int | None = None


class ResponsesFormat(msgspec.Struct):
    """Format of a response's text."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None


class ResponsesText(msgspec.Struct):
    """Field `text` of the Responses API."""

    format: ResponsesFormat | None = None


class ResponsesTool(msgspec.Struct):
    """A function, or a built-in tool of the server, which is never called."""

    type: str
    name: str = ""
    parameters: dict[str, Any] | None = None


class ResponsesBody(GeneratingBody, kw_only=True):
    """Body of `/v1/responses`. Input items other than messages are ignored."""

    input: str | list[ChatMessage]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: ResponsesText | None = None
    include: list[str] | None = None
    top_logprobs: int | None = 0
    request_id: str | None = None
    # Rejected: refers to a prompt template that is stored on the server.
    prompt: msgspec.Raw = _NOTHING


class EmbeddingsBody(Body, kw_only=True):
    """Body of `/v1/embeddings`. Each input has its own embedding."""

    input: Inputs
    encoding_format: str = "float"
    dimensions: int | None = None


class DetokenizeBody(Body, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


class TokenizeBody(Body, kw_only=True):
    """Body of `/tokenize`: text or a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: msgspec.Raw = _NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request to generate, from any endpoint.

    Attributes:
        prompts: one or more; each has `choices` answers.
        max_tokens: the client's limit per answer; None if not stated.
        max_tokens_param: name of that field in the request.
        spec: requirements on the text of the answers.
        request_id: id for the answer; None to generate one.
    """

    body: GeneratingBody
    prompts: list[Prompt]
    max_tokens: int | None
    max_tokens_param: str
    spec: OutputSpec
    request_id: str | None = None

    @property
    def choices(self) -> int:
        """Number of answers per prompt."""
        return 1 if self.body.n is None else self.body.n

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def counts_continuously(self) -> bool:
        """True if each chunk of a stream carries the token counts."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)


B = TypeVar("B")


def decoder_of(kind: type[B]) -> "msgspec.json.Decoder[B]":
    """Return a decoder that coerces types as vLLM does: it accepts 5.0 and "5" for 5."""
    return msgspec.json.Decoder(kind, strict=False)


def decode(decoder: "msgspec.json.Decoder[B]", raw: bytes) -> B:
    """Decode a body, or raise `ApiError` if it does not match."""
    try:
        # The decoder does not validate UTF-8 in unknown fields and in `Raw` fields.
        raw.decode()
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(str(error)) from error


_CHAT = decoder_of(ChatBody)
_COMPLETION = decoder_of(CompletionBody)
_RESPONSES = decoder_of(ResponsesBody)
_EMBEDDINGS = decoder_of(EmbeddingsBody)
_DETOKENIZE = decoder_of(DetokenizeBody)
_TOKENIZE = decoder_of(TokenizeBody)


def read_chat(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """Parse a chat completion request."""
    return chat_generation(decode(_CHAT, raw), tokenizer)


def chat_generation(
    body: ChatBody, tokenizer: PseudoTokenizer, limit: tuple[int | None, str] | None = None
) -> Generation:
    """Return the generation for a chat completion, including one converted from a message or a response.

    Args:
        tokenizer: counts the prompt's tokens.
        limit: `max_tokens` and the name of its field, if they differ from those of a chat.
    """
    if not body.messages:
        raise invalid("messages must not be empty", param="messages")
    if limit is None:
        param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        limit = getattr(body, param), param
    call = chat_call(body.tools, body.tool_choice, _last_user_text(body.messages))
    if call is not None and call.is_named and is_given(body.structured_outputs):
        raise invalid("You can only either use constraints for structured outputs or tools, not both.")
    constraint = read_constraint(body.response_format, body.structured_outputs)
    spec = _spec(body, constraint, _chat_logprobs(body), call)
    ids = None if body.kv_transfer_params is None else body.kv_transfer_params.prompt_token_ids
    if ids is not None:
        return _generation(body, [tokenizer.continued(ids)], limit, replace(spec, continues=True))
    prompt = conversation(body.messages, body.tools, tokenizer)
    return _generation(body, [prompt], limit, spec)


def read_completion(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """Parse a text completion request."""
    body = decode(_COMPLETION, raw)
    prompts = _inputs(body.prompt, tokenizer, "prompt")
    top = None if body.logprobs is None else _checked_logprobs(body.logprobs, "logprobs")
    spec = _spec(body, read_constraint(body.response_format, body.structured_outputs), top)
    if len(prompts) == 1 and not isinstance(prompts[0].source, bytes):
        prompts, spec = [tokenizer.continued(prompts[0].source)], replace(spec, continues=True)
    return _generation(body, prompts, (body.max_tokens, "max_tokens"), spec)


def read_responses(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """Parse a request of the Responses API."""
    body = decode(_RESPONSES, raw)
    messages = [ChatMessage(content=body.input)] if isinstance(body.input, str) else body.input
    if body.instructions:
        messages = [ChatMessage(role="system", content=body.instructions), *messages]
    if body.n not in {None, 1}:
        raise invalid("a response has one output, n must be 1", param="n", value=body.n)
    if is_given(body.prompt):
        raise not_emulated("prompt")
    chat = ChatBody(
        **{name: getattr(body, name) for name in GeneratingBody.__struct_fields__},
        messages=messages,
        **_function_tools(body),
        logprobs="message.output_text.logprobs" in (body.include or ()),
    )
    if chat.logprobs:
        chat.top_logprobs = body.top_logprobs
    wanted = None if body.text is None else body.text.format
    if wanted is not None and wanted.type != "text":
        if is_given(body.structured_outputs):
            message = "Cannot specify both structured_outputs and text.format"
            raise invalid(message, param="structured_outputs")
        schema = {"name": "", "schema": wanted.schema or {"type": "object"}}
        chat.response_format = as_raw({"type": wanted.type, "json_schema": schema})
    generation = chat_generation(chat, tokenizer, (body.max_output_tokens, "max_output_tokens"))
    return replace(generation, request_id=body.request_id)


def _function_tools(body: ResponsesBody) -> dict[str, Any]:
    """Return the chat fields for the tools of a response."""
    functions = [tool for tool in body.tools or () if tool.type == "function"]
    choice = body.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") in {"function", "custom"}:
            choice = {"type": "function", "function": {"name": choice.get("name")}}
            if choice["function"]["name"] not in {tool.name for tool in functions}:
                message = "Tool choice 'function' not found in 'tools' parameter."
                raise invalid(message, param="tool_choice")
        else:
            choice = "auto"
    if not functions:
        if choice == "required":
            message = "Tool choice 'required' must be specified with 'tools' parameter."
            raise invalid(message, param="tool_choice")
        return {}
    tools = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
        for tool in functions
    ]
    return {"tools": as_raw(tools), "tool_choice": as_raw(choice)}


def as_raw(value: Any) -> msgspec.Raw:
    """Encode a value as a raw field of a body."""
    return msgspec.Raw(encode(value))


def read_embeddings(raw: bytes, tokenizer: PseudoTokenizer) -> tuple[EmbeddingsBody, list[Prompt]]:
    """Parse an embeddings request and its inputs."""
    body = decode(_EMBEDDINGS, raw)
    if body.encoding_format not in {"float", "base64"}:
        raise invalid(
            "encoding_format must be 'float' or 'base64'", param="encoding_format", value=body.encoding_format
        )
    if body.dimensions is not None and not 1 <= body.dimensions <= _MAX_DIMENSIONS:
        raise invalid(
            f"dimensions must be between 1 and {_MAX_DIMENSIONS}", param="dimensions", value=body.dimensions
        )
    return body, _stated(body, _inputs(body.input, tokenizer, "input"))


def read_detokenize(raw: bytes) -> tuple[str | None, list[int]]:
    """Parse a detokenize request and return its model and tokens."""
    body = decode(_DETOKENIZE, raw)
    return body.model, body.tokens


def read_tokenize(raw: bytes) -> tuple[str | None, bytes]:
    """Parse a tokenize request and return its model and text."""
    body = decode(_TOKENIZE, raw)
    if body.prompt is not None:
        return body.model, body.prompt.encode()
    if body.messages is not None:
        return body.model, _render(body.messages, body.tools)[0]
    raise invalid("either prompt or messages is needed", param="prompt")


# -- checks -----------------------------------------------------------------------------------------------

# (field, check, requirement in vLLM's words).
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", math.isfinite, "a finite number"),
    ("temperature", lambda value: value >= 0, "non-negative"),
    ("temperature", lambda value: value <= 2, "in [0, 2]"),
    ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
    ("top_k", lambda value: value >= -1, "0 (disable), or at least 1"),
    ("min_p", lambda value: 0 <= value <= 1, "in [0, 1]"),
    ("presence_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "in [-2, 2]"),
    ("repetition_penalty", math.isfinite, "a finite number"),
    ("repetition_penalty", lambda value: value > 0, "greater than zero"),
)
# For these, vLLM's error also names the parameter in a suffix.
_NAMED_TWICE = frozenset({"temperature", "top_p"})
_NOT_EMULATED = (
    "use_beam_search",
    "return_tokens_as_token_ids",
    "prompt_logprobs",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "prompt_embeds",
    "suffix",
    "echo",
)
# Values with which a client disables one of them.
_UNWANTED = {b"false", b"[]", b'""'}


def _generation(
    body: GeneratingBody, prompts: list[Prompt], limit: tuple[int | None, str], spec: OutputSpec
) -> Generation:
    """Validate the request and return it; `limit` is `max_tokens` and the name of its field."""
    max_tokens, param = limit
    _check_parameters(body)
    if body.return_token_ids and not body.stream:
        raise not_emulated("return_token_ids")
    if max_tokens is not None and max_tokens < 1:
        raise invalid(
            f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens", value=max_tokens
        )
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}."
        )
    prompts = _stated(body, prompts)
    return Generation(body=body, prompts=prompts, max_tokens=max_tokens, max_tokens_param=param, spec=spec)


def _check_parameters(body: GeneratingBody) -> None:
    choices = 1 if body.n is None else body.n
    if choices < 1:
        raise invalid(f"n must be at least 1, got {choices}.")
    if choices > _MAX_CHOICES:
        raise invalid(
            f"n must be at most {_MAX_CHOICES}, got {choices}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    for name in _NOT_EMULATED:
        raw = getattr(body, name)
        if raw and is_given(raw) and bytes(raw) not in _UNWANTED:
            raise not_emulated(name)
    for name, is_valid, words in _RANGES:
        value = getattr(body, name)
        if value is not None and not is_valid(value):
            extras: dict[str, Any] = {"param": name, "value": value} if name in _NAMED_TWICE else {}
            raise invalid(f"{name} must be {words}, got {value}.", **extras)
    if choices > 1 and body.temperature is not None and body.temperature < _GREEDY:
        raise invalid(f"n must be 1 when using greedy sampling, got {choices}.")
    if body.stop == "" or (isinstance(body.stop, list) and "" in body.stop):
        raise invalid("stop cannot contain an empty string.")
    if body.min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if body.stream_options is not None and not body.stream:
        raise invalid("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.ewsjf_output_tokens is not None and body.ewsjf_output_tokens < 1:
        raise invalid("ewsjf_output_tokens must be at least 1", param="ewsjf_output_tokens")


def _chat_logprobs(body: ChatBody) -> int | None:
    """Return the number of alternatives per token; None if logprobs are not requested."""
    top = body.top_logprobs or 0
    if top < -1 or body.logprobs:
        checked = _checked_logprobs(top, "top_logprobs")
        return checked if body.logprobs else None
    if top:
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    return None


def _checked_logprobs(count: int, param: str) -> int:
    """Validate the number of alternatives per token; -1 means the whole vocabulary, which is too many."""
    if count < -1:
        raise invalid(f"`{param}` must be a positive value or -1.", param=param, value=count)
    count = VOCABULARY if count == -1 else count
    if count > _MAX_LOGPROBS:
        raise invalid(
            f"Requested sample logprobs of {count}, which is greater than max allowed: {_MAX_LOGPROBS}",
            param="logprobs",
            value=count,
        )
    return count


# -- requested text -----------------------------------------------------------------------------------------


def _spec(
    body: GeneratingBody,
    constraint: Constraint | None,
    top_logprobs: int | None,
    call: ToolCall | None = None,
) -> OutputSpec:
    """Return the request's requirements on the text of its answers."""
    return OutputSpec(
        # As in vLLM, -1 means no seed.
        seed=None if body.seed == -1 else body.seed,
        constraint=constraint,
        call=call,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        top_logprobs=top_logprobs,
    )


def _last_user_text(messages: list[ChatMessage]) -> str:
    """Return the text of the last message if the user wrote it."""
    if not messages or messages[-1].role != "user":
        return ""
    content = messages[-1].content
    if isinstance(content, str):
        return content
    return " ".join(part.text for part in content or () if part.text)


# -- prompts ----------------------------------------------------------------------------------------------


def _stated(body: Body, prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts, or placeholders of the length that the body states."""
    tokens = body.ewsjf_prompt_tokens
    if tokens is None:
        return prompts
    if tokens < 1:
        raise invalid("ewsjf_prompt_tokens must be at least 1", param="ewsjf_prompt_tokens", value=tokens)
    return [Prompt(tokens, (), prompt.seed) for prompt in prompts]


def _inputs(value: Inputs, tokenizer: PseudoTokenizer, param: str) -> list[Prompt]:
    """Return prompts from text or token ids, alone or in a list."""
    if isinstance(value, str):
        return [tokenizer.prompt_of_text(value.encode())]
    if not value or [] in value:
        raise invalid(f"{param} must not be empty", param=param)
    ids = [item for item in value if isinstance(item, int)]
    texts = [item for item in value if isinstance(item, str)]
    lists = [item for item in value if isinstance(item, list)]
    if len(value) not in {len(ids), len(texts), len(lists)}:
        raise invalid(f"{param} must hold either texts or token ids, not both", param=param)
    if ids:
        return [tokenizer.prompt_of_ids(ids)]
    return [tokenizer.prompt_of_text(text.encode()) for text in texts] + [
        tokenizer.prompt_of_ids(item) for item in lists
    ]


def conversation(messages: list[ChatMessage], tools: msgspec.Raw, tokenizer: PseudoTokenizer) -> Prompt:
    """Return the prompt of a conversation."""
    text, media = _render(messages, tools)
    return tokenizer.prompt_of_text(text, media * _MEDIA_TOKENS)


def _render(messages: list[ChatMessage], tools: msgspec.Raw) -> tuple[bytes, int]:
    """Apply the chat template and return the text of a conversation and the number of its media."""
    parts: list[str] = []
    media = 0
    if len(tools):
        parts.append(f"<|tools|>\n{bytes(tools).decode()}\n")
    for message in messages:
        parts.append(f"<|{message.role}|>\n")
        if isinstance(message.content, str):
            parts.append(message.content)
        for part in message.content if isinstance(message.content, list) else ():
            if part.text is not None:
                parts.append(part.text)
            else:
                # The checksum makes equal images share cached blocks, and different ones not.
                checksum = zlib.crc32(bytes(part.image_url) + bytes(part.input_audio))
                parts.append(f"<|{part.type} {checksum:08x}|>")
                media += 1
        if len(message.tool_calls):
            parts.append(bytes(message.tool_calls).decode())
        parts.append("\n")
    parts.append(_GENERATION_PROMPT)
    return "".join(parts).encode(), media
