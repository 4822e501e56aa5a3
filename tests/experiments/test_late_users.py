"""The experiment `late_users`: its application, its scenario, and its figures."""

import pytest

from experiments.common.application import serve_config
from experiments.late_users.run import LateUsersSettings, figures_of, model, scenario
from serve_app.settings.application import settings_of
from tests.core.metrics.builders import record


def test_the_application_can_be_served() -> None:
    (application,) = serve_config("test", {"models": [model("tokens", "fcfs")]})["applications"]
    (found,) = settings_of(application["args"]).models
    assert found.name == "tokens"


def test_late_users_arrive_a_moment_after_the_flood() -> None:
    settings = LateUsersSettings(policy="fcfs", modes=("off",), flood=3, after_s=0.5, repeats=1)
    trace = scenario(settings)
    assert [(one.tenant, one.arrival_s) for one in trace.requests] == [
        *[("A", 0.0)] * 3,
        ("B", 0.5),
        ("C", 0.55),
    ]


def test_times_of_the_late_user_are_separate_from_those_of_the_first() -> None:
    records = [
        *(record(tenant="A", arrived_at=0.0, first_token_at=at, finished_at=9.0) for at in (1.0, 2.0)),
        record(tenant="B", arrived_at=0.5, first_token_at=1.4, finished_at=9.0),
        record(tenant="C", arrived_at=0.55, first_token_at=1.5, finished_at=9.0),
    ]
    figures = figures_of(records)
    assert (figures["b_ttft_s"], figures["a_ttft_s"]) == pytest.approx((0.9, 1.5))
