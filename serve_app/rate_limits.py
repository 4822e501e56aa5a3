"""What the scheduler is told of an API key, and what it tells of that key's limits."""

from dataclasses import dataclass, field


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
