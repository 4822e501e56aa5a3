"""Duration of one engine iteration: a roofline over the tokens that it computes.

An iteration reads the weights once and computes the prompt tokens that it prefills. For each decoding
sequence it computes one token, which reads the KV cache of that sequence. With P prefilled tokens, A pairs of
a prompt token and a token that it attends to, and S decoding sequences whose contexts add up to C tokens:

    read = base of the phases in it + expert_read * (1 - (1 - expert_share) ** (P + S))
    step = max(read, P * prefill_per_token + S * decode_compute) + A * prefill_per_pair
           + S * decode_per_sequence + C * decode_per_context_token

The maximum applies because the bases are the time to read the weights from memory, and tokens are computed
while they are read. Up to the number of tokens at which the two times are equal, prompt tokens add nothing to
a decode step (piggybacking in Sarathi, arXiv 2308.16369). Two measurements support this. The prefill of a 70B
model on four H100 (Splitwise) takes the same 50 to 60 ms from 128 to 512 tokens, and grows in proportion
after that. In timestamps of an 8B model on an RTX 4090, half a run predicts the p90 of TPOT of the other half
within 0.2 %; with the sum of both times, within 2.6 %.

In a mixture of experts only those experts are read to which a token of the batch is routed; routing is
assumed to be uniform.
"""

from dataclasses import asdict, replace
from typing import Annotated

from serve_app.core.settings_base import NOT_NEGATIVE, settings

# Chunks are multiples of 64, like the tiles of matrix products.
_CHUNK_STEP = 64


@settings
class StepTimeModel:
    """Coefficients of the time of one iteration, in seconds unless stated otherwise.

    Attributes:
        decode_base_s: base of an iteration with at least one decoding sequence.
        decode_per_sequence_s: added per decoding sequence.
        decode_per_context_token_s: added per token of context that a decoding sequence reads.
        prefill_base_s: base of an iteration with at least one prompt token.
        prefill_per_token_s: computing one prompt token, in parallel with reading weights.
        prefill_per_pair_s: added per pair of a prompt token and a token that it attends to.
        decode_compute_s: computing one decoded token, in parallel with reading weights; 0 if a fit includes
            it in `decode_per_sequence_s`.
        expert_read_s: reading all experts of a mixture.
        expert_share: share of the experts that one token is routed to (0-1).
    """

    decode_base_s: Annotated[float, NOT_NEGATIVE]
    decode_per_sequence_s: Annotated[float, NOT_NEGATIVE]
    prefill_base_s: Annotated[float, NOT_NEGATIVE]
    prefill_per_token_s: Annotated[float, NOT_NEGATIVE]
    decode_per_context_token_s: Annotated[float, NOT_NEGATIVE] = 0.0
    prefill_per_pair_s: Annotated[float, NOT_NEGATIVE] = 0.0
    decode_compute_s: Annotated[float, NOT_NEGATIVE] = 0.0
    expert_read_s: Annotated[float, NOT_NEGATIVE] = 0.0
    expert_share: Annotated[float, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        if self.expert_share > 1.0 or bool(self.expert_share) != bool(self.expert_read_s):
            raise ValueError(
                f"expert_share ({self.expert_share}) must be between 0 and 1, and 0 exactly if "
                f"expert_read_s ({self.expert_read_s}) is"
            )
        if self.decode_base_s + self.decode_per_sequence_s <= 0.0:
            raise ValueError(
                "decode_base_s and decode_per_sequence_s are both 0: a decode step must take time"
            )
        if self.prefill_base_s + self.prefill_per_token_s <= 0.0:
            raise ValueError("prefill_base_s and prefill_per_token_s are both 0: a prefill must take time")

    def scaled(self, factor: float) -> "StepTimeModel":
        """Return the model of an engine whose iterations take `factor` times as long."""
        times = {name: factor * value for name, value in asdict(self).items() if name.endswith("_s")}
        return replace(self, **times)

    def step_s(
        self, *, prefill_tokens: int = 0, attended_pairs: int = 0, sequences: int = 0, context_tokens: int = 0
    ) -> float:
        """Return the seconds of one iteration.

        Args:
            prefill_tokens: prompt tokens computed in it.
            attended_pairs: pairs of a prompt token and a token that it attends to, see `attended_pairs`
                below.
            sequences: sequences that decode one token in it.
            context_tokens: sum of their contexts, in tokens.
        """
        read_s = self.decode_base_s if sequences else 0.0
        if prefill_tokens:
            read_s = max(read_s, self.prefill_base_s)
        if self.expert_read_s:
            read_s += self.expert_read_s * (1.0 - (1.0 - self.expert_share) ** (prefill_tokens + sequences))
        compute_s = prefill_tokens * self.prefill_per_token_s + sequences * self.decode_compute_s
        seconds = max(read_s, compute_s) + attended_pairs * self.prefill_per_pair_s
        return (
            seconds
            + sequences * self.decode_per_sequence_s
            + context_tokens * self.decode_per_context_token_s
        )

    def decode_run_s(self, steps: int, *, sequences: int, context_tokens: int) -> float:
        """Return the seconds of `steps` successive iterations that only decode the same sequences.

        Args:
            context_tokens: sum of their contexts in the first iteration; grows by one per sequence and
                iteration.
        """
        first_s = self.step_s(sequences=sequences, context_tokens=context_tokens)
        growth_s = sequences * self.decode_per_context_token_s
        return steps * first_s + growth_s * (steps * (steps - 1) // 2)

    def chunk_tokens(self) -> int:
        """Return the largest prefill chunk that does not delay decoding (`long_prefill_token_threshold`).

        It is the number of prompt tokens that are computed while a decode step reads the weights, rounded
        down to a multiple of 64. Smaller chunks only slow the prefill down; larger ones lengthen every step.
        Attention to earlier chunks takes time at any size, and the same in total.

        Returns:
            Tokens, at least 64; 0 (no limit) if a prefill costs nothing per token.
        """
        if not self.prefill_per_token_s:
            return 0
        free = (self.decode_base_s + self.expert_read_s) / self.prefill_per_token_s
        return max(_CHUNK_STEP, int(free) // _CHUNK_STEP * _CHUNK_STEP)

    def prefill_s(self, prompt_tokens: int, *, max_num_batched_tokens: int) -> float:
        """Return the seconds to prefill one prompt on an idle engine, in chunks of the token budget."""
        seconds = 0.0
        for start in range(0, prompt_tokens, max_num_batched_tokens):
            chunk = min(max_num_batched_tokens, prompt_tokens - start)
            seconds += self.step_s(prefill_tokens=chunk, attended_pairs=attended_pairs(start, chunk))
        return seconds


def attended_pairs(computed_tokens: int, chunk_tokens: int) -> int:
    """Return the pairs of a token of the chunk and a token that it attends to: all before it, and itself."""
    return chunk_tokens * computed_tokens + chunk_tokens * (chunk_tokens + 1) // 2
