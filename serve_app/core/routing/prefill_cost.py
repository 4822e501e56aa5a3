"""The learned cost of a prefill, C_prefill of EWSJF.

`C(b) = base_s + per_token_s * b` for a prompt of `b` tokens is fitted by least squares, with less weight on
older observations. An observation is the time from dispatch to first token of a request whose prefill had its
replica to itself. Requests that share a replica wait for each other, and would count the same time twice.

Each pool has a separate fit, because pools may run on different hardware if the planner finds that cheaper. A
pool with few observations uses the fit of all pools.

Source: EWSJF, section 4.3, which calls the cost empirical and leaves its form open. A prior counts as a few
observations and decays as real ones arrive.
"""

from serve_app.core.routing.snapshot import Snapshot, check_version, number, numbers, section

_STATE_VERSION = 2
# The prior is between an 8B model on a large GPU and a 70B model on four. Only the ratio of the two numbers
# affects the order.
_PRIOR_BASE_S, _PRIOR_PER_TOKEN_S = 0.03, 1e-4
# Weight of the prior, in observations.
_PRIOR_WEIGHT = 4.0
# Prefills after which a pool's own fit outweighs its prior.
_LEARNED = 8
# Factor on the weight of earlier observations at each new one: about the last 200 count.
_DECAY = 0.995


class PrefillCost:
    """One fit, of a pool or of all pools of a model."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        for tokens in (64.0, 4096.0):
            seconds = _PRIOR_BASE_S + _PRIOR_PER_TOKEN_S * tokens
            for place, value in enumerate((1.0, tokens, seconds, tokens * tokens, tokens * seconds)):
                self._sums[place] += _PRIOR_WEIGHT * value
        self.base_s, self.per_token_s = _PRIOR_BASE_S, _PRIOR_PER_TOKEN_S
        self.observations = 0

    def seconds(self, tokens: float) -> float:
        """Return C_prefill of a prompt of `tokens`; always positive."""
        return self.base_s + self.per_token_s * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one prefill that had its replica to itself. Impossible values are ignored."""
        if tokens < 1 or seconds <= 0:
            return
        self.observations += 1
        x = float(tokens)
        weight, xs, ys, xxs, xys = self._sums
        # Unrolled, because nearly every first token updates it.
        self._sums = [
            weight * _DECAY + 1.0,
            xs * _DECAY + x,
            ys * _DECAY + seconds,
            xxs * _DECAY + x * x,
            xys * _DECAY + x * seconds,
        ]
        self._fit()

    def state(self) -> dict[str, object]:
        """Return everything learned (see `snapshot`)."""
        return {
            "sums": list(self._sums),
            "base_s": self.base_s,
            "per_token_s": self.per_token_s,
            "observations": self.observations,
        }

    def restore(self, state: Snapshot) -> None:
        """Restore a result of `state` (see `snapshot`). It decays like any observation."""
        sums = numbers(state, "sums", len(self._sums), at_least=0)
        base_s, per_token_s = number(state, "base_s", at_least=0), number(state, "per_token_s", at_least=0)
        if not (base_s > 0 and sums[0] > 0):
            raise ValueError(
                f"learned state: prefill costs need observations and a positive base_s, got {base_s}"
            )
        observations = int(number(state, "observations", at_least=0))
        self._sums, self.base_s, self.per_token_s = sums, base_s, per_token_s
        self.observations = observations

    def _fit(self) -> None:
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        if spread <= 0:
            return
        slope = (weight * xy - x * y) / spread
        # More tokens never cost less, and no prompt is free; noise may suggest otherwise for a while.
        self.per_token_s = max(slope, 1e-9)
        self.base_s = max((y - self.per_token_s * x) / weight, 1e-4)

    def __repr__(self) -> str:
        return (
            f"<PrefillCost {self.base_s:.4f} s + {self.per_token_s * 1e3:.4f} ms/token n={self.observations}>"
        )


class PrefillCosts:
    """The fits of a model's pools."""

    def __init__(self) -> None:
        self._by_pool: dict[str, PrefillCost] = {}
        self.shared = PrefillCost()

    def of(self, pool: str) -> PrefillCost:
        """Return the pool's own fit, or the shared one if the pool has few observations."""
        own = self._by_pool.get(pool)
        return self.shared if own is None or own.observations < _LEARNED else own

    def observe(self, pool: str, tokens: int, seconds: float) -> None:
        """Learn from one prefill that had its replica to itself. Impossible values are ignored."""
        if pool not in self._by_pool:
            self._by_pool[pool] = PrefillCost()
        for cost in (self._by_pool[pool], self.shared):
            cost.observe(tokens, seconds)

    def state(self) -> dict[str, object]:
        """Return everything learned (see `snapshot`)."""
        return {
            "version": _STATE_VERSION,
            "shared": self.shared.state(),
            "pools": {pool: cost.state() for pool, cost in self._by_pool.items()},
        }

    def restore(self, state: Snapshot) -> None:
        """Restore a result of `state` (see `snapshot`)."""
        check_version(state, _STATE_VERSION)
        shared = self._restored(section(state, "shared"))
        pools = section(state, "pools")
        by_pool = {pool: self._restored(section(pools, pool)) for pool in pools}
        self.shared, self._by_pool = shared, by_pool

    def _restored(self, state: Snapshot) -> PrefillCost:
        cost = PrefillCost()
        cost.restore(state)
        return cost

    def __repr__(self) -> str:
        pools = " ".join(f"{pool}={cost}" for pool, cost in self._by_pool.items())
        return f"<PrefillCosts shared={self.shared} {pools}".rstrip() + ">"
