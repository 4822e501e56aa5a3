"""The engine model of the papers, which reproduces their tables for comparison.

Source: token-budget pool routing (arXiv 2604.09613 and 2604.08075). An engine has slots for sequences of the
longest context, and advances by iterations of

    t_iter = W + H * (mean length / calibration context) * n            n sequences in the batch
    service = (ceil(prompt / chunk) + output) * t_iter
    slots(context) = min(blocks // ceil(context / 16), max_slots * 8192 // context)

Each slot is reserved for the longest context that the pool admits, which is the source of their saving. vLLM
reserves nothing per sequence: it allocates KV blocks as tokens are computed. So these figures hold for an
operator who sets `max_num_seqs` by the longest context.
"""

import math
from dataclasses import dataclass

import numpy as np

from serve_app.planning.model.erlang import wait_quantile_s
from serve_app.planning.model.length_mix import LengthMix
from serve_app.planning.model.performance import UTILISATION_CAP

_REFERENCE_CONTEXT = 8_192


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperEngine:
    """Constants of one instance.

    Attributes:
        base_s: W, an iteration without sequences.
        per_sequence_s: H, added by each sequence of `calibration_tokens`.
        chunk_tokens: prompt tokens of one sequence in one iteration.
        max_slots: sequences at a context of 8,192 tokens.
        kv_blocks: of `block_tokens` each.
        gpus: of one instance (the papers use tensor parallelism of 2 for Llama-3-70B).
    """

    base_s: float
    per_sequence_s: float
    chunk_tokens: int
    max_slots: int
    calibration_tokens: int = 8_192
    kv_blocks: int = 65_536
    block_tokens: int = 16
    gpus: int = 2

    def slots(self, context_tokens: int) -> int:
        """Sequences in a batch when each slot holds the longest context."""
        by_memory = self.kv_blocks // math.ceil(context_tokens / self.block_tokens)
        return max(1, min(by_memory, self.max_slots * _REFERENCE_CONTEXT // context_tokens))

    def iteration_s(self, mean_tokens: float, sequences: float) -> float:
        """Seconds of one iteration with so many sequences of that mean length."""
        return self.base_s + self.per_sequence_s * mean_tokens / self.calibration_tokens * sequences

    def pool(self, mix: LengthMix, context_tokens: int) -> "PaperPool":
        """An instance that admits contexts of that length, under these requests."""
        slots = self.slots(context_tokens)
        iteration_s = self.iteration_s(float(mix.totals.mean()), slots)
        iterations = np.ceil(mix.prompts / self.chunk_tokens) + mix.outputs
        first_token_s = float(np.quantile(np.ceil(mix.prompts / self.chunk_tokens), 0.99)) * iteration_s
        return PaperPool(
            slots=slots,
            service_s=float(iterations.mean()) * iteration_s,
            service_cv2=float(iterations.var() / iterations.mean() ** 2),
            prefill_p99_s=first_token_s,
            gpus=self.gpus,
        )


A100 = PaperEngine(base_s=0.008, per_sequence_s=0.00065, chunk_tokens=512, max_slots=128)
"""Llama-3-70B on two A100. Its weights in 16 bits (141 GB) and 65,536 blocks of 16 tokens at 320 KiB a token
(344 GB) do not fit into 160 GB, so the setup of the papers cannot be built."""
H100 = PaperEngine(base_s=0.004, per_sequence_s=0.00032, chunk_tokens=1_024, max_slots=256)
"""The same for two H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPool:
    """One kind of instance under one mix: every slot is a server.

    Attributes:
        service_s: mean time of a request in its slot, with a full batch.
        service_cv2: squared coefficient of variation of it.
        prefill_p99_s: P99 of the time from admission to the first token.
    """

    slots: int
    service_s: float
    service_cv2: float
    prefill_p99_s: float
    gpus: int

    @property
    def throughput_per_s(self) -> float:
        """mu: requests per second of one saturated instance."""
        return self.slots / self.service_s

    def instances(self, rate_per_s: float, ttft_s: float, *, utilisation_cap: float = UTILISATION_CAP) -> int:
        """The smallest number of instances below the cap whose P99 TTFT is within `ttft_s`.

        A limit that the prefill alone exceeds counts as met when no request waits.
        """
        count = max(1, math.ceil(rate_per_s / (utilisation_cap * self.throughput_per_s)))
        while self.p99_wait_s(rate_per_s, count) > max(0.0, ttft_s - self.prefill_p99_s):
            count += 1
        return count

    def p99_wait_s(self, rate_per_s: float, instances: int) -> float:
        """P99 of the wait for a slot."""
        return wait_quantile_s(
            servers=instances * self.slots,
            rate_per_s=rate_per_s,
            mean_service_s=self.service_s,
            service_cv2=self.service_cv2,
        )
