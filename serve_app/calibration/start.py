"""Where the fit starts: coefficients read off the timestamps, and usual proportions where they do not tell.

The duration of a typical decode step and the pace of prefills can be read off directly. How a decode step
divides into its base, its sequences and its context cannot, while the engine is saturated: its cache is full
then, so all three hardly vary. The proportions below are those of measured GPUs; the fit moves them as far as
the data say.
"""

from collections.abc import Sequence

import numpy as np

from serve_app.calibration.measurements import CalibrationError, MeasuredRequest
from serve_app.engine_model.step_time import StepTimeModel

# Per sequence, of the base of a decode step: an 8B model on one RTX 4090 shows 0.4 %, a 70B one on four H100
# 1.2 %.
_SEQUENCE_SHARE = 0.005
# Per token of context: its KV entries (128 KiB) against 16 GB of weights, both read from the same memory.
_CONTEXT_SHARE = 5e-6
# Attention in a prefill against its matrix products, at the mean prompt.
_PAIR_SHARE = 0.05
# Prefills take turns with decoding, so a prompt's pace in a busy engine is a little above its own cost.
_OWN_PREFILL_SHARE = 0.9
# A preempted request decodes slowly, so does one in a prefill burst: the quicker quarter shows steps alone.
_TYPICAL_PERCENTILE = 25.0


def starting_point(requests: Sequence[MeasuredRequest]) -> StepTimeModel:
    """Rough coefficients, right to a factor of about two.

    Raises:
        CalibrationError: no request generated two tokens, so there is no decode step to see.
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
    """Seconds of a usual decode step, from requests of two tokens or more."""
    paces = [
        (request.last_token_at - request.first_token_at) / (request.output_tokens - 1)
        for request in requests
        if request.output_tokens > 1
    ]
    return float(np.percentile(paces, _TYPICAL_PERCENTILE))


def _decode_load(requests: Sequence[MeasuredRequest]) -> float:
    """What sequences and context add to a typical step, as a share of its base."""
    begin = min(request.first_token_at for request in requests)
    span_s = max(request.last_token_at for request in requests) - begin
    sequences = context_tokens = 0.0
    for request in requests:
        present = (request.last_token_at - request.first_token_at) / span_s
        sequences += present
        context_tokens += present * (request.prompt_tokens + request.output_tokens / 2)
    return _SEQUENCE_SHARE * max(1.0, sequences) + _CONTEXT_SHARE * context_tokens


def _prefill_pace_s(requests: Sequence[MeasuredRequest]) -> float:
    """Seconds per prompt token: the median, over requests, of the wait from scheduling to the first token.

    Each wait is divided by the prompts that were completed in it, its own among them.
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
