"""Data that a replica sends to the scheduler: its limits when it joins, and reports of its load."""

from dataclasses import dataclass

# Context limit of an engine that does not report one; longer than any real limit.
UNREPORTED_CONTEXT = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """The limits of a replica, as its engine reports them when it joins.

    Attributes:
        max_model_len: the engine's context limit, prompt and output together, in tokens.
            `UNREPORTED_CONTEXT` if it is not reported: then it is learned from rejections.
        kv_tokens: capacity of the KV cache in tokens; None if it is not reported: then the cache sets no
            limit.
        max_num_seqs: maximum number of sequences in the batch; None if it is not reported: then it is
            learned.
        tpot_s: time per output token with a full batch, if it is known before anything is served.
        prefill_token_s: seconds to compute one prompt token, likewise.
        max_num_batched_tokens: maximum number of tokens per iteration; None if it is not reported.
        long_prefill_token_threshold: maximum number of tokens of one prompt per iteration; 0 for no limit,
            None if it is not reported.
        stall_timeout_s: seconds after which an engine with outstanding answers that computes nothing is
            considered hung; None if that is detected elsewhere.
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
    def has_known_context(self) -> bool:
        """True if the context limit is reported or configured."""
        return self.max_model_len != UNREPORTED_CONTEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The load of a replica, reported two to five times per second. None for what its engine does not report.

    Attributes:
        received: requests accepted since it joined. It shows which dispatches the report includes. None if
            they are not counted: then a report includes the dispatches before the previous report.
        waiting: requests in the engine's own queue.
        kv_usage_ratio: share of KV blocks in use, 0 to 1.
        tpot_s: recent mean time per output token; None if nothing was generated recently.
        draining: whether it accepts no new requests and stops when its last one ends.
        computes: whether it has computed since the previous report.
    """

    received: int | None
    waiting: int | None
    running: int | None
    kv_usage_ratio: float | None
    tpot_s: float | None = None
    draining: bool = False
    computes: bool | None = None
