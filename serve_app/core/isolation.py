"""Prefill isolation: a limit on the long prefills in flight on a replica. Ours, not from the papers.

While an engine mixes prefills, the order in which requests reach it has little effect: every short prompt
shares its iterations with the long ones in progress. So at most `max_long_prefills` long prefills are in
flight on a replica, from dispatch to first token. The others remain queued, where short requests can pass
them. In the engine, `long_prefill_token_threshold` prevents long prefills from filling whole iterations, and
is part of the method (`StepTimeModel.chunk_tokens`).

Prefills have classes (`PrefillClass`). Short ones always pass, and long ones are limited. Of the longest only
`max_longest_prefills` may be in flight, so that a medium prompt never waits for two of them. That lowers the
tail latency of short and medium prompts, and raises the mean of the longest.

The boundaries are learned, since no constant fits all traffic. The first is the length below which prompts
make up about `short_work_share` of all prefill work, moved to a nearby gap between lengths if there is one.
Above the second is `longest_work_share` of the work. So short prompts delay each other by at most their
share. A prompt of at most one chunk is always short (`ALWAYS_SHORT_TOKENS`).

If feedback is delayed, the limits grow so that as many prefills as intended are in the engines
(`FeedbackDelay`).
"""

import heapq
import itertools
import math
from collections import deque
from typing import Annotated

from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.replica_state import PrefillClass, Running
from serve_app.core.settings_base import INNER_SHARE, INTERNAL, NOT_NEGATIVE, POSITIVE, settings
from serve_app.request import PriorityClass

# Short enough to follow a change within seconds, long enough for one prompt that waited for no other prefill.
_WINDOW = 64
_MIN_OBSERVATIONS = 16
# Weight of one long prefill in their mean: an average over about the last thirty.
_WEIGHT = 0.03

ALWAYS_SHORT_TOKENS = 256
"""A prompt of at most this length is always short. It takes no more of an iteration than one chunk of a long
prefill, which isolation lets pass, so limits on such prompts would only leave iterations empty."""

_BUCKETS_PER_OCTAVE = 8
_RELEARN_EVERY = 64
# A gap is preferred to the exact share within this relative distance: it is a more stable boundary.
_GAP_TOLERANCE = 0.6
# Buckets with a smaller share of the work are treated as outliers in a gap.
_OUTLIER_SHARE = 0.001
# Number of requests after which the learned boundaries replace the prior ones.
_LEARNED_REQUESTS = 200
# Round trip in seconds that does not count as delay: a part of an iteration costs nothing.
_USUAL_LAG_S = 0.05
# Weight of an observation after 1,000 requests, so that old traffic decays.
_DECAY_PER_THOUSAND = 0.5

# The end of an unobserved prefill is assumed late rather than early: a second concurrent long prefill costs
# more than a short pause.
_USUAL_TIMES = 2.0


class FeedbackDelay:
    """The round trip from dispatch to first-token notice without the engine's work; 0 until known."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._long_s: float | None = None
        self.seconds = 0.0

    def __repr__(self) -> str:
        return f"<FeedbackDelay {self.seconds:.3f} s n={len(self._recent)}>"

    def on_short_first_token(self, seconds: float) -> None:
        """Record a short prompt's time from dispatch to notice, less its prefill and one iteration."""
        oldest = self._recent[0] if len(self._recent) == _WINDOW else None
        self._recent.append(seconds)
        if len(self._recent) < _MIN_OBSERVATIONS:
            return
        # The minimum changes only with a smaller value, or when the old minimum leaves the window.
        if seconds <= self.seconds or oldest is None or oldest <= self.seconds:
            self.seconds = max(0.0, min(self._recent))

    def on_long_first_token(self, seconds: float) -> None:
        """Record a long prompt's time from dispatch to first-token notice."""
        self._long_s = seconds if self._long_s is None else self._long_s + _WEIGHT * (seconds - self._long_s)

    def limit_factor(self, usual_s: float) -> float:
        """Return the factor (T + L) / T for limits on long prefills in flight.

        L is the delay above `usual_s`, and T the mean time of a long prefill without it.

        Args:
            usual_s: part of the delay that costs nothing.
        """
        delay_s = self.seconds - usual_s
        if delay_s <= 0 or self._long_s is None:
            return 1.0
        return self._long_s / max(self._long_s - delay_s, 0.1 * self._long_s)


@settings(block="isolation")
class IsolationSettings:
    """Limits on long prefills in flight, and the classification of prompts by length."""

    # Maximum number of long prefills in flight per replica, including the longest; 0 disables isolation. Two
    # keep the engine busy while first-token notices are in transit, and admit a medium prompt beside a huge
    # one. One lowers the TTFT of short requests slightly, and raises that of long ones much more.
    max_long_prefills: Annotated[int, NOT_NEGATIVE.hint("0 disables isolation")] = 2
    # Maximum number of the longest prefills. At `max_long_prefills` both classes have the same limit.
    max_longest_prefills: Annotated[int, POSITIVE] = 1
    # Share of prefill work that counts as short. A higher share isolates less.
    short_work_share: Annotated[float, INNER_SHARE] = 0.25
    # Share of prefill work that counts as longest. A higher share leaves more capacity to medium prompts.
    longest_work_share: Annotated[float, INNER_SHARE] = 0.5
    # Boundary of "long" in prompt tokens, until enough requests have been observed.
    prior_boundary_tokens: Annotated[int, INTERNAL] = 1_024
    # The same for "longest".
    prior_longest_tokens: Annotated[int, INTERNAL] = 4_096
    # Fair shares take precedence over isolation. Otherwise a tenant with mostly long requests would never get
    # its share beside others with short ones. A tenant may have one more long prefill for each time that it
    # is owed this many average requests (`FairShares`), up to `max_owed`. At 1, similar tenants break
    # isolation for each other in overload; at 16, a light tenant's long prompts wait for heavy tenants.
    owed_requests: Annotated[float, POSITIVE, INTERNAL] = 2.0
    # Maximum number of additional long prefills in flight because of `owed_requests`.
    max_owed: Annotated[int, NOT_NEGATIVE.hint("0 disables it"), INTERNAL] = 4
    # Seconds without a short request above the batch class after which there is none to protect. Then the
    # limit rises to `no_short_long_prefills`. Otherwise a backlog of long prompts alone would leave much of
    # each iteration unused.
    no_short_s: Annotated[float, POSITIVE, INTERNAL] = 2.0
    # Maximum number of long prefills in flight per replica after `no_short_s`: as many as fill an iteration
    # with their chunks (2,048 by 256 tokens on a 70B profile).
    no_short_long_prefills: Annotated[int, POSITIVE, INTERNAL] = 8

    def __post_init__(self) -> None:
        if not 0 < self.prior_boundary_tokens <= self.prior_longest_tokens:
            raise ValueError(
                "isolation.prior_boundary_tokens must be positive and at most prior_longest_tokens, got "
                f"{self.prior_boundary_tokens} and {self.prior_longest_tokens}"
            )


class PrefillIsolation:
    """Learns the boundaries of prefill classes, and limits the long prefills in flight on a replica."""

    def __init__(self, settings: IsolationSettings, delay: FeedbackDelay, *, isolates: bool) -> None:
        self._settings = settings
        self._delay = delay
        self._isolates = isolates
        self._work: dict[int, float] = {}
        self._observed = 0
        self._short_arrived_at = 0.0
        self.boundary_tokens = float(settings.prior_boundary_tokens)
        self.longest_boundary_tokens = float(settings.prior_longest_tokens)

    @property
    def is_enabled(self) -> bool:
        """True if long prefills are limited at all."""
        return self._isolates and self._settings.max_long_prefills > 0

    def retune(self, settings: IsolationSettings) -> None:
        """Apply other limits and shares from now on. The learned distribution of lengths is retained."""
        self._settings = settings
        if self._observed:
            self._update_boundaries()

    def observe(self, prompt_tokens: int) -> None:
        """Count a prompt that has arrived."""
        bucket = math.floor(_BUCKETS_PER_OCTAVE * math.log2(max(1, prompt_tokens)))
        self._work[bucket] = self._work.get(bucket, 0.0) + prompt_tokens
        self._observed += 1
        if self._observed % _RELEARN_EVERY == 0:
            self._learn()

    def prefill_class(self, prompt_tokens: int) -> PrefillClass:
        """Return the class of a prefill of this length; always `SHORT` while isolation is off."""
        if not self.is_enabled or prompt_tokens <= self.boundary_tokens:
            return PrefillClass.SHORT
        longest = prompt_tokens > self.longest_boundary_tokens
        return PrefillClass.LONGEST if longest else PrefillClass.LONG

    def on_arrival(self, scheduled: ScheduledRequest, now: float) -> None:
        """Count a request that has arrived, and set the class of its whole prefill."""
        self.observe(scheduled.prefill_tokens)
        scheduled.prefill_class = self.prefill_class(scheduled.estimate.expected_prompt_tokens)
        is_protected = scheduled.request.priority is not PriorityClass.BATCH
        if scheduled.prefill_class is PrefillClass.SHORT and is_protected:
            self._short_arrived_at = now

    def limits(
        self, prefill_class: PrefillClass, now: float, deficit_requests: float = 0.0
    ) -> tuple[int, ...]:
        """Return limits for a replica that gets one more prefill: (), (long), or (long, longest)."""
        if prefill_class is PrefillClass.SHORT:
            return ()
        settings = self._settings
        more = min(settings.max_owed, int(deficit_requests / settings.owed_requests))
        if now - self._short_arrived_at > settings.no_short_s:
            more = max(more, settings.no_short_long_prefills - settings.max_long_prefills)
        limit_factor = self._delay.limit_factor(_USUAL_LAG_S)
        long = round(settings.max_long_prefills * limit_factor)
        longest = round(settings.max_longest_prefills * limit_factor)
        return (long + more, longest + more)[:prefill_class]

    def _learn(self) -> None:
        decay = _DECAY_PER_THOUSAND ** (_RELEARN_EVERY / 1_000)
        self._work = {bucket: work * decay for bucket, work in self._work.items()}
        self._update_boundaries()

    def _update_boundaries(self) -> None:
        if self._observed < _LEARNED_REQUESTS:
            return
        learned = (
            2 ** (place / _BUCKETS_PER_OCTAVE) for place in (self._boundary_bucket(), self._longest_bucket())
        )
        self.boundary_tokens, self.longest_boundary_tokens = (
            max(ALWAYS_SHORT_TOKENS, each) for each in learned
        )

    def _boundary_bucket(self) -> float:
        """Return the bucket at the share of short work, or the middle of the widest gap nearby."""
        share, total = self._settings.short_work_share, sum(self._work.values())
        below, widest, middle, crossing = 0.0, 1, None, None
        buckets = sorted(bucket for bucket, work in self._work.items() if work > _OUTLIER_SHARE * total)
        for bucket, following in itertools.pairwise(buckets):
            below += self._work[bucket]
            gap = following - bucket
            if gap > widest and share * (1 - _GAP_TOLERANCE) <= below / total <= share * (1 + _GAP_TOLERANCE):
                widest, middle = gap, (bucket + 1 + following) / 2
            if crossing is None and below > share * total:
                crossing = float(bucket + 1)
        if middle is not None:
            return middle
        return crossing if crossing is not None else float(buckets[-1])

    def _longest_bucket(self) -> float:
        """Return the bucket at the share of longest work, or 0 if nearly all prompts have one length."""
        target = self._settings.longest_work_share * sum(self._work.values())
        above = 0.0
        for bucket in sorted(self._work, reverse=True):
            above += self._work[bucket]
            if above > target:
                return float(bucket + 1)
        return 0.0

    def __repr__(self) -> str:
        longest = self.longest_boundary_tokens
        boundaries = f"long > {self.boundary_tokens:.0f}, longest > {longest:.0f} tokens"
        return f"<PrefillIsolation {'on' if self.is_enabled else 'off'} {boundaries}>"


class PrefillTracker:
    """Ends prefills in the ledger, and learns their cost and the feedback delay.

    The first token of a streamed answer marks the end of its prefill. An answer that is not streamed has no
    such mark, so its prefill counts as ended after its usual time, as learned from streamed ones.
    """

    def __init__(self, ledger: ReplicaLedger, costs: PrefillCosts, delay: FeedbackDelay) -> None:
        self._ledger = ledger
        self.costs = costs
        self._delay = delay
        # A heap of (assumed end, order of dispatch, request, its attempt).
        self._assumed: list[tuple[float, int, ScheduledRequest, Running]] = []
        self._sent = 0

    def on_dispatch(self, scheduled: ScheduledRequest, running: Running, now: float) -> None:
        """Schedule the assumed end of a dispatched request's prefill if its answer is not streamed."""
        if not scheduled.request.spec.streamed:
            cost = self.costs.of(running.replica.spec.pool)
            self._sent += 1
            ends_at = now + _USUAL_TIMES * cost.seconds(scheduled.prefill_tokens)
            heapq.heappush(self._assumed, (ends_at, self._sent, scheduled, running))

    def on_first_token(self, scheduled: ScheduledRequest, running: Running, now: float) -> None:
        """Learn from the first token of a streamed answer. `ReplicaLedger.start` ends its prefill."""
        replica, seconds = running.replica, now - scheduled.dispatched_at
        if running.prefilled_alone and running.number == replica.dispatches:
            self.costs.observe(replica.spec.pool, scheduled.prefill_tokens, seconds)
        self._learn_delay(scheduled.prefill_tokens, running, seconds)

    def end_assumed(self, now: float) -> None:
        """End the prefills whose assumed end has come."""
        while self._assumed and self._assumed[0][0] <= now:
            _, _, scheduled, running = heapq.heappop(self._assumed)
            if scheduled.running is running:
                self._ledger.end_prefill(running)

    def next_at(self) -> float | None:
        """Return the next assumed end of a prefill, or None."""
        return self._assumed[0][0] if self._assumed else None

    def _learn_delay(self, prefill_tokens: int, running: Running, seconds: float) -> None:
        replica = running.replica
        if running.prefill_class is not PrefillClass.SHORT:
            self._delay.on_long_first_token(seconds)
        elif replica.in_flight < replica.likely_num_seqs:
            iteration_s = (replica.report.tpot_s if replica.report else None) or 0.0
            token_s = self.costs.of(replica.spec.pool).per_token_s
            self._delay.on_short_first_token(seconds - token_s * prefill_tokens - iteration_s)
