"""Optimiser: proposes candidate values from the rewards of earlier ones.

The tree-structured Parzen estimator (TPE) samples where good candidates are dense and bad ones are not. The
first `startup` candidates, usually the incumbent and the presets, are given to it; if there are fewer, the
others are sampled from the prior of the search space. Candidates without a reward count as bad, so that
proposals made at the same time differ.

An optimiser has no state except its candidates: a proposal is determined by the seed and the earlier rewards.

Source: Bergstra, Bardenet, Bengio, Kegl, Algorithms for Hyper-Parameter Optimization (NIPS 2011), in the
implementation of hyperopt.
"""

import math
from collections.abc import Mapping
from typing import Any

from serve_app.lab.workloads.catalog import plain_stream
from serve_app.tuning.objective import finite
from serve_app.tuning.search_space import SearchSpace, Values

# Rounding to integers or four digits may map two draws to the same values, and a repetition adds nothing.
_REDRAWS = 5
_STARTUP = 12


class TpeOptimiser:
    """TPE in a search space.

    Args:
        startup: candidates before the estimator is used.
    """

    def __init__(self, space: SearchSpace, *, seed: int = 0, startup: int = _STARTUP) -> None:
        # Imported here because it takes a second, for which importers of the settings should not wait.
        from hyperopt import Domain, hp  # noqa: PLC0415 - see above

        self._space, self._seed, self._startup = space, seed, startup
        self._domain = Domain(None, {name: hp.uniform(name, 0.0, 1.0) for name in space.names})
        # By number. The loss of a candidate without a reward is infinite.
        self._candidates: list[Values] = []
        self._losses: list[float] = []

    def __repr__(self) -> str:
        return f"<TpeOptimiser candidates={len(self._candidates)}>"

    def add(self, values: Values) -> None:
        """Add a candidate. They are numbered from 0."""
        self._candidates.append(self._space.clipped(values))
        self._losses.append(math.inf)

    def propose(self) -> Values:
        """Add a new candidate, and return its values.

        They differ from all others, unless several draws in a row give known ones.
        """
        number = len(self._candidates)
        values: Values = {}
        for attempt in range(_REDRAWS):
            values = self._space.from_draws(self._draws(number, f"proposal {number}.{attempt}"))
            if values not in self._candidates:
                break
        self.add(values)
        return values

    def tell(self, rewards: Mapping[int, float | None]) -> None:
        """Record rewards by number of the candidate. A reward that is not finite counts as none."""
        for number, reward in rewards.items():
            known = finite(reward)
            self._losses[number] = math.inf if known is None else -known

    def _draws(self, number: int, stream: str) -> dict[str, float]:
        """Return a draw from [0, 1] for each parameter."""
        from hyperopt import tpe, trials_from_docs  # noqa: PLC0415 - see `__init__`

        trials = trials_from_docs([self._document(each) for each in range(number)], validate=False)
        seed = plain_stream(self._seed, stream).getrandbits(31)
        (document,) = tpe.suggest(
            [number], self._domain, trials, seed, n_startup_jobs=self._startup, verbose=False
        )
        drawn = document["misc"]["vals"]
        return {name: float(drawn[name][0]) for name in self._space.names}

    def _document(self, number: int) -> dict[str, Any]:
        """Return a candidate as a trial in hyperopt's format."""
        draws = self._space.draws_of(self._candidates[number])
        return {
            "tid": number,
            "state": 2,  # done
            "spec": None,
            "result": {"status": "ok", "loss": self._losses[number]},
            "misc": {
                "tid": number,
                "cmd": None,
                "workdir": None,
                "idxs": {name: [number] for name in draws},
                "vals": {name: [draw] for name, draw in draws.items()},
            },
            "exp_key": None,
            "owner": None,
            "version": 0,
            "book_time": None,
            "refresh_time": None,
        }
