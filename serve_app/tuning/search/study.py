"""A search from its first window to its verdict, as a machine without a clock: jobs out, rewards in.

Theory of operation. `jobs()` names the windows to play next, `tell` brings their rewards, and when all of a
round are told, the study takes its next decision. Whoever drives it plays the jobs, one after the other or
side by side, here or elsewhere, and may stop after any of them; `end_search` says that time is up.

1. *Incumbent*: what is in force plays all search windows. The reward of a candidate is told to the optimiser
   as the incumbent's mean plus the paired difference, so that candidates compare although most of them never
   play all windows.
2. *Search*, in rounds of `batch` candidates: all play the windows of the first rung. Those among the best
   `keep_ratio` of all that ever came so far play those of the next; the others stop (successive halving, in
   the stopping form). How a round goes does not depend on how many processes play it.
3. *Confirmation*: the best candidates that played all search windows, one after the other, against the
   incumbent on *fresh* windows: on the windows that they were chosen by, the best of many looks better than
   it is. The first that wins with confidence (`comparison`) is the recommendation; if none does, what is in
   force stands.

Sources: Li et al., A System for Massively Parallel Hyperparameter Tuning (MLSys 2020), for the rungs; common
random numbers as in any textbook of simulation.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from serve_app.routing.snapshot import Snapshot, number, section, text
from serve_app.tuning.search.comparison import Comparison
from serve_app.tuning.search.history import Proposal
from serve_app.tuning.search.optimiser import Optimiser
from serve_app.tuning.search.scoreboard import INCUMBENT, Job, Scoreboard
from serve_app.tuning.search.search_space import SearchSpace
from serve_app.tuning.search.study_settings import StudySettings

_VERSION = 1


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
        best: the best candidate; None when none looked better than what is in force.
        search: how it compares on the windows that it was chosen by; optimistic.
        confirmation: how it compares on fresh windows; None when it never came to that.
        confident: whether it is to be recommended.
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
        phase: where it stands.
        board: what every candidate got.
        finding: the verdict; None before there is one.
    """

    def __init__(
        self, optimiser: Optimiser, settings: StudySettings, *, independent_windows: float = math.inf
    ) -> None:
        self._optimiser, self._settings = optimiser, settings
        self._search_windows = range(settings.rungs[-1])
        self.phase = Phase.INCUMBENT
        self.board = Scoreboard(settings.rungs[-1], independent_windows)
        self.finding: Finding | None = None
        # The round under way: its candidates, how far they are, and what is still to be told.
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
        """What came of a job; None, or a number that is not finite, when it could not be measured.

        A job that is not waited for, because its round was given up, changes nothing.
        """
        if self._pending.pop((job.candidate, job.window), None) is None:
            return
        self.board.note(job.candidate, job.window, reward)
        if not self._pending:
            self._go_on()

    def end_search(self) -> None:
        """Time is up: try no more candidates. The confirmation follows, if there is anything to confirm."""
        self._search_ended = True
        if self.phase is Phase.SEARCH:
            self._pending.clear()
            self._go_on()

    # Decisions

    def _plan(self, candidates: list[int], windows: Iterable[int]) -> None:
        """Window by window, so that candidates have played about the same when a round is cut short."""
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
            self._end("what is in force cannot be measured, so nothing can be compared with it")
            return
        self._optimiser.tell(self.board.candidates[INCUMBENT], reward)
        self.phase = Phase.SEARCH

    def _search_on(self) -> None:
        if self._racing and not self._search_ended:
            self._next_rung()
        if self._pending:
            return
        self._end_batch()
        room = self._settings.trials - len(self.board)
        if self._search_ended or room < 1:
            self._begin_confirmation()
        else:
            self._begin_batch(min(self._settings.batch, room))

    def _begin_batch(self, size: int) -> None:
        proposals = [self._optimiser.ask() for _ in range(size)]
        for proposal in proposals:
            self.board.admit(proposal)
        self._racing, self._rung = [proposal.number for proposal in proposals], 0
        self._plan(self._racing, range(self._settings.rungs[0]))

    def _next_rung(self) -> None:
        """Let the best of the batch go on, if there is a rung to go to."""
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
        """Tell the optimiser what came of the batch, as far as it came."""
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
            self._end(
                "no candidate won with confidence on fresh windows"
                if self._refuted
                else "no candidate looked better than what is in force"
            )
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

    # Storage

    def state(self) -> dict[str, Any]:
        """Everything known, in plain values; a study that is over has a verdict, and nothing to resume."""
        return {
            "version": _VERSION,
            "phase": self.phase.value,
            "optimiser": self._optimiser.state(),
            "board": self.board.as_json(),
            "racing": list(self._racing),
            "rung": self._rung,
            "finalists": list(self._finalists),
            "refuted": list(self._refuted),
            "pending": [list(key) for key in self._pending],
            "search_ended": self._search_ended,
        }

    def restore(self, state: Snapshot, space: SearchSpace) -> None:
        """Take over what `state` returned; jobs that were not told are to be played again.

        Nothing is taken over when it is refused.

        Raises:
            ValueError: it is of another space, search or release, is over, or is broken.
        """
        if int(number(state, "version")) != _VERSION or text(state, "phase") not in set(Phase) - {Phase.DONE}:
            raise ValueError(
                "learned state: it is of no study under way in this format; delete it to begin anew"
            )
        board = self.board.restored(state, "board", space)
        known = {"racing", "finalists", "refuted"}
        lists = {name: _candidates(state, name, board) for name in known}
        pending = _pending(state, board)
        rung = int(number(state, "rung", at_least=0))
        if rung >= len(self._settings.rungs) or not pending:
            raise ValueError("learned state: the study's round is broken; delete the state to begin anew")
        self._optimiser.restore(section(state, "optimiser"))
        self.board, self._rung, self._pending = board, rung, pending
        self.phase = Phase(text(state, "phase"))
        self._racing, self._finalists, self._refuted = lists["racing"], lists["finalists"], lists["refuted"]
        self._search_ended = state.get("search_ended") is True


def _candidates(state: Snapshot, name: str, board: Scoreboard) -> list[int]:
    """Numbers of candidates under `name`."""
    found = state.get(name)
    if not isinstance(found, list) or not all(each in board.candidates for each in found):
        raise ValueError(
            f"learned state: {name!r} should be a list of candidates, got {str(found)[:80]!r}; delete the "
            "state to begin anew"
        )
    return list(found)


def _pending(state: Snapshot, board: Scoreboard) -> dict[tuple[int, int], Job]:
    """The jobs of the round that were not told."""
    pairs = state.get("pending")
    jobs = {}
    for pair in pairs if isinstance(pairs, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2 or pair[0] not in board.candidates:
            raise ValueError(
                f"learned state: 'pending' should list pairs of candidate and window, got "
                f"{str(pairs)[:80]!r}; delete the state to begin anew"
            )
        candidate, window = int(pair[0]), int(pair[1])
        jobs[candidate, window] = Job(candidate, window, board.candidates[candidate].values)
    return jobs
