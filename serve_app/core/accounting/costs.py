"""Costs of requests: the engine time that they use, divided among them, and sums by class and tenant."""

from collections.abc import Iterator

from serve_app.core.accounting.engine_share import EngineShare, ReplicaTime
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.replica_state import ReplicaState
from serve_app.request import PriorityClass, Request

# Sums by class and tenant, bounded in number.


# Tenants beyond these are summed together.
_MOST = 1_000
OTHERS = "other"
"""The name under which all further tenants are summed."""


class TenantTotals:
    """Seconds by a place, class and tenant.

    Args:
        most: how many sums there may be besides those of `OTHERS`.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._seconds: dict[tuple[str, PriorityClass, str], float] = {}

    def add(self, place: str, request: Request, seconds: float) -> None:
        """A request has so much more on its account; nothing is kept of no time at all."""
        if not seconds:
            return
        key = place, request.priority, request.tenant
        known = self._seconds
        if key not in known and len(known) >= self._most:
            key = place, request.priority, OTHERS
        known[key] = known.get(key, 0.0) + seconds

    def __iter__(self) -> Iterator[tuple[str, PriorityClass, str, float]]:
        """Place, class, tenant and the seconds so far."""
        for (place, priority, tenant), seconds in self._seconds.items():
            yield place, priority, tenant, seconds

    def __repr__(self) -> str:
        return f"<TenantTotals {len(self._seconds)} sums, {sum(self._seconds.values()):.1f} s>"


# Engine time: the seconds that replicas worked, divided among the requests that they worked on.
#
# An engine works while it has a request. What it does in each step is not told, so its time is divided by a
# model of steps:
#
# - A step reads the weights of the model once for all requests in it. This *common* time is divided equally
#   among the requests on the replica.
# - A step with prompt tokens takes longer where computing them takes longer than the reading
#   (`engines.model.step_time`). Only that excess is charged to the prompt's request. A prompt of `b` uncached
#   tokens passes in `k = max(1, b / chunk)` steps, each of which has room for as many as are computed while
#   the weights are read. The prefills under way beside it, `m` with its own, share that room:
#
#       excess = max(0, per_token * b - k * base / m)
#
#   `per_token` and `base` are those of the learned cost of a prefill (`core.routing.prefill_cost`): what is
#   left for an empty prompt is about one reading of the weights.
#
# So that nothing is divided twice, the time between two events goes into a *pot*. Prefills that have not been
# paid keep what they need of it. The rest moves the *common clock*: the seconds that a request has used which
# was there all the while. A request pays the difference of that clock between its dispatch and its end, and
# its excess at its first token, or at its end where the answer is not streamed. What remains when the last
# request leaves is its own. The sum of all that is charged is the time worked.


# vLLM's default for `max_num_batched_tokens` on most GPUs, where an engine does not state its own.
_LIKELY_CHUNK_TOKENS = 2048


class EngineTime:
    """Divides the time of engines.

    Args:
        costs: of prefills, as learned.

    Attributes:
        used: seconds of requests that have left their replica, by pool, class and tenant.
    """

    def __init__(self, costs: PrefillCosts) -> None:
        self._costs = costs
        self._replicas: dict[str, ReplicaTime] = {}
        self.used = TenantTotals()

    def __repr__(self) -> str:
        return f"<EngineTime of {len(self._replicas)} replicas at work, {self.used}>"

    def on_dispatch(self, scheduled: ScheduledRequest, state: ReplicaState, now: float) -> None:
        """A request is on a replica, which holds it already; its answer may have begun."""
        spec = state.spec
        time = self._replicas.get(spec.replica_id)
        if time is None:
            time = self._replicas[spec.replica_id] = ReplicaTime(now)
        else:
            time.advance(now)
        time.requests += 1
        if scheduled.started:
            scheduled.engine_share = EngineShare(time, 0.0, 0.0, 1)
            return
        cost, tokens = self._costs.of(spec.pool), scheduled.prefill_tokens
        chunk = spec.long_prefill_token_threshold or spec.max_num_batched_tokens or _LIKELY_CHUNK_TOKENS
        read_s = cost.base_s * tokens / chunk if tokens > chunk else cost.base_s
        scheduled.engine_share = EngineShare(time, cost.per_token_s * tokens, read_s, state.unstarted or 1)

    def on_first_token(self, scheduled: ScheduledRequest, state: ReplicaState, now: float) -> None:
        """The streamed answer of a request has begun; the replica holds its prefill still."""
        share = scheduled.engine_share
        if share is not None:
            share.time.advance(now)
            share.pay(share.excess_s((share.prefills + (state.unstarted or 1)) / 2))

    def on_departure(
        self, scheduled: ScheduledRequest, state: ReplicaState, now: float, *, ran: bool
    ) -> None:
        """A request leaves its replica.

        Args:
            ran: the engine has worked on it, as far as is known; else its prefill costs nothing.
        """
        share = scheduled.engine_share
        if share is None:
            return
        time, scheduled.engine_share = share.time, None
        time.advance(now)
        if share.owed_s:
            share.pay(share.owed_s if ran else 0.0)
        seconds = share.paid_s + time.common_s - share.since
        time.requests -= 1
        if not time.requests:
            seconds += time.pot_s
            del self._replicas[state.spec.replica_id]
        self.used.add(state.spec.pool, scheduled.request, seconds)
