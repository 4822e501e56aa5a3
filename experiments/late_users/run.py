"""One user sends many requests at once, two others one each a moment later: when are they served?

One application has a model for each mode of counting service (`fairness.mode`), each with its own emulated
engine. The scenario runs against all of them in turn, over HTTP, with streamed answers.

Scenario: TNG, "Efficient Request Queueing".
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.common.application import emulated_pool, serve_config, served_application
from experiments.common.experiment import Context, Experiment, Measurement, over_seeds
from experiments.common.load_test.open_loop import (
    ApiEndpoint,
    BodyKind,
    BodySettings,
    all_completed,
    play_trace,
)
from experiments.common.provenance import generated
from serve_app.cli.command import progress_bar
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.settings_base import settings
from serve_app.lab.workloads import Trace, TraceRequest

_FIRST, _LATE = "A", ("B", "C")
_PROMPT_TOKENS, _OUTPUT_TOKENS = 100, 60
_BETWEEN_LATE_S = 0.05


@settings
class LateUsersSettings:
    """Settings of the experiment.

    Attributes:
        modes: values of `fairness.mode`.
        flood: requests of A, all at once.
        after_s: delay until B's request; C's follows 0.05 s later.
        repeats: of all modes in turn.
    """

    policy: str
    modes: tuple[str, ...]
    flood: int
    after_s: float
    repeats: int


Figures = Mapping[str, float]


def play(settings: LateUsersSettings, context: Context) -> Iterator[Measurement]:
    """Measure all modes in turn, so that each has the same machine load."""
    if all(context.has({"mode": mode}) for mode in settings.modes):
        return
    played: dict[str, list[Figures]] = {mode: [] for mode in settings.modes}
    trace = scenario(settings)
    models = [model(mode, settings.policy) for mode in settings.modes]
    with (
        served_application(serve_config("late-users", {"models": models})) as served,
        progress_bar("late_users", settings.repeats * len(settings.modes)) as advance,
    ):
        for _repeat in range(settings.repeats):
            for mode, plays in played.items():
                plays.append(figures_of(all_completed(play_trace(served.url, bodies(mode), trace))))
                advance()
    for mode, plays in played.items():
        yield Measurement(
            key={"mode": mode},
            figures=over_seeds(plays),
            traces=generated("late users"),
        )


def model(mode: str, policy: str) -> dict[str, Any]:
    """Return a model with this mode and its own engine."""
    pool = emulated_pool("all", resources={"num_cpus": 0.1}, advanced={"long_prefill_token_threshold": 192})
    return {
        "name": mode,
        "pools": [pool],
        "scheduler": {"policy": policy, "fairness": {"mode": mode}},
    }


def bodies(mode: str) -> BodySettings:
    """Return the settings of a model's completions."""
    return BodySettings(model=mode, kind=BodyKind.TEXT, endpoint=ApiEndpoint.COMPLETIONS, ignore_eos=True)


def scenario(settings: LateUsersSettings) -> Trace:
    """Return A's simultaneous requests, then B's and C's."""
    late = (
        _request(tenant, settings.after_s + _BETWEEN_LATE_S * number) for number, tenant in enumerate(_LATE)
    )
    requests = (*(_request(_FIRST, 0.0) for _ in range(settings.flood)), *late)
    return Trace(name="late users", source="the article's scenario", requests=requests)


def figures_of(records: Sequence[RequestRecord]) -> Figures:
    """Return the TTFT of B, from the time at which its client should send, and the mean over those of A."""
    (late,) = (one for one in records if one.tenant == _LATE[0])
    first = fmean(one.ttft_s or 0.0 for one in records if one.tenant == _FIRST)
    return {"b_ttft_s": late.ttft_s or 0.0, "a_ttft_s": first}


def _request(tenant: str, arrival_s: float) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s, prompt_tokens=_PROMPT_TOKENS, output_tokens=_OUTPUT_TOKENS, tenant=tenant
    )


EXPERIMENT = Experiment(settings=LateUsersSettings, play=play)
