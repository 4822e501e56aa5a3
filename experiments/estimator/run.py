"""How good are token estimates on real text with real tokenizers, after how many observations?

Bodies are made of pieces of real texts, and pass the gateway's own parser. Observations come from the first
half of every text and are judged on its second half. Priors and thresholds were chosen by the *known* texts;
the *fresh* ones are other languages, sources and programming languages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement, over_seeds
from experiments.estimator.bodies import (
    CORPORA_VARIABLE,
    Sample,
    corpora,
    missing_packages,
    read_fresh_texts,
    read_texts,
    text_sources,
    tokenizers,
)
from experiments.estimator.lessons import (
    OUTPUT_TOKENS,
    FixedEstimator,
    Lessons,
    PublishedEstimator,
    figures_of,
    judge,
    seeded,
)
from serve_app.cli.command import progress_bar
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError

OURS, PUBLISHED, FIXED = "ours", "published", "fixed"
BY_LANGUAGE = ("signed", "other_pool_lmsys", "overflow_lmsys")
"""Columns for each source of text."""


@settings
class EstimatorExperiment:
    """Settings of the experiment.

    Attributes:
        after: observations of each category after which estimates are judged, ascending.
        margins: values of `EstimatorSettings.margin_deviations` to compare.
        languages_after: observations of each category before margins and languages are judged.
        prompts: bodies to observe, and as many to judge.
        longest_bytes: of the text in a body.
        fixed_bytes_per_token: ratio in the papers' comparison.
        seeds: orders of observation; the bodies stay the same.
    """

    after: tuple[int, ...]
    margins: tuple[float, ...]
    languages_after: int
    prompts: int
    seeds: int
    longest_bytes: int = 40_000
    b_short_tokens: int = 4_096
    fixed_bytes_per_token: float = 4.0
    bodies_seed: int = 1

    def estimator(self, name: str) -> TokenEstimator:
        """Return an estimator that has learned nothing."""
        made: Mapping[str, Callable[[], TokenEstimator]] = {
            OURS: lambda: TokenEstimator(EstimatorSettings()),
            PUBLISHED: PublishedEstimator,
            FIXED: lambda: FixedEstimator(self.fixed_bytes_per_token),
        }
        return made[name]()


@dataclass(frozen=True, slots=True)
class Subject:
    """A tokenizer with its samples."""

    tokenizer: str
    texts: str
    lessons: Lessons
    experiment: EstimatorExperiment

    def judged(self, estimator: TokenEstimator, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Return the columns of one estimator on some samples."""
        return figures_of(judge(estimator, samples, self.experiment.b_short_tokens))

    def row(
        self, key: Mapping[str, str], by_seed: Sequence[Mapping[str, float]], **changed: Any
    ) -> Measurement:
        """Return a row with the columns of each seed."""
        experiment = self.experiment
        shared = ("prompts", "longest_bytes", "bodies_seed", "b_short_tokens", "languages_after")
        return Measurement(
            key={"tokenizer": self.tokenizer, "texts": self.texts, **key},
            seeds=range(len(by_seed)),
            figures=over_seeds(by_seed),
            settings={
                **{name: getattr(experiment, name) for name in shared},
                "output_tokens": OUTPUT_TOKENS,
                **changed,
            },
        )


def play(experiment: EstimatorExperiment, _: Context) -> Iterator[Measurement]:
    """Measure one tokenizer after another.

    Raises:
        SettingsError: texts or tokenizers are missing.
    """
    if (missing := unavailable()) is not None:
        raise SettingsError(missing)
    folder = corpora()
    assert folder is not None
    texts = {"known": read_texts(folder), "fresh": read_fresh_texts(folder)}
    sources, all_tokenizers = text_sources(folder), list(tokenizers())
    with progress_bar("estimator", len(all_tokenizers) * len(texts)) as advance:
        for tokenizer in all_tokenizers:
            for kind, by_source in texts.items():
                lessons = Lessons.of(
                    tokenizer,
                    by_source,
                    seed=experiment.bodies_seed,
                    prompts=experiment.prompts,
                    longest_bytes=experiment.longest_bytes,
                )
                subject = Subject(tokenizer.name, kind, lessons, experiment)
                rows = [*learning(subject), *margins(subject)]
                if kind == "fresh":
                    rows += languages(subject)
                for row in rows:
                    yield replace(row, traces=sources)
                advance()


def unavailable() -> str | None:
    """Return what is missing on this machine."""
    if corpora() is None:
        return f"the corpora are not here: README.md names them, {CORPORA_VARIABLE} their folder"
    missing = missing_packages()
    return f"no tokenizer is here: pip install {' '.join(missing)}" if missing else None


def learning(subject: Subject) -> Iterator[Measurement]:
    """Yield a row for each estimator and number of observations."""
    experiment = subject.experiment
    unseen = subject.lessons.unseen
    for name in (OURS, PUBLISHED):
        found: dict[int, list[Mapping[str, float]]] = {count: [] for count in experiment.after}
        for seed in range(experiment.seeds):
            fresh = experiment.estimator(name)
            for count, learned in subject.lessons.learning(fresh, experiment.after, seeded(seed)):
                found[count].append(subject.judged(learned, unseen))
        for count, by_seed in found.items():
            yield subject.row({"estimate": name, "after": str(count)}, by_seed)
    fixed = subject.judged(experiment.estimator(FIXED), unseen)
    yield subject.row({"estimate": FIXED, "after": "0"}, [fixed])


def margins(subject: Subject) -> Iterator[Measurement]:
    """Yield a row for each margin."""
    experiment, lessons = subject.experiment, subject.lessons
    for margin in experiment.margins:
        by_seed = []
        for seed in range(experiment.seeds):
            estimator = TokenEstimator(EstimatorSettings(margin_deviations=margin))
            lessons.taught(estimator, experiment.languages_after, seeded(seed))
            by_seed.append(subject.judged(estimator, lessons.unseen))
        yield subject.row({"margin": f"{margin:g}"}, by_seed, margin_deviations=margin)


def languages(subject: Subject) -> Iterator[Measurement]:
    """Yield a row for each estimator, with columns for each source of text."""
    experiment, lessons = subject.experiment, subject.lessons
    sources = dict.fromkeys(one.source for one in lessons.unseen)
    for name in (OURS, PUBLISHED):
        learned = [
            lessons.taught(experiment.estimator(name), experiment.languages_after, seeded(seed))
            for seed in range(experiment.seeds)
        ]
        by_seed: list[dict[str, float]] = [{} for _ in learned]
        for source in sources:
            samples = [one for one in lessons.unseen if one.source == source]
            for columns, estimator in zip(by_seed, learned, strict=True):
                found = subject.judged(estimator, samples)
                columns |= {f"{column} of {source}": found[column] for column in BY_LANGUAGE}
        yield subject.row({"languages": "all", "estimate": name}, by_seed)


EXPERIMENT = Experiment(settings=EstimatorExperiment, play=play, unavailable=unavailable)
