"""Optimiser: proposes candidate values through an ask-and-tell interface.

The tree-structured Parzen estimator (TPE) samples where good trials are dense and bad ones are not. It begins
with the incumbent values, then the `anchors`, such as the product's defaults, then `startup` samples from the
prior of the search space. Trials without a reward count as bad, so that proposals made at the same time
differ.

An optimiser has no state except its trials: proposal n is determined by the seed, n and the earlier rewards.

Source: Bergstra, Bardenet, Bengio, Kegl, Algorithms for Hyper-Parameter Optimization (NIPS 2011), in the
implementation of hyperopt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.lab.workloads.generators import plain_stream
from serve_app.tuning.objective import finite
from serve_app.tuning.search_space import SearchSpace, Values

# Rounding to integers or four digits may map two draws to the same values, and a repetition adds nothing.
_REDRAWS = 5
_STARTUP = 12


@dataclass(frozen=True, slots=True)
class Proposal:
    """Values to try, numbered from 0; the first proposal has the incumbent values."""

    number: int
    values: Values


class TpeOptimiser:
    """TPE in a search space.

    Args:
        startup: trials sampled from the prior before the estimator is used; with all trials, this is random
            search.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        seed: int = 0,
        anchors: Sequence[Values] = (),
        startup: int = _STARTUP,
    ) -> None:
        # Imported here because it takes a second, for which importers of the settings should not wait.
        from hyperopt import Domain, hp  # noqa: PLC0415 - see above

        self._space, self._seed, self._startup = space, seed, startup
        self._domain = Domain(None, {name: hp.uniform(name, 0.0, 1.0) for name in space.names})
        first = [space.current, *map(space.clipped, anchors)]
        self._first = [values for place, values in enumerate(first) if values not in first[:place]]
        # Losses by number of the proposal. A loss that is not reported yet, or was not measured, is infinite.
        self._proposals: list[Proposal] = []
        self._losses: list[float] = []

    def __repr__(self) -> str:
        return f"<TpeOptimiser proposals={len(self._proposals)}>"

    def ask(self) -> Proposal:
        """Return the incumbent values first, then the anchors, then proposals of the estimator."""
        number = len(self._proposals)
        values = self._first[number] if number < len(self._first) else self._fresh(number)
        proposal = Proposal(number, values)
        self._proposals.append(proposal)
        self._losses.append(float("inf"))
        return proposal

    def tell(self, proposal: Proposal, reward: float | None) -> None:
        """Record a reward. A reward that is not finite counts as none.

        Raises:
            ValueError: the proposal is not from this optimiser.
        """
        if proposal.number >= len(self._proposals):
            raise ValueError(
                f"proposal {proposal.number} was not made by this optimiser: tell only proposals of ask"
            )
        known = finite(reward)
        self._losses[proposal.number] = float("inf") if known is None else -known

    def _fresh(self, number: int) -> dict[str, float]:
        """Return values that were not proposed before, unless several draws in a row give known ones."""
        known = [proposal.values for proposal in self._proposals]
        values: dict[str, float] = {}
        for attempt in range(_REDRAWS):
            values = self._space.from_draws(self._draws(number, f"proposal {number}.{attempt}"))
            if values not in known:
                break
        return values

    def _draws(self, number: int, stream: str) -> dict[str, float]:
        """Return a draw from [0, 1] for each parameter."""
        from hyperopt import tpe, trials_from_docs  # noqa: PLC0415 - see `__init__`

        trials = trials_from_docs(
            [self._document(*each) for each in zip(self._proposals, self._losses, strict=True)],
            validate=False,
        )
        seed = plain_stream(self._seed, stream).getrandbits(31)
        (document,) = tpe.suggest(
            [number], self._domain, trials, seed, n_startup_jobs=self._startup, verbose=False
        )
        drawn = document["misc"]["vals"]
        return {name: float(drawn[name][0]) for name in self._space.names}

    def _document(self, proposal: Proposal, loss: float) -> dict[str, Any]:
        """Return a trial in hyperopt's format."""
        draws, tid = self._space.draws_of(proposal.values), proposal.number
        return {
            "tid": tid,
            "state": 2,  # done
            "spec": None,
            "result": {"status": "ok", "loss": loss},
            "misc": {
                "tid": tid,
                "cmd": None,
                "workdir": None,
                "idxs": {name: [tid] for name in draws},
                "vals": {name: [draw] for name, draw in draws.items()},
            },
            "exp_key": None,
            "owner": None,
            "version": 0,
            "book_time": None,
            "refresh_time": None,
        }
