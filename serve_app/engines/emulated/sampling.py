"""The ranges of sampling parameters, checked and refused as vLLM does.

The text of answers is a placeholder, so that most of these parameters change nothing. What would change an
answer visibly and is not emulated is refused.
"""

import math

from serve_app.engines.emulated.bodies import GeneratingBody
from serve_app.engines.emulated.content.constraints import is_given
from serve_app.engines.emulated.errors import ApiError, invalid, not_emulated
from serve_app.engines.emulated.text import VOCABULARY

# Below this temperature vLLM samples greedily.
_GREEDY = 1e-5
# vLLM's default for `--max-logprobs`.
_MAX_LOGPROBS = 20
_NOT_EMULATED = (
    "use_beam_search",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "prompt_logprobs",
    "logprob_token_ids",
    "truncate_prompt_tokens",
    "repetition_detection",
    "prompt_embeds",
    "suffix",
)
# What a client writes to say that it does not want one of them.
_UNWANTED = {b"false", b"[]", b'""'}


def check_sampling(body: GeneratingBody, choices: int) -> None:
    """Refuse parameters out of their range."""
    # In one expression: most requests have none of them, and a loop would cost them a microsecond.
    if (
        body.use_beam_search
        or body.return_token_ids
        or body.return_tokens_as_token_ids
        or body.prompt_logprobs
        or body.logprob_token_ids
        or body.truncate_prompt_tokens
        or body.repetition_detection
        or body.prompt_embeds
        or body.suffix
    ):
        _refuse_not_emulated(body)
    _check_penalties(body)
    _check_distribution(body)
    if choices > 1 and body.temperature is not None and body.temperature < _GREEDY:
        raise invalid(f"n must be 1 when using greedy sampling, got {choices}.")
    _check_words(body)
    if body.stop_token_ids or body.logit_bias or body.allowed_token_ids is not None:
        _check_token_ids(body)


def checked_logprobs(count: int, param: str) -> int:
    """The alternatives to name per token; -1 asks for the whole vocabulary, which exceeds the limit."""
    if count < -1:
        raise invalid(f"`{param}` must be a positive value or -1.", param=param, value=count)
    count = VOCABULARY if count == -1 else count
    if count > _MAX_LOGPROBS:
        raise invalid(
            f"Requested sample logprobs of {count}, which is greater than max allowed: {_MAX_LOGPROBS}",
            param="logprobs",
            value=count,
        )
    return count


def _refuse_not_emulated(body: GeneratingBody) -> None:
    for name in _NOT_EMULATED:
        raw = getattr(body, name)
        if is_given(raw) and bytes(raw) not in _UNWANTED:
            raise not_emulated(name)


def _check_penalties(body: GeneratingBody) -> None:
    presence, frequency = body.presence_penalty, body.frequency_penalty
    repetition = body.repetition_penalty
    if presence is not None and not -2.0 <= presence <= 2.0:
        raise invalid(f"presence_penalty must be in [-2, 2], got {presence}.")
    if frequency is not None and not -2.0 <= frequency <= 2.0:
        raise invalid(f"frequency_penalty must be in [-2, 2], got {frequency}.")
    if repetition is None:
        return
    if not math.isfinite(repetition):
        raise invalid(f"repetition_penalty must be a finite number, got {repetition}.")
    if repetition <= 0.0:
        raise invalid(f"repetition_penalty must be greater than zero, got {repetition}.")


def _check_distribution(body: GeneratingBody) -> None:
    if body.temperature is not None and not 0.0 <= body.temperature <= 2.0:
        raise _temperature(body.temperature)
    if body.top_p is not None and not 0.0 < body.top_p <= 1.0:
        raise invalid(f"top_p must be in (0, 1], got {body.top_p}.", param="top_p", value=body.top_p)
    if body.top_k is not None and body.top_k < -1:
        raise invalid(f"top_k must be 0 (disable), or at least 1, got {body.top_k}.")
    if body.min_p is not None and not 0.0 <= body.min_p <= 1.0:
        raise invalid(f"min_p must be in [0, 1], got {body.min_p}.")


def _temperature(value: float) -> ApiError:
    expected = "in [0, 2]" if value > 0 else "non-negative"
    if not math.isfinite(value):
        expected = "a finite number"
    return invalid(f"temperature must be {expected}, got {value}.", param="temperature", value=value)


def _check_words(body: GeneratingBody) -> None:
    if body.stop == "" or (isinstance(body.stop, list) and "" in body.stop):
        raise invalid("stop cannot contain an empty string.")
    if body.bad_words and "" in body.bad_words:
        raise invalid(f"bad_words cannot contain an empty string. Got bad_words={body.bad_words}")


def _check_token_ids(body: GeneratingBody) -> None:
    unknown = _beyond_vocabulary(body.stop_token_ids or ())
    if unknown:
        raise _out_of_vocabulary("stop_token_ids", unknown)
    try:
        biased = [int(token) for token in body.logit_bias or ()]
    except ValueError:
        keys = [token for token in body.logit_bias or () if not token.lstrip("+-").isdecimal()]
        raise invalid(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {keys!r}",
            param="logit_bias",
            value=keys,
        ) from None
    if unknown := _beyond_vocabulary(biased):
        raise _out_of_vocabulary("logit_bias", unknown)
    allowed = body.allowed_token_ids
    if allowed is None:
        return
    if not allowed:
        raise invalid("allowed_token_ids is not None and empty!", param="allowed_token_ids", value=allowed)
    if unknown := _beyond_vocabulary(allowed):
        raise invalid(
            "allowed_token_ids contains out-of-vocab token id!", param="allowed_token_ids", value=unknown
        )


def _beyond_vocabulary(token_ids: list[int] | tuple[int, ...]) -> list[int]:
    return [token for token in token_ids if not 0 <= token < VOCABULARY]


def _out_of_vocabulary(param: str, unknown: list[int]) -> ApiError:
    return invalid(
        f"token_id(s) {unknown} in {param} contain out-of-vocab token ids. Vocabulary size: {VOCABULARY}",
        param=param,
        value=unknown,
    )
