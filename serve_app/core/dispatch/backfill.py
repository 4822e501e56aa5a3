"""Backfill: batch work fills the capacity that other requests leave, and gives way to them.

- `Backfill`: decides how much batch work a replica gets, and which of it is revoked.
- `TenantHeadroom`: the last part of a replica's KV cache, kept from tenants that hold more than their share.

`Backfill`. A replica is *shared* while a request above the batch class runs on it, and for `linger_s` after
the last one.

- Alone, batch work uses the engine, except a small reserve: the first request of a higher class that arrives
  there starts at once.
- On a shared replica, batch work may slow the others down by at most `max_slowdown`: by its tokens in each
  iteration and by its prefills together. The first is learned (`IterationTime`), and prefills count by their
  share of the last seconds. If no batch request runs, one may start as soon as that share allows it.
- An engine that computes long prefills in small chunks hides one of them: an iteration computes the chunk
  while it reads the weights, and a second one doubles it. So below a `max_slowdown` of 1, a batch prefill
  starts there only while no other one is in flight. It counts as far as a chunk exceeds an iteration, or in
  whole beside another prefill.
- Running batch requests beyond that number are *revoked*: their gateways stop them, and they queue again.
  They continue with the tokens that they have generated, which then are a part of their prompt.
- A request above the batch class, or of a tenant that is behind its floor, that waits for KV cache or a place
  in a batch revokes as much as it needs.
- A replica that drains revokes all of them, and other requests that its gateways can continue elsewhere.

The requests with the fewest tokens to compute again are revoked first. So those with the most progress end,
however often others are revoked. Requests that were dispatched by their class floor or starvation bound are
not revoked.

Source: ours, after backfilling of parallel jobs (Lifka, "The ANL/IBM SP scheduling system", 1995), whose
backfilled jobs also must not delay others.

`TenantHeadroom`. Fair shares decide which tenant is next, but a request holds its KV cache for its whole
answer. If a few tenants fill the cache of every replica, a request of any other waits until one of their
answers ends, even if it is the next in order. So a tenant that holds more than its share of a pool gets no
capacity from the last part of a replica, as long as others need it.

The size follows the *light* tenants, those that hold at most half of their share. Their requests arrive at
random and take the reserved part. It is free again as soon as answers end, because no heavy tenant gets it.
With `r`, the share of light tenants in the tokens of a pool, the number of light requests that find no room
falls by `r` with each request that fits into the reserved part:

    P(light request waits) = r ** n  <=  1 %       n = log(0.01) / log(r)

The reserved part is `n` mean requests of light tenants, on all replicas of the pool together; on each at
least one, and at most a tenth of the cache. It is 0 if tenants are alike, since none is light, and if no
other tenant has sent a request lately.

The price: heavy tenants wait for that part.

Source: trunk reservation of loss networks (Kelly, "Loss Networks", 1991); the geometric tail assumes Poisson
arrivals.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from serve_app.core.accounting.wait_causes import WaitCause
from serve_app.core.accounting.waits import WaitAccount
from serve_app.core.queueing.fairness import TenantWeights
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.prefill_cost import DecayingLine, DecayingRate, PrefillCosts
from serve_app.core.routing.replica import ReplicaReport
from serve_app.core.routing.replica_state import ReplicaState, Running
from serve_app.core.settings_base import INTERNAL, NOT_NEGATIVE, SHARE, settings
from serve_app.request import PriorityClass

if TYPE_CHECKING:
    from serve_app.core.queueing.request_queue import RequestQueue

# Share of its fair share up to which a tenant is light.
_LIGHT = 0.5
# Probability that a light request finds the reserved part in use, and the largest part of a replica's cache.
_MISSES, _MAX_RATIO = 0.01, 0.1
# Time after which a tenant without requests no longer has a share.
_ACTIVE_S = 60.0
# Weight of a request in the means: about the last two hundred.
_WEIGHT = 0.005
# Below this share of all tokens, light tenants get no part.
_MIN_LIGHT = 0.005


class _PoolUse:
    """Tokens that each tenant holds in one pool, and its mean request."""

    __slots__ = ("by_tenant", "light_mean", "light_tokens", "mean_tokens", "tokens")

    def __init__(self) -> None:
        self.by_tenant: dict[str, int] = {}
        self.tokens = 0
        self.mean_tokens = self.light_tokens = self.light_mean = 0.0


class TenantHeadroom:
    """Counts what tenants hold, and determines what must remain free after a request.

    Attributes:
        is_enabled: whether anything is kept: under fair shares and a policy that promotes.
    """

    def __init__(self, ledger: ReplicaLedger, weights: TenantWeights, *, is_enabled: bool) -> None:
        self._ledger = ledger
        self.is_enabled = is_enabled
        self._weights = weights
        self._pools: dict[str, _PoolUse] = {}
        # The tenants with recent requests, by the time of the last one.
        self._active: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._active_weight = 0.0

    def __repr__(self) -> str:
        return f"<TenantHeadroom of {len(self._active)} tenants>"

    def on_hold(self, tenant: str, pool: str, tokens: int, now: float) -> None:
        """Count the tokens that a replica of the pool holds from now on for a request of a tenant."""
        self._touch(tenant, now)
        use = self._pools.get(pool)
        if use is None:
            use = self._pools[pool] = _PoolUse()
        held = use.by_tenant.get(tenant, 0)
        is_light = held + tokens <= _LIGHT * self._share(tenant) * use.tokens
        use.by_tenant[tenant] = held + tokens
        use.tokens += tokens
        use.mean_tokens += _WEIGHT * (tokens - use.mean_tokens)
        use.light_tokens += _WEIGHT * (tokens * is_light - use.light_tokens)
        if is_light:
            use.light_mean += (_WEIGHT if use.light_mean else 1.0) * (tokens - use.light_mean)

    def on_release(self, tenant: str, running: Running) -> None:
        """Count a request that is no longer held."""
        assert running.use is not None
        use, tokens = self._pools[running.use.pool], running.tokens
        use.tokens -= tokens
        # A request may need no tokens, so a tenant without any may still have requests.
        left = use.by_tenant.pop(tenant, 0) - tokens
        if left:
            use.by_tenant[tenant] = left

    def tokens(self, scheduled: ScheduledRequest, pool: str) -> int:
        """Return the tokens that a request must leave free on its replica; 0 within its tenant's share."""
        use = self._pools.get(pool)
        if use is None or not use.light_mean or not self.is_enabled:
            return 0
        tenant = scheduled.request.tenant
        if use.by_tenant.get(tenant, 0) <= self._share(tenant) * use.tokens:
            return 0
        return self._kept(use, pool)

    def _kept(self, use: _PoolUse, pool: str) -> int:
        light = use.light_tokens / use.mean_tokens
        if light < _MIN_LIGHT:
            return 0
        requests = math.log(_MISSES) / math.log(min(light, 0.99))
        replicas, budget = len(self._ledger.of_pool(pool)), self._ledger.smallest_kv_budget(pool)
        return int(min(_MAX_RATIO * budget, use.light_mean * max(1.0, requests / max(1, replicas))))

    def _share(self, tenant: str) -> float:
        return self._weights.of(tenant) / max(self._active_weight, self._weights.of(tenant))

    def _touch(self, tenant: str, now: float) -> None:
        _, weight = self._active.pop(tenant, (0.0, 0.0))
        self._active_weight += self._weights.of(tenant) - weight
        self._active[tenant] = now, self._weights.of(tenant)
        while (first := next(iter(self._active))) != tenant and self._active[first][0] < now - _ACTIVE_S:
            self._active_weight -= self._active.pop(first)[1]


@settings(block="backfill")
class BackfillSettings:
    """Limits on batch work."""

    # Share by which batch work may lengthen the iterations of an engine that serves other requests, too.
    max_slowdown: Annotated[float, NOT_NEGATIVE] = 0.1
    # Share of an engine's batch and KV cache that batch work leaves free when it is alone.
    reserve: Annotated[float, SHARE, INTERNAL] = 0.05
    # Seconds after the last other request on a replica during which it counts as shared. Requests of
    # interactive users and of agents follow each other within seconds.
    linger_s: Annotated[float, NOT_NEGATIVE, INTERNAL] = 2.0


# Number of sequences that double the duration of an iteration, until it is learned, and its bounds.
_PRIOR_TO_DOUBLE, _FEWEST_TO_DOUBLE, _MOST_TO_DOUBLE = 64.0, 4.0, 256.0
# Weights of a report below and above the low quantile of its octave, which is about the second percentile.
_BELOW_WEIGHT, _ABOVE_WEIGHT = 0.2, 0.004
# Reports of one octave that have its full weight.
_ENOUGH_REPORTS = 100
# Weight of a report in the mean number of running sequences: about one second of reports.
_RUNNING_WEIGHT = 0.2
# Time constant of the share of batch prefills.
_PREFILL_WINDOW_S = 5.0
# Tokens for which there must be room if an account of short requests waits, whose lengths it does not state.
_LEAST_TOKENS = 4_096
# Time per output token of a replica that has reported none.
_LIKELY_TPOT_S = 0.03
# Share by which the chunk of a second prefill lengthens an iteration whose first chunk is hidden.
_TWO_CHUNKS = 1.0
# Causes of a wait that end when batch requests leave an engine.
_CAPACITY = (WaitCause.ENGINES_BUSY, WaitCause.KV_CACHE, WaitCause.ENGINE_QUEUE)


class IterationTime:
    """The duration of an iteration by the number of running sequences, learned for one pool.

    Reports of the time per output token include prefills. So for each octave of sequences a low quantile
    counts, and the line `base + slope * sequences` is fitted to these. It does not depend on how often an
    engine has which number of sequences.
    """

    def __init__(self) -> None:
        # By octave: weight, mean number of sequences, and low quantile of the time per output token.
        self._low: dict[int, tuple[int, float, float]] = {}

    def __repr__(self) -> str:
        return f"<IterationTime doubled by {self.to_double():.0f} sequences>"

    def observe(self, running: float, tpot_s: float) -> None:
        """Learn from a report of the mean time per output token while so many sequences ran."""
        octave = int(running).bit_length()
        reports, mean, low_s = self._low.get(octave, (0, running, tpot_s))
        weight = _BELOW_WEIGHT if tpot_s < low_s else _ABOVE_WEIGHT
        self._low[octave] = (
            min(reports + 1, _ENOUGH_REPORTS),
            mean + _BELOW_WEIGHT * (running - mean),
            low_s + weight * (tpot_s - low_s),
        )

    def to_double(self) -> float:
        """Return the number of sequences that take as long as everything else in an iteration."""
        return self._fit()[1]

    def seconds(self, sequences: int) -> float:
        """Return the duration with so many sequences. Needs at least one report."""
        (weight, x, y, _, _), to_double = self._fit()
        return y * (to_double + sequences) / (to_double * weight + x)

    def _fit(self) -> tuple[list[float], float]:
        """Return the sums of the line, and `to_double`."""
        line = DecayingLine()
        for reports, mean, low_s in self._low.values():
            line.add(mean, low_s, reports)
        weight, x, y, _, _ = line.sums
        slope = line.slope()
        if slope is None or slope <= 0.0:
            # There is one octave, or noise is larger than the effect.
            return line.sums, _PRIOR_TO_DOUBLE
        return line.sums, min(max((y / slope - x) / weight, _FEWEST_TO_DOUBLE), _MOST_TO_DOUBLE)


@dataclass(slots=True)
class _Load:
    """The requests on one replica.

    Attributes:
        others: number above the batch class.
        shared_until: end of the time for which it counts as shared.
        running: mean number of running sequences over the time for which engines report the mean TPOT.
        prefill_s: seconds by which batch prefills lengthen iterations, per second.
        prefilling: the last batch request on it, and the seconds of its prefill that lengthen iterations
            only beside another prefill.
        batch: number of the batch class.
        revocable: batch requests that may be revoked.
        movable: requests above the batch class that may be revoked while the replica drains.
        revoked: requests whose revocation is in transit.
    """

    prefill_s: DecayingRate
    running: float = 0.0
    others: int = 0
    shared_until: float = -math.inf
    prefilling: tuple[Running, float] | None = None
    batch: int = 0
    revocable: dict[ScheduledRequest, None] = field(default_factory=dict)
    movable: dict[ScheduledRequest, None] = field(default_factory=dict)
    revoked: set[ScheduledRequest] = field(default_factory=set)

    def is_shared(self, now: float) -> bool:
        """Return whether requests above the batch class run, or have run recently."""
        return self.others > 0 or now < self.shared_until


class Backfill:
    """Decides how much batch work a replica gets, and which of it is revoked."""

    def __init__(self, settings: BackfillSettings, prefill_costs: PrefillCosts) -> None:
        self._settings = settings
        self._prefill_costs = prefill_costs
        self._loads: dict[str, _Load] = {}
        self._iterations: dict[str, IterationTime] = {}
        # Replicas on which batch requests may have to be revoked, and those with any to revoke or revoked.
        self._crowded: set[str] = set()
        self._with_revocable: dict[str, None] = {}

    def __repr__(self) -> str:
        batch = sum(load.batch for load in self._loads.values())
        return f"<Backfill {batch} on {len(self._loads)} replicas>"

    def on_dispatch(self, scheduled: ScheduledRequest, running: Running, now: float) -> None:
        """Count a request before its replica holds it."""
        replica_id = running.replica.spec.replica_id
        load = self._loads.get(replica_id)
        if load is None:
            load = self._loads[replica_id] = _Load(DecayingRate(_PREFILL_WINDOW_S, now))
        is_revocable = scheduled.request.submission.revocable
        if scheduled.request.priority is PriorityClass.BATCH:
            self._count_prefill(load, running, now)
            load.batch += 1
            if is_revocable and not (running.is_guaranteed or running.bypassed):
                load.revocable[scheduled] = None
                self._with_revocable[replica_id] = None
            return
        load.others += 1
        if load.prefilling is not None:
            prefilling, hidden_s = load.prefilling
            if prefilling.prefill_tokens:
                load.prefill_s.add(hidden_s, now)
            load.prefilling = None
        if is_revocable:
            load.movable[scheduled] = None
        if load.batch:
            self._crowded.add(replica_id)

    def on_release(self, scheduled: ScheduledRequest, running: Running, now: float) -> None:
        """Remove a request before its replica releases it."""
        replica_id = running.replica.spec.replica_id
        load = self._loads[replica_id]
        load.revoked.discard(scheduled)
        load.revocable.pop(scheduled, None)
        load.movable.pop(scheduled, None)
        if load.prefilling is not None and load.prefilling[0] is running:
            load.prefilling = None
        if not (load.revocable or load.revoked):
            self._with_revocable.pop(replica_id, None)
        if scheduled.request.priority is PriorityClass.BATCH:
            load.batch -= 1
            return
        load.others -= 1
        load.shared_until = now + self._settings.linger_s

    def on_report(self, replica: ReplicaState, report: ReplicaReport) -> None:
        """Learn from a replica's report, and note if it drains."""
        load = self._loads.get(replica.spec.replica_id)
        if load is None:
            return
        if report.draining and (load.batch or load.movable):
            self._crowded.add(replica.spec.replica_id)
        load.running += _RUNNING_WEIGHT * ((report.running or 0) - load.running)
        if report.tpot_s is not None and load.running >= 1.0:
            iteration = self._iterations.setdefault(replica.spec.pool, IterationTime())
            iteration.observe(load.running, report.tpot_s)

    def on_loss(self, ledger: ReplicaLedger) -> None:
        """Drop the replicas that have left the ledger."""
        self._loads = {name: load for name, load in self._loads.items() if ledger.get(name) is not None}

    def iteration_s(self, pool: str, sequences: int) -> float | None:
        """Return the learned duration of an iteration in a pool, in seconds; None before a report of it."""
        iteration = self._iterations.get(pool)
        return None if iteration is None else iteration.seconds(sequences)

    def is_shared(self, replica: ReplicaState, now: float) -> bool:
        """Return whether requests above the batch class run on a replica, or have run there recently."""
        load = self._loads.get(replica.spec.replica_id)
        return load is not None and load.is_shared(now)

    def admits(self, replica: ReplicaState, now: float) -> bool:
        """Return whether a replica has capacity for one more batch request."""
        load = self._loads.get(replica.spec.replica_id)
        if load is None or not replica.in_flight:
            return True
        if load.is_shared(now):
            if self._settings.max_slowdown < _TWO_CHUNKS and _prefills_chunks(replica):
                return False
            slowdown = self._slowdown(replica, load, load.batch + 1) if load.batch else 0.0
            return slowdown + load.prefill_s.per_s(now) <= self._settings.max_slowdown
        places, reserve = replica.max_num_seqs, self._settings.reserve
        if places is not None and replica.in_flight >= places - math.ceil(reserve * places):
            return False
        return replica.free_tokens > reserve * replica.kv_budget

    def revocations(
        self, ledger: ReplicaLedger, queue: "RequestQueue", now: float
    ) -> Iterator[tuple[ScheduledRequest, str]]:
        """Yield the requests to revoke now, each once, with their replicas."""
        crowded, self._crowded = self._crowded, set()
        for replica_id in sorted(crowded):
            if (replica := ledger.get(replica_id)) is None:
                continue
            load = self._loads[replica_id]
            if replica.report is not None and replica.report.draining:
                chosen = [each for each in (*load.revocable, *load.movable) if _has_other(ledger, each)]
            elif (excess := self._excess(replica, load)) > 0:
                chosen = _cheapest_first(replica, load, now)[:excess]
            else:
                continue
            for scheduled in chosen:
                yield _revoke(load, scheduled), replica_id
        if not self._with_revocable:
            return
        due = [floor.tenant for floor in queue.due_floors(now) if floor.tenant is not None]
        for account in queue.waits:
            precedes = account.priority is not PriorityClass.BATCH or account.has_any(due)
            if precedes and account.pool and account.cause in _CAPACITY:
                yield from self._make_room(ledger, account, now)

    def _count_prefill(self, load: _Load, running: Running, now: float) -> None:
        """Count the seconds of a batch prefill that lengthen iterations, and note those that may yet."""
        replica = running.replica
        token_s = self._prefill_costs.of(replica.spec.pool).per_token_s
        prefill_s, hidden_s = token_s * running.prefill_tokens, 0.0
        chunk = replica.spec.long_prefill_token_threshold
        if chunk and not replica.prefills.tokens:
            tpot_s = replica.tpot_s or _LIKELY_TPOT_S
            # One chunk is computed while an iteration reads the weights, if it is small enough.
            hidden_s = prefill_s * min(1.0, tpot_s / (token_s * chunk))
        load.prefill_s.add(prefill_s - hidden_s, now)
        load.prefilling = running, hidden_s

    def _make_room(
        self, ledger: ReplicaLedger, account: WaitAccount, now: float
    ) -> Iterator[tuple[ScheduledRequest, str]]:
        """Yield batch requests of one replica that must end before a waiting request of an account fits."""
        limit = ledger.context_limit(account.pool)
        assert limit is not None, "an account waits for a pool with a usable replica"
        tokens = min(limit, max(_LEAST_TOKENS, 2 * account.tokens))
        found: tuple[int, ReplicaState, _Load] | None = None
        for replica_id in self._with_revocable:
            replica, load = ledger.get(replica_id), self._loads[replica_id]
            if replica is None or replica.spec.pool != account.pool or not replica.is_usable:
                continue
            if not _lacks(replica, load, tokens):
                # It fits as soon as earlier revocations have arrived, or waits for something else.
                return
            held = _held_tokens(load.revocable)
            if found is None or held > found[0]:
                found = held, replica, load
        if found is None:
            return
        _, replica, load = found
        for scheduled in _cheapest_first(replica, load, now):
            yield _revoke(load, scheduled), replica.spec.replica_id
            if not _lacks(replica, load, tokens):
                return

    def _excess(self, replica: ReplicaState, load: _Load) -> int:
        """Return how many batch requests to revoke on a shared replica. One may always stay."""
        slowdown_of_one = self._slowdown(replica, load, 1)
        most = max(1, int(self._settings.max_slowdown / slowdown_of_one))
        return load.batch - len(load.revoked) - most

    def _slowdown(self, replica: ReplicaState, load: _Load, running: int) -> float:
        """Return by which share so many batch requests lengthen an iteration of the others."""
        iteration = self._iterations.get(replica.spec.pool)
        to_double = _PRIOR_TO_DOUBLE if iteration is None else iteration.to_double()
        return running / (to_double + load.others)


def _prefills_chunks(replica: ReplicaState) -> bool:
    """Return whether a replica computes prefills, and in chunks."""
    return bool(replica.spec.long_prefill_token_threshold and replica.prefills.tokens)


def _cheapest_first(replica: ReplicaState, load: _Load, now: float) -> list[ScheduledRequest]:
    """Return the batch requests that may be revoked, those with the fewest computed tokens first."""
    tpot_s = replica.tpot_s or _LIKELY_TPOT_S

    def computed_tokens(scheduled: ScheduledRequest) -> float:
        started_at = scheduled.started_at
        if started_at is None:
            return 0.0
        return scheduled.estimate.expected_prompt_tokens + (now - started_at) / tpot_s

    return sorted(load.revocable, key=lambda each: (computed_tokens(each), -each.sequence))


def _revoke(load: _Load, scheduled: ScheduledRequest) -> ScheduledRequest:
    """Mark a request as revoked, and return it."""
    load.revocable.pop(scheduled, None)
    load.movable.pop(scheduled, None)
    load.revoked.add(scheduled)
    return scheduled


def _held_tokens(requests: Iterable[ScheduledRequest]) -> int:
    return sum(each.running.tokens for each in requests if each.running is not None)


def _has_other(ledger: ReplicaLedger, scheduled: ScheduledRequest) -> bool:
    """Return whether a replica that accepts requests can continue one of a replica that drains."""
    return any(ledger.has_usable(pool) for pool in scheduled.pools)


def _lacks(replica: ReplicaState, load: _Load, tokens: int) -> bool:
    """Return whether a replica lacks KV cache or a place for a request, after its revocations."""
    freed = _held_tokens(load.revoked)
    places = replica.max_num_seqs
    lacks_place = places is not None and replica.in_flight - len(load.revoked) >= places
    return lacks_place or replica.free_tokens + freed < tokens
