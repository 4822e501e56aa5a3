"""Engine time: the seconds that replicas worked, divided among the requests that they worked on.

An engine works while it has a request. What it does in each step is not told, so its time is divided by a
model of steps:

- A step reads the weights of the model once for all requests in it. This *common* time is divided equally
  among the requests on the replica.
- A step with prompt tokens takes longer where computing them takes longer than the reading
  (`engine_model.step_time`). Only that excess is charged to the prompt's request. A prompt of `b` uncached
  tokens passes in `k = max(1, b / chunk)` steps, each of which has room for as many as are computed while
  the weights are read. The prefills under way beside it, `m` with its own, share that room:

      excess = max(0, per_token * b - k * base / m)

  `per_token` and `base` are those of the learned cost of a prefill (`routing.prefill_cost`): what is left for
  an empty prompt is about one reading of the weights.

So that nothing is divided twice, the time between two events goes into a *pot*. Prefills that have not been
paid keep what they need of it. The rest moves the *common clock*: the seconds that a request has used which
was there all the while. A request pays the difference of that clock between its dispatch and its end, and
its excess at its first token, or at its end where the answer is not streamed. What remains when the last
request leaves is its own. The sum of all that is charged is the time worked.
"""

from serve_app.routing.prefill_cost import PrefillCosts
from serve_app.routing.replica_state import ReplicaState
from serve_app.scheduling.costs.engine_share import EngineShare
from serve_app.scheduling.costs.tenant_totals import TenantTotals
from serve_app.scheduling.request import ScheduledRequest

# vLLM's default for `max_num_batched_tokens` on most GPUs, where an engine does not state its own.
_LIKELY_CHUNK_TOKENS = 2048


class _ReplicaTime:
    """The time of one replica since it last had nothing to do.

    Attributes:
        at: when it was last looked at.
        pot_s: time that is not divided yet.
        owed_s: prefills that are not paid.
        common_s: the common clock.
        requests: how many are on the replica.
    """

    __slots__ = ("at", "common_s", "owed_s", "pot_s", "requests")

    def __init__(self, now: float) -> None:
        self.at = now
        self.pot_s = 0.0
        self.owed_s = 0.0
        self.common_s = 0.0
        self.requests = 0

    def advance(self, now: float) -> None:
        """Put the time since the last look into the pot, and divide what no prefill needs."""
        self.pot_s += now - self.at
        self.at = now
        if self.pot_s > self.owed_s:
            self.common_s += (self.pot_s - self.owed_s) / self.requests
            self.pot_s = self.owed_s

    def take(self, share: EngineShare, seconds: float) -> float:
        """What a prefill pays that has ended, of `seconds` that it should."""
        paid = min(seconds, self.pot_s)
        self.pot_s -= paid
        self.owed_s = max(0.0, self.owed_s - share.prefill_s)
        share.prefill_s = 0.0
        return paid


class EngineTime:
    """Divides the time of engines.

    Args:
        costs: of prefills, as learned.

    Attributes:
        used: seconds by pool, class and tenant.
    """

    def __init__(self, costs: PrefillCosts) -> None:
        self._costs = costs
        self._replicas: dict[str, _ReplicaTime] = {}
        self.used = TenantTotals()

    def __repr__(self) -> str:
        return f"<EngineTime of {len(self._replicas)} replicas at work, {self.used}>"

    def on_dispatch(self, scheduled: ScheduledRequest, state: ReplicaState, now: float) -> None:
        """A request is on a replica, which holds it already; its answer may have begun."""
        time = self._replicas.get(state.spec.replica_id)
        if time is None:
            time = self._replicas[state.spec.replica_id] = _ReplicaTime(now)
        else:
            time.advance(now)
        time.requests += 1
        prefills = max(1, state.unstarted)
        excess_s = 0.0 if scheduled.started else self._excess_s(scheduled, state, prefills)
        scheduled.engine_share = EngineShare(time.common_s, excess_s, prefills)
        time.owed_s += excess_s

    def on_first_token(self, scheduled: ScheduledRequest, state: ReplicaState, now: float) -> None:
        """The streamed answer of a request has begun; the replica holds its prefill still."""
        share, time = scheduled.engine_share, self._replicas.get(state.spec.replica_id)
        if share is None or time is None:
            return
        time.advance(now)
        prefills = (share.prefills + max(1, state.unstarted)) / 2
        excess_s = self._excess_s(scheduled, state, prefills)
        self.used.add(state.spec.pool, scheduled.request, time.take(share, excess_s))

    def on_departure(self, scheduled: ScheduledRequest, state: ReplicaState, now: float, *, ran: bool) -> None:
        """A request leaves its replica.

        Args:
            ran: the engine has worked on it, as far as is known; else its prefill costs nothing.
        """
        share, time = scheduled.engine_share, self._replicas.get(state.spec.replica_id)
        if share is None or time is None:
            return
        scheduled.engine_share = None
        time.advance(now)
        seconds = time.take(share, share.prefill_s if ran else 0.0) + time.common_s - share.since
        time.requests -= 1
        if not time.requests:
            seconds += time.pot_s
            del self._replicas[state.spec.replica_id]
        self.used.add(state.spec.pool, scheduled.request, seconds)

    def _excess_s(self, scheduled: ScheduledRequest, state: ReplicaState, prefills: float) -> float:
        spec, tokens = state.spec, scheduled.prefill_tokens
        cost = self._costs.of(spec.pool)
        chunk = spec.long_prefill_token_threshold or spec.max_num_batched_tokens or _LIKELY_CHUNK_TOKENS
        steps = max(1.0, tokens / chunk)
        return max(0.0, cost.per_token_s * tokens - steps * cost.base_s / prefills)
