"""The endpoints that engines answer: what is read of a request, and how its answer is treated.

A line says of a scheduled endpoint:
- the fields that are looked at, and what is made of them: the size of the prompt, from which its tokens are
  estimated, and the limit of the output, which with it decides the pool;
- the events that begin a stream before any token, so that none of them counts as the first;
- the API in which errors are told.

Token counts are read of all answers in one way (`answer.usage`). Others cost an engine next to nothing and go
to any replica: of them only the model is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from serve_app.serving.gateway.answer.client_api import ANTHROPIC, OPENAI, ClientApi
from serve_app.serving.gateway.answer.sse import Announcements
from serve_app.serving.gateway.request.bodies import (
    BodyFields,
    ChatFields,
    CompletionFields,
    EmbeddingFields,
    ModelOnly,
    ResponsesFields,
)
from serve_app.serving.gateway.request.parse import BodyParser, ParsedBody
from serve_app.serving.gateway.routes.audio import AudioFields, read_audio
from serve_app.serving.gateway.routes.generation import read_chat, read_completion, read_responses
from serve_app.serving.gateway.routes.messages import CountTokensFields, MessagesFields, read_messages
from serve_app.serving.gateway.routes.pooling import (
    CohereEmbedFields,
    PoolingFields,
    RerankFields,
    ScoreFields,
    read_cohere_embed,
    read_embedding,
    read_pooling,
    read_rerank,
    read_score,
)

_RESPONSES_BEGIN = Announcements("response.created", "response.queued", "response.in_progress")
_MESSAGES_BEGIN = Announcements("message_start", "ping")


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """One path.

    Attributes:
        summary: what its answer is.
        fields: of the body, as far as they are looked at.
    """

    summary: str
    fields: type[msgspec.Struct]
    api: ClientApi


@dataclass(frozen=True, slots=True)
class ScheduledRoute(ModelRoute):
    """One whose requests are scheduled.

    Attributes:
        parse: makes of a body what scheduling needs; raises `RequestRefused`.
        announced: the events with which a stream begins before its first token, if there are any.
    """

    parse: Callable[[bytes], ParsedBody]
    announced: Announcements | None


@dataclass(frozen=True, slots=True)
class FormRoute(ModelRoute):
    """One whose requests are scheduled and come as forms with a file; they reach the engine unchanged.

    Attributes:
        parse: makes of a body and its content type what scheduling needs; raises `RequestRefused`.
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


SCHEDULED: Mapping[str, ScheduledRoute] = {
    "/v1/chat/completions": _scheduled("a chat's next message", ChatFields, read_chat),
    "/v1/completions": _scheduled("the continuation of a text", CompletionFields, read_completion),
    "/v1/responses": _scheduled(
        "a response to an input", ResponsesFields, read_responses, announced=_RESPONSES_BEGIN
    ),
    "/v1/messages": _scheduled(
        "the message that answers a conversation", MessagesFields, read_messages, ANTHROPIC, _MESSAGES_BEGIN
    ),
    "/v1/embeddings": _scheduled("vectors of texts", EmbeddingFields, read_embedding),
    "/v2/embed": _scheduled("vectors of texts, as Cohere's API", CohereEmbedFields, read_cohere_embed),
    "/pooling": _scheduled("what a model makes of texts", PoolingFields, read_pooling),
    "/classify": _scheduled("classes of texts", EmbeddingFields, read_embedding),
    **dict.fromkeys(
        ("/v1/score", "/score"), _scheduled("what pairs of texts have in common", ScoreFields, read_score)
    ),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        _scheduled("documents in the order of what they say of a query", RerankFields, read_rerank),
    ),
}

FORMS: Mapping[str, FormRoute] = {
    "/v1/audio/transcriptions": FormRoute("the text of a sound", AudioFields, OPENAI, read_audio),
    "/v1/audio/translations": FormRoute("the text of a sound in English", AudioFields, OPENAI, read_audio),
}

# Of these any replica is asked, of the model that the body names.
UNSCHEDULED: Mapping[str, ModelRoute] = {
    "/tokenize": ModelRoute("the tokens of a text or a chat", ModelOnly, OPENAI),
    "/detokenize": ModelRoute("the text of tokens", ModelOnly, OPENAI),
    "/v1/messages/count_tokens": ModelRoute("the length of a conversation", CountTokensFields, ANTHROPIC),
}
# Likewise, of the model that the query names, or the first one.
QUESTIONS: Mapping[str, str] = {
    "/version": "the version of a model's engines",
    "/tokenizer_info": "how a model's tokenizer is set up",
}


def api_of(path: str) -> ClientApi:
    """The API of a path, also of one that is not there."""
    endpoint = SCHEDULED.get(path) or UNSCHEDULED.get(path)
    return OPENAI if endpoint is None else endpoint.api
