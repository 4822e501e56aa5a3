"""What the calls on a request's path cost, in microseconds of one core."""

import timeit
from collections.abc import Callable, Mapping
from functools import partial

from experiments.estimator.bodies import Sample
from experiments.estimator.judgement import request_of
from serve_app.request import PromptShape, Usage
from serve_app.routing.estimation.estimate import EstimatorSettings, TokenEstimator
from serve_app.routing.estimation.text_category import classify

_ROUNDS, _CALLS = 5, 200


def call_costs_us(texts: Mapping[str, str]) -> dict[str, float]:
    """The best of five rounds for each call."""
    estimator = TokenEstimator(EstimatorSettings())
    english, japanese = texts["docs_en"].encode(), texts["docs_ja"].encode()
    request = request_of(Sample("x", "chat", PromptShape(text_bytes=4000, messages=3), 1000))
    usage = Usage(prompt_tokens=1000, output_tokens=100)
    calls: dict[str, Callable[[], object]] = {
        "classify 1,000 B": partial(classify, english[:1_000]),
        "classify 10,000 B": partial(classify, english[:10_000]),
        "classify 10,000 B of Japanese": partial(classify, japanese[:10_000]),
        "classify 1 MB": partial(classify, (english * 7)[:1_000_000]),
        "estimate": partial(estimator.estimate, request),
        "observe": partial(estimator.observe, request, usage),
    }
    return {
        name: min(timeit.repeat(call, number=_CALLS, repeat=_ROUNDS)) / _CALLS * 1e6
        for name, call in calls.items()
    }
