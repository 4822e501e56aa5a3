"""Which values should be tried next? Ask and tell: whoever asks tries them whenever and wherever it likes.

Two methods behind one protocol: TPE (hyperopt), and random search as the control that any method has to beat.
Both begin with the values in force, then with the `anchors` they are given, such as the product's defaults;
and both draw from the prior of the search space.

No state but the trials: proposal n follows from the seed, n and what was told before, so that an optimiser
that was stored and restored goes on with the very proposals that it would have made.
"""

import abc
import random
from collections.abc import Sequence
from typing import Any, Protocol

from serve_app.errors import SettingsError
from serve_app.routing.snapshot import Snapshot, number, text
from serve_app.tuning.search.history import Proposal, Trial, finite, trials_as_json, trials_in
from serve_app.tuning.search.search_space import SearchSpace, Values
from serve_app.workloads.streams import plain_stream

METHODS = ("tpe", "random")

_VERSION = 1
# Whole numbers and four digits may lead two draws to the same values; trying them twice tells nothing new.
_REDRAWS = 5


class Optimiser(Protocol):
    """Proposes values, and learns from what came of them."""

    def ask(self) -> Proposal:
        """Values to try next; several may be asked for before any is told."""
        ...

    def tell(self, proposal: Proposal, reward: float | None) -> None:
        """What came of a proposal, higher is better; None when that could not be measured."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything learned, in plain values."""
        ...

    def restore(self, state: Snapshot) -> None:
        """Take over what `state` returned; ValueError when it is of another search, or broken."""
        ...


class _Search(abc.ABC):
    """What both methods share: the beginning, the memory, and how draws become values."""

    method = ""

    def __init__(self, space: SearchSpace, *, seed: int = 0, anchors: Sequence[Values] = ()) -> None:
        self._space, self._seed = space, seed
        first = [space.current, *map(space.clipped, anchors)]
        self._first = [values for place, values in enumerate(first) if values not in first[:place]]
        self._trials: dict[int, Trial] = {}
        self._asked = 0

    def __repr__(self) -> str:
        told = sum(trial.reward is not None for trial in self._trials.values())
        return f"<{type(self).__name__} asked={self._asked} told={told}>"

    def ask(self) -> Proposal:
        """The values in force first, then the anchors, then what the method proposes."""
        number = self._asked
        self._asked += 1
        values = self._first[number] if number < len(self._first) else self._fresh(number)
        proposal = Proposal(number, values)
        self._trials[number] = Trial(proposal, None)
        return proposal

    def tell(self, proposal: Proposal, reward: float | None) -> None:
        """A reward that is not finite counts as none.

        Raises:
            ValueError: it was never proposed.
        """
        if proposal.number not in self._trials:
            raise ValueError(f"proposal {proposal.number} was not made here: tell only what was asked for")
        self._trials[proposal.number] = Trial(proposal, finite(reward))

    def state(self) -> dict[str, Any]:
        """Everything that the next proposals depend on."""
        return {
            "version": _VERSION,
            "method": self.method,
            "seed": self._seed,
            "asked": self._asked,
            "trials": trials_as_json(self._trials),
        }

    def restore(self, state: Snapshot) -> None:
        """Take over what `state` returned; nothing is taken over when it is refused.

        Raises:
            ValueError: it is of another method, seed, space or release, or broken.
        """
        found = (int(number(state, "version")), text(state, "method"), int(number(state, "seed")))
        if found != (_VERSION, self.method, self._seed):
            raise ValueError(
                f"learned state: it is of {found[1]} with seed {found[2]}, format {found[0]}, and not of "
                f"{self.method} with seed {self._seed}, format {_VERSION}; delete it to begin anew"
            )
        trials = trials_in(state, self._space)
        self._asked = int(number(state, "asked", at_least=len(trials)))
        self._trials = {trial.proposal.number: trial for trial in trials}

    def _fresh(self, number: int) -> dict[str, float]:
        """Values that were not proposed before, unless that takes too long."""
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
    """Draws from the prior, whatever came of earlier draws."""

    method = "random"

    def _draws(self, number: int, chance: random.Random) -> dict[str, float]:  # noqa: ARG002 - see `_Search`
        return {name: chance.random() for name in self._space.names}


class TpeSearch(_Search):
    """Tree-structured Parzen estimator: draws where good trials are dense and bad ones are not.

    Trials that were asked for and not told, or could not be measured, count as bad, so that proposals made at
    once differ.

    Source: Bergstra, Bardenet, Bengio, Kegl, Algorithms for Hyper-Parameter Optimization (NIPS 2011), in the
    implementation of hyperopt.

    Args:
        startup: trials drawn from the prior before the estimator has its say.
    """

    method = "tpe"

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
        """A trial as hyperopt keeps it; it minimises."""
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
