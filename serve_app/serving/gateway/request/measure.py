"""Measurement of the prompt in a body, without a tokenizer: its size, its kind of text and its prefix hashes.

Images, audio and files are counted as items. Tool definitions, documents and response schemas are measured by
the bytes of their raw JSON. Token ids are exact.

Chat templates receive whole messages and further fields, and only the engine knows what a field adds to a
prompt. So every other field counts by the bytes of its JSON unless it is known to be inert (`_INERT`). That
takes two more passes over the body, which run only if much of the body is unexplained: more than the quotes,
names and escapes around the measured parts. Media are excluded from that comparison, and an ASCII-only body
is compared as if its texts were in UTF-8.

Prefix hashes identify prompts with a common beginning by leading blocks. The text of a prompt is joined in
the order of chat templates: tool definitions, then the messages with their roles, instructions first. It is
cut at the ends of `core.routing.prefix`, and each hash covers all text before its end. A request that
continues another one has the hashes of that one and more. A partial last block has no hash, because only a
repetition would match it.

A hash also covers the model's name (an adapter has its own cache), the kind of prompt, the client's
`cache_salt`, and the tenant if configured. An image or audio ends the comparison, because its content is not
read. All gateways compute the same hashes, and a hash reveals nothing of the text.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any

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
    EmbeddingFields,
    InputItem,
    MessageFields,
    MessagesFields,
    PartFields,
    Prompts,
    ResponsesFields,
)

_NULL = b"null"
# Bytes of JSON that certainly count as a token, for an element that may be a token id.
_ID_BYTES = 4


def json_bytes(data: bytes) -> int:
    """Return the bytes by which JSON counts: short token ids in it count as much as longer ones."""
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
# Separators before messages of the common roles.
_HEADS = {role: f"\0{role}\0".encode() for role in ("system", "developer", "user", "assistant", "tool")}
# Size of a token id in the hashed bytes.
_BLOCK_ID_BYTES = 8

# A text in UTF-8. ASCII texts remain strings, because their size is known and copies of long ones take time.
_Utf8 = str | bytes


def _utf8(text: str) -> _Utf8:
    return text if text.isascii() else text.encode()


class Prompt(msgspec.Struct):
    """Parts of one prompt, collected in one pass over its body, for its size and for its prefix hashes.

    Each text is encoded at most once for both, because encoding costs about as much as decoding it did.

    Attributes:
        kind: prompts of different kinds never match; empty for prompts without hashes.
        salt: the client's `cache_salt`.
        texts: texts that the model reads, in UTF-8.
        pieces: texts, roles and definitions to hash, in the order in which the model reads them.
        end: number of pieces before the first part that is not text; None if all are text.
        ids: the prompt as token ids, instead of pieces.
        media_bytes: bytes of the JSON of images, audio and files, as far as known.
    """

    kind: bytes = b""
    salt: str | None = None
    texts: list[_Utf8] = msgspec.field(default_factory=list)
    pieces: list[_Utf8] = msgspec.field(default_factory=list)
    end: int | None = None
    ids: Sequence[int] = ()
    messages: int = 0
    prompts: int = 1
    prompt_tokens: int | None = None
    tool_bytes: int = 0
    media_items: int = 0
    media_bytes: int = 0

    def begin(self, role: str) -> None:
        """Add a role to hash, which also marks the end of the previous message."""
        self.pieces.append(_HEADS.get(role) or f"\0{role}\0")

    def add_piece(self, text: _Utf8 | None) -> None:
        """Add a text to hash; None stands for a part that is not text."""
        if text is not None:
            self.pieces.append(text)
        elif self.end is None:
            self.end = len(self.pieces)

    def add_content(
        self, content: str | Iterable[str | PartFields] | None, *, is_hashed: bool = True
    ) -> None:
        """Add a text or a list of parts."""
        for part in [content] if isinstance(content, str) else content or ():
            text = self._measure(part)
            if is_hashed:
                self.add_piece(text)

    def _measure(self, part: str | PartFields) -> _Utf8 | None:
        """Measure a text or another part, and return the text to hash; None for a part without text."""
        if isinstance(part, str):
            text = _utf8(part)
            self.texts.append(text)
            return text
        # All texts count, because the engine selects by a type that clients choose.
        texts = [_utf8(text) for text in (part.text, part.refusal, part.thinking) if text is not None]
        self.texts += texts
        if not texts or part.type in _MEDIA_TYPES:
            self.media_items += 1
            self.media_bytes += sum(len(memoryview(field)) for field in part.media)
        # An empty refusal is not hashed. Gateways of other versions must compute the same hashes.
        if part.text is None and not part.refusal:
            return None if part.thinking is None else texts[-1]
        return texts[0]

    def add_raw(self, *values: msgspec.Raw, is_hashed: bool = True) -> None:
        """Add definitions by the bytes of their JSON."""
        for value in values:
            if value is not ABSENT and (data := bytes(value)) and data != _NULL:
                self.tool_bytes += json_bytes(data)
                if is_hashed:
                    self.pieces += (b"\0", data)

    def add_message(self, role: str, content: str | Iterable[str | PartFields] | None) -> None:
        """Add a message."""
        if len(role) > _ROLE_CHARACTERS:
            self.texts.append(_utf8(role))
        if content is None:
            return
        self.begin(role)
        if isinstance(content, str):
            # As `add_content` does it, without calls: this is most messages.
            text = _utf8(content)
            self.texts.append(text)
            self.pieces.append(text)
        else:
            self.add_content(content)

    def add_messages(self, messages: Sequence[MessageFields]) -> None:
        """Add the messages of a chat."""
        self.messages = len(messages)
        for message in messages:
            if message.is_plain:
                self.add_message(message.role or "", message.content)
                continue
            texts: list[_Utf8] = []
            for value in (message.reasoning, message.reasoning_content):
                if (data := bytes(value))[:1] == b'"':
                    self.pieces += (b"\0", data)
                    texts.append(_utf8(msgspec.json.decode(data, type=str)))
                else:
                    self.add_raw(value)
            self.add_message(message.role or "", message.content)
            self.texts += texts
            self.add_raw(message.tool_calls, message.function_call)

    def add_prompts(self, prompts: Prompts) -> None:
        """Measure one text, several texts, or the token ids of one or several prompts."""
        if isinstance(prompts, str):
            self.texts.append(_utf8(prompts))
            return
        is_one = bool(prompts) and isinstance(prompts[0], int)
        if is_one and set(map(type, prompts)) == {int}:
            ids = len(prompts)
        else:
            ids = 0
            for one in prompts:
                if isinstance(one, str):
                    self.texts.append(_utf8(one))
                else:
                    ids += len(one) if isinstance(one, list) else 1
        self.prompts = 1 if is_one else max(1, len(prompts))
        if ids and not (self.texts or self.media_items):
            self.prompt_tokens = ids + self.tool_bytes // _ID_BYTES
        else:
            self.tool_bytes += _ID_BYTES * ids

    def shape(self, body: bytes, fields: BodyFields) -> PromptShape:
        """Return the size of all added parts, and of other fields of a chat.

        Args:
            body: an object that was parsed as `fields`.
        """
        strings = [text for text in self.texts if isinstance(text, str)]
        if len(strings) == len(self.texts):
            text: _Utf8 = "".join(strings)
        else:
            text = b"".join([text if isinstance(text, bytes) else text.encode() for text in self.texts])
        byte_classes, category = measure_text(text)
        # Only chat messages are rendered through a template, which may use further fields of the body.
        uncounted = self._uncounted_bytes(body, fields, text) if self.messages else 0
        return PromptShape(
            text_bytes=len(text),
            category=category,
            byte_classes=byte_classes,
            messages=self.messages,
            tool_bytes=self.tool_bytes + uncounted,
            media_items=self.media_items,
            prompt_tokens=self.prompt_tokens,
            prompts=self.prompts,
        )

    def _uncounted_bytes(self, body: bytes, fields: BodyFields, text: _Utf8) -> int:
        """Return the bytes of a request's fields that are not measured yet."""
        explained = len(text) + self.tool_bytes + _MESSAGE_BYTES * self.messages + _ORDINARY_BYTES
        if _is_ordinary(len(body), explained):
            return 0
        # Chats are rare at the endpoint for embeddings, so they are always searched.
        escaped = escape_bytes(text) if isinstance(text, bytes) and body.isascii() else 0
        if self.kind and _is_ordinary(len(body) - self.media_bytes - escaped, explained):
            return 0
        raw, names = _body_decoder.decode(body), fields.__struct_fields__
        found = _bytes_besides(raw, _INERT.union(names))
        for name, inert in _INERT_IN.items():
            if name in raw and name in names:
                found += sum(_bytes_besides(each, inert) for each in _objects(raw[name]))
        return found

    def prefix_hashes(self, *, model: str, tenant: str = "") -> tuple[int, ...]:
        """Return the 64-bit hashes of the leading blocks, longest last; empty if no block is full.

        Hashes are isolated by tenant, unless it is empty.
        """
        if self.ids:
            bytes_per_token = _BLOCK_ID_BYTES
            try:
                data = array("q", self.ids[: BLOCK_ENDS[-1]]).tobytes()
            except (OverflowError, TypeError):  # ids outside any vocabulary; the engine will reject them
                return ()
        else:
            bytes_per_token = BYTES_PER_TOKEN
            data = _beginning(self.pieces[: self.end], BLOCK_ENDS[-1] * bytes_per_token)
        if len(data) < BLOCK_ENDS[0] * bytes_per_token:
            return ()
        hasher = blake3(key=_key(self.kind, model, self.salt or "", tenant))
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


def _beginning(pieces: Iterable[_Utf8], size: int) -> bytes:
    """Return the pieces as one, at least up to this size."""
    found: list[bytes] = []
    for piece in pieces:
        found.append(piece if isinstance(piece, bytes) else piece[:size].encode())
        size -= len(piece)
        if size <= 0:
            break
    return b"".join(found)


def chat_prompt(body: ChatFields) -> Prompt:
    """Return the prompt of a chat completion."""
    prompt = Prompt(b"chat", body.cache_salt)
    prompt.add_raw(body.tools, body.functions, body.documents)
    prompt.add_raw(body.response_format, body.kv_transfer_params, is_hashed=False)
    prompt.add_messages(body.messages)
    return prompt


def completion_prompt(body: CompletionFields) -> Prompt:
    """Return the prompt or prompts of a completion; several have no beginning in common."""
    prompt = Prompt(b"text", body.cache_salt)
    if body.suffix:
        prompt.texts.append(_utf8(body.suffix))
    prompt.add_raw(body.response_format, body.kv_transfer_params, is_hashed=False)
    if size := len(memoryview(body.prompt_embeds)):
        prompt.media_items += math.ceil(size / _EMBEDS_BYTES)
    one: Any = body.prompt if body.prompt is not None else ""
    prompt.add_prompts(one)
    if isinstance(one, list) and len(one) == 1 and not isinstance(one[0], int):
        one = one[0]
    if isinstance(one, str):
        prompt.pieces = prompt.texts[-1:]
    elif one and isinstance(one[0], int):
        prompt.kind, prompt.ids = b"ids", one
    return prompt


def responses_prompt(body: ResponsesFields) -> Prompt:
    """Return the prompt of a Responses request; the items of its input count as messages."""
    prompt = Prompt(b"responses", body.cache_salt)
    if body.previous_response_id:
        # It begins with the conversation stored by the engine, which is unknown here.
        prompt.end = 0
    prompt.add_raw(body.tools)
    prompt.add_raw(body.text, body.kv_transfer_params, is_hashed=False)
    instructions = _utf8(body.instructions or "")
    if body.instructions is not None:
        prompt.begin("system")
        prompt.pieces.append(instructions)
    if isinstance(body.input, str):
        prompt.messages = 1
        prompt.add_message("user", body.input)
    else:
        prompt.messages = len(body.input)
        for item in body.input:
            _add_item(prompt, item)
    if instructions:
        prompt.messages += 1
        prompt.texts.append(instructions)
    return prompt


def _add_item(prompt: Prompt, item: InputItem) -> None:
    prompt.add_message(item.role or "", item.content)
    if item.arguments is not None:
        prompt.tool_bytes += len(item.arguments)
        prompt.begin("call")
        prompt.pieces.append(item.arguments)
    prompt.add_message("output", [item.output] if isinstance(item.output, PartFields) else item.output)
    prompt.add_content(item.summary, is_hashed=False)


def embedding_prompt(body: EmbeddingFields) -> Prompt:
    """Return the prompt or prompts of an embedding, which have no hashes."""
    prompt = Prompt(end=0)
    if body.messages is None:
        prompt.add_prompts(body.input if body.input is not None else "")
        return prompt
    prompt.add_messages(body.messages)
    if body.input is not None:
        # The engine chooses one of the two.
        prompt.tool_bytes += json_bytes(msgspec.json.encode(body.input))
    return prompt


# -- Anthropic's Messages ---------------------------------------------------------------------------------

# vLLM converts Messages to a chat: the system text first, tool results as separate messages, thinking as
# reasoning. A system text with this prefix differs between requests; vLLM drops it, and so does this module.
_BILLING = "x-anthropic-billing-header"
_MEDIA = frozenset({"image", "document"})
_MAY_BE_EMPTY = frozenset({"redacted_thinking", "tool_result", "tool_reference"})


def messages_prompt(body: MessagesFields) -> Prompt:
    """Return the prompt of a conversation in Anthropic's Messages API."""
    prompt = Prompt(b"messages", body.cache_salt, messages=len(body.messages) + (body.system is not None))
    prompt.add_raw(body.tools)
    prompt.add_raw(body.output_config, is_hashed=False)
    prompt.begin("system")
    for block in _blocks_of(body.system):
        _add_block(prompt, block, in_system=True)
    for message in body.messages:
        prompt.begin(message.role)
        for block in _blocks_of(message.content):
            prompt.messages += block.type == "tool_result"
            _add_block(prompt, block)
    return prompt


def _add_block(prompt: Prompt, block: BlockFields, *, in_system: bool = False) -> None:
    """Add all parts of a block, because the engine selects by a type that clients choose."""
    texts = [_utf8(text) for text in (block.text, block.thinking) if text is not None]
    prompt.texts += texts
    prompt.add_raw(block.input, is_hashed=not in_system)
    prompt.add_raw(block.tool, is_hashed=False)
    if not in_system:
        prompt.begin(block.name or block.type or "")
    if block.input is ABSENT and (in_system or block.content is None):
        prompt.add_piece(texts[0] if texts else None)
    prompt.add_content(block.content, is_hashed=not in_system)
    is_empty = not texts and block.content is None and block.input is ABSENT and block.tool is ABSENT
    if block.type in _MEDIA or (is_empty and block.type not in _MAY_BE_EMPTY):
        prompt.media_items += 1
        prompt.media_bytes += len(memoryview(block.source))


def _blocks_of(content: Blocks | None) -> Iterator[BlockFields]:
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


def _is_ordinary(size: int, explained: int) -> bool:
    return size - explained <= size // _ORDINARY_SHARE


# Length of an escaped character in ASCII-only JSON, such as \u00e9; above U+FFFF there are two.
_ESCAPED_BYTES = 6
# Thresholds of UTF-8 bytes: non-ASCII characters, and the first byte of each.
_NON_ASCII, _FIRST = 0x80, 0xC0


def escape_bytes(text: bytes) -> int:
    """Return a lower bound of the bytes that ASCII-only JSON adds to a text in UTF-8."""
    data = np.frombuffer(text, np.uint8)
    escaped = _ESCAPED_BYTES * int(np.count_nonzero(data >= _FIRST))
    return escaped - int(np.count_nonzero(data >= _NON_ASCII))


def _bytes_besides(fields: Mapping[str, msgspec.Raw], inert: frozenset[str]) -> int:
    return sum(len(name) + json_bytes(bytes(fields[name])) for name in fields.keys() - inert)


def _objects(value: msgspec.Raw) -> Iterable[_Fields]:
    try:
        return _messages_decoder.decode(value)
    except msgspec.ValidationError:
        # An embedding may have texts or token ids in place of items.
        return ()


# -- prefix hashes ----------------------------------------------------------------------------------------


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
