"""The start of the fit: coefficients from the timestamps, and usual proportions where these do not suffice.

The timestamps give the duration of a typical decode step and the pace of prefills. They do not give the
shares of base, sequences and context in a decode step of a saturated engine: its cache is full then, so all
three hardly vary. The proportions below are those of measured GPUs; the fit adjusts them to the data.
"""

from collections.abc import Sequence

import numpy as np

from serve_app.calibration.measurement import MeasuredRequest
from serve_app.calibration.measurements import CalibrationError
from serve_app.engine_model.step_time import StepTimeModel

# Per sequence, of the base of a decode step: 0.4 % for an 8B model on one RTX 4090, 1.2 % for a 70B model on
# four H100.
_SEQUENCE_SHARE = 0.005
# Per token of context: its KV entries (128 KiB) against 16 GB of weights, both read from the same memory.
_CONTEXT_SHARE = 5e-6
# Attention in a prefill, of its matrix products, at the mean prompt.
_PAIR_SHARE = 0.05
# Prefills share steps with decoding, so a prompt in a busy engine takes a little more than its own cost.
_OWN_PREFILL_SHARE = 0.9
# Preempted requests and those in a prefill burst decode slowly; the fastest quarter shows pure decode steps.
_TYPICAL_PERCENTILE = 25.0


def starting_point(requests: Sequence[MeasuredRequest]) -> StepTimeModel:
    """Rough coefficients, within a factor of about two.

    Raises:
        CalibrationError: no request generated two tokens, so there is no decode step.
    """
    decoding = [request for request in requests if request.output_tokens > 1]
    if not decoding:
        raise CalibrationError("no measured request has 2 output tokens or more: decode steps are not seen")
    base = typical_step_s(decoding) / (1.0 + _decode_load(decoding))
    per_token = _prefill_pace_s(requests)
    mean_prompt = float(np.mean([request.prompt_tokens for request in requests]))
    return StepTimeModel(
        decode_base_s=base,
        decode_per_sequence_s=_SEQUENCE_SHARE * base,
        decode_per_context_token_s=_CONTEXT_SHARE * base,
        prefill_base_s=base / 2,
        prefill_per_token_s=_OWN_PREFILL_SHARE * per_token,
        prefill_per_pair_s=_PAIR_SHARE * per_token / mean_prompt,
    )


def typical_step_s(requests: Sequence[MeasuredRequest]) -> float:
    """Seconds of a typical decode step, from requests with two tokens or more."""
    paces = [
        (request.last_token_at - request.first_token_at) / (request.output_tokens - 1)
        for request in requests
        if request.output_tokens > 1
    ]
    return float(np.percentile(paces, _TYPICAL_PERCENTILE))


def _decode_load(requests: Sequence[MeasuredRequest]) -> float:
    """The time that sequences and context add to a typical step, as a share of its base."""
    begin = min(request.first_token_at for request in requests)
    span_s = max(request.last_token_at for request in requests) - begin
    sequences = context_tokens = 0.0
    for request in requests:
        present = (request.last_token_at - request.first_token_at) / span_s
        sequences += present
        context_tokens += present * (request.prompt_tokens + request.output_tokens / 2)
    return _SEQUENCE_SHARE * max(1.0, sequences) + _CONTEXT_SHARE * context_tokens


def _prefill_pace_s(requests: Sequence[MeasuredRequest]) -> float:
    """Seconds per prompt token: the median over requests of the time from scheduling to the first token.

    Each time is divided by the tokens of all prompts that were completed in it, the request's own included.
    """
    scheduled = np.array([request.scheduled_at for request in requests])
    first = np.array([request.first_token_at for request in requests])
    prompts = np.array([request.prompt_tokens for request in requests], dtype=float)
    paces = [
        (end - begin) / prompts[(first > begin) & (first <= end)].sum()
        for begin, end in zip(scheduled, first, strict=True)
        if end > begin
    ]
    if not paces:
        raise CalibrationError("every first token comes at the instant of scheduling: prefills are not seen")
    return float(np.median(paces))
