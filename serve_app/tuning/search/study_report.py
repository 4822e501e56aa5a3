"""What is told of a study: the verdict, the figures of both sides by class, and settings ready to paste."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from serve_app.tuning.objective.service_class import ClassFigures
from serve_app.tuning.search.scoreboard import INCUMBENT
from serve_app.tuning.search.search_space import Values
from serve_app.tuning.search.study import Finding
from serve_app.tuning.search.study_run import Course
from serve_app.tuning.search.study_settings import StudySettings
from serve_app.tuning.search.tunable import as_model_settings
from serve_app.tuning.twin.digital_twin import Played, TwinPlan


def report(plan: TwinPlan, settings: StudySettings, finding: Finding, course: Course) -> str:
    """The verdict for a reader."""
    lines = [_verdict(finding), "", *class_table(settings, finding, course)]
    if finding.best is not None:
        lines += ["", *_changes(plan, finding.best.values)]
    if finding.confident and finding.best is not None:
        lines += [
            "",
            "To paste into the model's settings:",
            "",
            settings_yaml(plan, finding.best.values).rstrip(),
        ]
    else:
        lines += ["", "The current settings stand."]
    return "\n".join(lines)


def settings_yaml(plan: TwinPlan, values: Values) -> str:
    """The values as they stand below a model in the application's settings."""
    return yaml.safe_dump(as_model_settings(plan.space, values), sort_keys=False)


def as_json(plan: TwinPlan, settings: StudySettings, finding: Finding, course: Course) -> dict[str, Any]:
    """Everything that was found, in plain values."""
    best = finding.best
    sides = {"incumbent": INCUMBENT} | ({} if best is None else {"best": best.number})
    return {
        "confident": finding.confident,
        "reason": finding.reason,
        "trials": finding.trials,
        "simulated_requests": course.requests,
        "seconds": course.seconds,
        "incumbent": dict(plan.space.current),
        "best": None if best is None else dict(best.values),
        "search": None if finding.search is None else finding.search.as_json(),
        "confirmation": None if finding.confirmation is None else finding.confirmation.as_json(),
        "recommended": as_model_settings(plan.space, best.values)
        if best is not None and finding.confident
        else None,
        "rewards": {
            side: _mean([each.reward.value for each in _windows(number, settings, finding, course)])
            for side, number in sides.items()
        },
        "terms": {
            side: _terms(_windows(number, settings, finding, course)) for side, number in sides.items()
        },
        "classes": {
            side: {
                name: figures.as_json()
                for name, figures in mean_classes(_windows(number, settings, finding, course)).items()
            }
            for side, number in sides.items()
        },
        "course": [
            {
                "seconds": step.seconds,
                "requests": step.requests,
                "trials": step.trials,
                "leader": step.leader,
                "gain": step.gain,
            }
            for step in course.steps
        ],
    }


def class_table(settings: StudySettings, finding: Finding, course: Course) -> list[str]:
    """TTFT and attainment of each class, side by side, as means over windows."""
    before = mean_classes(_windows(INCUMBENT, settings, finding, course))
    number = INCUMBENT if finding.best is None else finding.best.number
    after = mean_classes(_windows(number, settings, finding, course))
    head = (
        f"| {'class':17} | requests | p50 TTFT s now > best | "
        "p99 TTFT s now > best | within targets now > best |"
    )
    rule = (
        f"|{'-' * 19}|---------:|----------------------:|----------------------:|--------------------------:|"
    )
    rows = [
        f"| {name:17} | {now.requests:8,} | {_pair(now.ttft_p50_s, best.ttft_p50_s):>21} | "
        f"{_pair(now.ttft_p99_s, best.ttft_p99_s):>21} | "
        f"{f'{now.attainment_ratio:.1%} > {best.attainment_ratio:.1%}':>25} |"
        for name, now in before.items()
        if (best := after.get(name)) is not None
    ]
    return [head, rule, *rows]


def mean_classes(windows: Sequence[Played]) -> dict[str, ClassFigures]:
    """The figures of each class, averaged over the windows in which it occurs; its requests, added up."""
    names = sorted({name for each in windows for name in each.reward.classes})
    return {
        name: _mean_class([each.reward.classes[name] for each in windows if name in each.reward.classes])
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


def _windows(number: int, settings: StudySettings, finding: Finding, course: Course) -> list[Played]:
    """The fresh windows, where both were played; otherwise those of the search."""
    first = settings.rungs[-1]
    if finding.confirmation is not None:
        return course.rounds_of(number, range(first, first + settings.confirm_windows))
    return course.rounds_of(number, range(first))


def _terms(windows: Sequence[Played]) -> dict[str, float | None]:
    names = sorted({name for each in windows for name in each.reward.terms})
    return {name: _mean([each.reward.terms.get(name) for each in windows]) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _verdict(finding: Finding) -> str:
    text = f"{finding.trials} candidates: {finding.reason}"
    found = finding.confirmation
    if found is None or found.low is None or found.high is None:
        return text
    return f"{text}; reward {found.mean:+.4f} (95 %: {found.low:+.4f} to {found.high:+.4f})"


def _changes(plan: TwinPlan, values: Values) -> list[str]:
    """Each parameter now and in the best candidate."""
    return [
        f"  {each.model_path}: {plan.space.current[each.name]:g} > {values[each.name]:g}"
        for each in plan.space
        if values[each.name] != plan.space.current[each.name]
    ]


def _pair(now: float | None, best: float | None) -> str:
    return f"{_seconds(now)} > {_seconds(best)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
