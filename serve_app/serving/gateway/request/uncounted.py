"""What a body says besides the fields that `shape` measures, and that an engine may read to its model.

Chat templates are handed whole messages, and names for them beside: what a field adds to a prompt is known to
the engine alone. So every field counts, by the bytes of its JSON, unless it is known to be inert. To look at
all fields costs two more passes over the body. They are taken only where much of the body is unexplained:
more than the quotes, names and escapes that belong to what was measured. Media do not count as part of a body
there, and one of ASCII alone counts as if its texts were written in UTF-8.
"""

from collections.abc import Iterable, Mapping

import msgspec

from serve_app.request import PromptShape
from serve_app.serving.gateway.request.bodies import BodyFields, InputItem, MessageFields
from serve_app.serving.gateway.request.shape import PromptMeasure

# What is unexplained in an ordinary body: settings of one request, `role` and quotes of each message, escapes
# of line ends and quotes in code. What hides below adds an eighth to a prompt at most.
_ORDINARY_BYTES = 512
_MESSAGE_BYTES = 64
_ORDINARY_SHARE = 8

# They set how an engine works, or name something. What a body's type decodes is measured, or inert as well.
_INERT_NAMES = """
    model stream stream_options user safety_identifier service_tier priority cache_salt prompt_cache_key
    prompt_cache_retention metadata store include background previous_response_id truncation request_id
    session_id max_tokens max_completion_tokens max_output_tokens max_tool_calls min_tokens
    thinking_token_budget n best_of temperature top_p top_k min_p presence_penalty frequency_penalty
    repetition_penalty repetition_detection length_penalty seed stop stop_token_ids bad_words logit_bias
    logprobs top_logprobs prompt_logprobs logprob_token_ids allowed_token_ids logits_processors echo
    use_beam_search ignore_eos skip_special_tokens spaces_between_special_tokens
    include_stop_str_in_output truncate_prompt_tokens truncation_side add_generation_prompt
    continue_final_message add_special_tokens media_io_kwargs mm_processor_kwargs mm_payload
    return_mm_kwargs structured_outputs guided_json guided_regex guided_choice guided_grammar
    kv_transfer_params ec_transfer_params vllm_xargs stream_interval watermarking
    return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text reasoning_effort
    include_reasoning parallel_tool_calls modalities audio prediction web_search_options encoding_format
    thinking stop_sequences context_management container mcp_servers
    top_n max_tokens_per_query max_tokens_per_doc input_type embedding_types output_dimension truncate
    padding task use_activation dimensions embed_dtype endianness normalize
    enable_response_messages chat_template_content_format
"""
_INERT = frozenset(_INERT_NAMES.split())
# `encrypted_content` is for the server that wrote it. Some templates write the ids of tool calls.
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
    """Bytes of the fields of a request that its shape does not have.

    Args:
        body: parsed before as `body_type`, so known to be an object.
        measure: of which its shape was made.
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
    return sum(len(name) + len(memoryview(fields[name])) for name in fields.keys() - inert)


def _objects(value: msgspec.Raw) -> Iterable[_Fields]:
    try:
        return _messages_decoder.decode(value)
    except msgspec.ValidationError:
        # A text, or texts or token ids, which an embedding has in place of items.
        return ()
