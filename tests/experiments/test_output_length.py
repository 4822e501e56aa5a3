"""Output-length experiment, with answers whose length is known."""

import random

import pytest

from experiments.output_length.run import (
    GradientBoosting,
    LearnedCurves,
    Method,
    OutputLengthExperiment,
    RunningMedian,
    figures_of,
)
from experiments.output_length.tables import TABLES
from serve_app.lab.workloads import TraceRequest
from tests.experiments.builders import row

EXPERIMENT = OutputLengthExperiment(traces={}, parts=2, warm_up=300, refit_every=100, fitted=1_000)


def answers(count: int) -> list[TraceRequest]:
    """Return answers of two tenants; those of `code` are short, and otherwise a tenth of the prompt."""
    rng, made = random.Random(1), []
    for number in range(count):
        tenant, prompt = rng.choice(("code", "chat")), rng.randint(100, 8_000)
        length = 10 if tenant == "code" else prompt / 10
        tokens = max(1, round(length * rng.lognormvariate(0, 0.2)))
        made.append(
            TraceRequest(arrival_s=0.2 * number, prompt_tokens=prompt, output_tokens=tokens, tenant=tenant)
        )
    return made


@pytest.fixture(scope="module")
def errors() -> dict[str, list[float]]:
    methods: dict[str, Method] = {
        "median": RunningMedian(),
        "curves": LearnedCurves(),
        "boosting": GradientBoosting(EXPERIMENT.refit_every, EXPERIMENT.fitted),
    }
    found = {name: figures_of(method, answers(1_000), EXPERIMENT) for name, method in methods.items()}
    assert all(len(one["covered"]) == 2 for one in found.values())
    for one in found.values():
        assert min(one["covered"]) > 0.75
    return {name: one["log_sigma"] for name, one in found.items()}


def test_each_method_uses_what_it_knows(errors: dict[str, list[float]]) -> None:
    # Tenants tell code from chat; only gradient boosting sees that answers are a share of the prompt.
    assert max(errors["curves"]) < 0.8 * min(errors["median"])
    assert max(errors["boosting"]) < 0.6 * min(errors["curves"])
    assert min(errors["boosting"]) > 0.15


def test_the_table_has_a_line_for_each_method() -> None:
    figures = figures_of(RunningMedian(), answers(600), EXPERIMENT)
    text = TABLES["accuracy"].written([row({"tenants": "known", "method": "running median"}, figures)])
    assert "| known | running median |" in text
