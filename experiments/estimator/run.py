"""How good are token estimates on real text with real tokenizers, after how many observations?

Bodies are made of pieces of real texts, and pass the gateway's own parser. Observations come from the first
half of every text and are judged on its second half.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.estimator.bodies import (
    CORPORA_VARIABLE,
    Sample,
    corpora,
    missing_packages,
    read_texts,
    text_sources,
    tokenizers,
)
from experiments.estimator.lessons import OUTPUT_TOKENS, Lessons, figures_of, fixed_ratio, judge, seeded
from serve_app.cli.command import progress_bar
from serve_app.core.routing.estimation.bytes_per_token import EstimatorSettings
from serve_app.core.routing.estimation.estimate import TokenEstimator
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError
from serve_app.request import TextCategory

ALL = "all"
FIXED = "fixed"


@settings
class RatioVariant:
    """Other settings of the estimate.

    Attributes:
        ratio: changes of `EstimatorSettings`.
        cut_margin_ratio: the router's own margin; None is the default.
    """

    ratio: Mapping[str, float] = field(default_factory=dict)
    cut_margin_ratio: float | None = None

    def settings(self) -> EstimatorSettings:
        """Return the settings of the estimator."""
        return EstimatorSettings(**self.ratio)  # type: ignore[arg-type]

    @property
    def margin(self) -> float:
        """Return the margin of the router."""
        return RoutingSettings().cut_margin_ratio if self.cut_margin_ratio is None else self.cut_margin_ratio


@settings
class EstimatorExperiment:
    """Settings of the experiment.

    Attributes:
        after: observations of each category after which estimates are judged, ascending.
        variants: settings, by their names in the table.
        variants_after: observations of each category before variants are judged.
        drift: observations of half of the sources, then of the others, on which `drift` is judged.
        prompts: bodies to observe, and as many to judge.
        longest_bytes: of the text in a body.
        fixed_bytes_per_token: ratio in the papers' comparison.
        seeds: orders of observation; the bodies stay the same.
    """

    after: tuple[int, ...]
    variants: Mapping[str, RatioVariant]
    variants_after: int
    drift: tuple[int, int]
    prompts: int
    seeds: int
    longest_bytes: int = 40_000
    b_short_tokens: int = 4_096
    fixed_bytes_per_token: float = 4.0
    bodies_seed: int = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """A tokenizer with its samples."""

    name: str
    lessons: Lessons
    experiment: EstimatorExperiment

    def judged(
        self, estimator: TokenEstimator, samples: Sequence[Sample], variant: RatioVariant | None = None
    ) -> Mapping[str, float]:
        """Return the columns of one estimator on some samples."""
        margin = (variant or RatioVariant()).margin
        return figures_of(judge(estimator, samples, self.experiment.b_short_tokens, margin))


def play(experiment: EstimatorExperiment, _: Context) -> Iterator[Measurement]:
    """Measure one tokenizer after another.

    Raises:
        SettingsError: texts or tokenizers are missing.
    """
    if (missing := unavailable()) is not None:
        raise SettingsError(missing)
    folder = corpora()
    assert folder is not None
    texts, sources = read_texts(folder), text_sources(folder)
    all_tokenizers = list(tokenizers())
    with progress_bar("estimator", len(all_tokenizers)) as advance:
        for tokenizer in all_tokenizers:
            lessons = Lessons.of(
                tokenizer,
                texts,
                seed=experiment.bodies_seed,
                prompts=experiment.prompts,
                longest_bytes=experiment.longest_bytes,
            )
            subject = Subject(tokenizer.name, lessons, experiment)
            for row in (*_learning(subject), *_variants(subject)):
                yield replace(row, traces=sources)
            advance()


def unavailable() -> str | None:
    """Return what is missing on this machine."""
    if corpora() is None:
        return f"the corpora are not here: README.md names them, {CORPORA_VARIABLE} their folder"
    missing = missing_packages()
    return f"no tokenizer is here: pip install {' '.join(missing)}" if missing else None


def _settings(experiment: EstimatorExperiment, variant: RatioVariant | None = None) -> dict[str, Any]:
    """Return the resolved settings of one row."""
    variant = variant or RatioVariant()
    shared = ("prompts", "longest_bytes", "bodies_seed", "b_short_tokens", "variants_after", "drift")
    return {
        **{name: getattr(experiment, name) for name in shared},
        "output_tokens": OUTPUT_TOKENS,
        "ratio": asdict(variant.settings()),
        "cut_margin_ratio": variant.margin,
    }


# Learning


def _learning(subject: Subject) -> Iterator[Measurement]:
    """Yield a row for each number of observations: the columns of every category, a value for each order."""
    experiment = subject.experiment
    found: dict[int, list[Mapping[str, Mapping[str, float]]]] = {count: [] for count in experiment.after}
    for seed in range(experiment.seeds):
        for count, estimator in subject.lessons.learning(experiment.after, seeded(seed)):
            found[count].append(_by_category(subject, estimator))
    for count, by_seed in found.items():
        yield Measurement(
            key={"tokenizer": subject.name, "after": str(count)},
            seeds=range(experiment.seeds),
            figures={
                category: {name: [one[category][name] for one in by_seed] for name in by_seed[0][category]}
                for category in by_seed[0]
            },
            settings=_settings(experiment),
        )
    fixed = _by_category(subject, fixed_ratio(experiment.fixed_bytes_per_token))
    yield Measurement(
        key={"tokenizer": subject.name, "after": FIXED},
        figures={name: {of: [value] for of, value in one.items()} for name, one in fixed.items()},
        settings=_settings(experiment) | {"bytes_per_token": experiment.fixed_bytes_per_token},
    )


def _by_category(subject: Subject, estimator: TokenEstimator) -> Mapping[str, Mapping[str, float]]:
    unseen = subject.lessons.unseen
    groups = {
        category.value: [one for one in unseen if one.shape.category is category] for category in TextCategory
    }
    return {
        name: subject.judged(estimator, samples)
        for name, samples in (groups | {ALL: list(unseen)}).items()
        if samples
    }


# Settings


def _variants(subject: Subject) -> Iterator[Measurement]:
    """Yield each variant's columns after some observations, and after a drift to other sources."""
    experiment = subject.experiment
    for name, variant in experiment.variants.items():
        by_seed = [_of_variant(subject, variant, seed) for seed in range(experiment.seeds)]
        yield Measurement(
            key={"tokenizer": subject.name, "variant": name},
            seeds=range(experiment.seeds),
            figures={
                when: {of: [one[when][of] for one in by_seed] for of in by_seed[0][when]}
                for when in by_seed[0]
            },
            settings=_settings(experiment, variant),
        )


def _of_variant(subject: Subject, variant: RatioVariant, seed: int) -> Mapping[str, Mapping[str, float]]:
    experiment, lessons, settings = subject.experiment, subject.lessons, variant.settings()
    taught = lessons.taught(settings, experiment.variants_after, seeded(seed))
    drifted, samples = lessons.drifted(settings, *experiment.drift, seeded(seed))
    return {
        "learned": subject.judged(taught, lessons.unseen, variant),
        "drift": subject.judged(drifted, samples, variant),
    }


EXPERIMENT = Experiment(settings=EstimatorExperiment, play=play, unavailable=unavailable)
