"""What `bench_estimator.py` measures: estimates beside true lengths, and where the router sends both."""

import argparse
import statistics
import timeit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from random import Random
from typing import Any

from estimator_texts import Bodies, Sample, Tokenizer, seeded

from serve_app.request import PromptShape, Request, TextCategory, Usage
from serve_app.routing.estimation.bytes_per_token import RatioSettings
from serve_app.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.routing.estimation.text_category import classify
from serve_app.routing.pools import PoolRouter, RoutingSettings

OUTPUT_TOKENS = 256
AFTER = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
CHOICES_AFTER = (0, 10, 50, 500)
REPEATED_AFTER = (0, 10, 50, 200, 1000)
GAMMAS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
# How it learns: beta, and the tokens from which on an observation counts in full.
LEARNING = ((0.9, 64), (0.95, 64), (0.98, 64), (0.99, 64), (0.95, 256), (0.95, 1024), (0.98, 1024))
USUAL_LEARNING = (0.95, 64)
FLOORS = (0.5, 1.0, 1.5)
USUAL_FLOOR = 1.0
USUAL_MARGIN = RoutingSettings().cut_margin_ratio
MARGINS = (0.0, 0.05, USUAL_MARGIN)
# Share of requests with at most so many tokens in total.
EDGES = (0, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 32768)
MIXES = {
    "azure": (0, 0.0282, 0.0676, 0.2886, 0.4045, 0.6569, 0.7798, 0.8687, 0.8982, 0.9758, 0.99997, 1, 1),
    "lmsys": (0, 0.2359, 0.3825, 0.6383, 0.8307, 0.9089, 0.9483, 0.9729, 0.9837, 0.9929, 0.9965, 0.99926, 1),
}


def request_of(sample: Sample) -> Request:
    """The request that carries the sample."""
    return Request(
        request_id="bench",
        gateway_id="bench",
        model="bench",
        shape=sample.shape,
        arrived_at=0.0,
        max_output_tokens=OUTPUT_TOKENS,
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """One estimate beside the truth, in tokens, and where the router sends each.

    Attributes:
        is_short: to the short pool, for each of MARGINS.
        belongs_short: prompt and output fit into the short pool.
    """

    true: int
    expected: int
    careful: int
    least: int
    is_short: tuple[bool, ...]
    belongs_short: bool

    @property
    def error(self) -> float:
        """Relative error of the expected prompt tokens."""
        return abs(self.expected - self.true) / self.true


def judge(estimator: TokenEstimator, samples: Iterable[Sample], boundary: int) -> list[Judged]:
    """Estimate every sample, and route it between two pools; the short one's context ends at the boundary."""
    limits = {"short": boundary, "long": 1_000_000}
    routers = [
        PoolRouter(RoutingSettings(b_short_tokens=boundary, cut_margin_ratio=margin), limits.get)
        for margin in MARGINS
    ]
    judged = []
    for sample in samples:
        asked = request_of(sample)
        estimate = estimator.estimate(asked)
        judged.append(
            Judged(
                true=sample.tokens,
                expected=estimate.expected_prompt_tokens,
                careful=estimate.prompt_tokens,
                least=estimate.least_prompt_tokens,
                is_short=tuple(router.route(asked, estimate)[0] == "short" for router in routers),
                belongs_short=sample.tokens + OUTPUT_TOKENS <= boundary,
            )
        )
    return judged


def shares(judged: Sequence[Judged], margin: float = USUAL_MARGIN) -> dict[str, float]:
    """The columns of a table line, as the docstring of this file explains them."""
    errors = sorted(item.error for item in judged)
    found = {
        "signed": sum(item.expected for item in judged) / sum(item.true for item in judged) - 1,
        "median": statistics.median(errors),
        "p95": errors[int(0.95 * len(errors))],
        "under": sum(item.careful < item.true for item in judged) / len(judged),
        "least>": sum(item.least > item.true for item in judged) / len(judged),
        "n": float(len(judged)),
    }
    index = MARGINS.index(margin)
    for mix in ("uniform", *MIXES):
        weights = mix_weights(judged, mix)
        pairs = list(zip(judged, weights, strict=True))
        wrong = sum(weight for item, weight in pairs if item.is_short[index] != item.belongs_short)
        overflow = sum(weight for item, weight in pairs if item.is_short[index] and not item.belongs_short)
        found[f"wrong {mix}"] = wrong / sum(weights)
        found[f"overflow {mix}"] = overflow / sum(weights)
    return found


def mix_weights(judged: Sequence[Judged], mix: str) -> list[float]:
    """Weights under which the total tokens of the samples are distributed as in a trace."""
    if mix == "uniform":
        return [1.0] * len(judged)
    bins = [sum(item.true + OUTPUT_TOKENS > edge for edge in EDGES[1:-1]) for item in judged]
    counts = [max(1, bins.count(index)) for index in range(len(EDGES) - 1)]
    cdf = MIXES[mix]
    return [(cdf[index + 1] - cdf[index]) / counts[index] for index in bins]


class Lessons:
    """The samples of one tokenizer: some to learn from, others to be judged on."""

    def __init__(self, tokenizer: Tokenizer, texts: dict[str, str], options: argparse.Namespace) -> None:
        bodies = Bodies(texts, tokenizer, seeded(options.seed), options.longest)
        self.boundary = options.boundary
        self.seen, self.unseen = (self._draw(bodies, half, options.prompts) for half in (0, 1))
        self.seen_images, self.unseen_images = (
            [bodies.with_image(half=half, image_bytes=size) for size in (0, 200_000) * 25] for half in (0, 1)
        )
        sources = sorted({sample.source for sample in self.unseen})
        self.later_sources = set(sources[1::2])

    @staticmethod
    def _draw(bodies: Bodies, half: int, count: int) -> list[Sample]:
        samples: list[Sample] = []
        while len(samples) < count:
            samples += bodies.draw(half=half)
        return samples

    def lesson(self, count: int, rng: Random, samples: Sequence[Sample] | None = None) -> list[Sample]:
        """`count` samples of each category by turns, each category in an order of its own."""
        columns = []
        for category in TextCategory:
            pool = [sample for sample in samples or self.seen if sample.shape.category is category]
            columns.append(rng.choices(pool, k=count) if pool else [])
        return [sample for row in zip(*filter(None, columns), strict=True) for sample in row]


def learn(estimator: TokenEstimator, lesson: Iterable[Sample]) -> None:
    """Let the estimator observe what an engine would report."""
    for sample in lesson:
        estimator.observe(request_of(sample), Usage(prompt_tokens=sample.tokens, output_tokens=10))


def learning_curve(lessons: Lessons, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The columns for each category and for all, after each number of observations per category."""
    judged: dict[tuple[int, str], list[Judged]] = {}
    for seed in range(options.seeds):
        rng = seeded(seed)
        lesson = lessons.lesson(AFTER[-1], rng)
        estimator, learned = TokenEstimator(EstimatorSettings()), 0
        for after in AFTER:
            upto = after * len(lesson) // AFTER[-1]
            learn(estimator, lesson[learned:upto])
            learned = upto
            everything: list[Judged] = []
            for category in TextCategory:
                samples = [one for one in lessons.unseen if one.shape.category is category]
                found = judge(estimator, samples, lessons.boundary)
                judged.setdefault((after, category.value), []).extend(found)
                everything += found
            judged.setdefault((after, "all"), []).extend(everything)
    return [{"after": after, "category": name, **shares(items)} for (after, name), items in judged.items()]


def repeated(lessons: Lessons, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Error, wrong pools and overflow by category and margin, each order of observation by itself.

    Each figure is a list with one value for each seed. The estimator as shipped learns; rows with `after` of
    "fixed" are 4 bytes per token, which no order changes.
    """
    values: dict[tuple[str, str, float], dict[str, list[float]]] = {}
    for seed in range(options.seeds):
        lesson = lessons.lesson(REPEATED_AFTER[-1], seeded(1_000 + seed))
        estimator, learned = TokenEstimator(EstimatorSettings()), 0
        for after in REPEATED_AFTER:
            upto = after * len(lesson) // REPEATED_AFTER[-1]
            learn(estimator, lesson[learned:upto])
            learned = upto
            _file(values, str(after), lessons, estimator)
        _file(values, "fixed", lessons, _untaught())
    return [
        {"after": after, "category": category, "margin": margin, **figures}
        for (after, category, margin), figures in values.items()
    ]


def _file(
    values: dict[tuple[str, str, float], dict[str, list[float]]],
    after: str,
    lessons: Lessons,
    estimator: TokenEstimator,
) -> None:
    """Add what one estimator does now, for each category and all of them, with each margin."""
    everything: list[Judged] = []
    groups: dict[str, list[Judged]] = {}
    for category in TextCategory:
        samples = [one for one in lessons.unseen if one.shape.category is category]
        groups[category.value] = judge(estimator, samples, lessons.boundary)
        everything += groups[category.value]
    for (name, judged), margin in product((groups | {"all": everything}).items(), MARGINS):
        figures = values.setdefault((after, name, margin), {})
        for column, share in shares(judged, margin).items():
            figures.setdefault(column, []).append(share)


def kinds_of_bodies(lessons: Lessons) -> list[dict[str, Any]]:
    """The columns by kind of body and by source, after 200 observations of each category and 50 images."""
    estimator = TokenEstimator(EstimatorSettings())
    learn(estimator, lessons.lesson(200, seeded(0)) + lessons.seen_images)
    rows = []
    for name in ("kind", "source"):
        samples = lessons.unseen + (lessons.unseen_images if name == "kind" else [])
        for value in sorted({getattr(sample, name) for sample in samples}):
            judged = judge(
                estimator, [one for one in samples if getattr(one, name) == value], lessons.boundary
            )
            rows.append({"by": name, "value": value, **shares(judged)})
    return rows


def choices(lessons: Lessons, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The columns that decide, for each way to learn, gamma, floor and margin of the router."""
    rows = []
    for beta, weight in LEARNING:
        ratio = replace(EstimatorSettings().ratio, beta=beta, full_weight_tokens=weight)
        learned: dict[str, list[tuple[TokenEstimator, list[Sample]]]] = {}
        for seed in range(options.seeds):
            for name, estimator, samples in _learned(lessons, ratio, seeded(100 + seed)):
                learned.setdefault(name, []).append((estimator, samples))
        for (name, estimators), gamma, floor in product(learned.items(), GAMMAS, FLOORS):
            if floor != USUAL_FLOOR and (beta, weight) != USUAL_LEARNING:
                continue
            judged: list[Judged] = []
            for estimator, samples in estimators:
                judged += judge(_with(estimator, gamma, floor), samples, lessons.boundary)
            settings = {"beta": beta, "weight": weight, "gamma": gamma, "floor": floor}
            rows += [
                {"after": name, **settings, "margin": margin, **shares(judged, margin)} for margin in MARGINS
            ]
    return rows


def _learned(
    lessons: Lessons, ratio: RatioSettings, rng: Random
) -> Iterable[tuple[str, TokenEstimator, list[Sample]]]:
    """Estimators after some observations and after a drift, each with the samples to judge it on."""
    settings = EstimatorSettings(ratio=ratio)
    for after in CHOICES_AFTER:
        estimator = TokenEstimator(settings)
        learn(estimator, lessons.lesson(after, rng))
        yield str(after), estimator, lessons.unseen
    later = lessons.later_sources
    estimator = TokenEstimator(settings)
    for count, is_later in ((500, False), (25, True)):
        seen = [one for one in lessons.seen if (one.source in later) is is_later]
        learn(estimator, lessons.lesson(count, rng, seen))
    yield "drift", estimator, [one for one in lessons.unseen if one.source in later]


def _with(learned: TokenEstimator, gamma: float, floor: float) -> TokenEstimator:
    """A copy that has learned the same and errs more or less to the safe side."""
    ratio = replace(learned.settings.ratio, gamma=gamma, floor_bytes_per_token=floor)
    copy = TokenEstimator(replace(learned.settings, ratio=ratio))
    copy.restore(learned.state())
    return copy


def fixed_ratio(lessons: Lessons) -> dict[str, Any]:
    """The columns of 4 bytes per token for everything, which nothing teaches: the papers' comparison."""
    return shares(judge(_untaught(), lessons.unseen, lessons.boundary), 0.0)


def _untaught() -> TokenEstimator:
    """Four bytes per token, without any margin of its own."""
    ratio = replace(
        EstimatorSettings().ratio,
        gamma=0.0,
        cold_bytes_per_token=dict.fromkeys(TextCategory, 4.0),
        cold_tool_bytes_per_token=4.0,
        cold_deviation_ratio=0.0,
    )
    return TokenEstimator(EstimatorSettings(ratio=ratio))


def measure_times(texts: dict[str, str]) -> dict[str, float]:
    """Microseconds of the calls on a request's path, the best of five rounds."""
    estimator = TokenEstimator(EstimatorSettings())
    english, japanese = texts["docs_en"].encode(), texts["docs_ja"].encode()
    request = request_of(Sample("x", "chat", PromptShape(text_bytes=4000, messages=3), 1000))
    usage = Usage(prompt_tokens=1000, output_tokens=100)
    calls: dict[str, Callable[[], object]] = {
        "classify 1,000 B": partial(classify, english[:1_000]),
        "classify 10,000 B": partial(classify, english[:10_000]),
        "classify 10,000 B of Japanese": partial(classify, japanese[:10_000]),
        "classify 1 MB": partial(classify, english * 7),
        "estimate": partial(estimator.estimate, request),
        "observe": partial(estimator.observe, request, usage),
    }
    return {name: min(timeit.repeat(call, number=500, repeat=5)) / 500 * 1e6 for name, call in calls.items()}
