"""Figures of one run: targets met, refusals, calibration of the chance, and the price for others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Distribution
from serve_app.errors import Outcome
from serve_app.lab.simulation.run import SloByLength


@dataclass(slots=True)
class Judgement:
    """What was predicted for one request, and what became of it."""

    target_s: float
    chance: float | None = None
    refused: bool = False
    is_shadow: bool = False
    retry_of: str = ""


def measured_of(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Return the records without the first tenth, in which the scheduler learns."""
    ordered = sorted(records, key=lambda one: (one.arrived_at, one.request_id))
    return ordered[len(ordered) // 10 :]


def figures_of(records: Sequence[RequestRecord], judged: Mapping[str, Judgement]) -> dict[str, object]:
    """Return the figures of a run; `judged` has the requests with a target, stated or not."""
    measured = measured_of(records)
    with_target = [one for one in measured if one.request_id in judged]
    admitted = [
        one
        for one in with_target
        if one.outcome is Outcome.COMPLETED and not judged[one.request_id].is_shadow
    ]
    first = [one for one in with_target if not judged[one.request_id].retry_of]
    retries = [one for one in with_target if judged[one.request_id].retry_of]
    refused = [one for one in first if judged[one.request_id].refused]
    shadows = [one for one in refused if judged[one.request_id].is_shadow]

    def met(one: RequestRecord) -> bool:
        return one.ttft_s is not None and one.ttft_s <= judged[one.request_id].target_s

    others = Distribution.of(
        one.ttft_s for one in measured if one.request_id not in judged and one.ttft_s is not None
    )
    slo = SloByLength()
    unstated = [one for one in measured if one.request_id not in judged]
    span_s = max(one.finished_at for one in records) - min(one.arrived_at for one in records)
    wrong = sum(met(one) for one in shadows) / len(shadows) if shadows else None
    figures: dict[str, object] = {
        "admitted_met": sum(map(met, admitted)) / max(1, len(admitted)),
        # Refused requests count as missed; a retry counts as an attempt of its own.
        "goodput": sum(met(one) for one in first if not judged[one.request_id].is_shadow)
        / max(1, len(first) - len(shadows)),
        "refused": len(refused) / max(1, len(first)),
        "refusals_wrong": wrong,
        "false_refusals": None if wrong is None else wrong * len(refused) / max(1, len(first)),
        "retries_admitted": sum(not judged[one.request_id].refused for one in retries) / len(retries)
        if retries
        else None,
        "others_mean_s": others.mean,
        "others_p99_s": others.p99,
        "others_goodput": sum(slo.met_by(one) for one in unstated) / max(1, len(unstated)),
        "tokens_per_s": sum(one.prompt_tokens + one.output_tokens for one in records) / span_s,
    }
    return figures | _reliability(with_target, judged)


_BINS = 10


def _reliability(with_target: Sequence[RequestRecord], judged: Mapping[str, Judgement]) -> dict[str, object]:
    """Return, by tenth of the predicted chance of a miss, the number of requests and of misses."""
    counts, misses = [0] * _BINS, [0] * _BINS
    for one in with_target:
        each = judged[one.request_id]
        if each.chance is None or one.ttft_s is None:
            continue
        place = min(int(_BINS * each.chance), _BINS - 1)
        counts[place] += 1
        misses[place] += one.ttft_s > each.target_s
    return {"bin_counts": counts, "bin_misses": misses}
