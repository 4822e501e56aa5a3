"""Estimates beside true lengths, and where the router sends both."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.estimator.bodies import Sample
from serve_app.request import Request, RequestSpec, Submission
from serve_app.routing.estimation.estimate import TokenEstimator
from serve_app.routing.pools import PoolRouter, RoutingSettings

OUTPUT_TOKENS = 256
_LONG_CONTEXT_TOKENS = 1_000_000
# Share of requests with at most so many tokens in total, as published.
_EDGES = (0, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384, 32768)
_MIXES = {
    "azure": (0, 0.0282, 0.0676, 0.2886, 0.4045, 0.6569, 0.7798, 0.8687, 0.8982, 0.9758, 0.99997, 1, 1),
    "lmsys": (0, 0.2359, 0.3825, 0.6383, 0.8307, 0.9089, 0.9483, 0.9729, 0.9837, 0.9929, 0.9965, 0.99926, 1),
}


def request_of(sample: Sample) -> Request:
    """The request that carries the sample."""
    spec = RequestSpec(model="bench", shape=sample.shape, max_output_tokens=OUTPUT_TOKENS)
    return Request(submission=Submission(request_id="bench", spec=spec), gateway_id="bench", arrived_at=0.0)


@dataclass(frozen=True, slots=True)
class Judged:
    """One estimate beside the truth, in tokens, and where the router sends each.

    Attributes:
        is_short: to the short pool.
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
        """Relative error of the expected prompt tokens."""
        return abs(self.expected - self.true) / self.true


def judge(
    estimator: TokenEstimator, samples: Iterable[Sample], b_short_tokens: int, cut_margin_ratio: float
) -> list[Judged]:
    """Estimate every sample, and route it between two pools; the short one's context ends at `B_short`."""
    limits = {"short": b_short_tokens, "long": _LONG_CONTEXT_TOKENS}
    settings = RoutingSettings(b_short_tokens=b_short_tokens, cut_margin_ratio=cut_margin_ratio)
    router = PoolRouter(settings, limits.get)
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
    """The columns of a table, as README.md explains them; `other_pool` and `overflow` once for each mix."""
    errors = sorted(item.error for item in judged)
    found = {
        "signed": sum(item.expected for item in judged) / sum(item.true for item in judged) - 1,
        "median": statistics.median(errors),
        "p95": errors[int(0.95 * len(errors))],
        "under": sum(item.upper < item.true for item in judged) / len(judged),
        "refused_wrongly": sum(item.least > item.true for item in judged) / len(judged),
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
    """Weights under which the total tokens of the samples are distributed as in a trace."""
    if mix == "uniform":
        return [1.0] * len(judged)
    bins = [sum(item.true + OUTPUT_TOKENS > edge for edge in _EDGES[1:-1]) for item in judged]
    counts = [max(1, bins.count(index)) for index in range(len(_EDGES) - 1)]
    cdf = _MIXES[mix]
    return [(cdf[index + 1] - cdf[index]) / counts[index] for index in bins]
