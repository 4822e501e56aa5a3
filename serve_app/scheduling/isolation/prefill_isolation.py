"""Prefill isolation: long prefills must not stack up inside one engine. Ours, not in the three sources.

Question: may one more *long* prefill go to this replica now? While an engine mixes prefills, the order in
which requests reach it moves little: every short prompt shares its iterations with whatever long ones are
being computed. So at most `max_long_prefills` long prefills are in flight on a replica, from dispatch to
first token, and the others wait here, where they can be passed. In the engine,
`long_prefill_token_threshold` keeps those that are there from filling whole iterations; it belongs to the
method (`StepTimeModel.chunk_tokens`).

Prefills have classes (`PrefillClass`). Short ones may always pass, long ones are limited. Of the longest only
`max_longest_prefills` may be in flight, so that a prompt of medium length never waits until two huge ones are
done: on a merge of Azure's two traces at load 0.9 (70B on H100) that takes the p99 of prompts up to 2,048
tokens from 1.6 s to 1.2 s, for a mean of the longer ones of 14.0 s instead of 12.3 s.

What counts as long is learned, since no constant fits all traffic: the first boundary is the length below
which the shorter prompts make up about `short_work_share` of all prefill work, moved into a gap of the
lengths where there is one near; above the second lies `longest_work_share` of it. Short prompts can never
delay each other by more than their share.

Where news is late, the limits grow so that as many prefills are in the engines as they allow (`news_lag`).
"""

import itertools
import math
from typing import Annotated

from serve_app.routing.replica_state import PrefillClass
from serve_app.scheduling.isolation.feedback_delay import FeedbackDelay
from serve_app.settings_base import INNER_SHARE, NOT_NEGATIVE, POSITIVE, settings

_BUCKETS_PER_OCTAVE = 8
_RELEARN_EVERY = 64
# A gap this much below or above the share is as good a boundary as the share itself, and stabler.
_NEAR = 0.6
# Buckets with less of the work than this are stragglers in a gap.
_TRACE = 0.001


@settings(block="isolation")
class IsolationSettings:
    """How far long prefills are kept apart."""

    # Long prefills in flight per replica, the longest among them; 0 switches isolation off. Two keep the
    # engine busy when the scheduler hears of first tokens late, and let a medium prompt in beside a huge
    # one. One gives short requests a tenth less time to first token, and long ones half as much again.
    max_long_prefills: Annotated[int, NOT_NEGATIVE.hint("0 switches isolation off")] = 2
    # Of the longest alone. As many as `max_long_prefills` makes one prefill_class of both.
    max_longest_prefills: Annotated[int, POSITIVE] = 1
    # Share of prefill work that counts as short. More isolates less.
    short_work_share: Annotated[float, INNER_SHARE] = 0.25
    # Share of prefill work that counts as longest. More reserves more for medium prompts.
    longest_work_share: Annotated[float, INNER_SHARE] = 0.5
    # Where "long" and "longest" begin until enough requests have been seen, in tokens.
    prior_boundary_tokens: int = 1_024
    prior_longest_tokens: int = 4_096
    # Requests after which the boundaries are learned rather than prior.
    min_observations: Annotated[int, POSITIVE] = 200
    # As many more as ageing may let in, one per `relief_s` seconds that the first of its kind has waited. It
    # shortens the longest waits below saturation (Azure at load 0.7: long p99 6.0 s with none, 4.3 s with
    # one), but in overload everybody has waited, and it undoes the isolation for all: at load 1.1 of the
    # paper's mix one costs nine tenths of the goodput. Off, therefore.
    max_relief: Annotated[int, NOT_NEGATIVE.hint("0 switches it off")] = 0
    relief_s: Annotated[float, POSITIVE] = 2.0
    # Shares of tenants come before isolation: one whose requests are mostly long would otherwise never get
    # its share beside others with short ones. For each so many average requests that it is behind every
    # other tenant that waits, it may have one long prefill more, up to `max_owed` more.
    owed_requests: Annotated[float, POSITIVE] = 16.0
    max_owed: Annotated[int, NOT_NEGATIVE.hint("0 switches it off")] = 4
    # When no short request of a class above batch has come for so many seconds, nobody is to be protected,
    # and as many long prefills may be in flight as fill an iteration with their chunks (2,048 by 256 on a 70B
    # profile). Otherwise a backlog of long prompts alone would run at half of the engines' throughput.
    no_short_s: Annotated[float, POSITIVE] = 2.0
    no_short_long_prefills: Annotated[int, POSITIVE] = 8
    # Seconds to an engine and back that do not count as late news: a part of an iteration costs nothing.
    usual_lag_s: Annotated[float, NOT_NEGATIVE] = 0.05
    # Share of a length's weight that is left after 1,000 requests; forgets old traffic.
    keep_per_thousand: Annotated[float, INNER_SHARE] = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.prior_boundary_tokens <= self.prior_longest_tokens:
            raise ValueError(
                "isolation.prior_boundary_tokens must be positive and at most prior_longest_tokens, got "
                f"{self.prior_boundary_tokens} and {self.prior_longest_tokens}"
            )


class PrefillIsolation:
    """Learns where "long" begins, and how many long prefills a replica may have in flight.

    Args:
        lag: how late first tokens are heard of.
        wanted: the policy asks for it; baselines do not.
    """

    def __init__(self, settings: IsolationSettings, lag: FeedbackDelay, *, wanted: bool) -> None:
        self._settings = settings
        self._lag = lag
        self._wanted = wanted
        self._work: dict[int, float] = {}
        self._observed = 0
        self._short_at = 0.0
        self.boundary_tokens = float(settings.prior_boundary_tokens)
        self.longest_boundary_tokens = float(settings.prior_longest_tokens)

    @property
    def is_on(self) -> bool:
        """Whether long prefills are limited at all."""
        return self._wanted and self._settings.max_long_prefills > 0

    def retune(self, settings: IsolationSettings) -> None:
        """Other limits and shares from now on; what has been learned of lengths stays."""
        self._settings = settings
        if self._observed:
            self._draw_boundaries()

    def observe(self, prompt_tokens: int) -> None:
        """Count a prompt that has arrived."""
        bucket = math.floor(_BUCKETS_PER_OCTAVE * math.log2(max(1, prompt_tokens)))
        self._work[bucket] = self._work.get(bucket, 0.0) + prompt_tokens
        self._observed += 1
        if self._observed % _RELEARN_EVERY == 0:
            self._learn()

    def prefill_class(self, prompt_tokens: int) -> PrefillClass:
        """Class of a prefill of this length; `SHORT` for all where isolation is off."""
        if not self.is_on or prompt_tokens <= self.boundary_tokens:
            return PrefillClass.SHORT
        longest = prompt_tokens > self.longest_boundary_tokens
        return PrefillClass.LONGEST if longest else PrefillClass.LONG

    def on_short_arrival(self, now: float) -> None:
        """A short request came that is to be protected."""
        self._short_at = now

    def limits(
        self, prefill_class: PrefillClass, now: float, waited_s: float, behind_requests: float = 0.0
    ) -> tuple[int, ...]:
        """How many prefills may be in flight on a replica that gets one more: () without limit, (long), or (long, longest).

        Args:
            now: seconds on the scheduler's clock.
            waited_s: how long this one, the first of its kind, has waited.
            behind_requests: how far its tenant is behind its share, see `FairShares.behind_requests`.
        """
        if prefill_class is PrefillClass.SHORT:
            return ()
        settings = self._settings
        relief = min(settings.max_relief, int(waited_s / settings.relief_s))
        if behind_requests >= settings.owed_requests:
            relief += min(settings.max_owed, int(behind_requests / settings.owed_requests))
        if now - self._short_at > settings.no_short_s:
            relief = max(relief, settings.no_short_long_prefills - settings.max_long_prefills)
        limit_factor = self._lag.limit_factor(settings.usual_lag_s)
        long = round(settings.max_long_prefills * limit_factor)
        longest = round(settings.max_longest_prefills * limit_factor)
        return (long + relief, longest + relief)[:prefill_class]

    def _learn(self) -> None:
        settings = self._settings
        keep = settings.keep_per_thousand ** (_RELEARN_EVERY / 1_000)
        self._work = {bucket: work * keep for bucket, work in self._work.items()}
        self._draw_boundaries()

    def _draw_boundaries(self) -> None:
        settings = self._settings
        if self._observed < settings.min_observations:
            return
        self.boundary_tokens = 2 ** (self._boundary_bucket() / _BUCKETS_PER_OCTAVE)
        self.longest_boundary_tokens = 2 ** (self._longest_bucket() / _BUCKETS_PER_OCTAVE)

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

    def _longest_bucket(self) -> float:
        """Above it lies at most the share of the longest; nothing, where nearly all have one length."""
        wanted = self._settings.longest_work_share * sum(self._work.values())
        above = 0.0
        for bucket in sorted(self._work, reverse=True):
            above += self._work[bucket]
            if above > wanted:
                return float(bucket + 1)
        return 0.0

    def __repr__(self) -> str:
        longest = self.longest_boundary_tokens
        boundaries = f"long > {self.boundary_tokens:.0f}, longest > {longest:.0f} tokens"
        return f"<PrefillIsolation {'on' if self.is_on else 'off'} {boundaries}>"
