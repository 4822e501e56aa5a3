"""Prefill isolation: long prefills must not stack up inside one engine. Ours, not in the three sources.

Question: may one more *long* prefill go to this replica now? While an engine mixes prefills, the order in
which requests reach
it moves little: every short prompt shares its iterations with whatever long ones are being computed. So at
most `max_long_prefills` long prefills are in flight on a replica, from dispatch to first token, and the
others wait here, where they can be passed. In the engine, `long_prefill_token_threshold` keeps the one that
is there from filling whole iterations.

What counts as long is learned, since no constant fits all traffic: the boundary is the length below which the
shorter prompts make up about `short_work_share` of all prefill work, moved into a gap of the lengths where
there is one near. Those below may always pass; they can never delay each other by more than that share.
Ageing: for every `relief_s` that the first of the long has waited, one more may be in flight.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

_BUCKETS_PER_OCTAVE = 8
_RELEARN_EVERY = 64
# A gap this much below or above the share is as good a boundary as the share itself, and stabler.
_NEAR = 0.6
# Buckets with less of the work than this are stragglers in a gap.
_TRACE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationSettings:
    """How far long prefills are kept apart."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    # Long prefills in flight per replica; 0 switches isolation off. One gives short requests the best time to
    # first token when the scheduler hears of first tokens at once; with slower news, two keep the engine
    # busy.
    max_long_prefills: int = 1
    # Share of prefill work that counts as short. More isolates less.
    short_work_share: float = 0.25
    # Where "long" begins until enough requests have been seen, in tokens.
    prior_boundary_tokens: int = 1_024
    # Requests after which the boundary is learned rather than prior.
    min_observations: int = 200
    # One more long prefill may be in flight per this many seconds that the first of them has waited. At load
    # 0.98 of the paper's mix (70B on H100), 30 s costs 1.1 % of throughput and a long mean of 4.0 s, 2 s
    # costs 0.6 % and 1.8 s.
    relief_s: float = 2.0
    # As many as relief may let in. In lasting overload every long request has waited, and without an end to
    # relief they would all flood back in: at load 1.1, four give short requests a p99 of 2.2 s, two 1.4 s.
    max_relieved: int = 2
    # Share of a length's weight that is left after 1,000 requests; forgets old traffic.
    keep_per_thousand: float = 0.5

    def __post_init__(self) -> None:
        if self.max_long_prefills < 0:
            raise ValueError(f"max_long_prefills must be 0 (off) or more, got {self.max_long_prefills}")
        for name in ("short_work_share", "keep_per_thousand"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"isolation.{name} must be between 0 and 1, got {getattr(self, name)}")
        for name in ("prior_boundary_tokens", "min_observations", "relief_s", "max_relieved"):
            if not getattr(self, name) > 0:
                raise ValueError(f"isolation.{name} must be positive, got {getattr(self, name)}")


class PrefillIsolation:
    """Learns where "long" begins, and how many long prefills a replica may have in flight.

    Args:
        wanted: the policy asks for it; baselines do not.
    """

    def __init__(self, settings: IsolationSettings, *, wanted: bool) -> None:
        self._settings = settings
        self._wanted = wanted
        self._work: dict[int, float] = {}
        self._observed = 0
        self.boundary_tokens = float(settings.prior_boundary_tokens)

    @property
    def is_on(self) -> bool:
        """Whether long prefills are limited at all."""
        return self._wanted and self._settings.max_long_prefills > 0

    def observe(self, prompt_tokens: int) -> None:
        """Count a prompt that has arrived."""
        bucket = math.floor(_BUCKETS_PER_OCTAVE * math.log2(max(1, prompt_tokens)))
        self._work[bucket] = self._work.get(bucket, 0.0) + prompt_tokens
        self._observed += 1
        if self._observed % _RELEARN_EVERY == 0:
            self._learn()

    def is_long(self, prompt_tokens: int) -> bool:
        """Whether a prefill of this length is limited."""
        return self.is_on and prompt_tokens > self.boundary_tokens

    def limit(self, waited_s: float) -> int:
        """Long prefills that may be in flight on one replica when the first that waits has waited so long."""
        settings = self._settings
        relieved = settings.max_long_prefills + int(waited_s / settings.relief_s)
        return min(relieved, max(settings.max_long_prefills, settings.max_relieved))

    def _learn(self) -> None:
        settings = self._settings
        keep = settings.keep_per_thousand ** (_RELEARN_EVERY / 1_000)
        self._work = {bucket: work * keep for bucket, work in self._work.items()}
        if self._observed < settings.min_observations:
            return
        self.boundary_tokens = 2 ** (self._boundary_bucket() / _BUCKETS_PER_OCTAVE)

    def _boundary_bucket(self) -> float:
        """Where the work below comes to its share; in the middle of the widest gap near by."""
        share, total = self._settings.short_work_share, sum(self._work.values())
        below, widest, middle, crossing = 0.0, 1, None, None
        buckets = sorted(bucket for bucket, work in self._work.items() if work > _TRACE * total)
        for bucket, following in itertools.pairwise(buckets):
            below += self._work[bucket]
            gap = following - bucket
            if gap > widest and share * (1 - _NEAR) <= below / total <= share * (1 + _NEAR):
                widest, middle = gap, (bucket + 1 + following) / 2
            if crossing is None and below > share * total:
                crossing = float(bucket + 1)
        if middle is not None:
            return middle
        return crossing if crossing is not None else float(buckets[-1])

    def __repr__(self) -> str:
        return f"<PrefillIsolation {'on' if self.is_on else 'off'} long > {self.boundary_tokens:.0f} tokens>"
