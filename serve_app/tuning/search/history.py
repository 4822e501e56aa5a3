"""What has been tried, and what came of it: the memory of an optimiser, in plain values.

Also how such values are read back. They come from a file that may be cut off, edited, or of another release;
what cannot be read is refused as a whole, with a message that says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.routing.snapshot import Snapshot, number, section, sections
from serve_app.tuning.search.search_space import SearchSpace, Values


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
    """A proposal and its reward; None when it could not be measured, or was not yet told."""

    proposal: Proposal
    reward: float | None

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        return {
            "number": self.proposal.number,
            "values": dict(self.proposal.values),
            "reward": self.reward,
        }


def finite(reward: float | None) -> float | None:
    """The reward; None when it is none or not finite, as a broken objective may return."""
    return reward if reward is not None and math.isfinite(reward) else None


def values_in(state: Snapshot, name: str, space: SearchSpace) -> dict[str, float]:
    """Values of all parameters under `name`.

    Raises:
        ValueError: there are none, or not those of this space.
    """
    found = section(state, name)
    if set(found) != set(space.names):
        raise ValueError(
            f"learned state: it is of the parameters {', '.join(sorted(found))}, and those to tune are "
            f"{', '.join(space.names)}; delete the state to begin anew"
        )
    return {each.name: _typed(number(found, each.name), integer=each.integer) for each in space}


def trials_in(state: Snapshot, space: SearchSpace) -> list[Trial]:
    """The trials under `trials`.

    Raises:
        ValueError: something there is no trial of this space.
    """
    return [
        Trial(
            Proposal(int(number(each, "number", at_least=0)), values_in(each, "values", space)),
            reward_in(each),
        )
        for each in sections(state, "trials")
    ]


def reward_in(state: Snapshot) -> float | None:
    """The number under `reward`, which may be None.

    Raises:
        ValueError: it is something else.
    """
    return None if state.get("reward", "") is None else number(state, "reward")


def trials_as_json(trials: Sequence[Trial] | Mapping[int, Trial]) -> list[dict[str, Any]]:
    """What `trials_in` reads."""
    every = trials.values() if isinstance(trials, Mapping) else trials
    return [trial.as_json() for trial in every]


def _typed(value: float, *, integer: bool) -> float:
    return int(value) if integer and value.is_integer() else value
