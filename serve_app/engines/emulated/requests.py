"""Reading requests: each body becomes a `Generation` with its prompts as token counts and blocks."""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from serve_app.engines.emulated.bodies import (
    Body,
    ChatBody,
    ChatMessage,
    CohereEmbedBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingsBody,
    GeneratingBody,
    Inputs,
    PoolingBody,
    RerankBody,
    ResponsesBody,
    ScoreBody,
    TokenizeBody,
)
from serve_app.engines.emulated.content.spec import OutputSpec
from serve_app.engines.emulated.errors import invalid, unreadable
from serve_app.engines.emulated.messages import chat_of, counted_chat
from serve_app.engines.emulated.sampling import check_sampling
from serve_app.engines.emulated.specs import chat_spec, completion_spec, responses_spec
from serve_app.engines.emulated.text import Prompt, PseudoTokenizer

# Prompt tokens of an image or another medium. Vision models take some 85 to 1,600 tokens for an image.
_MEDIA_TOKENS = 256
# Limit of `n`, as in vLLM.
_MAX_CHOICES = 16_384
# Above that of any embedding model.
_MAX_DIMENSIONS = 16_384
# The chat template's opening of the answer.
_GENERATION_PROMPT = "<|assistant|>\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request to generate, from any endpoint.

    Attributes:
        prompts: one or more; each has `choices` answers.
        max_tokens: the client's limit per answer; None when it stated none.
        max_tokens_param: name of that field in the request.
        include_usage: whether a stream ends with the token counts.
        exact_output_tokens: from `ewsjf_output_tokens`.
        spec: what it asks of the text of its answers; None when some text will do.
        request_id: the id that its answer is to have; None for one that is made here.
    """

    model: str | None
    prompts: list[Prompt]
    max_tokens: int | None
    max_tokens_param: str = "max_tokens"
    choices: int = 1
    stream: bool = False
    include_usage: bool = False
    priority: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    exact_output_tokens: int | None = None
    spec: OutputSpec | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledInputs:
    """A request of which nothing is generated.

    Attributes:
        prompts: what is computed, one for each part of the answer.
        texts: those that the answer repeats.
        most: parts of the answer that are wanted; None for all.
        dimensions: of its vectors; None for the engine's own.
    """

    model: str | None
    prompts: list[Prompt]
    priority: int
    texts: tuple[str, ...]
    most: int | None = None
    dimensions: int | None = None


def read_chat(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """A chat completion request."""
    return _chat(_decode(_CHAT, raw), raw, tokenizer)


def read_messages(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """A request for one of Anthropic's messages."""
    return _chat(chat_of(raw), raw, tokenizer)


def read_count(raw: bytes, tokenizer: PseudoTokenizer) -> tuple[str | None, int]:
    """A conversation of Anthropic's to be counted: its model and its tokens."""
    body = counted_chat(raw)
    return body.model, _conversation(body.messages, body.tools, tokenizer).tokens


def read_completion(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """A text completion request."""
    body = _decode(_COMPLETION, raw)
    prompts = _inputs(body.prompt, tokenizer, "prompt")
    return _generation(body, prompts, (body.max_tokens, "max_tokens"), completion_spec(body, raw))


def read_responses(raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    """A request of the Responses API."""
    body = _decode(_RESPONSES, raw)
    messages = [ChatMessage(content=body.input)] if isinstance(body.input, str) else body.input
    if body.instructions:
        messages = [ChatMessage(role="system", content=body.instructions), *messages]
    if body.n not in {None, 1}:
        raise invalid("a response has one output, n must be 1", param="n", value=body.n)
    prompts = [_conversation(messages, body.tools, tokenizer)]
    spec = responses_spec(body, raw, messages)
    generation = _generation(body, prompts, (body.max_output_tokens, "max_output_tokens"), spec)
    return replace(generation, request_id=body.request_id)


def read_embeddings(raw: bytes, tokenizer: PseudoTokenizer) -> tuple[EmbeddingsBody, list[Prompt]]:
    """An embeddings request, and its inputs."""
    body = _decode(_EMBEDDINGS, raw)
    if body.encoding_format not in {"float", "base64"}:
        raise invalid(
            "encoding_format must be 'float' or 'base64'", param="encoding_format", value=body.encoding_format
        )
    if body.dimensions is not None and not 1 <= body.dimensions <= _MAX_DIMENSIONS:
        raise invalid(
            f"dimensions must be between 1 and {_MAX_DIMENSIONS}", param="dimensions", value=body.dimensions
        )
    inputs = body.input if _is_batch(body.input) else [body.input]
    prompts = [
        replace(prompt, fingerprint=_fingerprint(item))
        for prompt, item in zip(_stated(body, _inputs(body.input, tokenizer, "input")), inputs, strict=True)
    ]
    return body, prompts


def read_pooling(raw: bytes, tokenizer: PseudoTokenizer) -> PooledInputs:
    """A request for what a model makes of texts, or for their classes."""
    body = _decode(_POOLING, raw)
    inputs = body.input if _is_batch(body.input) else [body.input]
    return _pooled(body, inputs, _stated(body, _inputs(body.input, tokenizer, "input")))


def read_cohere_embed(raw: bytes, tokenizer: PseudoTokenizer) -> PooledInputs:
    """Cohere's request for embeddings."""
    body = _decode(_COHERE, raw)
    if body.output_dimension is not None and not 1 <= body.output_dimension <= _MAX_DIMENSIONS:
        raise invalid(f"output_dimension must be between 1 and {_MAX_DIMENSIONS}", param="output_dimension")
    prompts = _stated(body, _inputs(list(body.texts), tokenizer, "texts"))
    return replace(_pooled(body, body.texts, prompts), dimensions=body.output_dimension)


def read_rerank(raw: bytes, tokenizer: PseudoTokenizer) -> PooledInputs:
    """A request to order documents."""
    body = _decode(_RERANK, raw)
    return replace(_pairs(body, [body.query], body.documents, tokenizer), most=body.top_n or None)


def read_score(raw: bytes, tokenizer: PseudoTokenizer) -> PooledInputs:
    """A request to score pairs."""
    body = _decode(_SCORE, raw)
    named = (
        (body.queries, body.documents),
        (body.queries, body.items),
        (body.data_1, body.data_2),
        (body.text_1, body.text_2),
    )
    for first, second in named:
        if first is not None and second is not None:
            one, other = ([side] if isinstance(side, str) else side for side in (first, second))
            return _pairs(body, one, other, tokenizer)
    raise invalid("queries and documents are needed", param="queries")


def read_detokenize(raw: bytes) -> tuple[str | None, list[int]]:
    """A detokenize request: its model, and the tokens."""
    body = _decode(_DETOKENIZE, raw)
    return body.model, body.tokens


def read_tokenize(raw: bytes) -> tuple[str | None, bytes]:
    """A tokenize request: its model, and the text to tokenize."""
    body = _decode(_TOKENIZE, raw)
    if body.prompt is not None:
        return body.model, body.prompt.encode()
    if body.messages is not None:
        return body.model, _render(body.messages, body.tools)[0]
    raise invalid("either prompt or messages is needed", param="prompt")


_CHAT = msgspec.json.Decoder(ChatBody, strict=False)
_COMPLETION = msgspec.json.Decoder(CompletionBody, strict=False)
_RESPONSES = msgspec.json.Decoder(ResponsesBody, strict=False)
_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody, strict=False)
_POOLING = msgspec.json.Decoder(PoolingBody, strict=False)
_COHERE = msgspec.json.Decoder(CohereEmbedBody, strict=False)
_RERANK = msgspec.json.Decoder(RerankBody, strict=False)
_SCORE = msgspec.json.Decoder(ScoreBody, strict=False)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody, strict=False)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody, strict=False)


_B = TypeVar("_B", bound=Body)


def _decode(decoder: "msgspec.json.Decoder[_B]", raw: bytes) -> _B:
    try:
        # The decoder skips names that it does not know, and parts that are read later, as they are.
        raw.decode()
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(str(error)) from error


def _chat(body: ChatBody, raw: bytes, tokenizer: PseudoTokenizer) -> Generation:
    if not body.messages:
        raise invalid("messages must not be empty", param="messages")
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    prompts = [_conversation(body.messages, body.tools, tokenizer)]
    return _generation(body, prompts, (getattr(body, param), param), chat_spec(body, raw))


def _generation(
    body: GeneratingBody, prompts: list[Prompt], limit: tuple[int | None, str], spec: OutputSpec | None
) -> Generation:
    """The request, checked; `limit` is `max_tokens` and the name of its field."""
    max_tokens, max_tokens_param = limit
    choices = 1 if body.n is None else body.n
    if choices < 1:
        raise invalid(f"n must be at least 1, got {choices}.")
    if choices > _MAX_CHOICES:
        raise invalid(
            f"n must be at most {_MAX_CHOICES}, got {choices}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    check_sampling(body, choices)
    if max_tokens is not None and max_tokens < 1:
        raise invalid(
            f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens", value=max_tokens
        )
    if body.min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {body.min_tokens}.")
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {body.min_tokens}."
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.ewsjf_output_tokens is not None and body.ewsjf_output_tokens < 1:
        raise invalid("ewsjf_output_tokens must be at least 1", param="ewsjf_output_tokens")
    return Generation(
        model=body.model,
        prompts=_stated(body, prompts),
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        choices=choices,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        priority=body.priority,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        exact_output_tokens=body.ewsjf_output_tokens,
        spec=spec,
    )


def _stated(body: Body, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts, or prompts of the length that the body states."""
    tokens = body.ewsjf_prompt_tokens
    if tokens is None:
        return prompts
    if tokens < 1:
        raise invalid("ewsjf_prompt_tokens must be at least 1", param="ewsjf_prompt_tokens", value=tokens)
    return [Prompt(tokens)] * len(prompts)


def _pairs(body: Body, first: list[str], second: list[str], tokenizer: PseudoTokenizer) -> PooledInputs:
    """Each of one side with its counterpart, or the only one with each of the other."""
    if not first or not second:
        raise invalid("At least one text element must be given")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise invalid("Input lengths must be either 1:1, 1:N or N:N")
    pairs = [f"{one}\n{other}" for one, other in zip(first, second, strict=True)]
    prompts = _stated(body, _inputs(list(pairs), tokenizer, "documents"))
    return replace(_pooled(body, pairs, prompts), texts=tuple(second))


def _pooled(body: Body, inputs: Sequence[object], prompts: list[Prompt]) -> PooledInputs:
    marked = [
        replace(prompt, fingerprint=_fingerprint(item)) for prompt, item in zip(prompts, inputs, strict=True)
    ]
    texts = tuple(item if isinstance(item, str) else "" for item in inputs)
    return PooledInputs(model=body.model, prompts=marked, priority=body.priority, texts=texts)


def _fingerprint(item: object) -> str:
    return hashlib.md5(msgspec.json.encode(item), usedforsecurity=False).hexdigest()


def _is_batch(value: Inputs) -> bool:
    """Whether the value is a list of inputs, not one input."""
    return isinstance(value, list) and not isinstance(value[0] if value else None, int)


def _inputs(value: Inputs, tokenizer: PseudoTokenizer, param: str) -> list[Prompt]:
    """Prompts from text or token ids, alone or in a list."""
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


def _conversation(messages: list[ChatMessage], tools: msgspec.Raw, tokenizer: PseudoTokenizer) -> Prompt:
    text, media = _render(messages, tools)
    return tokenizer.prompt_of_text(text, media * _MEDIA_TOKENS)


def _render(messages: list[ChatMessage], tools: msgspec.Raw) -> tuple[bytes, int]:
    """The text of a conversation after a chat template, and the number of its media."""
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
                # The checksum of the bytes stands in the text: equal images share cached blocks, others do
                # not.
                checksum = zlib.crc32(bytes(part.image_url) + bytes(part.input_audio))
                parts.append(f"<|{part.type} {checksum:08x}|>")
                media += 1
        if len(message.tool_calls):
            parts.append(bytes(message.tool_calls).decode())
        parts.append("\n")
    parts.append(_GENERATION_PROMPT)
    return "".join(parts).encode(), media
