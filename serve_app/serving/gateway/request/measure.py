"""Measurement of the prompt in a body: size and kind of text, without a tokenizer.

Images, audio and files are counted as items. Tool definitions, documents and response schemas are measured by
the bytes of their raw JSON. Token ids are exact.

Chat templates receive whole messages and further fields, and only the engine knows what a field adds to a
prompt. So every other field counts by the bytes of its JSON unless it is known to be inert
(`uncounted_bytes`). That takes two more passes over the body, which run only if much of the body is
unexplained: more than the quotes, names and escapes around the measured parts. Media are excluded from that
comparison, and an ASCII-only body is compared as if its texts were in UTF-8.

Prefix hashes: identify prompts with a common beginning by leading blocks, without a tokenizer.

The text of a prompt is joined in the order of chat templates: tool definitions, then the messages with their
roles, instructions first. It is cut at the ends of `core.routing.prefix`, and each hash covers all text
before its end. A request that continues another one has the hashes of that one and more. A partial last block
has no hash, because only a repetition would match it.

A hash also covers the model's name (an adapter has its own cache), the kind of prompt, the client's
`cache_salt`, and the tenant if configured. An image or audio ends the comparison, because its content is not
read. All gateways compute the same hashes, and a hash reveals nothing of the text.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np
from blake3 import blake3

from serve_app.core.routing.estimation.byte_classes import measure_text
from serve_app.core.routing.prefix import BLOCK_ENDS, BYTES_PER_TOKEN
from serve_app.core.settings_base import INTERNAL, settings
from serve_app.request import PromptShape
from serve_app.serving.gateway.request.fields import (
    ABSENT,
    BlockFields,
    Blocks,
    BodyFields,
    ChatFields,
    CompletionFields,
    Content,
    EmbeddingFields,
    InputItem,
    MessageFields,
    MessagesFields,
    PartFields,
    Prompt,
    ResponsesFields,
)

# Length of an escaped character in ASCII-only JSON, such as \u00e9; above U+FFFF there are two.
_ESCAPED_BYTES = 6
# Thresholds of UTF-8 bytes: non-ASCII characters, and the first byte of each.
_NON_ASCII, _FIRST = 0x80, 0xC0


class Utf8:
    """Cache of the UTF-8 of one body's texts. The body must outlive it.

    Each text is encoded at most once, for the size of the prompt and for the hashes of its beginning. ASCII
    texts are not cached, because their size is known and a copy is cheap. Encoding other characters costs
    about as much as decoding them did.
    """

    __slots__ = ("_made",)

    def __init__(self) -> None:
        # Keyed by identity, which needs no hash of the text and is safe while the body lives.
        self._made: dict[int, bytes] = {}

    def of(self, text: str) -> bytes:
        """Return a text in UTF-8."""
        if text.isascii():
            return text.encode()
        made = self._made.get(id(text))
        if made is None:
            made = self._made[id(text)] = text.encode()
        return made

    def escape_bytes(self) -> int:
        """Return a lower bound of the bytes that ASCII-only JSON adds to the cached texts."""
        longer = 0
        for made in self._made.values():
            data = np.frombuffer(made, np.uint8)
            longer += _ESCAPED_BYTES * int(np.count_nonzero(data >= _FIRST))
            longer -= int(np.count_nonzero(data >= _NON_ASCII))
        return longer

    def known(self, text: str) -> str | bytes:
        """Return the UTF-8 of a text if it is cached, otherwise the text."""
        return self._made.get(id(text), text)


_NULL = b"null"
# Bytes of JSON that certainly count as a token, for an element that may be a token id.
_ID_BYTES = 4


def json_bytes(value: msgspec.Raw | memoryview | bytes) -> int:
    """Return the bytes by which JSON counts: short token ids in it count as much as longer ones."""
    data = bytes(value)
    return max(len(data), _ID_BYTES * (data.count(b",") + 1))


# Bytes of a completion's embeddings that count as one item: a thousand tokens of a small model, in 16 bits.
_EMBEDS_BYTES = 2_800_000
# Templates render roles; roles of ordinary length are part of the overhead of a message.
_ROLE_CHARACTERS = 32
_MEDIA_TYPES = frozenset(
    {
        *("image_url", "input_image", "image_pil", "image_embeds"),
        *("input_audio", "audio_url", "audio_embeds", "video_url"),
        *("input_video", "file", "input_file"),
    }
)


class PromptMeasure:
    """Accumulator for the parts of one prompt.

    Attributes:
        texts: texts that the model reads.
        utf8: cached UTF-8 of the texts.
        media_bytes: bytes of the JSON of images, audio and files, as far as known.
    """

    __slots__ = ("media_bytes", "media_items", "texts", "tool_bytes", "utf8")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.utf8 = Utf8()
        self.media_items = self.media_bytes = 0
        self.tool_bytes = 0

    def add_content(self, content: Content) -> None:
        """Add a text or a list of parts."""
        if isinstance(content, str):
            self.texts.append(content)
        elif content is not None:
            for part in content:
                self.add_part(part)

    def add_part(self, part: str | PartFields) -> None:
        """Add a text or another part."""
        if isinstance(part, str):
            self.texts.append(part)
            return
        # All texts count, because the engine selects by a type that clients choose.
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
                self.tool_bytes += json_bytes(view)

    def add_text(self, *pieces: msgspec.Raw) -> None:
        """Count strings as text, and other values by the bytes of their JSON."""
        for piece in pieces:
            if bytes(memoryview(piece)[:1]) == b'"':
                self.texts.append(msgspec.json.decode(piece, type=str))
            else:
                self.add_raw(piece)

    def add_messages(self, messages: Iterable[MessageFields]) -> None:
        """Add the messages of a chat."""
        for message in messages:
            if message.role is not None and len(message.role) > _ROLE_CHARACTERS:
                self.texts.append(message.role)
            self.add_content(message.content)
            if not message.is_plain:
                self.add_text(message.reasoning, message.reasoning_content)
                self.add_raw(message.tool_calls, message.function_call)

    def add_items(self, items: Iterable[InputItem]) -> None:
        """Add the items of a Responses input."""
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
        """Return the bytes of a body that are certainly no text: media, and escapes of an ASCII-only body."""
        return self.media_bytes + (self.utf8.escape_bytes() if body.isascii() else 0)

    def shape(self, *, messages: int = 0, prompts: int = 1, prompt_tokens: int | None = None) -> PromptShape:
        """Return the shape of all added parts."""
        text: str | bytes = "".join(self.texts)
        if not text.isascii():
            text = b"".join([self.utf8.of(each) for each in self.texts])
        measured = measure_text(text)
        return PromptShape(
            text_bytes=len(text),
            category=measured.category,
            byte_classes=measured.byte_classes,
            messages=messages,
            tool_bytes=self.tool_bytes,
            media_items=self.media_items,
            prompt_tokens=prompt_tokens,
            prompts=prompts,
        )


def chat_shape(body: ChatFields, measure: PromptMeasure) -> PromptShape:
    """Return the shape of a chat completion's prompt."""
    measure.add_messages(body.messages)
    measure.add_raw(body.tools, body.functions, body.documents, body.response_format)
    measure.add_raw(body.kv_transfer_params)
    return measure.shape(messages=len(body.messages))


def completion_shape(body: CompletionFields) -> PromptShape:
    """Return the shape of a completion's prompt or prompts."""
    measure = PromptMeasure()
    if body.suffix:
        measure.texts.append(body.suffix)
    measure.add_raw(body.response_format, body.kv_transfer_params)
    if size := len(memoryview(body.prompt_embeds)):
        measure.media_items += math.ceil(size / _EMBEDS_BYTES)
    return _prompts_shape(measure, body.prompt if body.prompt is not None else "")


def responses_shape(body: ResponsesFields, measure: PromptMeasure) -> PromptShape:
    """Return the shape of a Responses input; its items count as messages."""
    messages = 1
    if isinstance(body.input, str):
        measure.texts.append(body.input)
    else:
        messages = len(body.input)
        measure.add_items(body.input)
    if body.instructions:
        messages += 1
        measure.texts.append(body.instructions)
    measure.add_raw(body.tools, body.text, body.kv_transfer_params)
    return measure.shape(messages=messages)


def embedding_shape(body: EmbeddingFields) -> PromptShape:
    """Return the shape of an embedding's text or texts."""
    measure = PromptMeasure()
    if body.messages is not None:
        measure.add_messages(body.messages)
        if body.input is not None:
            # The engine chooses one of the two.
            measure.add_raw(msgspec.Raw(msgspec.json.encode(body.input)))
        return measure.shape(messages=len(body.messages))
    return _prompts_shape(measure, body.input if body.input is not None else "")


def _prompts_shape(measure: PromptMeasure, prompt: Prompt) -> PromptShape:
    """Return the shape of one text, several texts, or the token ids of one or several prompts."""
    if isinstance(prompt, str):
        measure.texts.append(prompt)
        return measure.shape()
    is_one = bool(prompt) and isinstance(prompt[0], int)
    if is_one and set(map(type, prompt)) == {int}:
        ids = len(prompt)
    else:
        ids = 0
        for one in prompt:
            if isinstance(one, str):
                measure.texts.append(one)
            else:
                ids += len(one) if isinstance(one, list) else 1
    prompts = 1 if is_one else max(1, len(prompt))
    if ids and not (measure.texts or measure.media_items):
        return measure.shape(prompts=prompts, prompt_tokens=ids + measure.tool_bytes // _ID_BYTES)
    measure.tool_bytes += _ID_BYTES * ids
    return measure.shape(prompts=prompts)


# -- Anthropic's Messages ---------------------------------------------------------------------------------

# vLLM converts Messages to a chat: the system text first, tool results as separate messages, thinking as
# reasoning. A system text with this prefix differs between requests; vLLM drops it, and so does this module.
_BILLING = "x-anthropic-billing-header"
_MEDIA = frozenset({"image", "document"})
_MAY_BE_EMPTY = frozenset({"redacted_thinking", "tool_result", "tool_reference"})


def messages_shape(body: MessagesFields, measure: PromptMeasure) -> PromptShape:
    """Return the shape of a conversation in Anthropic's Messages API."""
    results = 0
    for block in blocks_of(body.system):
        _add_block(measure, block)
    for message in body.messages:
        for block in blocks_of(message.content):
            results += block.type == "tool_result"
            _add_block(measure, block)
    measure.add_raw(body.tools, body.output_config)
    return measure.shape(messages=len(body.messages) + results + (body.system is not None))


def _add_block(measure: PromptMeasure, block: BlockFields) -> None:
    """Add all parts of a block, because the engine selects by a type that clients choose."""
    texts = [text for text in (block.text, block.thinking) if text is not None]
    measure.texts += texts
    measure.add_content(block.content)
    measure.add_raw(block.input, block.tool)
    is_empty = not texts and block.content is None and block.input is ABSENT and block.tool is ABSENT
    if block.type in _MEDIA or (is_empty and block.type not in _MAY_BE_EMPTY):
        measure.media_items += 1
        measure.media_bytes += len(memoryview(block.source))


def blocks_of(content: Blocks | None) -> Iterator[BlockFields]:
    """Yield the blocks of a message that belong to its prompt."""
    if isinstance(content, str):
        content = [BlockFields(type="text", text=content)]
    for block in content or ():
        if block.text is None or not block.text.startswith(_BILLING):
            yield block


# -- uncounted fields -------------------------------------------------------------------------------------

# Unexplained bytes of an ordinary body: sampling settings, `role` and quotes of each message, escapes of line
# ends and quotes in code. Below these limits, undetected fields add at most an eighth to a prompt.
_ORDINARY_BYTES = 512
_MESSAGE_BYTES = 64
_ORDINARY_SHARE = 8

# Fields that configure an engine or name something. Fields of the body's type are measured or inert as well.
_INERT_NAMES = """
    model stream stream_options user safety_identifier service_tier priority cache_salt prompt_cache_key
    prompt_cache_retention metadata store include background previous_response_id truncation request_id
    session_id max_tokens max_completion_tokens max_output_tokens max_tool_calls min_tokens
    thinking_token_budget n best_of temperature top_p top_k min_p presence_penalty frequency_penalty
    repetition_penalty repetition_detection length_penalty seed stop stop_token_ids bad_words logit_bias
    logprobs top_logprobs prompt_logprobs logprob_token_ids allowed_token_ids logits_processors echo
    use_beam_search ignore_eos skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output truncate_prompt_tokens truncation_side add_generation_prompt
    continue_final_message add_special_tokens return_mm_kwargs
    structured_outputs guided_json guided_regex guided_choice guided_grammar
    stream_interval watermarking
    return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text reasoning_effort
    include_reasoning parallel_tool_calls modalities audio encoding_format
    thinking stop_sequences context_management container
    top_n max_tokens_per_query max_tokens_per_doc input_type embedding_types output_dimension truncate
    padding task use_activation dimensions embed_dtype endianness normalize
    enable_response_messages chat_template_content_format
"""
_INERT = frozenset(_INERT_NAMES.split())
# `encrypted_content` is for the server that wrote it. Some templates write ids of tool calls, so these count.
_INERT_IN_MESSAGES = frozenset(["type", "status", "audio", "encrypted_content"])
_INERT_IN = {
    "messages": _INERT_IN_MESSAGES | frozenset(MessageFields.__struct_fields__),
    "input": _INERT_IN_MESSAGES | frozenset(InputItem.__struct_fields__),
}

_Fields = dict[str, msgspec.Raw]
_body_decoder = msgspec.json.Decoder(_Fields)
_messages_decoder = msgspec.json.Decoder(list[_Fields])


def uncounted_bytes(
    body: bytes, shape: PromptShape, body_type: type[BodyFields], measure: PromptMeasure | None
) -> int:
    """Return the bytes of a request's fields that its shape does not include.

    Args:
        body: an object that was parsed as `body_type`.
        measure: source of the shape.
    """
    explained = shape.text_bytes + shape.tool_bytes + _MESSAGE_BYTES * shape.messages + _ORDINARY_BYTES
    if _is_ordinary(len(body), explained):
        return 0
    if measure is not None and _is_ordinary(len(body) - measure.unread_bytes(body), explained):
        return 0
    fields = _body_decoder.decode(body)
    found = _bytes_besides(fields, _INERT.union(body_type.__struct_fields__))
    for name, inert in _INERT_IN.items():
        if name in fields and name in body_type.__struct_fields__:
            found += sum(_bytes_besides(each, inert) for each in _objects(fields[name]))
    return found


def _is_ordinary(size: int, explained: int) -> bool:
    return size - explained <= size // _ORDINARY_SHARE


def _bytes_besides(fields: Mapping[str, msgspec.Raw], inert: frozenset[str]) -> int:
    return sum(len(name) + json_bytes(fields[name]) for name in fields.keys() - inert)


def _objects(value: msgspec.Raw) -> Iterable[_Fields]:
    try:
        return _messages_decoder.decode(value)
    except msgspec.ValidationError:
        # An embedding may have texts or token ids in place of items.
        return ()


_BLOCK_ID_BYTES = 8
_MIN_BYTES, _MAX_BYTES = (end * BYTES_PER_TOKEN for end in (BLOCK_ENDS[0], BLOCK_ENDS[-1]))

# Separators before messages of the common roles.
_HEADS = {role: f"\0{role}\0".encode() for role in ("system", "developer", "user", "assistant", "tool")}


@settings
class PrefixSettings:
    """Prefix hashes that the gateway sends to the scheduler."""

    # Send hashes of prompt prefixes to the scheduler. Costs about 20 microseconds per 10 kB of text; without
    # it, requests are placed by load alone.
    enabled: Annotated[bool, INTERNAL] = True
    # Isolate tenants in prefix caches. Clients that share a cache can infer from the time to first token
    # whether another one has sent a text before. With this setting tenants share nothing, neither here nor in
    # the engines, which receive a `cache_salt` (supported by vLLM, maybe rejected by other servers). It costs
    # the cache hits on text that tenants have in common.
    per_tenant: bool = False


class Opening(msgspec.Struct, frozen=True):
    """Beginning of a prompt, as references into its parsed body; copied only when it is hashed.

    Attributes:
        kind: prompts of different kinds never match.
        pieces: texts in the order in which the model reads them.
        ids: the prompt as token ids, instead of text.
        salt: the client's `cache_salt`.
    """

    kind: bytes
    pieces: tuple[str | bytes, ...] = ()
    ids: Sequence[int] = ()
    salt: str = ""


NO_OPENING = Opening(b"")


def prefix_hashes(opening: Opening, *, model: str, tenant: str = "") -> tuple[int, ...]:
    """Return the 64-bit hashes of the leading blocks, longest last; empty if no block is full.

    Hashes are isolated by tenant, unless it is empty.
    """
    if opening.ids:
        try:
            data = array("q", opening.ids).tobytes()
        except (OverflowError, TypeError):  # ids outside any vocabulary; the engine will reject them
            return ()
        return _block_hashes(data, _BLOCK_ID_BYTES, _key(opening.kind, model, opening.salt, tenant))
    data = _joined(opening.pieces)
    if len(data) < _MIN_BYTES:
        return ()
    return _block_hashes(data, BYTES_PER_TOKEN, _key(opening.kind, model, opening.salt, tenant))


# Most requests repeat the arguments of a recent one.
@lru_cache(maxsize=256)
def _key(kind: bytes, *names: str) -> bytes:
    """Return the key that separates the hashes of different kinds, models, salts and tenants."""
    return blake3(_length_prefixed(kind, *(name.encode() for name in names))).digest()


def _length_prefixed(*parts: bytes) -> bytes:
    return b"".join([len(part).to_bytes(4, "big") + part for part in parts])


def engine_salt(tenant: str, client_salt: str) -> str:
    """Return the `cache_salt` that isolates a tenant in an engine; clients cannot reproduce another's."""
    both = _length_prefixed(tenant.encode(), client_salt.encode())
    return blake2b(both, digest_size=16).hexdigest()


def chat_opening(body: ChatFields, utf8: Utf8 | None = None) -> Opening:
    """Return the beginning of a chat."""
    pieces = OpeningPieces(utf8)
    pieces.add_raw(body.tools, body.functions, body.documents)
    pieces.add_messages(body.messages)
    return Opening(b"chat", tuple(pieces.found), salt=body.cache_salt or "")


def completion_opening(body: CompletionFields) -> Opening:
    """Return the beginning of a completion's prompt; several prompts have none in common."""
    prompt: object = body.prompt
    salt = body.cache_salt or ""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Opening(b"text", (prompt,), salt=salt)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return Opening(b"ids", ids=prompt[: BLOCK_ENDS[-1]], salt=salt)
    return Opening(b"several", salt=salt)


def responses_opening(body: ResponsesFields, utf8: Utf8 | None = None) -> Opening:
    """Return the beginning of a Responses request's input."""
    if body.previous_response_id:
        # It begins with the conversation stored by the engine, which is unknown here.
        return Opening(b"responses", salt=body.cache_salt or "")
    pieces = OpeningPieces(utf8)
    pieces.add_raw(body.tools)
    pieces.add("system", body.instructions)
    if isinstance(body.input, str):
        pieces.add("user", body.input)
    else:
        for item in body.input:
            pieces.add(item.role or "", item.content)
            pieces.add("call", item.arguments)
            pieces.add("output", [item.output] if isinstance(item.output, PartFields) else item.output)
    return Opening(b"responses", tuple(pieces.found), salt=body.cache_salt or "")


def messages_opening(body: MessagesFields, utf8: Utf8) -> Opening:
    """Return the beginning of a conversation in Anthropic's Messages API."""
    pieces = OpeningPieces(utf8)
    pieces.add_raw(body.tools)
    pieces.add("system", _parts_of(blocks_of(body.system)))
    for message in body.messages:
        pieces.add(message.role, "")
        for block in blocks_of(message.content):
            pieces.add_raw(block.input)
            content = _parts_of([block]) if block.content is None else block.content
            pieces.add(block.name or block.type or "", content)
    return Opening(b"messages", tuple(pieces.found), salt=body.cache_salt or "")


def _parts_of(blocks: Iterable[BlockFields]) -> Content:
    """Convert blocks to the parts of a chat message; blocks without text end the comparison as media."""
    return [PartFields(text=block.text, thinking=block.thinking) for block in blocks if block.input is ABSENT]


class OpeningPieces:
    """Accumulator for the text of a prompt, up to the first part that is not text."""

    __slots__ = ("_ended", "_utf8", "found")

    def __init__(self, utf8: Utf8 | None = None) -> None:
        self.found: list[str | bytes] = []
        self._utf8 = utf8 or Utf8()
        self._ended = False

    def add_messages(self, messages: Iterable[MessageFields]) -> None:
        """Add the messages of a chat."""
        for message in messages:
            if message.is_plain:
                self.add(message.role or "", message.content)
            else:
                self.add_raw(message.reasoning, message.reasoning_content)
                self.add(message.role or "", message.content)
                self.add_raw(message.tool_calls, message.function_call)
            if self._ended:
                return

    def add(self, role: str, content: Content) -> None:
        """Add a message; its role also marks the end of the previous one."""
        if content is None or self._ended:
            return
        self.found.append(_HEADS.get(role) or f"\0{role}\0")
        for part in [content] if isinstance(content, str) else content:
            text = part if isinstance(part, str) else _text_of(part)
            if text is None:
                self._ended = True
                return
            self.found.append(self._utf8.known(text))

    def add_raw(self, *values: msgspec.Raw) -> None:
        """Add definitions by the bytes of their JSON."""
        for value in values:
            if value is ABSENT:
                continue
            piece = bytes(value)
            if piece and piece != _NULL and not self._ended:
                self.found += ("\0", piece)


def _text_of(part: PartFields) -> str | None:
    return part.text if part.text is not None else part.refusal or part.thinking


def _joined(pieces: Iterable[str | bytes]) -> bytes:
    """Return the UTF-8 of the pieces, at least up to the last block end."""
    encoded: list[bytes] = []
    size = 0
    for piece in pieces:
        # A character has at least one byte.
        data = piece if isinstance(piece, bytes) else piece[:_MAX_BYTES].encode()
        encoded.append(data)
        size += len(data)
        if size >= _MAX_BYTES:
            break
    return b"".join(encoded)


def _block_hashes(data: bytes, bytes_per_token: int, key: bytes) -> tuple[int, ...]:
    hasher = blake3(key=key)
    view = memoryview(data)
    hashes, start = [], 0
    for tokens in BLOCK_ENDS:
        end = tokens * bytes_per_token
        if end > len(data):
            break
        hasher.update(view[start:end])
        hashes.append(int.from_bytes(hasher.digest(8), "big"))
        start = end
    return tuple(hashes)
