"""Endpoints that engines answer: the fields read from each request, and the treatment of its answer.

For each scheduled endpoint, the tables at the end define:
- the fields that are read, for the size of the prompt and the output limit; together they decide the pool;
- the events that begin a stream before any token, so that they do not count as the first token;
- the API whose error format is used.

Models that score, rank, pool or transcribe split their input into pieces of limited length, each a sequence
of the engine. For these, the size of the body is a sufficient estimate (`ByteEstimate`).

Token counts are read from all answers in the same way (`answer.stream`). Unscheduled endpoints cost an engine
next to nothing and use any replica; only the model is read from their bodies.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    NO_OPENING,
    Opening,
    PromptMeasure,
    chat_opening,
    chat_shape,
    completion_opening,
    completion_shape,
    embedding_shape,
    json_bytes,
    messages_opening,
    messages_shape,
    responses_opening,
    responses_shape,
    uncounted_bytes,
)

T = TypeVar("T")

_MAX_PARTS = 100
_MAX_NAME_BYTES = 1_000


class ParsedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a body, and what they mean for scheduling.

    Attributes:
        spec: work requested from an engine.
        opening: beginning of the prompt; empty for embeddings.
        measure: source of the prompt's shape; None if not needed later.
        form_model: place of the model's name in a form; None for JSON.
    """

    fields: BodyFields
    spec: RequestSpec
    opening: Opening = NO_OPENING
    measure: PromptMeasure | None = None
    form_model: slice | None = None


class BodyParser:
    """Parser for the bodies of one endpoint.

    Args:
        body_type: fields to decode.
        read: derives the work from the decoded fields.
    """

    def __init__(self, body_type: type[BodyFields], read: Callable[[Any], ParsedBody]) -> None:
        # Not strict, like vLLM: 5.0 and "5" are accepted for 5, and "true" for true.
        self._decoder = msgspec.json.Decoder(body_type, strict=False)
        self._body_type = body_type
        self._read = read

    def parse(self, body: bytes) -> ParsedBody:
        """Parse a body.

        Raises:
            RequestRejected: the body is not JSON, or a field is missing or of the wrong type.
        """
        parsed = self._read(_decode(self._decoder, body))
        shape = parsed.spec.shape
        # Only chat messages are rendered through a template, which may use further fields of the body.
        if not shape.messages:
            return parsed
        try:
            uncounted = uncounted_bytes(body, shape, self._body_type, parsed.measure)
        except RecursionError as exc:
            raise _nested_too_deeply() from exc
        if not uncounted:
            return parsed
        shape = msgspec.structs.replace(shape, tool_bytes=shape.tool_bytes + uncounted)
        spec = msgspec.structs.replace(parsed.spec, shape=shape)
        return msgspec.structs.replace(parsed, spec=spec)


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


def _read_chat(body: ChatFields) -> ParsedBody:
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    measure = PromptMeasure()
    spec = RequestSpec(
        model=body.model,
        shape=chat_shape(body, measure),
        max_output_tokens=limit,
        choices=body.n or 1,
        streamed=bool(body.stream),
    )
    return ParsedBody(fields=body, spec=spec, opening=chat_opening(body, measure.utf8), measure=measure)


def _read_completion(body: CompletionFields) -> ParsedBody:
    if body.prompt is None and not memoryview(body.prompt_embeds):
        raise _missing("prompt")
    shape = completion_shape(body)
    spec = RequestSpec(
        model=body.model,
        shape=shape,
        max_output_tokens=body.max_tokens,
        choices=(body.n or 1) * shape.prompts,
        streamed=bool(body.stream),
    )
    return ParsedBody(fields=body, spec=spec, opening=completion_opening(body))


def _read_responses(body: ResponsesFields) -> ParsedBody:
    """Parse a Responses body. Only the new input counts; the length of a stored conversation is unknown."""
    measure = PromptMeasure()
    spec = RequestSpec(
        model=body.model,
        shape=responses_shape(body, measure),
        max_output_tokens=body.max_output_tokens,
        streamed=bool(body.stream),
    )
    return ParsedBody(fields=body, spec=spec, opening=responses_opening(body, measure.utf8), measure=measure)


def _read_messages(body: MessagesFields) -> ParsedBody:
    measure = PromptMeasure()
    spec = RequestSpec(
        model=body.model,
        shape=messages_shape(body, measure),
        max_output_tokens=body.max_tokens,
        streamed=bool(body.stream),
    )
    return ParsedBody(fields=body, spec=spec, opening=messages_opening(body, measure.utf8), measure=measure)


def _read_embedding(body: EmbeddingFields) -> ParsedBody:
    """Parse an embedding body. Nothing is generated, so the prompts alone decide the pool."""
    if body.input is None and body.messages is None:
        raise _missing("input")
    shape = embedding_shape(body)
    spec = RequestSpec(
        model=body.model, shape=shape, max_output_tokens=0, choices=shape.prompts, streamed=False
    )
    return ParsedBody(fields=body, spec=spec)


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


def _read_sized(body: bytes) -> ParsedBody:
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


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """An endpoint whose requests name a model.

    Attributes:
        summary: description of the answer.
        fields: fields that are read from the body.
    """

    summary: str
    fields: type[msgspec.Struct]
    api: ClientApi


@dataclass(frozen=True, slots=True)
class ScheduledRoute(ModelRoute):
    """A scheduled endpoint with JSON bodies.

    Attributes:
        parse: parses a body; raises `RequestRejected`.
        announced: events that begin a stream before its first token, if any.
    """

    parse: Callable[[bytes], ParsedBody]
    announced: Announcements | None


@dataclass(frozen=True, slots=True)
class FormRoute(ModelRoute):
    """A scheduled endpoint for forms with a file, which are passed to the engine unchanged.

    `parse` needs the body and its content type, and raises `RequestRejected`.
    """

    parse: Callable[[bytes, bytes], ParsedBody]


def _scheduled(
    summary: str,
    fields: type[BodyFields],
    read: Callable[[Any], ParsedBody],
    api: ClientApi = OPENAI,
    announced: Announcements | None = None,
) -> ScheduledRoute:
    return ScheduledRoute(summary, fields, api, BodyParser(fields, read).parse, announced)


def _sized(summary: str) -> ScheduledRoute:
    return ScheduledRoute(summary, BodyFields, OPENAI, _read_sized, None)


SCHEDULED: Mapping[str, ScheduledRoute] = {
    "/v1/chat/completions": _scheduled("chat completion", ChatFields, _read_chat, announced=_CHAT_BEGINS),
    "/v1/completions": _scheduled("text completion", CompletionFields, _read_completion),
    "/v1/responses": _scheduled(
        "response of the Responses API", ResponsesFields, _read_responses, announced=_RESPONSES_BEGIN
    ),
    "/v1/messages": _scheduled(
        "message of the Messages API", MessagesFields, _read_messages, ANTHROPIC, _MESSAGES_BEGIN
    ),
    "/v1/embeddings": _scheduled("embeddings", EmbeddingFields, _read_embedding),
    "/v2/embed": _sized("embeddings in Cohere's format"),
    "/pooling": _sized("pooling outputs"),
    "/classify": _sized("classes of texts"),
    **dict.fromkeys(("/v1/score", "/score"), _sized("similarity scores of text pairs")),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        _sized("documents ranked by relevance to a query"),
    ),
}

FORMS: Mapping[str, FormRoute] = {
    "/v1/audio/transcriptions": FormRoute("transcription of audio", FormFields, OPENAI, read_form),
    "/v1/audio/translations": FormRoute("English translation of audio", FormFields, OPENAI, read_form),
}

# Any replica of the model in the body answers these.
UNSCHEDULED: Mapping[str, ModelRoute] = {
    "/tokenize": ModelRoute("token ids of a text or chat", ModelOnly, OPENAI),
    "/detokenize": ModelRoute("text of token ids", ModelOnly, OPENAI),
    "/v1/messages/count_tokens": ModelRoute(
        "number of tokens of a conversation", CountTokensFields, ANTHROPIC
    ),
}
# Any replica of the model in the query string answers these, or of the first model.
QUERY_ROUTES: Mapping[str, str] = {
    "/version": "engine version of a model",
    "/tokenizer_info": "tokenizer configuration of a model",
}


APIS: Mapping[str, ClientApi] = {path: route.api for path, route in {**SCHEDULED, **UNSCHEDULED}.items()}
"""API of a path; unknown paths use OpenAI's."""
