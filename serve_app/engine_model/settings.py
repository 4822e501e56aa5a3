"""Settings of the engine model, named as in vLLM: capacity, and how batches are filled."""

from typing import Annotated

from serve_app.engine_model.waiting import SchedulingPolicy
from serve_app.settings_base import NOT_NEGATIVE, at_least, settings


@settings
class EngineModelSettings:
    """Limits of one emulated engine.

    Attributes:
        max_model_len: context limit, prompt and output together, in tokens.
        kv_tokens: capacity of the KV cache in tokens; rounded down to whole blocks.
    """

    max_model_len: Annotated[int, at_least(1)]
    kv_tokens: Annotated[int, at_least(1)]
    # Larger blocks waste more of the cache at the end of each sequence; 16 is vLLM's default on GPUs.
    block_size: Annotated[int, at_least(1)] = 16
    # More sequences per step mean more throughput and a longer step for each of them.
    max_num_seqs: Annotated[int, at_least(1)] = 256
    # More prompt tokens per step mean faster prefills and longer stalls for decoding sequences.
    max_num_batched_tokens: Annotated[int, at_least(1)] = 2_048
    # 0 lets one long prefill take the whole budget of a step; with a limit, short prompts overtake it.
    long_prefill_token_threshold: Annotated[int, NOT_NEGATIVE.hint("0 is no limit")] = 0
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.FCFS
    prefix_caching: bool = True
    # Admit a prompt only when all of it fits into free blocks now (`scheduler_reserve_full_isl`, on in vLLM).
    # When off, its first chunk is enough, and prompts that are admitted together preempt each other.
    full_prompt_must_fit: bool = True

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or decoding sequences starve: raise the first or lower the second"
            )
        if self.kv_blocks * self.block_size < self.max_model_len:
            raise ValueError(
                f"max_model_len ({self.max_model_len:,}) does not fit into the KV cache "
                f"({self.kv_tokens:,} tokens in blocks of {self.block_size}): such a sequence could never "
                "finish; lower max_model_len"
            )

    @property
    def kv_blocks(self) -> int:
        """Blocks in the KV cache."""
        return self.kv_tokens // self.block_size
