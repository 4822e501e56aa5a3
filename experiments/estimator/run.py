"""How good are token estimates on real text with real tokenizers, after how many observations?

Bodies are made of pieces of real texts, and pass the gateway's own parser. Observations come from the first
half of every text and are judged on its second half. Priors and thresholds were chosen by the *known* texts;
the *fresh* ones are other languages, sources and programming languages.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from experiments.common.experiment import Context, Experiment, Measurement, over_seeds
from experiments.estimator.bodies import (
    CORPORA_VARIABLE,
    Bodies,
    Sample,
    Tokenizer,
    corpora,
    missing_packages,
    read_fresh_texts,
    read_texts,
    text_sources,
    tokenizers,
)
from serve_app.cli.command import progress_bar
from serve_app.core.routing.estimation.estimate import EstimatorSettings, TokenEstimate, TokenEstimator
from serve_app.core.routing.pools import PoolRouter, RoutingSettings
from serve_app.core.settings_base import settings
from serve_app.errors import SettingsError
from serve_app.request import Request, RequestSpec, Submission, TextCategory, Usage

# Samples of one tokenizer: some to learn from, others to judge on


OUTPUT_TOKENS = 256
_LONG_CONTEXT_TOKENS = 1_000_000
# Published share of requests with at most this many tokens in total.
_EDGES = (0, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 32768)
_MIXES = {
    "azure": (0, 0.0282, 0.0676, 0.2886, 0.4045, 0.6569, 0.7798, 0.8687, 0.8982, 0.9758, 0.99997, 1, 1),
    "lmsys": (0, 0.2359, 0.3825, 0.6383, 0.8307, 0.9089, 0.9483, 0.9729, 0.9837, 0.9929, 0.9965, 0.99926, 1),
}


def request_of(sample: Sample) -> Request:
    """Return the request with this sample."""
    spec = RequestSpec(model="bench", shape=sample.shape, max_output_tokens=OUTPUT_TOKENS)
    return Request(submission=Submission(request_id="bench", spec=spec), gateway_id="bench", arrived_at=0.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """One estimate, its true value in tokens, and the router's choice for both.

    Attributes:
        is_short: routed to the short pool.
        belongs_short: prompt and output fit into the short pool.
    """

    true: int
    expected: int
    upper: int
    least: int
    is_short: bool
    belongs_short: bool

    @property
    def error(self) -> float:
        """Return the relative error of the expected prompt tokens."""
        return abs(self.expected - self.true) / self.true


class PublishedEstimator(TokenEstimator):
    """The estimator of the pool-routing paper: an exponential average of bytes per token for each category.

    Source: token-budget pool routing (arXiv 2604.09613), with its beta of 0.95 and its gamma of 1. The
    categories and their first values are ours, because the paper does not state them.
    """

    _BETA, _GAMMA = 0.95, 1.0

    def __init__(self) -> None:
        super().__init__(EstimatorSettings())
        # Mean and deviation.
        cold = {"prose": 3.9, "code": 3.2, "cjk": 2.0, "numeric": 1.15, "mixed": 2.3}
        self._ratios = {TextCategory(name): (mean, 0.15 * mean) for name, mean in cold.items()}

    def estimate(self, request: Request) -> TokenEstimate:
        """Return the estimate by the ratio of all bytes."""
        mean, deviation = self._ratios[request.shape.category]
        return _by_ratio(super().estimate(request), request, mean, mean - self._GAMMA * deviation)

    def observe(self, request: Request, usage: Usage) -> None:
        """Learn the ratio."""
        category, beta = request.shape.category, self._BETA
        observed = (request.shape.text_bytes + request.shape.tool_bytes) / usage.prompt_tokens
        mean, deviation = self._ratios[category]
        mean = beta * mean + (1 - beta) * observed
        self._ratios[category] = mean, beta * deviation + (1 - beta) * abs(observed - mean)


class FixedEstimator(TokenEstimator):
    """A constant ratio of bytes per token, without margin and learning."""

    def __init__(self, bytes_per_token: float) -> None:
        super().__init__(EstimatorSettings())
        self._bytes_per_token = bytes_per_token

    def estimate(self, request: Request) -> TokenEstimate:
        """Return the estimate by the ratio of all bytes."""
        ratio = self._bytes_per_token
        return _by_ratio(super().estimate(request), request, ratio, ratio)

    def observe(self, request: Request, usage: Usage) -> None:
        """Learn nothing."""


def _by_ratio(estimate: TokenEstimate, request: Request, mean: float, careful: float) -> TokenEstimate:
    size = request.shape.text_bytes + request.shape.tool_bytes
    return replace(
        estimate,
        expected_prompt_tokens=math.ceil(size / mean),
        prompt_tokens=math.ceil(size / careful),
        least_prompt_tokens=1,
    )


def judge(estimator: TokenEstimator, samples: Iterable[Sample], b_short_tokens: int) -> list[Judged]:
    """Estimate every sample, and route it between two pools; the short one's context ends at `B_short`."""
    limits = {"short": b_short_tokens, "long": _LONG_CONTEXT_TOKENS}
    router = PoolRouter(RoutingSettings(b_short_tokens=b_short_tokens), limits.get)
    judged = []
    for sample in samples:
        request = request_of(sample)
        estimate = estimator.estimate(request)
        judged.append(
            Judged(
                true=sample.tokens,
                expected=estimate.expected_prompt_tokens,
                upper=estimate.prompt_tokens,
                least=estimate.least_prompt_tokens,
                is_short=router.route(request, estimate)[0] == "short",
                belongs_short=sample.tokens + OUTPUT_TOKENS <= b_short_tokens,
            )
        )
    return judged


def figures_of(judged: Sequence[Judged]) -> Mapping[str, float]:
    """Return the columns of a table (see README.md); `other_pool` and `overflow` once per mix."""
    errors = sorted(item.error for item in judged)
    found = {
        "signed": sum(item.expected for item in judged) / sum(item.true for item in judged) - 1,
        "median": statistics.median(errors),
        "p95": errors[int(0.95 * len(errors))],
        "under": sum(item.upper < item.true for item in judged) / len(judged),
        "rejected_wrongly": sum(item.least > item.true for item in judged) / len(judged),
        "prompts": float(len(judged)),
    }
    for mix in ("uniform", *_MIXES):
        weights = mix_weights(judged, mix)
        pairs = list(zip(judged, weights, strict=True))
        other = sum(weight for item, weight in pairs if item.is_short != item.belongs_short)
        overflow = sum(weight for item, weight in pairs if item.is_short and not item.belongs_short)
        found[f"other_pool_{mix}"] = other / sum(weights)
        found[f"overflow_{mix}"] = overflow / sum(weights)
    return found


def mix_weights(judged: Sequence[Judged], mix: str) -> list[float]:
    """Return weights that give the samples a trace's distribution of total tokens."""
    if mix == "uniform":
        return [1.0] * len(judged)
    bins = [sum(item.true + OUTPUT_TOKENS > edge for edge in _EDGES[1:-1]) for item in judged]
    counts = [max(1, bins.count(index)) for index in range(len(_EDGES) - 1)]
    cdf = _MIXES[mix]
    return [(cdf[index + 1] - cdf[index]) / counts[index] for index in bins]


def seeded(seed: int) -> Random:
    """Return a reproducible random generator."""
    return Random(seed)  # noqa: S311 - nothing here is a secret


@dataclass(frozen=True, slots=True)
class Lessons:
    """Samples of the first half of every text, and of its second half.

    Attributes:
        seen, unseen: to learn from, and to judge on.
    """

    seen: Sequence[Sample]
    unseen: Sequence[Sample]

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, texts: Mapping[str, str], *, seed: int, prompts: int, longest_bytes: int
    ) -> "Lessons":
        """Draw bodies, at least `prompts` of each half."""
        bodies = Bodies(texts, tokenizer, seeded(seed), longest_bytes)
        seen, unseen = (_drawn(bodies, half, prompts) for half in (0, 1))
        return cls(seen, unseen)

    def lesson(self, count: int, rng: Random) -> list[Sample]:
        """Return `count` samples of each category in turn, each category in a separate order."""
        columns = []
        for category in TextCategory:
            pool = [one for one in self.seen if one.shape.category is category]
            columns.append(rng.choices(pool, k=count) if pool else [])
        return [sample for row in zip(*filter(None, columns), strict=True) for sample in row]

    def learning(
        self, estimator: TokenEstimator, after: Sequence[int], rng: Random
    ) -> Iterator[tuple[int, TokenEstimator]]:
        """Yield the estimator after each number of observations per category."""
        lesson, learned = self.lesson(after[-1], rng), 0
        for count in after:
            upto = count * len(lesson) // max(1, after[-1])
            learn(estimator, lesson[learned:upto])
            learned = upto
            yield count, estimator


def learn(estimator: TokenEstimator, lesson: Iterable[Sample]) -> None:
    """Let the estimator observe what an engine would report."""
    for sample in lesson:
        estimator.observe(request_of(sample), Usage(prompt_tokens=sample.tokens, output_tokens=10))


def _drawn(bodies: Bodies, half: int, count: int) -> list[Sample]:
    samples: list[Sample] = []
    while len(samples) < count:
        samples += bodies.draw(half=half)
    return samples


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
            learn(estimator, lessons.lesson(experiment.languages_after, seeded(seed)))
            by_seed.append(subject.judged(estimator, lessons.unseen))
        yield subject.row({"margin": f"{margin:g}"}, by_seed, margin_deviations=margin)


def languages(subject: Subject) -> Iterator[Measurement]:
    """Yield a row for each estimator, with columns for each source of text."""
    experiment, lessons = subject.experiment, subject.lessons
    sources = dict.fromkeys(one.source for one in lessons.unseen)
    for name in (OURS, PUBLISHED):
        learned = [experiment.estimator(name) for _ in range(experiment.seeds)]
        for seed, estimator in enumerate(learned):
            learn(estimator, lessons.lesson(experiment.languages_after, seeded(seed)))
        by_seed: list[dict[str, float]] = [{} for _ in learned]
        for source in sources:
            samples = [one for one in lessons.unseen if one.source == source]
            for columns, estimator in zip(by_seed, learned, strict=True):
                found = subject.judged(estimator, samples)
                columns |= {f"{column} of {source}": found[column] for column in BY_LANGUAGE}
        yield subject.row({"languages": "all", "estimate": name}, by_seed)


EXPERIMENT = Experiment(settings=EstimatorExperiment, play=play, unavailable=unavailable)
