"""What requests ask of an engine that reads texts and generates none: embeddings, classes, scores, ranks."""

from dataclasses import replace

import msgspec

from serve_app.errors import Outcome
from serve_app.request import PromptShape, RequestSpec
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.request.bodies import ABSENT, BodyFields, Content, EmbeddingFields
from serve_app.serving.gateway.request.parse import ParsedBody
from serve_app.serving.gateway.request.shape import PromptMeasure, embedding_shape


class PartsFields(msgspec.Struct, gc=False):
    """A text with images."""

    content: Content = None


Scored = str | PartsFields
Several = Scored | list[Scored]


class PoolingFields(EmbeddingFields, kw_only=True):
    """`/pooling`: texts, a chat, or `data` for a plugin of the engine."""

    data: msgspec.Raw = ABSENT


class RerankFields(BodyFields, kw_only=True):
    """`/rerank`: documents to be ordered by what they say of a query."""

    query: Scored
    documents: Several


class ScoreFields(BodyFields, kw_only=True):
    """`/score`: pairs, under one of the four pairs of names that there are."""

    queries: Several | None = None
    documents: Several | None = None
    items: Several | None = None
    text_1: Several | None = None
    text_2: Several | None = None
    data_1: Several | None = None
    data_2: Several | None = None


class CohereEmbedFields(BodyFields, kw_only=True):
    """`/v2/embed`, which is Cohere's."""

    texts: list[str] | None = None
    images: list[str] | None = None
    inputs: list[PartsFields] | None = None


def read_embedding(body: EmbeddingFields) -> ParsedBody:
    """What a request for embeddings, or for the classes of texts, asks for.

    Raises:
        RequestRefused: it has no input.
    """
    if body.input is None and body.messages is None:
        raise _missing("input")
    return _parsed(body, embedding_shape(body))


def read_pooling(body: PoolingFields) -> ParsedBody:
    """What a request for a model's own output asks for.

    Raises:
        RequestRefused: it has neither input nor data.
    """
    if body.data is ABSENT:
        return read_embedding(body)
    measure = PromptMeasure()
    measure.add_raw(body.data)
    return _parsed(body, measure.shape())


def read_rerank(body: RerankFields) -> ParsedBody:
    """What a request for an order asks for."""
    return _parsed(body, _pairs(body.query, body.documents))


def read_score(body: ScoreFields) -> ParsedBody:
    """What a request for scores asks for.

    Raises:
        RequestRefused: one side of the pairs is missing.
    """
    first = next((each for each in (body.queries, body.data_1, body.text_1) if each is not None), None)
    others = (body.documents, body.items, body.data_2, body.text_2)
    second = next((each for each in others if each is not None), None)
    if first is None:
        raise _missing("queries")
    if second is None:
        raise _missing("documents")
    return _parsed(body, _pairs(first, second))


def read_cohere_embed(body: CohereEmbedFields) -> ParsedBody:
    """What Cohere's request for embeddings asks for.

    Raises:
        RequestRefused: it has nothing to embed.
    """
    inputs: list[Scored] = [*(body.texts or ()), *(body.inputs or ())]
    images = len(body.images or ())
    if not inputs and not images:
        raise _missing("texts")
    measure = PromptMeasure()
    measure.media_items = images
    _add(measure, inputs)
    return _parsed(body, measure.shape(prompts=len(inputs) + images))


def _pairs(first: Several, second: Several) -> PromptShape:
    """Each with its counterpart, or one with all of the others: an engine reads both of each pair."""
    sides = [side if isinstance(side, list) else [side] for side in (first, second)]
    pairs = max(1, *(len(side) for side in sides))
    whole = PromptMeasure()
    text_bytes = media_items = 0
    for side in sides:
        measure = PromptMeasure()
        _add(measure, side)
        times = pairs // max(1, len(side))
        text_bytes += times * measure.shape().text_bytes
        media_items += times * measure.media_items
        whole.texts += measure.texts
    return replace(whole.shape(prompts=pairs), text_bytes=text_bytes, media_items=media_items)


def _add(measure: PromptMeasure, inputs: list[Scored]) -> None:
    for each in inputs:
        measure.add_content(each.content if isinstance(each, PartsFields) else each)


def _parsed(body: BodyFields, shape: PromptShape) -> ParsedBody:
    """Nothing is generated, so the prompts alone decide the pool."""
    return ParsedBody(
        spec=RequestSpec(
            model=body.model, shape=shape, max_output_tokens=0, choices=shape.prompts, streamed=False
        ),
        service_tier=body.service_tier,
        priority=body.priority,
        user=body.safety_identifier or body.user,
    )


def _missing(field: str) -> RequestRefused:
    return RequestRefused(Outcome.REJECTED_INVALID, f"{field} is missing: add it to the request", param=field)
