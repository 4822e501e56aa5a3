"""A search from its first window to its verdict, as a machine without a clock: jobs go out, rewards come in.

Theory of operation. `jobs()` names the windows to play next, and `tell` takes in the reward of each. When all
rewards of a round are in, the study takes its next decision. A driver plays the jobs in any order, on any
number of processes, and may stop after any of them. `end_search` says that time is up.

1. *Incumbent*: the values in force play all search windows. The optimiser is told a candidate's reward as the
   incumbent's mean plus the paired difference. So candidates compare although most never play all windows.
2. *Search*, in rounds of `batch` candidates. All play the windows of the first rung. A candidate goes on to
   the next rung when it is among the best `keep_ratio` of all that ever came that far; the others stop. This
   is successive halving in its stopping form. A round does not depend on the number of processes.
3. *Confirmation*: the best candidates that played all search windows meet the incumbent on *fresh* windows,
   one after the other. On the windows it was chosen by, the best of many looks better than it is. The first
   that wins with confidence (`comparison`) is the recommendation. If none does, the values in force stand.

Sources: Li et al., A System for Massively Parallel Hyperparameter Tuning (MLSys 2020), for the rungs; common
random numbers as in any textbook of simulation.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from serve_app.settings_base import POSITIVE_SHARE, at_least, settings
from serve_app.tuning.search.comparison import Comparison
from serve_app.tuning.search.optimiser import Optimiser, Proposal
from serve_app.tuning.search.scoreboard import INCUMBENT, Scoreboard
from serve_app.tuning.search.search_space import Values


@settings(block="study")
class StudySettings:
    """How long a study searches, and what a candidate needs to win."""

    # Candidates, the one in force among them.
    trials: Annotated[int, at_least(1)] = 60
    # Windows after which poor candidates stop. The last number is how many windows all are compared on.
    rungs: tuple[int, ...] = (1, 2, 4, 8)
    # Share of candidates that go on at a rung. Lower searches wider; higher trusts a single window less.
    keep_ratio: Annotated[float, POSITIVE_SHARE] = 0.4
    # Candidates to a round: at least as many as processes, or some idle.
    batch: Annotated[int, at_least(1)] = 4
    # Fresh windows on which a candidate has to win.
    confirm_windows: Annotated[int, at_least(2).hint("with one, nobody can win")] = 12
    # Candidates that get the chance. Each has one in forty to win without being better.
    finalists: Annotated[int, at_least(1)] = 2

    def __post_init__(self) -> None:
        ordered = list(self.rungs) == sorted(set(self.rungs))
        if not self.rungs or self.rungs[0] < 1 or not ordered:
            raise ValueError(f"study.rungs must be numbers of windows in ascending order, got {self.rungs}")


@dataclass(frozen=True, slots=True)
class Job:
    """One window to play.

    Attributes:
        candidate: number of the proposal; 0 has the values in force.
        window: number of the window, the same traffic for all candidates.
    """

    candidate: int
    window: int
    values: Values


class Phase(StrEnum):
    """Where a study stands."""

    INCUMBENT = "incumbent"
    SEARCH = "search"
    CONFIRM = "confirm"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a study came to.

    Attributes:
        best: the best candidate; None when none looked better than the values in force.
        search: its comparison on the windows that it was chosen by, which is optimistic.
        confirmation: its comparison on fresh windows; None when it was never confirmed.
        confident: whether `best` is recommended.
        reason: the verdict in words.
        trials: candidates that were tried.
    """

    best: Proposal | None
    search: Comparison | None
    confirmation: Comparison | None
    confident: bool
    reason: str
    trials: int


class Study:
    """One search.

    Args:
        independent_windows: see `comparison.compare`.

    Attributes:
        phase: where the study stands.
        board: the rewards of every candidate.
        finding: the verdict; None until the study is over.
    """

    def __init__(
        self, optimiser: Optimiser, settings: StudySettings, *, independent_windows: float = math.inf
    ) -> None:
        self._optimiser, self._settings = optimiser, settings
        self._search_windows = range(settings.rungs[-1])
        self.phase = Phase.INCUMBENT
        self.board = Scoreboard(settings.rungs[-1], independent_windows)
        self.finding: Finding | None = None
        # The round under way: its candidates, their rung, and the jobs whose rewards are missing.
        self._racing: list[int] = []
        self._rung = 0
        self._pending: dict[tuple[int, int], Job] = {}
        self._finalists: list[int] = []
        self._refuted: list[int] = []
        self._search_ended = False
        self.board.admit(optimiser.ask())
        self._plan([INCUMBENT], self._search_windows)

    def __repr__(self) -> str:
        return f"<Study {self.phase} {self.board} pending={len(self._pending)}>"

    def jobs(self) -> tuple[Job, ...]:
        """The windows of this round that are still to be played; none when the study is over."""
        return tuple(self._pending.values())

    def tell(self, job: Job, reward: float | None) -> None:
        """The reward of a job; None or a number that is not finite when it could not be measured.

        A job of a round that was given up changes nothing.
        """
        if self._pending.pop((job.candidate, job.window), None) is None:
            return
        self.board.note(job.candidate, job.window, reward)
        if not self._pending:
            self._go_on()

    def end_search(self) -> None:
        """Try no more candidates: time is up. The confirmation follows, if a candidate looks better."""
        self._search_ended = True
        if self.phase is Phase.SEARCH:
            self._pending.clear()
            self._go_on()

    # Decisions

    def _plan(self, candidates: list[int], windows: Iterable[int]) -> None:
        """Plan window by window, so that a round that is cut short has treated candidates about alike."""
        for window in windows:
            for each in candidates:
                if not self.board.has_played(each, window):
                    self._pending[each, window] = Job(each, window, self.board.candidates[each].values)

    def _go_on(self) -> None:
        """Decide, until there is something to play or the study is over."""
        while not self._pending and self.phase is not Phase.DONE:
            if self.phase is Phase.INCUMBENT:
                self._begin_search()
            elif self.phase is Phase.SEARCH:
                self._search_on()
            else:
                self._confirm_on()

    def _begin_search(self) -> None:
        reward = self.board.mean_over(INCUMBENT, self._search_windows)
        if reward is None:
            self._end("the values in force cannot be measured, so nothing can be compared with them")
            return
        self._optimiser.tell(self.board.candidates[INCUMBENT], reward)
        self.phase = Phase.SEARCH

    def _search_on(self) -> None:
        if self._racing and not self._search_ended:
            self._next_rung()
        if self._pending:
            return
        self._end_batch()
        untried = self._settings.trials - len(self.board)
        if self._search_ended or untried < 1:
            self._begin_confirmation()
        else:
            self._begin_batch(min(self._settings.batch, untried))

    def _begin_batch(self, size: int) -> None:
        proposals = [self._optimiser.ask() for _ in range(size)]
        for proposal in proposals:
            self.board.admit(proposal)
        self._racing, self._rung = [proposal.number for proposal in proposals], 0
        self._plan(self._racing, range(self._settings.rungs[0]))

    def _next_rung(self) -> None:
        """Plan the next rung for the best of the batch; the last rung has none."""
        if self._rung + 1 >= len(self._settings.rungs):
            return
        windows = range(self._settings.rungs[self._rung])
        means = {
            each: mean
            for each in self.board.candidates
            if (mean := self.board.mean_over(each, windows)) is not None
        }
        kept = math.ceil(self._settings.keep_ratio * len(means))
        best = sorted(means, key=lambda each: (-means[each], each))[:kept]
        self._rung += 1
        self._plan([each for each in self._racing if each in best], range(self._settings.rungs[self._rung]))

    def _end_batch(self) -> None:
        """Tell the optimiser the rewards of the batch, as far as it was played."""
        base = self.board.mean_over(INCUMBENT, self._search_windows)
        assert base is not None
        for each in self._racing:
            found = self.board.over_search(each)
            is_known = found.windows and not found.missing
            self._optimiser.tell(self.board.candidates[each], base + found.mean if is_known else None)
        self._racing = []

    def _begin_confirmation(self) -> None:
        means = {each: self.board.over_search(each).mean for each in self.board.whole()}
        better = [each for each in means if means[each] > 0]
        self._finalists = sorted(better, key=lambda each: (-means[each], each))[: self._settings.finalists]
        self.phase = Phase.CONFIRM

    def _confirm_on(self) -> None:
        if not self._finalists:
            self._end(self._why_nobody_won())
            return
        candidate, first = self._finalists[0], self._settings.rungs[-1]
        self._plan([INCUMBENT, candidate], range(first, first + self._settings.confirm_windows))
        if self._pending:
            return
        found = self.board.over_fresh(candidate)
        if found is not None and found.is_win:
            self._end(f"candidate {candidate} won on {found.windows} fresh windows", candidate)
        else:
            self._refuted.append(self._finalists.pop(0))

    def _why_nobody_won(self) -> str:
        if self._refuted:
            return "no candidate won with confidence on fresh windows"
        if self._search_ended and self.board.whole() == [INCUMBENT]:
            return "time was up before any candidate had played all windows of the search"
        return "no candidate looked better than the values in force"

    def _end(self, reason: str, winner: int | None = None) -> None:
        best = winner if winner is not None else next(iter(self._refuted), None)
        self.finding = Finding(
            best=None if best is None else self.board.candidates[best],
            search=None if best is None else self.board.over_search(best),
            confirmation=None if best is None else self.board.over_fresh(best),
            confident=winner is not None,
            reason=reason,
            trials=len(self.board),
        )
        self.phase = Phase.DONE
