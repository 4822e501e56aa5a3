"""Cost attribution: engine time divided among the requests that used it, summed by class and tenant.

An engine is busy while it has a request. Engines do not report the content of each step, so a model of
steps divides the time:

- A step reads the weights of the model once for all requests in it. This *common* time is divided equally
  among the requests on the replica.
- A step with prompt tokens takes longer if computing them takes longer than reading the weights
  (`engines.model.step_time`). Only this excess is charged to the prompt's request. A prompt of `b` uncached
  tokens takes `k = max(1, b / chunk)` steps. Each step computes some prompt tokens at no cost while the
  weights are read. The `m` prefills in progress, this one included, share that capacity:

      excess = max(0, per_token * b - k * base / m)

  `per_token` and `base` are from the learned cost of a prefill (`core.routing.prefill_cost`): the cost of
  an empty prompt is about one read of the weights.

To divide no time twice, the time between two events is first *undivided*. Prefills in progress reserve
their excess of it. The rest advances the *common clock*: the seconds used by a request that was present all
the time. A request is charged the advance of that clock between its dispatch and its end. It is charged its
excess at its first token, or at its end if the answer is not streamed. The last request to leave is charged
the remaining undivided time. All charges add up to the busy time.
"""

from serve_app.core.accounting.wait_causes import EngineShare, ReplicaTime
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.prefill_cost import PrefillCosts
from serve_app.core.routing.replica_state import Running
from serve_app.request import PriorityClass, Request

# Bound on memory: seconds of tenants beyond these are summed under `OTHERS`.
_MAX_TENANTS = 1_000
OTHERS = "other"
"""The name under which all tenants beyond the bound are summed."""

# vLLM's default for `max_num_batched_tokens` on most GPUs, for engines that do not report theirs.
_LIKELY_CHUNK_TOKENS = 2048


class TenantTotals(dict[tuple[str, PriorityClass, str], float]):
    """Seconds by pool, class and tenant: at most `_MAX_TENANTS` sums, and those of `OTHERS`."""

    def add(self, pool: str, request: Request, seconds: float) -> None:
        """Add seconds to the sum of a request's class and tenant in a pool. Zero creates no entry."""
        if not seconds:
            return
        key = pool, request.priority, request.tenant
        if key not in self and len(self) >= _MAX_TENANTS:
            key = pool, request.priority, OTHERS
        self[key] = self.get(key, 0.0) + seconds

    def __repr__(self) -> str:
        return f"<TenantTotals {len(self)} sums, {sum(self.values()):.1f} s>"


class EngineTime:
    """Divides the busy time of engines among their requests.

    Attributes:
        used: seconds of requests that have left their replica, by pool, class and tenant.
    """

    def __init__(self, costs: PrefillCosts) -> None:
        self._costs = costs
        self._replicas: dict[str, ReplicaTime] = {}
        self.used = TenantTotals()

    def __repr__(self) -> str:
        return f"<EngineTime of {len(self._replicas)} replicas at work, {self.used}>"

    def on_dispatch(self, scheduled: ScheduledRequest, running: Running, now: float) -> None:
        """Open the account of a request that the replica already holds.

        A request whose answer has already started is charged no prefill.
        """
        spec = running.replica.spec
        time = self._replicas.get(spec.replica_id)
        if time is None:
            time = self._replicas[spec.replica_id] = ReplicaTime(now)
        else:
            time.advance(now)
        time.requests += 1
        if running.started:
            running.share = EngineShare(time, 0.0, 0.0, 1)
            return
        cost, tokens = self._costs.of(spec.pool), scheduled.prefill_tokens
        chunk = spec.long_prefill_token_threshold or spec.max_num_batched_tokens or _LIKELY_CHUNK_TOKENS
        read_s = cost.base_s * tokens / chunk if tokens > chunk else cost.base_s
        prefills = running.replica.unstarted or 1
        running.share = EngineShare(time, cost.per_token_s * tokens, read_s, prefills)

    def on_first_token(self, running: Running, now: float) -> None:
        """Charge the prefill of a streamed request. The replica must still count it as unstarted."""
        share = running.share
        if share is not None:
            share.time.advance(now)
            share.charge(share.excess_s((share.prefills + (running.replica.unstarted or 1)) / 2))

    def on_departure(self, request: Request, running: Running, now: float, *, ran: bool) -> None:
        """Move a request's seconds to `used`. If it never ran on the engine, its prefill costs nothing."""
        share, spec = running.share, running.replica.spec
        if share is None:
            return
        time, running.share = share.time, None
        time.advance(now)
        if share.reserved_s:
            share.charge(share.reserved_s if ran else 0.0)
        seconds = share.charged_s + time.common_s - share.since
        time.requests -= 1
        if not time.requests:
            seconds += time.undivided_s
            del self._replicas[spec.replica_id]
        self.used.add(spec.pool, request, seconds)
