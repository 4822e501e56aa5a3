"""Fields that the gateway reads from each endpoint's body; msgspec skips all others.

A wrong type here would also be an error in the engine. All other checks are left to the engine. For duplicate
keys the last value counts, as in the engines.
"""

from typing import Annotated

import msgspec

# Wider numbers are invalid, and would not fit the frames of the control channel.
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
TokenLimit = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# As wide as vLLM's, because some clients send a time in nanoseconds.
EnginePriority = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

ABSENT = msgspec.Raw()
# Default of OpenAI and vLLM for completions only.
COMPLETION_DEFAULT_MAX_TOKENS = 16


class PartFields(msgspec.Struct, gc=False):
    """Part of a message's content. Parts without text are images, audio or files."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: msgspec.Raw = ABSENT
    image_embeds: msgspec.Raw = ABSENT
    input_audio: msgspec.Raw = ABSENT
    audio_url: msgspec.Raw = ABSENT
    audio_embeds: msgspec.Raw = ABSENT
    video_url: msgspec.Raw = ABSENT
    file: msgspec.Raw = ABSENT
    file_data: msgspec.Raw = ABSENT

    @property
    def media(self) -> tuple[msgspec.Raw, ...]:
        """Media fields, which replace the text."""
        images, sounds = (self.image_url, self.image_embeds), (self.input_audio, self.audio_url)
        return (*images, *sounds, self.audio_embeds, self.video_url, self.file, self.file_data)


Content = str | list[str | PartFields] | None


class MessageFields(msgspec.Struct, gc=False):
    """One message of a chat."""

    role: str | None = None
    content: Content = None
    tool_calls: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    reasoning_content: msgspec.Raw = ABSENT

    @property
    def is_plain(self) -> bool:
        """True if there is only a role and content, as in most messages."""
        return self.tool_calls is self.function_call is self.reasoning is self.reasoning_content is ABSENT


class InputItem(msgspec.Struct, gc=False):
    """One item of a Responses input: a message, a tool call or a tool's output."""

    role: str | None = None
    content: Content = None
    arguments: str | None = None
    output: str | list[str | PartFields] | PartFields | None = None
    summary: list[PartFields] | None = None


class StreamOptionFields(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None


class BodyFields(msgspec.Struct):
    """Fields of all endpoints."""

    model: str
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    priority: EnginePriority | None = None
    cache_salt: str | None = None

    @property
    def end_user(self) -> str | None:
        """End user named by the client; None or empty if it names none."""
        return self.safety_identifier or self.user


class GenerationFields(BodyFields):
    """Fields of all OpenAI endpoints that generate text."""

    stream: bool | None = None
    # Ids of a conversation, see `program`.
    session_id: msgspec.Raw = ABSENT
    prompt_cache_key: msgspec.Raw = ABSENT
    metadata: msgspec.Raw = ABSENT
    nvext: msgspec.Raw = ABSENT
    # Fields that engines reject or omit in streams.
    prompt_logprobs: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT
    best_of: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT
    return_token_ids: msgspec.Raw = ABSENT
    # With `echo`, ids and logprobs of the prompt appear in only one of the two forms.
    echo: msgspec.Raw = ABSENT


class UsageOnRequestFields(GenerationFields):
    """Fields of the endpoints whose streams report usage only on request."""

    stream_options: StreamOptionFields | None = None

    @property
    def usage_requested(self) -> bool:
        """True if the client requests usage itself, so it is not hidden."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def may_be_assembled(self) -> bool:
        """True if the answer is not streamed, and a stream would carry the same information."""
        if self.stream or self.stream_options is not None:
            return False
        others = self.prompt_logprobs is self.use_beam_search is self.best_of is self.kv_transfer_params
        return others and self.echo is self.return_token_ids is self.prompt_logprobs is ABSENT


class ChatFields(UsageOnRequestFields, kw_only=True):
    """`/v1/chat/completions`."""

    messages: list[MessageFields]
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n: Count | None = None
    tools: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    audio: msgspec.Raw = ABSENT
    modalities: msgspec.Raw = ABSENT

    @property
    def may_be_assembled(self) -> bool:
        """See `UsageOnRequestFields`. Streams parse tool calls differently than finished texts."""
        others = self.tools is self.functions is self.audio is self.modalities is ABSENT
        return others and super().may_be_assembled


# Texts or token ids, of one prompt or of several.
Prompt = str | list[str | int | list[int]]


class CompletionFields(UsageOnRequestFields, kw_only=True):
    """`/v1/completions`."""

    prompt: Prompt | None = None
    prompt_embeds: msgspec.Raw = ABSENT
    suffix: str | None = None
    max_tokens: TokenLimit | None = COMPLETION_DEFAULT_MAX_TOKENS
    n: Count | None = None
    response_format: msgspec.Raw = ABSENT


class ResponsesFields(GenerationFields, kw_only=True):
    """`/v1/responses`."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: msgspec.Raw = ABSENT
    request_id: msgspec.Raw = ABSENT
    tools: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT


class EmbeddingFields(BodyFields, kw_only=True):
    """`/v1/embeddings` and `/classify`; vLLM also takes chat messages here."""

    input: Prompt | None = None
    messages: list[MessageFields] | None = None


class ModelOnly(msgspec.Struct):
    """`/tokenize` and `/detokenize`: only the model is needed to find a replica."""

    model: str


# -- Anthropic's Messages ---------------------------------------------------------------------------------


class BlockFields(msgspec.Struct, gc=False):
    """Block of a message: text, thinking, a tool call or its result. Other blocks are media."""

    type: str | None = None
    name: str | None = None
    text: str | None = None
    thinking: str | None = None
    content: Content = None
    input: msgspec.Raw = ABSENT
    tool: msgspec.Raw = ABSENT
    source: msgspec.Raw = ABSENT


Blocks = str | list[BlockFields]


class TurnFields(msgspec.Struct, gc=False):
    """One message of a conversation."""

    role: str
    content: Blocks


class MetadataFields(msgspec.Struct):
    """End user named by the client."""

    user_id: str | None = None


class MessagesFields(BodyFields, kw_only=True):
    """`/v1/messages`."""

    messages: list[TurnFields]
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    system: Blocks | None = None
    stream: bool | None = None
    metadata: MetadataFields | None = None
    tools: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT

    @property
    def end_user(self) -> str | None:
        """End user in the metadata."""
        return self.metadata.user_id if self.metadata is not None else None


class CountTokensFields(ModelOnly):
    """`/v1/messages/count_tokens`: only the model is needed to find a replica."""


# -- forms ------------------------------------------------------------------------------------------------


class FormFields(msgspec.Struct):
    """Form with a file; the gateway reads only the model's name."""

    file: bytes
    model: str
