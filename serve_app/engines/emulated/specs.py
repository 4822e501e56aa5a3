"""What each endpoint's request asks of the text of its answers; None when some text will do."""

import zlib

import msgspec

from serve_app.engines.emulated.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GeneratingBody,
    ResponsesBody,
    ResponsesText,
)
from serve_app.engines.emulated.content.constraints import (
    ANY_OBJECT,
    is_given,
    json_constraint,
    read_constraint,
    read_raw,
)
from serve_app.engines.emulated.content.spec import CallForm, Constraint, OutputSpec, ToolCall
from serve_app.engines.emulated.content.tools import chat_call, responses_call
from serve_app.engines.emulated.errors import invalid, not_emulated
from serve_app.engines.emulated.sampling import checked_logprobs

_NOTHING = msgspec.Raw()


def chat_spec(body: ChatBody, raw: bytes) -> OutputSpec | None:
    """What a chat completion asks for."""
    if body.echo:
        raise not_emulated("echo")
    top = _chat_logprobs(body)
    call: ToolCall | None = None
    if body.tools or body.tool_choice:
        call = chat_call(body.tools, body.tool_choice, _last_words(body.messages))
    constraint = _constraint(body, call) if body.response_format or body.structured_outputs else None
    return _spec(body, raw, constraint=constraint, call=call, top_logprobs=top)


def completion_spec(body: CompletionBody, raw: bytes) -> OutputSpec | None:
    """What a text completion asks for."""
    constraint = _constraint(body, None) if body.response_format or body.structured_outputs else None
    top = None if body.logprobs is None else checked_logprobs(body.logprobs, "logprobs")
    return _spec(body, raw, constraint=constraint, top_logprobs=top, echo=_echo(body))


def responses_spec(body: ResponsesBody, raw: bytes, messages: list[ChatMessage]) -> OutputSpec | None:
    """What a request of the Responses API asks for."""
    if is_given(body.prompt):
        raise not_emulated("prompt")
    call = responses_call(body.tools, body.tool_choice, _last_words(messages))
    constraint = read_constraint(_NOTHING, body.structured_outputs)
    if is_given(body.text):
        wanted = read_raw(body.text, ResponsesText).format
        if wanted is not None and wanted.type != "text":
            if constraint is not None:
                raise invalid(
                    "Cannot specify both structured_outputs and text.format", param="structured_outputs"
                )
            constraint = ANY_OBJECT if wanted.schema is None else json_constraint(wanted.schema)
    top: int | None = None
    if body.include and "message.output_text.logprobs" in body.include:
        top = checked_logprobs(body.top_logprobs or 0, "top_logprobs")
    return _spec(body, raw, constraint=constraint, call=call, top_logprobs=top)


def _spec(
    body: GeneratingBody,
    raw: bytes,
    *,
    constraint: Constraint | None,
    call: ToolCall | None = None,
    top_logprobs: int | None = None,
    echo: tuple[str, ...] = (),
) -> OutputSpec | None:
    options = body.stream_options
    continuous = options is not None and bool(options.include_usage and options.continuous_usage_stats)
    asks = constraint is not None or call is not None or top_logprobs is not None
    if not (asks or body.stop or echo or continuous):
        return None
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return OutputSpec(
        # As in vLLM, -1 is no seed.
        seed=zlib.crc32(raw) if body.seed in {None, -1} else int(body.seed or 0),
        constraint=constraint,
        call=call,
        stop=stop,
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        top_logprobs=top_logprobs,
        echo=echo,
        continuous_usage=continuous,
    )


def _constraint(body: ChatBody | CompletionBody, call: ToolCall | None) -> Constraint | None:
    if call is not None and call.form is CallForm.NAMED and is_given(body.structured_outputs):
        raise invalid("You can only either use constraints for structured outputs or tools, not both.")
    return read_constraint(body.response_format, body.structured_outputs)


def _chat_logprobs(body: ChatBody) -> int | None:
    """Alternatives per token; None when no logprobs are wanted."""
    top = body.top_logprobs or 0
    if top < -1 or body.logprobs:
        checked = checked_logprobs(top, "top_logprobs")
        return checked if body.logprobs else None
    if top:
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    return None


def _echo(body: CompletionBody) -> tuple[str, ...]:
    """The texts of the prompts, where they are to be repeated before the answers."""
    if not body.echo:
        return ()
    if body.logprobs is not None:
        raise not_emulated("echo with logprobs")
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = tuple(prompt for prompt in prompts if isinstance(prompt, str))
    if len(texts) != len(prompts):
        raise not_emulated("echo of token ids")
    return texts


def _last_words(messages: list[ChatMessage]) -> str:
    """The text of the last message, when the user wrote it."""
    if not messages or messages[-1].role != "user":
        return ""
    content = messages[-1].content
    if isinstance(content, str):
        return content
    return " ".join(part.text for part in content or () if part.text)
