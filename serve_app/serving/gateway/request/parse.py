"""The parsers of request bodies: the few facts that scheduling needs, in time linear in the body's size."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from serve_app.errors import Outcome
from serve_app.request import RequestSpec
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.request.bodies import (
    BodyFields,
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    ModelOnly,
    ResponsesFields,
)
from serve_app.serving.gateway.request.prefix import (
    NO_OPENING,
    Opening,
    chat_opening,
    completion_opening,
    responses_opening,
)
from serve_app.serving.gateway.request.shape import (
    chat_shape,
    completion_shape,
    embedding_shape,
    responses_shape,
)
from serve_app.serving.gateway.request.uncounted import uncounted_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """What the gateway needs to know of a body.

    Attributes:
        spec: what it asks of an engine.
        asks_usage: this endpoint's streams give usage only on demand.
        shows_usage: the client asked for that usage itself, so it is not hidden from it.
        may_be_assembled: the client wants the answer in one piece, and a stream of it would say as much.
        has_stream_options: the body carries `stream_options`, which must be kept.
        priority: vLLM's field, lower is sooner; None when the body has none.
        user: the end user that the body names.
        opening: how the prompt begins; empty for embeddings.
    """

    spec: RequestSpec
    asks_usage: bool = False
    shows_usage: bool = False
    may_be_assembled: bool = False
    has_stream_options: bool = False
    service_tier: str | None = None
    priority: int | None = None
    user: str | None = None
    opening: Opening = NO_OPENING


T = TypeVar("T")


class BodyParser:
    """Parses the bodies of one endpoint."""

    def __init__(self, body_type: type[BodyFields], read: Callable[[Any], ParsedBody]) -> None:
        # Not strict, as vLLM is not: it takes 5.0 and "5" for 5, and "true" for true.
        self._decoder = msgspec.json.Decoder(body_type, strict=False)
        self._body_type = body_type
        self._read = read

    def parse(self, body: bytes) -> ParsedBody:
        """The facts of a body.

        Raises:
            RequestRefused: the body is not JSON, or a field is missing or of the wrong type.
        """
        parsed = self._read(_decode(self._decoder, body))
        shape = parsed.spec.shape
        # Only messages are written into a template, together with what else a body has.
        if not shape.messages:
            return parsed
        try:
            uncounted = uncounted_bytes(body, shape, self._body_type)
        except RecursionError as exc:
            raise _nested_too_deeply() from exc
        if not uncounted:
            return parsed
        shape = replace(shape, tool_bytes=shape.tool_bytes + uncounted)
        return replace(parsed, spec=replace(parsed.spec, shape=shape))


def parse_model(body: bytes) -> str:
    """Only the model that a body names.

    Raises:
        RequestRefused: the body is not JSON or names none.
    """
    return _decode(_model_decoder, body).model


_model_decoder = msgspec.json.Decoder(ModelOnly)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as exc:
        raise _field_refused(str(exc)) from exc
    except UnicodeDecodeError as exc:
        raise RequestRefused(
            Outcome.REJECTED_INVALID, f"the body is not UTF-8 ({exc.reason}): encode it as UTF-8"
        ) from exc
    except msgspec.DecodeError as exc:
        raise RequestRefused(
            Outcome.REJECTED_INVALID, f"the body is not valid JSON: {exc}. Send one JSON object"
        ) from exc
    except RecursionError as exc:
        raise _nested_too_deeply() from exc


def _nested_too_deeply() -> RequestRefused:
    return RequestRefused(
        Outcome.REJECTED_INVALID, "the body is nested too deeply: flatten it below a few hundred levels"
    )


def _field_refused(found: str) -> RequestRefused:
    """Name the field and the remedy, from msgspec's "Expected `int`, got `str` - at `$.n`"."""
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
    return RequestRefused(Outcome.REJECTED_INVALID, message, param=param)


def _chat(body: ChatFields) -> ParsedBody:
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    options = body.stream_options
    return ParsedBody(
        spec=RequestSpec(
            model=body.model,
            shape=chat_shape(body),
            max_output_tokens=limit,
            choices=body.n or 1,
            streamed=bool(body.stream),
        ),
        asks_usage=True,
        shows_usage=options is not None and bool(options.include_usage),
        may_be_assembled=not body.stream and options is None and body.may_be_assembled,
        has_stream_options=options is not None,
        service_tier=body.service_tier,
        priority=body.priority,
        user=body.safety_identifier or body.user,
        opening=chat_opening(body),
    )


def _completion(body: CompletionFields) -> ParsedBody:
    if body.prompt is None and not memoryview(body.prompt_embeds):
        raise RequestRefused(
            Outcome.REJECTED_INVALID, "prompt is missing: add it to the request", param="prompt"
        )
    shape = completion_shape(body)
    options = body.stream_options
    return ParsedBody(
        spec=RequestSpec(
            model=body.model,
            shape=shape,
            max_output_tokens=body.max_tokens,
            choices=(body.n or 1) * shape.prompts,
            streamed=bool(body.stream),
        ),
        asks_usage=True,
        shows_usage=options is not None and bool(options.include_usage),
        may_be_assembled=not body.stream and options is None and body.may_be_assembled,
        has_stream_options=options is not None,
        service_tier=body.service_tier,
        priority=body.priority,
        user=body.safety_identifier or body.user,
        opening=completion_opening(body),
    )


def _responses(body: ResponsesFields) -> ParsedBody:
    if body.background:
        raise RequestRefused(
            Outcome.REJECTED_INVALID,
            "background responses cannot be fetched again through this gateway: leave `background` out",
            param="background",
        )
    if body.previous_response_id:
        raise RequestRefused(
            Outcome.REJECTED_INVALID,
            "previous_response_id names an answer that one engine has kept, and requests go to any: send the "
            "whole conversation as `input`",
            param="previous_response_id",
        )
    return ParsedBody(
        spec=RequestSpec(
            model=body.model,
            shape=responses_shape(body),
            max_output_tokens=body.max_output_tokens,
            streamed=bool(body.stream),
        ),
        service_tier=body.service_tier,
        priority=body.priority,
        user=body.safety_identifier or body.user,
        opening=responses_opening(body),
    )


def _embedding(body: EmbeddingFields) -> ParsedBody:
    if body.input is None and body.messages is None:
        raise RequestRefused(
            Outcome.REJECTED_INVALID, "input is missing: add it to the request", param="input"
        )
    shape = embedding_shape(body)
    return ParsedBody(
        spec=RequestSpec(
            model=body.model,
            shape=shape,
            max_output_tokens=0,
            choices=shape.prompts,
            streamed=False,
        ),
        service_tier=body.service_tier,
        priority=body.priority,
        user=body.safety_identifier or body.user,
    )


PARSERS: dict[str, BodyParser] = {
    "/v1/chat/completions": BodyParser(ChatFields, _chat),
    "/v1/completions": BodyParser(CompletionFields, _completion),
    "/v1/responses": BodyParser(ResponsesFields, _responses),
    "/v1/embeddings": BodyParser(EmbeddingFields, _embedding),
}
