"""Report of a study: the verdict, both sides' results by class, and settings ready to paste."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from serve_app.lab.tables import number_text, table_text
from serve_app.tuning.objective import ClassFigures
from serve_app.tuning.search_space import SearchSpace, Values, as_model_settings
from serve_app.tuning.study import INCUMBENT, Finding, StudyHistory, StudySettings, WindowResult

# Names of the two sides in tables.
_IN_FORCE, _BEST = "current", "best candidate"


@dataclass(frozen=True, slots=True)
class StudyReport:
    """A completed study as text and as JSON."""

    space: SearchSpace
    settings: StudySettings
    course: StudyHistory

    @property
    def finding(self) -> Finding:
        """The verdict."""
        return self.course.finding

    def as_text(self) -> str:
        """Return the verdict and tables as text."""
        parts = [self._verdict(), self._classes_table()]
        if self.finding.best is not None:
            parts.append(self._changes_table(self.finding.best))
        recommended = self._recommended()
        if recommended is None:
            parts.append("The current settings remain.")
        else:
            parts += ["For the model's settings:", yaml.safe_dump(recommended, sort_keys=False).rstrip()]
        return "\n\n".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return all results in plain values."""
        finding, best = self.finding, self.finding.best
        results = {side: self._results(number) for side, number in self._sides("incumbent", "best").items()}
        return {
            "confident": finding.confident,
            "reason": finding.reason,
            "candidates": finding.candidates,
            "simulated_requests": self.course.requests,
            "seconds": self.course.seconds,
            "incumbent": dict(self.space.current),
            "best": None if best is None else dict(best),
            "search": finding.search and asdict(finding.search),
            "confirmation": finding.confirmation and asdict(finding.confirmation),
            "recommended": self._recommended(),
            "rewards": {
                side: _mean([each.reward.value for each in found]) for side, found in results.items()
            },
            "terms": {side: _terms(found) for side, found in results.items()},
            "classes": {
                side: {name: figures.as_json() for name, figures in _mean_classes(found).items()}
                for side, found in results.items()
            },
        }

    def _recommended(self) -> dict[str, Any] | None:
        """Return the model settings of the recommended candidate; None if the incumbent remains."""
        best = self.finding.best
        if best is None or not self.finding.confident:
            return None
        return as_model_settings(self.space, best)

    def _verdict(self) -> str:
        """Return the number of candidates, the result and its confidence interval."""
        tried = self.finding.candidates
        text = f"{tried} candidate{'' if tried == 1 else 's'}: {self.finding.reason}"
        found = self.finding.confirmation
        if found is None or found.low is None or found.high is None:
            return text
        return f"{text}; reward {found.mean:+.4f} (95 %: {found.low:+.4f} to {found.high:+.4f})"

    def _classes_table(self) -> str:
        """Return TTFT and attainment of each class on both sides, as means over windows."""
        sides = self._sides(_IN_FORCE, _BEST)
        found = {side: _mean_classes(self._results(number)) for side, number in sides.items()}
        head = ["class", "side", "requests", "p50 TTFT s", "p99 TTFT s", "within targets"]
        rows = [
            [
                name,
                side,
                number_text(classes[name].requests),
                number_text(classes[name].ttft_p50_s, 3),
                number_text(classes[name].ttft_p99_s, 3),
                f"{classes[name].attainment_ratio:.1%}",
            ]
            for name in found[_IN_FORCE]
            for side, classes in found.items()
            if name in classes
        ]
        return table_text(head, rows, text_columns=2, key_columns=2)

    def _changes_table(self, best: Values) -> str:
        """Return the parameters that differ between incumbent and best candidate."""
        current = self.space.current
        rows = [
            [each.model_path, f"{current[each.name]:g}", f"{best[each.name]:g}"]
            for each in self.space
            if best[each.name] != current[each.name]
        ]
        return table_text(["setting", _IN_FORCE, _BEST], rows)

    def _sides(self, incumbent: str, best: str) -> dict[str, int]:
        """Return the numbers of the incumbent and the best candidate, if there is one, by these names."""
        return {incumbent: INCUMBENT} | ({} if self.course.best is None else {best: self.course.best})

    def _results(self, number: int) -> list[WindowResult]:
        """Return a candidate's fresh windows if there was a confirmation, otherwise those of the search."""
        fresh = self.finding.confirmation is not None
        windows = self.settings.fresh if fresh else self.settings.searched
        results = self.course.results
        return [results[number, window] for window in windows if (number, window) in results]


def _mean_classes(results: Sequence[WindowResult]) -> dict[str, ClassFigures]:
    """Average each class over the windows in which it occurs. Its requests are summed."""
    names = sorted({name for each in results for name in each.reward.classes})
    return {
        name: _mean_class([each.reward.classes[name] for each in results if name in each.reward.classes])
        for name in names
    }


def _mean_class(figures: Sequence[ClassFigures]) -> ClassFigures:
    def mean(of: Callable[[ClassFigures], float | None]) -> float | None:
        return _mean([of(each) for each in figures])

    return ClassFigures(
        requests=sum(each.requests for each in figures),
        attainment_ratio=statistics.fmean(each.attainment_ratio for each in figures),
        ttft_p50_s=mean(lambda each: each.ttft_p50_s),
        ttft_p99_s=mean(lambda each: each.ttft_p99_s),
    )


def _terms(results: Sequence[WindowResult]) -> dict[str, float | None]:
    names = sorted({name for each in results for name in each.reward.terms})
    return {name: _mean([each.reward.terms.get(name) for each in results]) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
