"""Report of a study: the verdict, both sides' results by class, and settings ready to paste."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from serve_app.lab.reports.document import Cell, ReportTable, number_cell
from serve_app.tuning.objective import ClassFigures
from serve_app.tuning.search_space import SearchSpace, as_model_settings
from serve_app.tuning.study import INCUMBENT, Finding, StudyHistory, StudySettings, WindowResult

IN_FORCE, BEST = "current", "best candidate"
"""Names of the two sides in tables."""


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
        lines = [self.verdict, "", self.classes_table.as_text()]
        if self.changes_table is not None:
            lines += ["", self.changes_table.as_text()]
        if self.yaml_settings is not None:
            lines += ["", "For the model's settings:", "", self.yaml_settings]
        else:
            lines += ["", "The current settings remain."]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return all results in plain values."""
        finding, best = self.finding, self.finding.best
        results = {side: self._results(number) for side, number in self._sides("incumbent", "best").items()}
        recommended = None
        if best is not None and finding.confident:
            recommended = as_model_settings(self.space, best)
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
            "recommended": recommended,
            "rewards": {
                side: _mean([each.reward.value for each in found]) for side, found in results.items()
            },
            "terms": {side: _terms(found) for side, found in results.items()},
            "classes": {
                side: {name: figures.as_json() for name, figures in _mean_classes(found).items()}
                for side, found in results.items()
            },
        }

    @property
    def yaml_settings(self) -> str | None:
        """Settings of the recommended candidate as YAML; None if the incumbent remains."""
        best = self.finding.best
        if best is None or not self.finding.confident:
            return None
        return yaml.safe_dump(as_model_settings(self.space, best), sort_keys=False).rstrip()

    @property
    def verdict(self) -> str:
        """Number of candidates, the result and its confidence interval."""
        tried = self.finding.candidates
        text = f"{tried} candidate{'' if tried == 1 else 's'}: {self.finding.reason}"
        found = self.finding.confirmation
        if found is None or found.low is None or found.high is None:
            return text
        return f"{text}; reward {found.mean:+.4f} (95 %: {found.low:+.4f} to {found.high:+.4f})"

    @property
    def classes_table(self) -> ReportTable:
        """TTFT and attainment of each class on both sides, as means over windows."""
        sides = self._sides(IN_FORCE, BEST)
        found = {side: _mean_classes(self._results(number)) for side, number in sides.items()}
        return ReportTable(
            caption="Priority classes, means over windows (fresh ones if there was a confirmation)",
            head=["class", "side", "requests", "p50 TTFT s", "p99 TTFT s", "within targets"],
            rows=[
                [
                    name,
                    side,
                    number_cell(classes[name].requests),
                    number_cell(classes[name].ttft_p50_s, 3),
                    number_cell(classes[name].ttft_p99_s, 3),
                    Cell(f"{classes[name].attainment_ratio:.1%}", classes[name].attainment_ratio),
                ]
                for name in found[IN_FORCE]
                for side, classes in found.items()
                if name in classes
            ],
            text_columns=2,
        )

    @property
    def changes_table(self) -> ReportTable | None:
        """Parameters that differ between incumbent and best candidate; None without a candidate."""
        best, current = self.finding.best, self.space.current
        if best is None:
            return None
        return ReportTable(
            caption="Changed values",
            head=["setting", IN_FORCE, BEST],
            rows=[
                [
                    each.model_path,
                    *(Cell(f"{side[each.name]:g}", side[each.name]) for side in (current, best)),
                ]
                for each in self.space
                if best[each.name] != current[each.name]
            ],
        )

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
