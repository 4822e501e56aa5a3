"""The protocol's version 5 as its release had it: a record, and no more to be changed than that release is.

Its readers are strict where the release was: a value or a message that version 5 did not have is an error.
"""

import enum
from dataclasses import dataclass

import msgspec

VERSION = 5


class Outcome(enum.StrEnum):
    REJECTED_INVALID = "rejected_invalid"
    REJECTED_UNAUTHORISED = "rejected_unauthorised"
    REJECTED_UNKNOWN_MODEL = "rejected_unknown_model"
    REJECTED_BODY_TOO_LARGE = "rejected_body_too_large"
    REJECTED_TOO_LONG = "rejected_too_long"
    REJECTED_QUEUE_FULL = "rejected_queue_full"
    REJECTED_DEADLINE_UNMEETABLE = "rejected_deadline_unmeetable"
    REJECTED_RATE_LIMITED = "rejected_rate_limited"
    REJECTED_NO_REPLICA = "rejected_no_replica"
    REJECTED_STOPPING = "rejected_stopping"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"
    COMPLETED = "completed"


class PriorityClass(enum.StrEnum):
    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"


class DispatchFailure(enum.StrEnum):
    UNREACHABLE = "unreachable"
    LOST = "lost"
    BUSY = "busy"
    TOO_LONG = "too_long"


class Role(enum.StrEnum):
    GATEWAY = "gateway"
    REPLICA = "replica"


class TextCategory(enum.StrEnum):
    PROSE = "prose"
    CODE = "code"
    CJK = "cjk"
    NUMERIC = "numeric"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShape:
    text_bytes: int
    category: TextCategory = TextCategory.PROSE
    messages: int = 0
    tool_bytes: int = 0
    media_items: int = 0
    prompt_tokens: int | None = None
    prompts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    model: str
    shape: PromptShape
    max_output_tokens: int | None = None
    choices: int = 1
    streamed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    request_id: str
    spec: RequestSpec
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.DEFAULT
    queue_timeout_s: float | None = None
    no_wait: bool = False
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Conclusion:
    outcome: Outcome
    message: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    replica_id: str
    pool: str
    max_model_len: int
    kv_tokens: int
    max_num_seqs: int
    tpot_s: float | None = None
    prefill_token_s: float | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    received: int
    waiting: int
    running: int
    kv_usage_ratio: float
    tpot_s: float | None = None
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    replica_id: str
    pool: str
    host: str
    port: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    request_id: str
    gateway_id: str
    replica_id: str
    pool: str
    length_queue: str
    estimated_tokens: int
    queue_wait_s: float
    engine_priority: int | None = None


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower, gc=False):
    """Base of all messages."""


class Heartbeat(Message, frozen=True):
    read: int


class Hello(Message, frozen=True):
    version: int
    role: Role
    peer_id: str
    secret: str
    highest_incarnation: int


class Bye(Message, frozen=True):
    pass


class PutBack(Message, frozen=True):
    request_id: str
    replica_id: str
    failure: DispatchFailure
    message: str
    grant: int


class Submit(Message, frozen=True):
    submission: Submission
    age_s: float
    waited_s: float
    grants: int = 0
    put_back: PutBack | None = None


class Running(Message, frozen=True):
    submission: Submission
    age_s: float
    grants: int
    replica_id: str
    started: bool


class SnapshotEnd(Message, frozen=True):
    pass


class First(Message, frozen=True):
    request_id: str


class Finish(Message, frozen=True):
    request_id: str
    outcome: Outcome
    usage: Usage | None


class Cancel(Message, frozen=True):
    request_id: str


class Scrape(Message, frozen=True):
    serial: int


class Register(Message, frozen=True):
    spec: ReplicaSpec
    address: ReplicaAddress


class Report(Message, frozen=True):
    report: ReplicaReport


class EngineFailed(Message, frozen=True):
    reason: str


class Welcome(Message, frozen=True):
    incarnation: int
    queue_timeouts_s: dict[PriorityClass, float]


class Rejected(Message, frozen=True):
    reason: str


class ReplicaEntry(Message, frozen=True):
    address: ReplicaAddress
    open: bool


class ReplicaTable(Message, frozen=True):
    entries: list[ReplicaEntry]


class Granted(Message, frozen=True):
    grant: int
    dispatch: Dispatch


class Refused(Message, frozen=True):
    request_id: str
    conclusion: Conclusion


class Queued(Message, frozen=True):
    requests: float


class Exposition(Message, frozen=True):
    serial: int
    text: str


FromGateway = Submit | PutBack | Running | SnapshotEnd | First | Finish | Cancel | Scrape
FromReplica = Register | Report | EngineFailed
FromPeer = Heartbeat | Hello | Bye | FromGateway | FromReplica
FromScheduler = Heartbeat | Welcome | Rejected | ReplicaTable | Granted | Refused | Exposition | Queued

decode_from_peer = msgspec.msgpack.Decoder(list[FromPeer]).decode
decode_from_scheduler = msgspec.msgpack.Decoder(list[FromScheduler]).decode
