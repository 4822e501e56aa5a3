"""The measuring of a prompt in a body: size and kind of text, without a tokenizer.

Only text counts as text: images, sounds and files are counted as items, and tool definitions, documents and
response schemas are measured as the raw JSON that they arrive as. Token ids are exact. Fields that are not
known here are counted by `uncounted`.
"""

from collections.abc import Iterable

import msgspec

from serve_app.request import PromptShape, TextCategory
from serve_app.routing.estimation.text_category import classify
from serve_app.serving.gateway.request.bodies import (
    ABSENT,
    ChatFields,
    CompletionFields,
    Content,
    EmbeddingFields,
    InputItem,
    MessageFields,
    PartFields,
    Prompt,
    ResponsesFields,
)
from serve_app.serving.gateway.request.utf8 import Utf8

_NULL = b"null"
# Templates write roles; those that there are belong to what a message adds to a prompt.
_ROLE_CHARACTERS = 32
_MEDIA_TYPES = frozenset(
    {
        *("image_url", "input_image", "image_pil", "image_embeds"),
        *("input_audio", "audio_url", "audio_embeds", "video_url"),
        *("input_video", "file", "input_file"),
    }
)


class PromptMeasure:
    """Collects the pieces of one prompt.

    Attributes:
        texts: what the model reads as text.
        utf8: of the texts, as far as it has been made.
        media_bytes: of the JSON of images, sounds and files, as far as that is known.
    """

    __slots__ = ("media_bytes", "media_items", "texts", "tool_bytes", "utf8")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.utf8 = Utf8()
        self.media_items = self.media_bytes = 0
        self.tool_bytes = 0

    def add_content(self, content: Content) -> None:
        """A text, or parts."""
        if content is None:
            return
        if isinstance(content, str):
            self.texts.append(content)
        else:
            for part in content:
                self.add_part(part)

    def add_part(self, part: str | PartFields) -> None:
        """A text, or something else."""
        if isinstance(part, str):
            self.texts.append(part)
            return
        # All that is there: which of them an engine reads depends on a type that clients choose.
        texts = [text for text in (part.text, part.refusal, part.thinking) if text is not None]
        self.texts += texts
        if not texts or part.type in _MEDIA_TYPES:
            self.media_items += 1
            self.media_bytes += sum(len(memoryview(field)) for field in part.media)

    def add_raw(self, *pieces: msgspec.Raw) -> None:
        """Count definitions by the bytes of their JSON."""
        for piece in pieces:
            if piece is ABSENT:
                continue
            view = memoryview(piece)
            if view and view != _NULL:
                self.tool_bytes += len(view)

    def add_text(self, *pieces: msgspec.Raw) -> None:
        """Count a text as such, and anything else by the bytes of its JSON."""
        for piece in pieces:
            if bytes(memoryview(piece)[:1]) == b'"':
                self.texts.append(msgspec.json.decode(piece, type=str))
            else:
                self.add_raw(piece)

    def add_messages(self, messages: Iterable[MessageFields]) -> None:
        """Messages of a chat."""
        for message in messages:
            if message.role is not None and len(message.role) > _ROLE_CHARACTERS:
                self.texts.append(message.role)
            self.add_content(message.content)
            if not message.is_plain:
                self.add_text(message.reasoning, message.reasoning_content)
                self.add_raw(message.tool_calls, message.function_call)

    def add_items(self, items: Iterable[InputItem]) -> None:
        """Items of a Responses input."""
        for item in items:
            if item.role is not None and len(item.role) > _ROLE_CHARACTERS:
                self.texts.append(item.role)
            self.add_content(item.content)
            if item.arguments is not None:
                self.tool_bytes += len(item.arguments)
            if isinstance(item.output, PartFields):
                self.add_part(item.output)
            else:
                self.add_content(item.output)
            self.add_content(list(item.summary) if item.summary else None)

    def unread_bytes(self, body: bytes) -> int:
        """What of a body's length is certainly no text: media, and what JSON adds that is ASCII alone."""
        return self.media_bytes + (self.utf8.escape_bytes() if body.isascii() else 0)

    def shape(self, *, messages: int = 0, prompts: int = 1, prompt_tokens: int | None = None) -> PromptShape:
        """All that was collected."""
        text: str | bytes = "".join(self.texts)
        if not text.isascii():
            text = b"".join([self.utf8.of(each) for each in self.texts])
        return PromptShape(
            text_bytes=len(text),
            category=classify(text) if text else TextCategory.PROSE,
            messages=messages,
            tool_bytes=self.tool_bytes,
            media_items=self.media_items,
            prompt_tokens=prompt_tokens,
            prompts=prompts,
        )


def chat_shape(body: ChatFields, measure: PromptMeasure) -> PromptShape:
    """The prompt of a chat completion."""
    measure.add_messages(body.messages)
    measure.add_raw(body.tools, body.functions, body.documents, body.response_format)
    return measure.shape(messages=len(body.messages))


def completion_shape(body: CompletionFields) -> PromptShape:
    """The prompt or prompts of a completion."""
    measure = PromptMeasure()
    if body.suffix:
        measure.texts.append(body.suffix)
    measure.add_raw(body.response_format)
    if memoryview(body.prompt_embeds):
        measure.media_items += 1
    return _prompts_shape(measure, body.prompt if body.prompt is not None else "")


def responses_shape(body: ResponsesFields, measure: PromptMeasure) -> PromptShape:
    """The input of a Responses request; its items are its messages."""
    messages = 1
    if isinstance(body.input, str):
        measure.texts.append(body.input)
    else:
        messages = len(body.input)
        measure.add_items(body.input)
    if body.instructions:
        messages += 1
        measure.texts.append(body.instructions)
    measure.add_raw(body.tools, body.text)
    return measure.shape(messages=messages)


def embedding_shape(body: EmbeddingFields) -> PromptShape:
    """The text or texts of an embedding."""
    measure = PromptMeasure()
    if body.messages is not None:
        measure.add_messages(body.messages)
        return measure.shape(messages=len(body.messages))
    return _prompts_shape(measure, body.input if body.input is not None else "")


def _prompts_shape(measure: PromptMeasure, prompt: Prompt) -> PromptShape:
    """One text, several texts, the ids of one prompt, or the ids of several."""
    if isinstance(prompt, str):
        measure.texts.append(prompt)
        return measure.shape()
    if prompt and isinstance(prompt[0], int):
        return measure.shape(prompt_tokens=len(prompt))
    ids = 0
    for one in prompt:
        if isinstance(one, str):
            measure.texts.append(one)
        elif isinstance(one, list):
            ids += len(one)
    only_ids = ids > 0 and not measure.texts
    return measure.shape(prompts=max(1, len(prompt)), prompt_tokens=ids if only_ids else None)
