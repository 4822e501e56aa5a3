"""What requests of OpenAI's generating endpoints ask of an engine: chats, completions, responses."""

from serve_app.errors import Outcome
from serve_app.request import RequestSpec
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.request.bodies import ChatFields, CompletionFields, ResponsesFields
from serve_app.serving.gateway.request.parse import ParsedBody
from serve_app.serving.gateway.request.prefix import chat_opening, completion_opening, responses_opening
from serve_app.serving.gateway.request.shape import (
    PromptMeasure,
    chat_shape,
    completion_shape,
    responses_shape,
)


def read_chat(body: ChatFields) -> ParsedBody:
    """What a chat completion asks for."""
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    options, measure = body.stream_options, PromptMeasure()
    return ParsedBody(
        spec=RequestSpec(
            model=body.model,
            shape=chat_shape(body, measure),
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
        opening=chat_opening(body, measure.utf8),
        measure=measure,
    )


def read_completion(body: CompletionFields) -> ParsedBody:
    """What a text completion asks for.

    Raises:
        RequestRefused: it has no prompt.
    """
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


def read_responses(body: ResponsesFields) -> ParsedBody:
    """What a request of the Responses API asks for.

    How long the conversation is that an engine has kept is not known here, so only the new input counts.
    """
    measure = PromptMeasure()
    return ParsedBody(
        spec=RequestSpec(
            model=body.model,
            shape=responses_shape(body, measure),
            max_output_tokens=body.max_output_tokens,
            streamed=bool(body.stream),
        ),
        service_tier=body.service_tier,
        priority=body.priority,
        user=body.safety_identifier or body.user,
        opening=responses_opening(body, measure.utf8),
        measure=measure,
        keeps_responses=True,
        previous_response=body.previous_response_id,
        background=bool(body.background),
        names_response=bool(memoryview(body.request_id)),
    )
