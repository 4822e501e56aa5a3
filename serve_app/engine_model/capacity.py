"""What an engine can hold: context, sequences, and the chunk of a long prefill that suits it.

vLLM refuses a `max_model_len` larger than its KV cache. A `max_num_seqs` that the cache cannot carry is
refused by nobody and never reached. `capacity` computes these figures from a model, a card and the engine's
arguments. Weights and other needs are those of `roofline.kv_tokens`, which finds within
1 % what vLLM 0.19 reported for an 8B model on an RTX 4090.

How many sequences a cache carries depends on their length. `usual_tokens` stands for the traffic that is not
known before it comes.
"""

from dataclasses import dataclass, replace

from serve_app.engine_model.roofline import EngineSetup, kv_tokens, step_time
from serve_app.errors import SettingsError

USUAL_TOKENS = 1_400
"""Prompt and answer of a usual request: the mean of Azure's conversations of 2023, up to 8,192 tokens."""

_WIDER = (2, 4, 8, 16)
_ROUND_LEN = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapacity:
    """What one engine can hold.

    Attributes:
        kv_tokens: tokens of KV cache.
        chunk_tokens: largest chunk of a long prefill that does not delay decoding; 0 is no limit.
    """

    kv_tokens: int
    chunk_tokens: int

    def sequences(self, tokens: int) -> int:
        """How many sequences of that length the KV cache carries at once."""
        return self.kv_tokens // tokens


def capacity(setup: EngineSetup) -> EngineCapacity:
    """The capacity of an engine without measurements.

    Raises:
        SettingsError: the weights do not fit; the message states the calculation.
    """
    return EngineCapacity(kv_tokens=kv_tokens(setup), chunk_tokens=step_time(setup).chunk_tokens())


def usual_tokens(*, at_most: int | None = None) -> int:
    """Prompt and answer of a usual request.

    Args:
        at_most: the context of the engine.
    """
    return USUAL_TOKENS if at_most is None else min(USUAL_TOKENS, at_most)


def context_that_fits(held: EngineCapacity) -> int:
    """The largest `max_model_len` with which the engine starts, rounded down to a multiple of 1,024."""
    return held.kv_tokens // _ROUND_LEN * _ROUND_LEN


def enough_gpus(setup: EngineSetup, tokens: int) -> int | None:
    """The smallest tensor-parallel degree with so many tokens of KV cache; None if 16 GPUs are too few."""
    for gpus in _WIDER:
        if gpus <= setup.tensor_parallel or setup.model.heads % gpus:
            continue
        wider = replace(setup, tensor_parallel=gpus)
        try:
            if kv_tokens(wider) >= tokens:
                return gpus
        except SettingsError:
            continue
    return None
