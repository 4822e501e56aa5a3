"""The samples of one tokenizer: some that an estimator learns from, others that it is judged on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from experiments.estimator.bodies import Bodies, Sample
from experiments.estimator.judgement import request_of
from experiments.estimator.tokenizers import Tokenizer
from serve_app.request import TextCategory, Usage
from serve_app.routing.estimation.estimate import EstimatorSettings, TokenEstimator

# Images: an address, or a data URI of so many bytes.
_IMAGE_BYTES = (0, 200_000)
_IMAGES_OF_EACH = 25


def seeded(seed: int) -> Random:
    """A reproducible source of chance."""
    return Random(seed)  # noqa: S311 - nothing here is a secret


@dataclass(frozen=True, slots=True)
class Lessons:
    """Samples of the first half of every text, and of its second half.

    Attributes:
        seen, unseen: to learn from, and to judge on.
        seen_images, unseen_images: bodies with images, which only the table of bodies shows.
        later_sources: half of the sources, for a drift from the others to these.
    """

    seen: Sequence[Sample]
    unseen: Sequence[Sample]
    seen_images: Sequence[Sample]
    unseen_images: Sequence[Sample]
    later_sources: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        sources = sorted({sample.source for sample in self.unseen})
        object.__setattr__(self, "later_sources", frozenset(sources[1::2]))

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, texts: Mapping[str, str], *, seed: int, prompts: int, longest_bytes: int
    ) -> "Lessons":
        """Draw bodies, at least `prompts` of each half."""
        bodies = Bodies(texts, tokenizer, seeded(seed), longest_bytes)
        seen, unseen = (_drawn(bodies, half, prompts) for half in (0, 1))
        images = [
            [bodies.with_image(half=half, image_bytes=size) for size in _IMAGE_BYTES * _IMAGES_OF_EACH]
            for half in (0, 1)
        ]
        return cls(seen, unseen, *images)

    def lesson(self, count: int, rng: Random, samples: Sequence[Sample] | None = None) -> list[Sample]:
        """`count` samples of each category by turns, each category in an order of its own."""
        columns = []
        for category in TextCategory:
            pool = [one for one in samples or self.seen if one.shape.category is category]
            columns.append(rng.choices(pool, k=count) if pool else [])
        return [sample for row in zip(*filter(None, columns), strict=True) for sample in row]

    def learning(self, after: Sequence[int], rng: Random) -> Iterator[tuple[int, TokenEstimator]]:
        """One estimator with the shipped settings, after each number of observations of every category."""
        lesson = self.lesson(after[-1], rng)
        estimator, learned = TokenEstimator(EstimatorSettings()), 0
        for count in after:
            upto = count * len(lesson) // max(1, after[-1])
            learn(estimator, lesson[learned:upto])
            learned = upto
            yield count, estimator

    def taught(self, settings: EstimatorSettings, count: int, rng: Random) -> TokenEstimator:
        """An estimator after so many observations of each category."""
        estimator = TokenEstimator(settings)
        learn(estimator, self.lesson(count, rng))
        return estimator

    def drifted(
        self, settings: EstimatorSettings, before: int, after: int, rng: Random
    ) -> tuple[TokenEstimator, list[Sample]]:
        """An estimator after many observations of some sources and few of the others, and those others."""
        estimator = TokenEstimator(settings)
        for count, is_later in ((before, False), (after, True)):
            seen = [one for one in self.seen if (one.source in self.later_sources) is is_later]
            learn(estimator, self.lesson(count, rng, seen))
        return estimator, [one for one in self.unseen if one.source in self.later_sources]


def learn(estimator: TokenEstimator, lesson: Iterable[Sample]) -> None:
    """Let the estimator observe what an engine would report."""
    for sample in lesson:
        estimator.observe(request_of(sample), Usage(prompt_tokens=sample.tokens, output_tokens=10))


def fixed_ratio(bytes_per_token: float) -> TokenEstimator:
    """So many bytes per token for everything, without any margin of its own; nobody teaches it."""
    ratio = replace(
        EstimatorSettings().ratio,
        gamma=0.0,
        cold_bytes_per_token=dict.fromkeys(TextCategory, bytes_per_token),
        cold_tool_bytes_per_token=bytes_per_token,
        cold_deviation_ratio=0.0,
    )
    return TokenEstimator(EstimatorSettings(ratio=ratio))


def _drawn(bodies: Bodies, half: int, count: int) -> list[Sample]:
    samples: list[Sample] = []
    while len(samples) < count:
        samples += bodies.draw(half=half)
    return samples
