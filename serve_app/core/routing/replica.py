"""What a replica tells the scheduler: its limits when it joins, and reports of its load."""

from dataclasses import dataclass

# Stands for the context limit of an engine that does not tell it. It is longer than any real one.
UNTOLD_CONTEXT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """The limits of a replica, as its engine states them when it joins.

    Attributes:
        pool: name of its pool.
        max_model_len: the engine's context limit, prompt and output together, in tokens; `UNTOLD_CONTEXT`
            where it does not say: then it is learned from what it refuses.
        kv_tokens: capacity of the KV cache in tokens; None where it does not say: then the cache is no limit.
        max_num_seqs: sequences the engine runs at once; None where it does not say: then it is learned.
        tpot_s: time per output token with a full batch, where that is known before anything is served.
        prefill_token_s: seconds to compute one prompt token, likewise.
        max_num_batched_tokens: most tokens that it computes in one iteration; None where it does not say.
        long_prefill_token_threshold: most of one prompt in an iteration, 0 for no limit; likewise.
        adapters: names of the LoRA adapters that its engine lists.
        stall_timeout_s: it hangs when it owes answers and computes nothing for so long; None where that is
            watched beside the engine.
    """

    replica_id: str
    pool: str
    max_model_len: int
    kv_tokens: int | None
    max_num_seqs: int | None
    tpot_s: float | None = None
    prefill_token_s: float | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    adapters: tuple[str, ...] = ()
    stall_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_model_len", "kv_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} of replica {self.replica_id} must be at least 1, got {value}")

    @property
    def tells_context(self) -> bool:
        """Whether the engine tells its context limit, or the configuration does."""
        return self.max_model_len != UNTOLD_CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The load of a replica, reported about five times a second; None for what its engine does not tell.

    Attributes:
        received: requests it has accepted since it joined; tells which dispatches the report has seen. None
            where nobody counts: then a report has seen what was dispatched before the one before it.
        waiting: requests in the engine's own queue.
        running: sequences in the engine's batch.
        kv_usage_ratio: share of KV blocks in use, 0 to 1.
        tpot_s: recent mean time per output token, None when nothing was generated lately.
        draining: it takes no new requests, and stops when its last one ends.
        computes: it has computed something since the report before.
    """

    received: int | None
    waiting: int | None
    running: int | None
    kv_usage_ratio: float | None
    tpot_s: float | None = None
    draining: bool = False
    computes: bool | None = None
