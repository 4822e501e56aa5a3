"""Does gradient boosting predict the length of answers better than learned curves, and at what cost?

Each method predicts every request at its arrival, and learns from answers when they have ended. Gradient
boosting is refitted to the latest answers at intervals, from what is known at an arrival: the length of the
prompt, and the earlier answers of the tenant.
"""

import heapq
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from scipy.stats import spearmanr
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import trace_sources
from serve_app.core.routing.estimation.output_length import OutputLengthEstimator
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import choose_trace
from serve_app.lab.workloads import TraceChoice, TraceRequest
from serve_app.request import PromptShape, Request, RequestSpec, Submission, Usage

# Share of answers that the upper prediction should cover. The curves know four lengths of equal probability;
# the longest is their quantile of 7/8.
COVERED = 0.875
# An answer ends after its tokens at this pace, and half a second for the prompt.
_TOKENS_PER_S, _PREFILL_S = 30.0, 0.5
_RECENT = 1_000
_UNKNOWN = -1.0


@settings
class OutputLengthExperiment:
    """Settings of the experiment.

    Attributes:
        traces: requests by trace, merged; each trace is a tenant.
        parts: consecutive parts of the traffic, which are judged separately.
        warm_up: answers before predictions are judged.
        refit_every: answers between two fits of gradient boosting.
        fitted: latest answers that it is fitted to.
    """

    traces: Mapping[str, int]
    parts: int = 3
    warm_up: int = 1_000
    refit_every: int = 500
    fitted: int = 5_000


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted length in tokens, and a length that `COVERED` of such answers do not exceed."""

    tokens: float
    upper: float


class Method(Protocol):
    """A predictor that learns online."""

    def predict(self, request: TraceRequest, /) -> Prediction:
        """Return the prediction at the arrival of a request."""
        ...

    def observe(self, request: TraceRequest, /) -> None:
        """Learn from an answer that has ended."""
        ...


class RunningMedian:
    """The median of the latest answers of all tenants."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._known = Prediction(1.0, 1.0)
        self._age = 0

    def predict(self, _: TraceRequest) -> Prediction:
        """Return the same for all requests."""
        return self._known

    def observe(self, request: TraceRequest) -> None:
        """Compute the quantiles again after some answers."""
        self._recent.append(request.output_tokens)
        self._age += 1
        if self._age % 50 == 0:
            middle, upper = np.quantile(self._recent, (0.5, COVERED))
            self._known = Prediction(float(middle), float(upper))


class LearnedCurves:
    """The estimator of the product: distributions by tenant and text category."""

    def __init__(self) -> None:
        self._estimator = OutputLengthEstimator()

    def predict(self, request: TraceRequest) -> Prediction:
        """Return the expected length, and the longest of four equally likely ones."""
        made = self._estimator.estimate(_request_of(request))
        return Prediction(made.expected, made.ends(0.0)[-1])

    def observe(self, request: TraceRequest) -> None:
        """Learn from the answer."""
        usage = Usage(prompt_tokens=request.prompt_tokens, output_tokens=request.output_tokens)
        self._estimator.observe(_request_of(request), usage)


@dataclass(slots=True)
class GradientBoosting:
    """Gradient-boosted trees of the logarithm of the length."""

    refit_every: int
    fitted: int
    _features: dict[int, list[float]] = field(default_factory=dict)
    _predicted: dict[int, float] = field(default_factory=dict)
    _seen: deque[tuple[list[float], float]] = field(default_factory=deque)
    _errors: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _of_tenant: dict[str, deque[float]] = field(default_factory=dict)
    _model: HistGradientBoostingRegressor | None = None
    _margin: float = 0.0
    _answers: int = 0

    def predict(self, request: TraceRequest) -> Prediction:
        """Return the prediction of the latest fit."""
        earlier = self._of_tenant.get(request.tenant)
        mean = statistics.fmean(earlier) if earlier else _UNKNOWN
        last = earlier[-1] if earlier else _UNKNOWN
        features = [math.log1p(request.prompt_tokens), mean, last]
        self._features[id(request)] = features
        if self._model is None:
            return Prediction(1.0, 1.0)
        predicted = float(self._model.predict([features])[0])
        self._predicted[id(request)] = predicted
        return Prediction(math.expm1(predicted), math.expm1(predicted + self._margin))

    def observe(self, request: TraceRequest) -> None:
        """Learn from the answer, and fit the trees again after some."""
        length = math.log1p(request.output_tokens)
        self._of_tenant.setdefault(request.tenant, deque(maxlen=50)).append(length)
        self._seen.append((self._features.pop(id(request)), length))
        if len(self._seen) > self.fitted:
            self._seen.popleft()
        if (predicted := self._predicted.pop(id(request), None)) is not None:
            self._errors.append(length - predicted)
        self._answers += 1
        if self._answers % self.refit_every == 0:
            if self._errors:
                self._margin = float(np.quantile(self._errors, COVERED))
            features, lengths = zip(*self._seen, strict=True)
            self._model = HistGradientBoostingRegressor(
                max_iter=80, max_leaf_nodes=15, min_samples_leaf=20, random_state=0
            ).fit(np.array(features), np.array(lengths))


def play(experiment: OutputLengthExperiment, _: Context) -> Iterator[Measurement]:
    """Yield a row for each method, with known and with unknown tenants."""
    merged = sorted(
        (
            replace(one, tenant=name)
            for name, count in experiment.traces.items()
            for one in choose_trace(TraceChoice(name=name, requests=count), 0).requests
        ),
        key=lambda one: one.arrival_s,
    )
    for tenants in ("known", "unknown"):
        requests = [one if tenants == "known" else replace(one, tenant="default") for one in merged]
        methods: Mapping[str, Method] = {
            "running median": RunningMedian(),
            "learned curves": LearnedCurves(),
            "gradient boosting": GradientBoosting(experiment.refit_every, experiment.fitted),
        }
        for name, method in methods.items():
            yield Measurement(
                key={"tenants": tenants, "method": name},
                figures=figures_of(method, requests, experiment),
                traces=trace_sources("+".join(experiment.traces)),
            )


def figures_of(
    method: Method, requests: Sequence[TraceRequest], experiment: OutputLengthExperiment
) -> Mapping[str, Any]:
    """Return the accuracy in each part, and the CPU time per request."""
    running: list[tuple[float, int]] = []
    judged: list[tuple[Prediction, int]] = []
    answered = 0
    began_s = time.thread_time()
    with threadpool_limits(1):  # the CPU time of one thread is measured
        for number, request in enumerate(requests):
            while running and running[0][0] <= request.arrival_s:
                method.observe(requests[heapq.heappop(running)[1]])
                answered += 1
            prediction = method.predict(request)
            if answered >= experiment.warm_up:
                judged.append((prediction, request.output_tokens))
            ends_s = request.arrival_s + _PREFILL_S + request.output_tokens / _TOKENS_PER_S
            heapq.heappush(running, (ends_s, number))
    cpu_us = 1e6 * (time.thread_time() - began_s) / len(requests)
    size = math.ceil(len(judged) / experiment.parts)
    parts = [_accuracy(judged[start : start + size]) for start in range(0, len(judged), size)]
    return {"cpu_us": cpu_us, **{name: [part[name] for part in parts] for name in parts[0]}}


def _accuracy(judged: Sequence[tuple[Prediction, int]]) -> Mapping[str, float]:
    true = np.log1p([length for _, length in judged])
    predicted = np.log1p([prediction.tokens for prediction, _ in judged])
    return {
        "log_sigma": float(np.std(true - predicted)),
        "rank": float(spearmanr(true, predicted).statistic) if np.ptp(predicted) > 0 else 0.0,
        "covered": statistics.fmean(length <= one.upper for one, length in judged),
    }


def _request_of(request: TraceRequest) -> Request:
    shape = PromptShape(text_bytes=0, prompt_tokens=request.prompt_tokens)
    submission = Submission(request_id="", spec=RequestSpec(model="m", shape=shape), tenant=request.tenant)
    return Request(submission=submission, gateway_id="", arrived_at=request.arrival_s)


EXPERIMENT = Experiment(settings=OutputLengthExperiment, play=play)
