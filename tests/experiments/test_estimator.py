"""Estimator experiment with a tokenizer of four bytes per token and generated texts."""

import json
import math
from dataclasses import replace
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
from experiments.estimator.run import (
    OUTPUT_TOKENS,
    EstimatorExperiment,
    FixedEstimator,
    Judged,
    Lessons,
    PublishedEstimator,
    Subject,
    figures_of,
    judge,
    languages,
    learn,
    learning,
    margins,
    mix_weights,
    seeded,
    unavailable,
)
from experiments.estimator.tables import TABLES
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.request import Usage
from tests.core.routing.prompts import request
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
    read: list[str] = []
    tokenizer = Tokenizer("records texts", lambda text: read.append(text) or 1, 3, 5)  # type: ignore[func-returns-value]
    bodies = Bodies(halves | {"mt_bench": "a" * 5_000 + "b" * 5_000}, tokenizer, seeded(0), 400)
    for half, letter in enumerate("ab"):
        read.clear()
        for _ in range(20):
            bodies.draw(half=half)
        # The others are the system prompt and the tools.
        pieces = [text for text in read if set(text) <= set("ab\n")]
        assert len(pieces) >= 20
        assert {sign for text in pieces for sign in text.strip()} == {letter, "\n"}


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
    learned = TokenEstimator(EstimatorSettings())
    learn(learned, lessons.lesson(100, seeded(0)))
    estimators = {"learned": learned, "two": FixedEstimator(2.0), "four": FixedEstimator(4.0)}
    errors = {
        name: figures_of(judge(estimator, lessons.unseen, 4_096))["median"]
        for name, estimator in estimators.items()
    }
    assert errors["learned"] < 0.05
    assert errors["four"] < 0.1
    assert errors["two"] > 0.5


def test_the_published_estimator_is_an_exponential_average(lessons: Lessons) -> None:
    """Prose at 3.9 +- 0.585; then 5 bytes per token with a weight of 0.05."""
    made = PublishedEstimator()
    asked = request(text_bytes=4_000)
    assert made.estimate(asked).expected_prompt_tokens == math.ceil(4_000 / 3.9)
    assert made.estimate(asked).prompt_tokens == math.ceil(4_000 / (3.9 - 0.585))
    made.observe(asked, Usage(prompt_tokens=800, output_tokens=1))
    mean = 0.95 * 3.9 + 0.05 * 5.0
    deviation = 0.95 * 0.585 + 0.05 * (5.0 - mean)
    assert made.estimate(asked).prompt_tokens == math.ceil(4_000 / (mean - deviation))


def test_a_lower_ratio_sends_less_to_a_pool_that_is_too_short(lessons: Lessons) -> None:
    found = [figures_of(judge(FixedEstimator(ratio), lessons.unseen, 2_048)) for ratio in (5.0, 3.5)]
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


def test_every_estimator_and_number_of_observations_gives_a_row(lessons: Lessons) -> None:
    subject = Subject("four bytes", "fresh", lessons, experiment())
    rows = list(learning(subject))
    assert [(one.key["estimate"], one.key["after"]) for one in rows] == [
        *(("ours", after) for after in ("0", "20", "50")),
        *(("published", after) for after in ("0", "20", "50")),
        ("fixed", "0"),
    ]
    text = TABLES["headline"].written([row(one.key, one.figures) for one in rows])
    assert "| byte classes, after 50 observations |" in text
    assert "| fixed 4.0 bytes per token |" in text


def test_margins_and_languages_give_a_row_each(lessons: Lessons) -> None:
    made = replace(experiment(), margins=(0.0, 3.0), languages_after=20)
    subject = Subject("four bytes", "fresh", lessons, made)
    rows = list(margins(subject))
    none, wide = (one.figures["under"][0] for one in rows)
    assert wide < none
    text = TABLES["margins"].written([row(one.key, one.figures) for one in rows])
    assert "| fresh | 3 |" in text
    by_language = list(languages(subject))
    assert [one.key["estimate"] for one in by_language] == ["ours", "published"]
    text = TABLES["languages"].written([row(one.key, one.figures) for one in by_language])
    assert all(f"| {name} |" in text for name in (*TEXTS, "two texts"))


def test_without_texts_it_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORPORA_VARIABLE, str(tmp_path))
    (tmp_path / "mt_bench_question.jsonl").write_text(json.dumps({"turns": ["Why?"]}))
    assert corpora() is None
    assert CORPORA_VARIABLE in str(unavailable())
