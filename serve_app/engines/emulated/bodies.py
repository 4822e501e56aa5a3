"""The bodies of OpenAI requests, with the fields that matter to an engine without a model.

Two fields of our own make traces replayable. `ewsjf_prompt_tokens` states the length of the prompt, so that
no text of that length needs to be sent; such a prompt does not use the prefix cache. `ewsjf_output_tokens`
states the length of the answer; `max_tokens` still limits it, and `finish_reason` is then "length".

Ignored, because the answer is placeholder text: sampling parameters, `stop`, `logprobs`, response formats.
"""

import msgspec

# Text or token ids, alone or in a list; a list that mixes them is refused by `_inputs`.
Inputs = str | list[str | int | list[int]]


class Body(msgspec.Struct, kw_only=True):
    """Fields of all endpoints."""

    model: str | None = None
    priority: int = 0
    ewsjf_prompt_tokens: int | None = None


class StreamOptions(msgspec.Struct):
    """What a stream holds besides text."""

    include_usage: bool = False


class GeneratingBody(Body, kw_only=True):
    """Fields of the endpoints that generate."""

    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    ewsjf_output_tokens: int | None = None


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


class CompletionBody(GeneratingBody, kw_only=True):
    """`/v1/completions`; a prompt is text or token ids, alone or in a list."""

    prompt: Inputs
    max_tokens: int | None = 16


class ResponsesBody(GeneratingBody, kw_only=True):
    """`/v1/responses`; input items other than messages are ignored."""

    input: str | list[ChatMessage]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw()


class EmbeddingsBody(Body, kw_only=True):
    """`/v1/embeddings`; each input has its own embedding."""

    input: Inputs
    encoding_format: str = "float"
    dimensions: int | None = None


class TokenizeBody(Body, kw_only=True):
    """`/tokenize`: text, or a conversation."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: msgspec.Raw = msgspec.Raw()
