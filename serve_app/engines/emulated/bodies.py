"""The bodies of OpenAI requests, with the fields that matter to an engine without a model.

Two fields of our own make traces replayable. `ewsjf_prompt_tokens` states the length of the prompt, so that
no text of that length needs to be sent; such a prompt does not use the prefix cache. `ewsjf_output_tokens`
states the length of the answer; `max_tokens` still limits it, and `finish_reason` is then "length".

Fields of type `Raw` are read by those who need them, so that a request without them pays nothing. Fields that
vLLM ignores are ignored here.
"""

from typing import Annotated, Any, Literal

import msgspec

# vLLM's limit of stop strings.
StopStrings = str | Annotated[list[str], msgspec.Meta(max_length=4)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

# Text or token ids, alone or in a list; a list that mixes them is refused by `_inputs`.
Inputs = str | list[str | int | list[int]]


class Body(msgspec.Struct, kw_only=True):
    """Fields of all endpoints."""

    model: str | None = None
    priority: int = 0
    ewsjf_prompt_tokens: int | None = None


class StreamOptions(msgspec.Struct):
    """What a stream holds besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GeneratingBody(Body, kw_only=True):
    """Fields of the endpoints that generate."""

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
    seed: Seed | None = None
    stop: StopStrings | None = None
    include_stop_str_in_output: bool = False
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    structured_outputs: msgspec.Raw = msgspec.Raw()
    # Refused, see `sampling`.
    use_beam_search: msgspec.Raw = msgspec.Raw()
    return_token_ids: msgspec.Raw = msgspec.Raw()
    return_tokens_as_token_ids: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    logprob_token_ids: msgspec.Raw = msgspec.Raw()
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw()
    repetition_detection: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    suffix: msgspec.Raw = msgspec.Raw()


class Part(msgspec.Struct):
    """A part of a message: text, or media that are told apart by their bytes."""

    type: str = "text"
    text: str | None = None
    image_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: str = "user"
    content: str | list[Part] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class ChatBody(GeneratingBody, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    echo: bool | None = False


class CompletionBody(GeneratingBody, kw_only=True):
    """`/v1/completions`; a prompt is text or token ids, alone or in a list."""

    prompt: Inputs
    max_tokens: int | None = 16
    response_format: msgspec.Raw = msgspec.Raw()
    logprobs: int | None = None
    echo: bool | None = False


class ResponsesBody(GeneratingBody, kw_only=True):
    """`/v1/responses`; input items other than messages are ignored."""

    input: str | list[ChatMessage]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    include: list[str] | None = None
    top_logprobs: int | None = 0
    request_id: str | None = None
    # Refused, see `specs`.
    prompt: msgspec.Raw = msgspec.Raw()


class ResponsesFormat(msgspec.Struct):
    """The format of a response's text."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None


class ResponsesText(msgspec.Struct):
    """`text` of the Responses API."""

    format: ResponsesFormat | None = None


class EmbeddingsBody(Body, kw_only=True):
    """`/v1/embeddings`; each input has its own embedding."""

    input: Inputs
    encoding_format: str = "float"
    dimensions: int | None = None


class PoolingBody(EmbeddingsBody, kw_only=True):
    """`/pooling` and `/classify`."""

    task: str | None = None


class RerankBody(Body, kw_only=True):
    """`/rerank`."""

    query: str
    documents: list[str]
    top_n: Annotated[int, msgspec.Meta(ge=0)] = 0


class ScoreBody(Body, kw_only=True):
    """`/score`: pairs, under one of the pairs of names that vLLM knows."""

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class CohereEmbedBody(Body, kw_only=True):
    """`/v2/embed`."""

    texts: list[str]
    output_dimension: int | None = None


class DetokenizeBody(Body, kw_only=True):
    """`/detokenize`."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0)]]


class TokenizeBody(Body, kw_only=True):
    """`/tokenize`: text, or a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: msgspec.Raw = msgspec.Raw()
