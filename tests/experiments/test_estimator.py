"""Estimator experiment with a tokenizer of four bytes per token and generated texts."""

import json
from pathlib import Path

import pytest

from experiments.common.catalogue import Catalogue
from experiments.common.config import read_settings
from experiments.estimator.bodies import (
    CORPORA_VARIABLE,
    Bodies,
    Tokenizer,
    corpora,
    made_texts,
    tool_definitions,
)
from experiments.estimator.lessons import (
    OUTPUT_TOKENS,
    Judged,
    Lessons,
    figures_of,
    fixed_ratio,
    judge,
    mix_weights,
    seeded,
)
from experiments.estimator.run import EstimatorExperiment, RatioVariant, Subject, _learning, unavailable
from experiments.estimator.tables import TABLES
from serve_app.core.routing.estimation.bytes_per_token import EstimatorSettings
from serve_app.core.routing.pools import RoutingSettings
from tests.experiments.builders import row

FOUR_BYTES = Tokenizer("four bytes", lambda text: max(1, round(len(text.encode()) / 4)), 3, 5)
TEXTS = made_texts() | {"mt_bench": "Name three rivers of Europe, and say where they rise. " * 200}


@pytest.fixture(scope="module")
def lessons() -> Lessons:
    return Lessons.of(FOUR_BYTES, TEXTS, seed=1, prompts=150, longest_bytes=20_000)


def experiment() -> EstimatorExperiment:
    return read_settings(Catalogue().config("estimator"), EstimatorExperiment, quick=True)


def test_bodies_come_from_their_half_of_a_text() -> None:
    halves = {"two halves": "a" * 5_000 + "b" * 5_000}
    bodies = Bodies(halves | {"mt_bench": "a" * 5_000 + "b" * 5_000}, FOUR_BYTES, seeded(0), 400)
    assert {letter for _ in range(20) for letter in bodies._piece("two halves", 300, 0)} == {"a"}
    assert {letter for _ in range(20) for letter in bodies._piece("two halves", 300, 1)} == {"b"}


def test_a_body_counts_its_text_and_its_template() -> None:
    bodies = Bodies(TEXTS, FOUR_BYTES, seeded(2), 5_000)
    samples = [sample for _ in range(60) for sample in bodies.draw(half=0)]
    assert {sample.kind for sample in samples} == {"completion", "chat", "turns", "tools"}
    for sample in samples:
        if sample.kind == "chat":
            template = FOUR_BYTES.per_chat + FOUR_BYTES.per_message * sample.shape.messages
            assert sample.tokens - template == pytest.approx(sample.shape.text_bytes / 4, abs=2)


def test_tools_are_real_functions_with_descriptions() -> None:
    tools = tool_definitions()
    assert len(tools) > 20
    assert all(tool["function"]["description"] for tool in tools)


def test_learning_beats_a_fixed_ratio_that_is_wrong_and_matches_the_one_that_is_right(
    lessons: Lessons,
) -> None:
    learned = lessons.taught(EstimatorSettings(), 100, seeded(0))
    errors = {
        name: figures_of(judge(estimator, lessons.unseen, 4_096, 0.1))["median"]
        for name, estimator in (("learned", learned), ("two", fixed_ratio(2.0)), ("four", fixed_ratio(4.0)))
    }
    assert errors["learned"] < 0.1
    assert errors["four"] < 0.1
    assert errors["two"] > 0.5


def test_a_margin_sends_less_to_a_pool_that_is_too_short(lessons: Lessons) -> None:
    found = [figures_of(judge(fixed_ratio(5.0), lessons.unseen, 2_048, margin)) for margin in (0.0, 0.3)]
    assert found[1]["overflow_uniform"] < found[0]["overflow_uniform"]


def _judged(true: int, *, is_short: bool) -> Judged:
    return Judged(
        true=true,
        expected=true,
        upper=true,
        least=true,
        is_short=is_short,
        belongs_short=true + OUTPUT_TOKENS <= 4_096,
    )


def test_an_overflow_is_sent_short_and_belongs_long() -> None:
    judged = [_judged(100, is_short=True)] * 3 + [_judged(5_000, is_short=True)]
    figures = figures_of([*judged, _judged(100, is_short=False)])
    assert figures["overflow_uniform"] == pytest.approx(1 / 5)
    assert figures["other_pool_uniform"] == pytest.approx(2 / 5)
    # Few LMSYS requests are that long, so they weigh less.
    assert 0 < figures["overflow_lmsys"] < 0.05


def test_the_weights_of_a_mix_give_each_range_of_lengths_its_share() -> None:
    judged = [_judged(true, is_short=True) for true in (100, 100, 100, 3_000)]
    weights = mix_weights(judged, "lmsys")
    assert weights[0] == weights[1] == weights[2]
    assert 3 * weights[0] == pytest.approx(0.6383 - 0.3825)
    assert weights[3] == pytest.approx(0.9837 - 0.9729)


def test_every_number_of_observations_gives_a_row_and_the_fixed_ratio_one_more(lessons: Lessons) -> None:
    rows = list(_learning(Subject("four bytes", lessons, experiment())))
    assert [one.key["after"] for one in rows] == ["0", "20", "50", "fixed"]
    assert all(len(values) == 1 for one in rows for values in one.figures["all"].values())
    text = TABLES["headline"].written([row(one.key, one.figures) for one in rows])
    assert "| learned, after 50 observations |" in text
    assert "| fixed 4.0 bytes per token |" in text


def test_a_variant_changes_what_it_names_and_nothing_else() -> None:
    variant = RatioVariant(ratio={"gamma": 2.0})
    assert variant.settings().gamma == 2.0
    assert variant.settings().beta == EstimatorSettings().beta
    assert variant.margin == RoutingSettings().cut_margin_ratio
    for name, one in experiment().variants.items():
        assert one.settings(), name


def test_without_texts_it_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORPORA_VARIABLE, str(tmp_path))
    (tmp_path / "mt_bench_question.jsonl").write_text(json.dumps({"turns": ["Why?"]}))
    assert corpora() is None
    assert CORPORA_VARIABLE in str(unavailable())
