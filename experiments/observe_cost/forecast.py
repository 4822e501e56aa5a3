"""The second part: what the twin told of scheduling, and what scheduling then did."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments.common.application import Application
from experiments.common.open_loop import all_completed, play_trace
from experiments.observe_cost.mode import ACTIVE, OBSERVE, mode_of, set_mode
from experiments.observe_cost.settings import ForecastSettings
from serve_app.bench.bodies import BodySettings
from serve_app.metrics.first_tokens import first_token_figures
from serve_app.metrics.record import RequestRecord
from serve_app.workloads.catalog import WorkloadSettings, resolve

PACED = "paced"


def forecast_figures(served: Application, settings: ForecastSettings) -> dict[str, Any]:
    """Times to first token: of the requests that passed, of those then scheduled, and the twin's of both."""
    set_mode(served, PACED, OBSERVE)
    passed = _played(served, settings, settings.observed_s, seed=0)
    forecast = mode_of(served, PACED).get("forecast") or {}
    set_mode(served, PACED, ACTIVE)
    scheduled = _played(served, settings, settings.scheduled_s, seed=1)
    return {
        "passed": _firsts(passed, settings.settle_s),
        "scheduled": _firsts(scheduled, settings.settle_s),
        "forecast_passed": forecast.get("passed"),
        "forecast_scheduled": forecast.get("scheduled"),
        "forecast_requests": forecast.get("requests"),
        "note": forecast.get("note"),
    }


def _played(
    served: Application, settings: ForecastSettings, seconds: float, seed: int
) -> Sequence[RequestRecord]:
    trace = resolve(
        WorkloadSettings(
            trace=settings.trace,
            rate_per_s=settings.rate_per_s,
            requests=round(seconds * settings.rate_per_s),
            seed=seed,
        )
    )
    return all_completed(
        play_trace(served.url, BodySettings(model=PACED), replace(trace, name=PACED))
    ).records


def _firsts(records: Sequence[RequestRecord], settle_s: float) -> dict[str, dict[str, Any]]:
    begin = min(record.arrived_at for record in records) + settle_s
    return first_token_figures(
        (record.prompt_tokens, record.ttft_s)
        for record in records
        if record.ttft_s is not None and record.arrived_at >= begin
    )
