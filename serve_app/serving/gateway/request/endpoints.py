"""Endpoints that engines answer: the fields read from each request, and the treatment of its answer.

For each endpoint, the tables at the end define:
- the fields that are read, for the size of the prompt and the output limit; together they decide the pool;
- the events that begin a stream before any token, so that they do not count as the first token;
- the API whose error format is used;
- its name in traces and metrics.

Models that score, rank, pool or transcribe split their input into pieces of limited length, each a sequence
of the engine. For these, the size of the body is a sufficient estimate (`ByteEstimate`).

Token counts are read from all answers in the same way (`answer.stream`). Unscheduled endpoints cost an engine
next to nothing and use any replica; only the model is read from their bodies.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from python_multipart.exceptions import FormParserError

from serve_app.errors import Outcome
from serve_app.request import PromptShape, RequestSpec
from serve_app.serving.gateway.answer.responses import ANTHROPIC, OPENAI, ClientApi, RequestRejected
from serve_app.serving.gateway.answer.stream import Announcements
from serve_app.serving.gateway.request.body import FormParser
from serve_app.serving.gateway.request.fields import (
    BodyFields,
    ChatFields,
    CompletionFields,
    CountTokensFields,
    EmbeddingFields,
    FormFields,
    MessagesFields,
    ModelOnly,
    ResponsesFields,
)
from serve_app.serving.gateway.request.measure import (
    Prompt,
    chat_prompt,
    completion_prompt,
    embedding_prompt,
    json_bytes,
    messages_prompt,
    responses_prompt,
)

T = TypeVar("T")

_MAX_PARTS = 100
_MAX_NAME_BYTES = 1_000


class ParsedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a body, and what they mean for scheduling.

    Attributes:
        spec: work requested from an engine.
        prompt: parts of the prompt, for its prefix hashes; empty if only the size of the body counts.
        form_model: place of the model's name in a form; None for JSON.
    """

    fields: BodyFields
    spec: RequestSpec
    prompt: Prompt = msgspec.field(default_factory=Prompt)
    form_model: slice | None = None


# The prompt in a body, the output limit, the choices of each prompt, and whether the answer is streamed.
_Work = tuple[Prompt, int | None, int, bool]


def _parse(
    decoder: msgspec.json.Decoder[BodyFields], read: Callable[[Any], _Work], body: bytes, _type: bytes = b""
) -> ParsedBody:
    """Parse a body.

    Raises:
        RequestRejected: the body is not JSON, or a field is missing or of the wrong type.
    """
    fields = _decode(decoder, body)
    prompt, limit, choices, streamed = read(fields)
    try:
        shape = prompt.shape(body, fields)
    except RecursionError as exc:
        raise _nested_too_deeply() from exc
    spec = RequestSpec(
        model=fields.model,
        shape=shape,
        max_output_tokens=limit,
        choices=choices * shape.prompts,
        streamed=streamed,
    )
    return ParsedBody(fields=fields, spec=spec, prompt=prompt)


def parse_model(body: bytes) -> str:
    """Return the model that a body names.

    Raises:
        RequestRejected: the body is not JSON or names no model.
    """
    return _decode(_model_decoder, body).model


_model_decoder = msgspec.json.Decoder(ModelOnly)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode the fields of a body.

    Raises:
        RequestRejected: the body is not JSON, or a field is missing or of the wrong type.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _field_rejected(str(exc)) from exc
    except UnicodeDecodeError as exc:
        raise RequestRejected(
            Outcome.REJECTED_INVALID, f"the body is not UTF-8 ({exc.reason}): encode it as UTF-8"
        ) from exc
    except msgspec.DecodeError as exc:
        raise RequestRejected(
            Outcome.REJECTED_INVALID, f"the body is not valid JSON: {exc}. Send one JSON object"
        ) from exc
    except RecursionError as exc:
        raise _nested_too_deeply() from exc


def _nested_too_deeply() -> RequestRejected:
    return RequestRejected(
        Outcome.REJECTED_INVALID, "the body is nested too deeply: flatten it below a few hundred levels"
    )


def _field_rejected(found: str) -> RequestRejected:
    """Convert msgspec's "Expected `int`, got `str` - at `$.n`" to a rejection with field and remedy."""
    what, at, place = found.partition(" - at `$")
    param = place.rstrip("`").removeprefix(".") if at else None
    if what.startswith("Object missing required field `"):
        field = what.split("`")[1]
        param = f"{param}.{field}" if param else field
        message = f"{param} is missing: add it to the request"
    elif param:
        message = f"{param} is invalid: {what[0].lower()}{what[1:]}"
    else:
        message = f"the body is invalid: {what[0].lower()}{what[1:]}; send one JSON object"
    return RequestRejected(Outcome.REJECTED_INVALID, message, param=param)


# -- readers ----------------------------------------------------------------------------------------------


def _read_chat(body: ChatFields) -> _Work:
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return chat_prompt(body), limit, body.n or 1, bool(body.stream)


def _read_completion(body: CompletionFields) -> _Work:
    if body.prompt is None and not memoryview(body.prompt_embeds):
        raise _missing("prompt")
    return completion_prompt(body), body.max_tokens, body.n or 1, bool(body.stream)


def _read_responses(body: ResponsesFields) -> _Work:
    """Read a Responses body. Only the new input counts; the length of a stored conversation is unknown."""
    return responses_prompt(body), body.max_output_tokens, 1, bool(body.stream)


def _read_messages(body: MessagesFields) -> _Work:
    return messages_prompt(body), body.max_tokens, 1, bool(body.stream)


def _read_embedding(body: EmbeddingFields) -> _Work:
    """Read an embedding body. Nothing is generated, so the prompts alone decide the pool."""
    if body.input is None and body.messages is None:
        raise _missing("input")
    return embedding_prompt(body), 0, 1, False


def _missing(name: str) -> RequestRejected:
    return RequestRejected(Outcome.REJECTED_INVALID, f"{name} is missing: add it to the request", param=name)


# -- sizes by bytes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteEstimate:
    """Size of a request, estimated from the bytes of its body.

    Attributes:
        bytes_per_piece: bytes of the body that become one sequence.
        prompt_tokens: per sequence; None to estimate them from the bytes, as JSON.
        output_tokens: maximum output per sequence.
    """

    bytes_per_piece: int
    prompt_tokens: int | None = None
    output_tokens: int = 0

    def spec(self, model: str, size: int) -> RequestSpec:
        """Return the estimated work of a request with a body of `size` bytes."""
        pieces = max(1, math.ceil(size / self.bytes_per_piece))
        exact = None if self.prompt_tokens is None else pieces * self.prompt_tokens
        shape = PromptShape(
            text_bytes=0, tool_bytes=size if exact is None else 0, prompt_tokens=exact, prompts=pieces
        )
        return RequestSpec(
            model=model, shape=shape, max_output_tokens=self.output_tokens, choices=pieces, streamed=False
        )


# Common rerankers and embedders accept at most 512 tokens per text.
TEXTS = ByteEstimate(bytes_per_piece=2_000)
# Thirty seconds at 32 kbit/s, a low bitrate, so that the estimate errs high. Speech has about four tokens per
# second. The prompt consists of the markers for language and task.
AUDIO = ByteEstimate(bytes_per_piece=120_000, prompt_tokens=4, output_tokens=120)


_sized_decoder = msgspec.json.Decoder(BodyFields, strict=False)


def _read_sized(body: bytes, _type: bytes = b"") -> ParsedBody:
    fields = _decode(_sized_decoder, body)
    return ParsedBody(fields=fields, spec=TEXTS.spec(fields.model, json_bytes(body)))


def read_form(body: bytes, content_type: bytes) -> ParsedBody:
    """Read the model from a form, and estimate the work from the form's size.

    Raises:
        RequestRejected: the body is not a form, names no model, or is ambiguous between servers.
    """
    model, place = _model_of(body, content_type)
    return ParsedBody(fields=BodyFields(model), spec=AUDIO.spec(model, len(body)), form_model=place)


def _model_of(body: bytes, content_type: bytes) -> tuple[str, slice]:
    reader = _ModelReader()
    parser = FormParser(content_type, reader, _MAX_PARTS)
    parser.feed(body)
    parser.finish()
    if len(reader.models) > 1:
        # Some servers use the first of two fields, others the last.
        raise RequestRejected(Outcome.REJECTED_INVALID, "model occurs twice: send it once", param="model")
    if not reader.models or not reader.models[0]:
        raise RequestRejected(Outcome.REJECTED_INVALID, "model is missing: add it to the form", param="model")
    return reader.models[0].decode("utf-8", "replace"), reader.place


class _ModelReader:
    """Collector of the values of the field `model` in a form, and of the place of the last one."""

    def __init__(self) -> None:
        self.models: list[bytearray] = []
        self.place = slice(0, 0)
        self._in_model = False

    def begin(self, name: str, _filename: str | None) -> None:
        self._in_model = name == "model"
        if self._in_model:
            self.models.append(bytearray())

    def add(self, data: bytes, start: int, end: int) -> None:
        if not self._in_model:
            return
        begin = self.place.start if self.models[-1] else start
        self.place = slice(begin, end)
        self.models[-1].extend(data[start:end])
        if len(self.models[-1]) > _MAX_NAME_BYTES:
            raise FormParserError(f"the model's name is longer than {_MAX_NAME_BYTES} bytes")


# -- tables -----------------------------------------------------------------------------------------------

_RESPONSES_BEGIN = Announcements("response.created", "response.queued", "response.in_progress")
_CHAT_BEGINS = Announcements()
_MESSAGES_BEGIN = Announcements("message_start", "ping")


def _not_scheduled(_body: bytes, _type: bytes = b"") -> ParsedBody:
    raise AssertionError("the requests of this endpoint are not scheduled")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How the gateway treats the requests and answers of a path.

    Attributes:
        summary: description of the answer.
        fields: fields that are read from the body.
        parse: parses a body and its content type; raises `RequestRejected`.
        is_form: bodies are forms with a file, which are passed to the engine unchanged.
        announced: events that begin a stream before its first token, if any.
        operation: its name in OpenTelemetry's conventions, which do not define all of them; empty if it is
            not scheduled.
    """

    summary: str = ""
    fields: type[msgspec.Struct] = BodyFields
    api: ClientApi = OPENAI
    parse: Callable[..., ParsedBody] = _not_scheduled
    is_form: bool = False
    announced: Announcements | None = None
    operation: str = ""

    @property
    def is_scheduled(self) -> bool:
        """True if the scheduler grants its requests."""
        return bool(self.operation)


OTHER = Endpoint()
"""A path that no engine answers."""


def _scheduled(
    summary: str,
    operation: str,
    fields: type[BodyFields],
    read: Callable[[Any], _Work],
    api: ClientApi = OPENAI,
    announced: Announcements | None = None,
) -> Endpoint:
    # Not strict, like vLLM: 5.0 and "5" are accepted for 5, and "true" for true.
    decoder = msgspec.json.Decoder(fields, strict=False)
    parse = partial(_parse, decoder, read)
    return Endpoint(summary, fields, api, parse, announced=announced, operation=operation)


def _sized(summary: str, operation: str) -> Endpoint:
    return Endpoint(summary, parse=_read_sized, operation=operation)


def _form(summary: str, operation: str) -> Endpoint:
    return Endpoint(summary, FormFields, parse=read_form, is_form=True, operation=operation)


SCHEDULED: Mapping[str, Endpoint] = {
    "/v1/chat/completions": _scheduled(
        "chat completion", "chat", ChatFields, _read_chat, announced=_CHAT_BEGINS
    ),
    "/v1/completions": _scheduled("text completion", "text_completion", CompletionFields, _read_completion),
    "/v1/responses": _scheduled(
        "response of the Responses API", "chat", ResponsesFields, _read_responses, announced=_RESPONSES_BEGIN
    ),
    "/v1/messages": _scheduled(
        "message of the Messages API", "chat", MessagesFields, _read_messages, ANTHROPIC, _MESSAGES_BEGIN
    ),
    "/v1/embeddings": _scheduled("embeddings", "embeddings", EmbeddingFields, _read_embedding),
    "/v2/embed": _sized("embeddings in Cohere's format", "embeddings"),
    "/pooling": _sized("pooling outputs", "pooling"),
    "/classify": _sized("classes of texts", "classify"),
    **dict.fromkeys(("/v1/score", "/score"), _sized("similarity scores of text pairs", "score")),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        _sized("documents ranked by relevance to a query", "rerank"),
    ),
}

FORMS: Mapping[str, Endpoint] = {
    "/v1/audio/transcriptions": _form("transcription of audio", "transcription"),
    "/v1/audio/translations": _form("English translation of audio", "translation"),
}

# Any replica of the model in the body answers these.
UNSCHEDULED: Mapping[str, Endpoint] = {
    "/tokenize": Endpoint("token ids of a text or chat", ModelOnly),
    "/detokenize": Endpoint("text of token ids", ModelOnly),
    "/v1/messages/count_tokens": Endpoint("number of tokens of a conversation", CountTokensFields, ANTHROPIC),
}
# Any replica of the model in the query string answers these, or of the first model.
QUERY_ROUTES: Mapping[str, str] = {
    "/version": "engine version of a model",
    "/tokenizer_info": "tokenizer configuration of a model",
}


ENDPOINTS: Mapping[str, Endpoint] = {**SCHEDULED, **FORMS, **UNSCHEDULED}
"""Those with bodies for engines, by path."""
