"""Shared types: a request before and after it is served, and the limits of its API key."""

import enum
import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of one API key, each for one model; None where there is none.

    Attributes:
        requests_per_minute: most requests that are admitted in any 60 s.
        tokens_per_minute: most tokens, of prompts and answers, that are admitted in any 60 s.
        concurrent: most requests under way at once, those that wait included.
        queued: most requests that wait at once.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    queued: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTerms:
    """What of an API key concerns a scheduler. It travels with each request of the key.

    Attributes:
        key_id: names the key in limits and in the ledger of usage; it is not secret.
        weight: of the request's tenant in the fair sharing; None where `fairness.weights` decides.
    """

    key_id: str
    weight: float | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """How one limit per minute stands.

    Attributes:
        remaining: what may still be admitted now.
        reset_s: seconds until the whole limit is free again, if nothing else comes.
    """

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """How the limits per minute of a key stand; None for a limit that it has not."""

    requests: LimitStatus | None = None
    tokens: LimitStatus | None = None


class PriorityClass(enum.StrEnum):
    """How urgent a request is; `rank` orders the classes, 0 first."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        """Position in the order of service between classes, 0 is served first."""
        return _RANKS[self]


_RANKS = {PriorityClass.INTERACTIVE: 0, PriorityClass.DEFAULT: 1, PriorityClass.BATCH: 2}


class TextCategory(enum.StrEnum):
    """What kind of text a prompt is made of; each kind has its own bytes-per-token ratio."""

    PROSE = "prose"
    CODE = "code"
    CJK = "cjk"
    NUMERIC = "numeric"
    MIXED = "mixed"


class Destination(NamedTuple):
    """Which replicas of its pools will do for a request.

    Attributes:
        replica_id: the only one, since it keeps what the request refers to; None for any.
        adapter: those that hold this LoRA adapter; None for all.
    """

    replica_id: str | None = None
    adapter: str | None = None

    def admits(self, replica_id: str, adapters: Container[str]) -> bool:
        """Whether a replica with these adapters will do."""
        return self.replica_id in (None, replica_id) and (self.adapter is None or self.adapter in adapters)


ANYWHERE = Destination()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptShape:
    """What the gateway measures of a prompt without a tokenizer.

    Attributes:
        text_bytes: UTF-8 bytes of the text that the model reads, without tool definitions and media.
        category: the kind of that text.
        messages: number of chat messages; 0 for a plain completion or an embedding.
        tool_bytes: UTF-8 bytes of tool definitions and response schemas.
        media_items: images, audio clips and the like; their bytes are not text.
        prompt_tokens: exact length, known only when the client sent token ids.
        prompts: independent prompts in this one request (batched completions, embeddings); all sizes above
            are sums over them, while a context limit holds for each of them alone.
    """

    text_bytes: int
    category: TextCategory = TextCategory.PROSE
    messages: int = 0
    tool_bytes: int = 0
    media_items: int = 0
    prompt_tokens: int | None = None
    prompts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a request asks of an engine, as read from its body.

    Attributes:
        model: the name of the model.
        adapter: the name that the client used, where it is a LoRA adapter of the model.
        max_output_tokens: the client's own limit per choice; None when it gave none, 0 when nothing is
            generated (embeddings).
        choices: sequences that the engine generates: `n` for each prompt.
        streamed: its answer is streamed, so its first token is seen.
    """

    model: str
    shape: PromptShape
    max_output_tokens: int | None = None
    choices: int = 1
    streamed: bool = True
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as a gateway hands it to the scheduler.

    Attributes:
        request_id: unique among all gateways of a model (the gateway's own, not the client's header).
        queue_timeout_s: how long it may wait in the queue, from the moment it came in; None for the class's
            default.
        no_wait: refuse at once rather than queue (`x-queue: no-wait`).
        prefix: hashes of the prompt's leading blocks, longest last, for prefix affinity.
        key: of the API key that it came with; None where it needed none.
        bound_to: the only replica that may serve it, since that one keeps what it refers to; None for any.
    """

    request_id: str
    spec: RequestSpec
    tenant: str = "default"
    priority: PriorityClass = PriorityClass.DEFAULT
    queue_timeout_s: float | None = None
    no_wait: bool = False
    prefix: tuple[int, ...] = ()
    key: KeyTerms | None = None
    bound_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A submission on the scheduler's clock. All times are seconds on that clock.

    Attributes:
        gateway_id: the gateway that holds the client's connection.
        expires_at: when the client no longer wants to wait in the queue.
        attempts: how often it has been dispatched before (a replica was lost or refused it).
        lost: the last of these dispatches ended with the loss of its replica.
    """

    submission: Submission
    gateway_id: str
    arrived_at: float
    expires_at: float = math.inf
    attempts: int = 0
    lost: bool = False

    # What the core asks for all the time, under short names.

    @property
    def request_id(self) -> str:
        """Unique among all gateways of a model."""
        return self.submission.request_id

    @property
    def tenant(self) -> str:
        """On whose behalf it is served."""
        return self.submission.tenant

    @property
    def priority(self) -> PriorityClass:
        """How urgent it is."""
        return self.submission.priority

    @property
    def bound_to(self) -> str | None:
        """The only replica that may serve it; None for any."""
        return self.submission.bound_to

    @property
    def destination(self) -> Destination:
        """Which replicas of its pools will do."""
        bound_to, adapter = self.submission.bound_to, self.submission.spec.adapter
        return ANYWHERE if bound_to is None and adapter is None else Destination(bound_to, adapter)

    @property
    def spec(self) -> RequestSpec:
        """What it asks of an engine."""
        return self.submission.spec

    @property
    def shape(self) -> PromptShape:
        """Size and kind of its prompt."""
        return self.submission.spec.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts as the engine reports them in its answer."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
