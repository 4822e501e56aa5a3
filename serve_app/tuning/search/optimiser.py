"""Optimisers that propose the values to try next, behind one ask/tell protocol.

Two methods: TPE (hyperopt), and random search as the control that any method has to beat. Both begin with the
values in force, then with the `anchors` they are given, such as the product's defaults. Both draw from the
prior of the search space.

An optimiser keeps no state but its trials: proposal n follows from the seed, n and the rewards told before.
So one that is asked as often and told the same rewards goes on with the same proposals.
"""

import abc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.errors import SettingsError
from serve_app.tuning.objective.objective import finite
from serve_app.tuning.search.search_space import SearchSpace, Values
from serve_app.workloads.generators import plain_stream

METHODS = ("tpe", "random")

# Whole numbers and four digits may lead two draws to the same values; trying them twice tells nothing new.
_REDRAWS = 5


@dataclass(frozen=True, slots=True)
class Proposal:
    """Values to try.

    Attributes:
        number: counts from 0; the first has the values in force.
    """

    number: int
    values: Values


@dataclass(frozen=True, slots=True)
class Trial:
    """A proposal and its reward; None when it was not measured, or not told yet."""

    proposal: Proposal
    reward: float | None


class Optimiser(Protocol):
    """Proposes values, and learns from their rewards."""

    def ask(self) -> Proposal:
        """Values to try next; several may be asked for before any is told."""
        ...

    def tell(self, proposal: Proposal, reward: float | None) -> None:
        """The reward of a proposal, higher is better; None when it could not be measured."""
        ...


class _Search(abc.ABC):
    """What both methods share: the first proposals, the trials, and how draws become values."""

    def __init__(self, space: SearchSpace, *, seed: int = 0, anchors: Sequence[Values] = ()) -> None:
        self._space, self._seed = space, seed
        first = [space.current, *map(space.clipped, anchors)]
        self._first = [values for place, values in enumerate(first) if values not in first[:place]]
        # By the proposal's number, which counts from 0.
        self._trials: dict[int, Trial] = {}

    def __repr__(self) -> str:
        told = sum(trial.reward is not None for trial in self._trials.values())
        return f"<{type(self).__name__} asked={len(self._trials)} told={told}>"

    def ask(self) -> Proposal:
        """The values in force first, then the anchors, then what the method proposes."""
        number = len(self._trials)
        values = self._first[number] if number < len(self._first) else self._fresh(number)
        proposal = Proposal(number, values)
        self._trials[number] = Trial(proposal, None)
        return proposal

    def tell(self, proposal: Proposal, reward: float | None) -> None:
        """Note a reward; one that is not finite counts as none.

        Raises:
            ValueError: this optimiser never proposed it.
        """
        if proposal.number not in self._trials:
            raise ValueError(f"proposal {proposal.number} was not made here: tell only what was asked for")
        self._trials[proposal.number] = Trial(proposal, finite(reward))

    def _fresh(self, number: int) -> dict[str, float]:
        """Values that were not proposed before, unless several draws in a row give known ones."""
        known = [trial.proposal.values for trial in self._trials.values()]
        values: dict[str, float] = {}
        for attempt in range(_REDRAWS):
            chance = plain_stream(self._seed, f"proposal {number}.{attempt}")
            values = self._space.from_draws(self._draws(number, chance))
            if values not in known:
                break
        return values

    @abc.abstractmethod
    def _draws(self, number: int, chance: random.Random) -> dict[str, float]:
        """A uniform draw from [0, 1] for each parameter."""


class RandomSearch(_Search):
    """Draws from the prior and ignores all rewards."""

    def _draws(self, number: int, chance: random.Random) -> dict[str, float]:  # noqa: ARG002 - see `_Search`
        return {name: chance.random() for name in self._space.names}


class TpeSearch(_Search):
    """Tree-structured Parzen estimator: draws where good trials are dense and bad ones are not.

    Trials without a reward count as bad, so that proposals made at the same time differ.

    Source: Bergstra, Bardenet, Bengio, Kegl, Algorithms for Hyper-Parameter Optimization (NIPS 2011), in the
    implementation of hyperopt.

    Args:
        startup: trials drawn from the prior before the estimator is used.
    """

    def __init__(
        self, space: SearchSpace, *, seed: int = 0, anchors: Sequence[Values] = (), startup: int = 12
    ) -> None:
        super().__init__(space, seed=seed, anchors=anchors)
        # Takes a second to import, and whoever only reads settings should not wait for it.
        from hyperopt import Domain, hp  # noqa: PLC0415 - see above

        self._startup = startup
        self._domain = Domain(None, {name: hp.uniform(name, 0.0, 1.0) for name in space.names})

    def _draws(self, number: int, chance: random.Random) -> dict[str, float]:
        from hyperopt import tpe, trials_from_docs  # noqa: PLC0415 - see `__init__`

        trials = trials_from_docs([self._document(trial) for trial in self._trials.values()], validate=False)
        (document,) = tpe.suggest(
            [number],
            self._domain,
            trials,
            chance.getrandbits(31),
            n_startup_jobs=self._startup,
            verbose=False,
        )
        drawn = document["misc"]["vals"]
        return {name: float(drawn[name][0]) for name in self._space.names}

    def _document(self, trial: Trial) -> dict[str, Any]:
        """A trial as hyperopt keeps it; hyperopt minimises a loss."""
        tid = trial.proposal.number
        draws = self._space.draws_of(trial.proposal.values)
        loss = float("inf") if trial.reward is None else -trial.reward
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


def make_optimiser(
    method: str, space: SearchSpace, *, seed: int = 0, anchors: Sequence[Values] = ()
) -> Optimiser:
    """An optimiser by the name of its method.

    Raises:
        SettingsError: there is no such method.
    """
    if method == "tpe":
        return TpeSearch(space, seed=seed, anchors=anchors)
    if method == "random":
        return RandomSearch(space, seed=seed, anchors=anchors)
    raise SettingsError(f"no search method {method!r}: choose one of {', '.join(METHODS)}")
