"""The parsing of a request's body: the few facts that scheduling needs, in time linear in the body's size.

What is read of the bodies of each endpoint stands in `routes.table`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from serve_app.errors import Outcome
from serve_app.request import RequestSpec
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.request.bodies import BodyFields, ModelOnly
from serve_app.serving.gateway.request.prefix import NO_OPENING, Opening
from serve_app.serving.gateway.request.shape import PromptMeasure
from serve_app.serving.gateway.request.uncounted import uncounted_bytes


class ParsedBody(msgspec.Struct, frozen=True, kw_only=True):
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
        keeps_responses: what it asks for may be kept by its engine, and referred to later.
        previous_response: id of the response that it goes on from.
        background: its engine is to work on after its answer.
        names_response: it gives its response a name, which some engines take.
        measure: of which the shape of its prompt was made; None where nothing else is asked of that.
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
    keeps_responses: bool = False
    previous_response: str | None = None
    background: bool = False
    names_response: bool = False
    measure: PromptMeasure | None = None


T = TypeVar("T")


class BodyParser:
    """Parses the bodies of one endpoint.

    Args:
        body_type: the fields that are looked at.
        read: makes the facts of them.
    """

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
            uncounted = uncounted_bytes(body, shape, self._body_type, parsed.measure)
        except RecursionError as exc:
            raise _nested_too_deeply() from exc
        if not uncounted:
            return parsed
        shape = replace(shape, tool_bytes=shape.tool_bytes + uncounted)
        return msgspec.structs.replace(parsed, spec=replace(parsed.spec, shape=shape))


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
