"""The rewards of every candidate in every window so far, and their comparison with the incumbent."""

import statistics
from collections.abc import Mapping

from serve_app.tuning.objective.objective import finite
from serve_app.tuning.search.comparison import Comparison, compare
from serve_app.tuning.search.optimiser import Proposal

INCUMBENT = 0
"""The number of the proposal that has the values in force."""


class Scoreboard:
    """Rewards by candidate and window.

    Args:
        search_windows: windows from 0 to this choose candidates; those from there on are fresh, and confirm.
        independent_windows: see `comparison.compare`.

    Attributes:
        candidates: by their number, the incumbent first.
        rewards: by candidate and window; None for a window that was played and could not be measured.
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
        """Add a candidate."""
        self.candidates[proposal.number] = proposal
        self.rewards[proposal.number] = {}

    def note(self, candidate: int, window: int, reward: float | None) -> None:
        """Note a reward; one that is not finite counts as none."""
        self.rewards[candidate][window] = finite(reward)

    def has_played(self, candidate: int, window: int) -> bool:
        """Whether the candidate played that window, measured or not."""
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
        return self._against_incumbent(self._rewards_in(candidate, fresh=False))

    def over_fresh(self, candidate: int) -> Comparison | None:
        """Against the incumbent, on the fresh windows; None before the candidate played any."""
        rewards = self._rewards_in(candidate, fresh=True)
        return self._against_incumbent(rewards) if rewards else None

    def whole(self) -> list[int]:
        """Candidates with a reward for every search window, the incumbent among them."""
        windows = range(self._search_windows)
        return [each for each in self.candidates if self.mean_over(each, windows) is not None]

    def _rewards_in(self, candidate: int, *, fresh: bool) -> dict[int, float | None]:
        rewards = self.rewards[candidate].items()
        return {window: reward for window, reward in rewards if (window >= self._search_windows) is fresh}

    def _against_incumbent(self, rewards: Mapping[int, float | None]) -> Comparison:
        return compare(rewards, self.rewards[INCUMBENT], independent_windows=self._independent)
