"""What every candidate got in every window so far, and how they compare."""

import statistics
from dataclasses import dataclass
from typing import Any

from serve_app.routing.snapshot import Snapshot, number, sections
from serve_app.tuning.search.comparison import Comparison, compare
from serve_app.tuning.search.history import Proposal, finite, reward_in, values_in
from serve_app.tuning.search.search_space import SearchSpace, Values

INCUMBENT = 0
"""The number of the proposal that is in force."""


@dataclass(frozen=True, slots=True)
class Job:
    """One window to play.

    Attributes:
        candidate: number of the proposal; 0 is what is in force.
        window: number of the window, the same traffic for all candidates.
    """

    candidate: int
    window: int
    values: Values


class Scoreboard:
    """Rewards by candidate and window.

    Args:
        search_windows: windows from 0 to this choose candidates; those from there on are fresh, and confirm.
        independent_windows: see `comparison.compare`.

    Attributes:
        candidates: by their number, the incumbent first.
        rewards: by candidate and window; None where there is none.
    """

    def __init__(self, search_windows: int, independent_windows: float) -> None:
        self._search_windows, self._independent = search_windows, independent_windows
        self.candidates: dict[int, Proposal] = {}
        self.rewards: dict[int, dict[int, float | None]] = {}

    def __len__(self) -> int:
        return len(self.candidates)

    def __repr__(self) -> str:
        return f"<Scoreboard {len(self)} candidates, leader {self.leader()}>"

    def admit(self, proposal: Proposal) -> None:
        """A new candidate."""
        self.candidates[proposal.number] = proposal
        self.rewards[proposal.number] = {}

    def note(self, candidate: int, window: int, reward: float | None) -> None:
        """A reward; what is not finite counts as none."""
        self.rewards[candidate][window] = finite(reward)

    def has_played(self, candidate: int, window: int) -> bool:
        """Whether something is known of that window, be it that it cannot be measured."""
        return window in self.rewards[candidate]

    def mean_over(self, candidate: int, windows: range) -> float | None:
        """Mean reward over these windows; None when one of them is missing."""
        rewards = [self.rewards[candidate].get(window) for window in windows]
        known = [reward for reward in rewards if reward is not None]
        return statistics.fmean(known) if known and len(known) == len(windows) else None

    def leader(self) -> int:
        """The best candidate that played all search windows; the incumbent, if none of them is better."""
        means = {each: self.over_search(each).mean for each in self.whole()}
        return max(means, key=lambda each: (means[each], -each), default=INCUMBENT)

    def over_search(self, candidate: int) -> Comparison:
        """Against the incumbent, on the search windows that the candidate played."""
        rewards = self.rewards[candidate].items()
        played = {window: reward for window, reward in rewards if window < self._search_windows}
        return compare(played, self.rewards[INCUMBENT], independent_windows=self._independent)

    def over_fresh(self, candidate: int) -> Comparison | None:
        """Against the incumbent, on the fresh windows; None before the candidate played any."""
        rewards = self.rewards[candidate].items()
        played = {window: reward for window, reward in rewards if window >= self._search_windows}
        if not played:
            return None
        return compare(played, self.rewards[INCUMBENT], independent_windows=self._independent)

    def whole(self) -> list[int]:
        """Candidates with a reward for every search window, the incumbent among them."""
        windows = range(self._search_windows)
        return [each for each in self.candidates if self.mean_over(each, windows) is not None]

    def as_json(self) -> list[dict[str, Any]]:
        """Everything, in plain values."""
        return [
            {
                "number": each.number,
                "values": dict(each.values),
                "rewards": [
                    {"window": window, "reward": reward}
                    for window, reward in self.rewards[each.number].items()
                ],
            }
            for each in self.candidates.values()
        ]

    def restored(self, state: Snapshot, name: str, space: SearchSpace) -> "Scoreboard":
        """A board like this one with what `as_json` returned, under `name`.

        Raises:
            ValueError: there is none, or none of this space.
        """
        board = Scoreboard(self._search_windows, self._independent)
        for each in sections(state, name):
            candidate = int(number(each, "number", at_least=0))
            board.admit(Proposal(candidate, values_in(each, "values", space)))
            for told in sections(each, "rewards"):
                board.note(candidate, int(number(told, "window", at_least=0)), reward_in(told))
        if INCUMBENT not in board.candidates:
            raise ValueError(
                f"learned state: {name!r} lacks the values in force; delete the state to begin anew"
            )
        return board
