"""Catalog of workloads: resolves names and paths for simulator, planner and load tests.

Generators are built from published figures, for use if the traces themselves are not available:

Azure 2023: percentiles of lengths, and gaps, computed from the two public traces (Azure/AzurePublicDataset,
CC-BY 4.0). Prompt and output are drawn independently, so their correlation is lost.
LMSYS-Chat-1M: the distribution of total tokens (vllm-project/semantic-router, fleet-sim, Apache-2.0) and
percentiles of outputs.
`paper-mix`: the workload of EWSJF (arXiv 2601.21758, section 5): 80 % short and 20 % long prompts, Poisson
arrivals.

Hashes of prompt blocks, computed from the block ids of a trace.

A trace names the leading blocks of a prompt by ids; equal ids mean equal text up to the end of their block.
Gateways and engines hash blocks of other sizes, so their hashes are derived from these ids.

Components of generated workloads: lengths, arrivals, tenants and priority classes, and random numbers.

A run has one seed and one named stream of random numbers per use, so that drawing more numbers for one use
does not change any other.
"""

import math
import os
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serve_app.core.routing.prefix import BLOCK_ENDS
from serve_app.lab.workloads.trace import (
    Trace,
    TraceError,
    TraceRequest,
    describe_skipped,
    load_trace,
    merge,
    scale_to_rate,
    take,
)
from serve_app.request import PriorityClass


def gateway_blocks(ids: Sequence[int], block_tokens: int, prompt_tokens: int) -> Iterator[int]:
    """Yield hashes of a prompt's blocks as a gateway computes them.

    Args:
        ids: ids of the prompt's leading blocks of `block_tokens`.
    """
    known_tokens = min(prompt_tokens, len(ids) * block_tokens)
    for place, end in enumerate(takewhile(lambda end: end <= known_tokens, BLOCK_ENDS)):
        yield ids[(end - 1) // block_tokens] * len(BLOCK_ENDS) + place


def engine_blocks(ids: Sequence[int], block_tokens: int, tokens: int, block_size: int) -> Iterator[int]:
    """Yield hashes of an engine's full blocks among the first `tokens`. One id may cover several of them."""
    per_id = block_tokens // block_size
    if per_id == 1:
        yield from ids[: tokens // block_size]
        return
    for place in range(min(len(ids) * per_id, tokens // block_size)):
        yield ids[place // per_id] * per_id + place % per_id


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the numpy generator of one use (`arrivals`, `lengths`...) in the run with this seed."""
    return np.random.default_rng(_entropy(seed, name))


def plain_stream(seed: int, name: str) -> random.Random:
    """Return a stream as `random.Random`, for the pure packages, which do not import numpy."""
    return random.Random(int(stream(seed, name).integers(1 << 62)))  # noqa: S311 - a simulation, not a secret


def _entropy(seed: int, name: str) -> list[int]:
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    return [seed, zlib.crc32(name.encode())]


Tokens = NDArray[np.int64]


class Lengths(Protocol):
    """Distribution of lengths in tokens, each at least 1."""

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw `count` lengths."""
        ...


@dataclass(frozen=True, slots=True)
class QuantileLengths:
    """Lengths whose distribution is known at a few points, interpolated linearly in between.

    Attributes:
        points: (share of requests at most this long, tokens), both ascending, from share 0 to share 1.
    """

    points: tuple[tuple[float, float], ...]

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Invert the distribution function at uniform shares."""
        shares, tokens = zip(*self.points, strict=True)
        return _whole(np.interp(rng.random(count), shares, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Lengths around `mean`, skewed to the right, cut at `max_tokens`."""

    mean: float
    cv: float
    max_tokens: int

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw from the lognormal distribution of this mean and coefficient of variation."""
        variance = math.log(1 + self.cv**2)
        drawn = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)
        return _whole(np.minimum(drawn, self.max_tokens))


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Uniform lengths from `low` to `high`, both included."""

    low: int
    high: int

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Draw whole numbers."""
        return rng.integers(self.low, self.high, count, dtype=np.int64, endpoint=True)


@dataclass(frozen=True, slots=True)
class MixedLengths:
    """Several kinds of lengths, each with its share of the requests."""

    parts: tuple[tuple[float, Lengths], ...]

    def sample(self, count: int, rng: np.random.Generator) -> Tokens:
        """Choose a part for each request, then draw from it."""
        chosen = rng.choice(len(self.parts), count, p=[share for share, _ in self.parts])
        drawn = np.empty(count, dtype=np.int64)
        for index, (_, lengths) in enumerate(self.parts):
            of_part = chosen == index
            drawn[of_part] = lengths.sample(int(of_part.sum()), rng)
        return drawn


def pair_within_totals(totals: Tokens, outputs: Tokens, rng: np.random.Generator) -> Tokens:
    """Give each total a shorter output at random, so that both retain their distributions.

    Drawing the two independently and cutting would distort one of them. Totals are paired in ascending order,
    each with one of the outputs that fit. If none fits, which is rare, the output is 1.
    """
    paired = np.ones_like(totals)
    ascending = np.sort(outputs)
    fitting: list[int] = []
    taken = 0
    for place in np.argsort(totals, kind="stable"):
        while taken < len(ascending) and ascending[taken] < totals[place]:
            fitting.append(int(ascending[taken]))
            taken += 1
        if fitting:
            drawn = int(rng.integers(len(fitting)))
            paired[place], fitting[drawn] = fitting[drawn], fitting[-1]
            fitting.pop()
    return paired


def _whole(lengths: Sequence[float] | NDArray[np.float64]) -> Tokens:
    return np.asarray(np.maximum(1, np.rint(lengths)), dtype=np.int64)


class Arrivals(Protocol):
    """Distribution of arrival times in seconds, ascending, after a start at 0."""

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw `count` arrival times."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals:
    """Independent gaps of a gamma distribution.

    A coefficient of variation (`cv`) of 1 is Poisson, more is bursty. Production traffic to large models has
    3.5 to 12 (ServeGen, Alibaba), one service as a whole about 1.1.
    """

    rate_per_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s, cv=self.cv)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrival times: sums of gaps of shape `1 / cv^2` and mean `1 / rate`."""
        variance_ratio = self.cv**2
        gaps = rng.gamma(1 / variance_ratio, variance_ratio / self.rate_per_s, count)
        return np.asarray(np.cumsum(gaps), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOffArrivals:
    """Poisson arrivals in on-periods, none in off-periods; both have exponential durations.

    Attributes:
        rate_per_s: mean over on- and off-periods together.
        on_s: mean length of an on-period.
        off_s: mean length of an off-period.
    """

    rate_per_s: float
    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        _check_positive(rate_per_s=self.rate_per_s, on_s=self.on_s, off_s=self.off_s)

    def sample(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw arrivals on a clock that runs in on-periods only, then insert the off-periods."""
        on_rate_per_s = self.rate_per_s * (self.on_s + self.off_s) / self.on_s
        on_clock = np.cumsum(rng.exponential(1 / on_rate_per_s, count))
        period_ends: list[float] = []
        ends_at = rng.exponential(self.on_s)
        while count and ends_at <= on_clock[-1]:
            period_ends.append(ends_at)
            ends_at += rng.exponential(self.on_s)
        off_s = np.concatenate(([0.0], np.cumsum(rng.exponential(self.off_s, len(period_ends)))))
        off_periods_before = np.searchsorted(np.asarray(period_ends), on_clock, side="right")
        return np.asarray(on_clock + off_s[off_periods_before], dtype=np.float64)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} must be positive, got {value}")


ZIPF_EXPONENT = 1.0
"""The first of ten tenants then sends 34 % of requests, within the 16 to 52 % of production (ServeGen)."""
_MAX_TENANTS, _MAX_EXPONENT = 100_000, 10


def zipf_shares(count: int, exponent: float = ZIPF_EXPONENT) -> dict[str, float]:
    """Return shares of `tenant-1` to `tenant-n`, proportional to `1 / rank^exponent`; 0 makes them equal."""
    if not 1 <= count <= _MAX_TENANTS or not 0 <= exponent <= _MAX_EXPONENT:
        raise TraceError(
            f"tenants need a count from 1 to {_MAX_TENANTS:,} and an exponent from 0 to {_MAX_EXPONENT}, got "
            f"{count}:{exponent}"
        )
    weights = [1 / rank**exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return {f"tenant-{rank}": weight / total for rank, weight in enumerate(weights, start=1)}


def parse_shares(text: str) -> dict[str, float]:
    """Parse `8` (Zipf), `8:1.2` (with an exponent) or `search=3,chat=1` (named, by weight).

    Raises:
        TraceError: the text is none of these.
    """
    try:
        if "=" not in text:
            count, _, exponent = text.partition(":")
            return zipf_shares(int(count), float(exponent or ZIPF_EXPONENT))
        pairs = [part.partition("=") for part in text.split(",")]
        weights = {name.strip(): float(weight) for name, _, weight in pairs}
    except ValueError as exc:
        raise TraceError(f"cannot parse shares {text!r}: use 8, 8:1.2 or search=3,chat=1") from exc
    if "" in weights or not all(0 < weight < float("inf") for weight in weights.values()):
        raise TraceError(f"shares need a name and a positive weight each, got {text!r}")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def assign_tenants(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Assign a tenant to each request, drawn by share."""
    requests = zip(trace.requests, _drawn(trace, shares, rng), strict=True)
    return replace(trace, requests=tuple(replace(request, tenant=name) for request, name in requests))


def assign_priorities(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> Trace:
    """Assign a priority class to each request, drawn by share.

    Raises:
        TraceError: a name is not a priority class.
    """
    unknown = set(shares) - set(PriorityClass)
    if unknown:
        raise TraceError(f"no priority class {', '.join(sorted(unknown))}: use {', '.join(PriorityClass)}")
    requests = zip(trace.requests, _drawn(trace, shares, rng), strict=True)
    return replace(
        trace, requests=tuple(replace(request, priority=PriorityClass(name)) for request, name in requests)
    )


def _drawn(trace: Trace, shares: Mapping[str, float], rng: np.random.Generator) -> list[str]:
    """Return a name for each request, drawn by share."""
    drawn = rng.choice(list(shares), len(trace.requests), p=list(shares.values()))
    return [str(name) for name in drawn]


LengthPairs = tuple[Tokens, Tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Generator of a named workload.

    Attributes:
        figures: the figures that it is built from, for the provenance of results.
        rate_per_s: default of the mean arrival rate.
        arrivals: returns the arrival process for a mean rate.
        lengths: draws prompt and output lengths.
    """

    figures: str
    rate_per_s: float
    arrivals: Callable[[float], Arrivals]
    lengths: Callable[[int, np.random.Generator], LengthPairs]

    def generate(self, name: str, count: int, seed: int, rate_per_s: float | None = None) -> Trace:
        """Draw `count` requests. Arrivals and lengths use separate streams."""
        rate = self.rate_per_s if rate_per_s is None else rate_per_s
        times = self.arrivals(rate).sample(count, stream(seed, f"{name} arrivals"))
        prompts, outputs = self.lengths(count, stream(seed, f"{name} lengths"))
        return Trace(
            name=name,
            source=f"generated from {self.figures} at {rate:.4g} requests/s, seed {seed}",
            requests=tuple(
                TraceRequest(arrival_s=float(at), prompt_tokens=int(prompt), output_tokens=int(output))
                for at, prompt, output in zip(times, prompts, outputs, strict=True)
            ),
        )


def _independent(prompts: Lengths, outputs: Lengths) -> Callable[[int, np.random.Generator], LengthPairs]:
    def draw(count: int, rng: np.random.Generator) -> LengthPairs:
        return prompts.sample(count, rng), outputs.sample(count, rng)

    return draw


def _within(totals: Lengths, outputs: Lengths) -> Callable[[int, np.random.Generator], LengthPairs]:
    def draw(count: int, rng: np.random.Generator) -> LengthPairs:
        total = totals.sample(count, rng)
        output = pair_within_totals(total, outputs.sample(count, rng), rng)
        return np.maximum(1, total - output), output

    return draw


def _percentiles(*tokens: int) -> QuantileLengths:
    """Return a distribution from its percentiles 0, 1, 5, 10, 25, 50, 75, 80, 90, 95, 99, 99.9 and 100."""
    return QuantileLengths(tuple(zip(_SHARES, tokens, strict=True)))


_SHARES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95, 0.99, 0.999, 1)

# (share of requests, maximum tokens of prompt and output together).
_LMSYS_TOTALS = QuantileLengths(
    (
        *((0.0, 2), (0.1314, 64), (0.2359, 128), (0.3825, 256), (0.6383, 512), (0.7580, 768), (0.8307, 1024)),
        *((0.9089, 1536), (0.9483, 2048), (0.9729, 3072), (0.9837, 4096), (0.9929, 6144), (0.9965, 8192)),
        *((0.99863, 12288), (0.99926, 16384), (0.99966, 24576), (0.99979, 32768), (1.0, 65536)),
    )
)
_LMSYS_OUTPUTS = QuantileLengths(
    ((0, 1), (0.5, 140), (0.8, 325), (0.9, 397), (0.95, 447), (0.99, 502), (1, 512))
)

RECIPES: dict[str, Recipe] = {
    "azure-code": Recipe(
        figures="percentiles of the Azure 2023 code trace",
        rate_per_s=2.57,
        # These periods leave about 12 minutes of 58 without arrivals and a cv of about 13, as in the trace.
        # At other rates they scale as the trace itself would.
        arrivals=lambda rate: OnOffArrivals(rate_per_s=rate, on_s=92 * 2.57 / rate, off_s=75 * 2.57 / rate),
        lengths=_independent(
            _percentiles(3, 17, 75, 147, 578, 1469, 2744, 3192, 5188, 7303, 7436, 7437, 7437),
            _percentiles(6, 6, 6, 7, 9, 13, 24, 29, 55, 90, 251, 825, 1899),
        ),
    ),
    "azure-conv": Recipe(
        figures="percentiles of the Azure 2023 conversation trace",
        rate_per_s=5.53,
        arrivals=lambda rate: GammaArrivals(rate_per_s=rate, cv=1.09),
        lengths=_independent(
            _percentiles(2, 29, 181, 207, 396, 1020, 1189, 1315, 2734, 4083, 4142, 6179, 14050),
            _percentiles(7, 16, 41, 54, 85, 129, 395, 400, 424, 451, 601, 954, 1000),
        ),
    ),
    "lmsys": Recipe(
        figures="the token distribution of LMSYS-Chat-1M",
        # The data set has no arrival times, so a Poisson stream of this rate is assumed.
        rate_per_s=10.0,
        arrivals=lambda rate: GammaArrivals(rate_per_s=rate),
        lengths=_within(_LMSYS_TOTALS, _LMSYS_OUTPUTS),
    ),
    "paper-mix": Recipe(
        figures="the mix of the EWSJF paper (80 % of 32-256, 20 % of 1,024-4,096, outputs around 100)",
        rate_per_s=20.0,
        arrivals=lambda rate: GammaArrivals(rate_per_s=rate),
        lengths=_independent(
            MixedLengths(((0.8, UniformLengths(32, 256)), (0.2, UniformLengths(1024, 4096)))),
            LognormalLengths(mean=100, cv=0.5, max_tokens=512),
        ),
    ),
}


TRACES_VARIABLE = "EWSJF_TRACES"
"""Environment variable with the folder of trace files."""

_ROOT = Path(__file__).resolve().parents[3]
DOWNLOAD_FOLDER = _ROOT / ".cache" / "traces"
"""Default folder of `scripts/fetch_traces`."""
_SHARED_FOLDER = _ROOT.parent / "shared" / "traces"

_FILES = {
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
}
_DEFAULT_REQUESTS = 1000
# Merged generators cover an hour, like the public traces.
_MERGED_SPAN_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """A workload, as given on the command line.

    Attributes:
        trace: a name (`azure-code`, `azure-conv`, `lmsys`, `paper-mix`) or the path of a trace file; several
            joined by `+` are merged on one clock.
        rate_per_s: mean arrival rate; None for the trace's own.
        requests: number of requests; None for a thousand, or as many as `duration_s` requires.
        duration_s: time during which requests arrive; exclusive with `requests`.
        tenants: see `generators.parse_shares`; None for those of the file.
        priorities: shares of priority classes, such as `interactive=1,batch=3`; None for those of the file.
        folder: folder of trace files; None for the default folders.
    """

    trace: str
    rate_per_s: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    tenants: str | None = None
    priorities: str | None = None
    seed: int = 0
    folder: Path | None = None

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "requests", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise TraceError(f"{name} must be positive, got {value}")
        if self.requests is not None and self.duration_s is not None:
            raise TraceError(
                f"set requests or duration_s, not both, got {self.requests} and {self.duration_s}: "
                "the rate determines the other"
            )
        if self.seed < 0:
            raise TraceError(f"seed must not be negative, got {self.seed}")


def resolve(settings: WorkloadSettings) -> Trace:
    """Read or generate the workload, cut to size, at its rate, with its tenants.

    Raises:
        TraceError: there is no such name or file, or it cannot be read.
    """
    is_one = Path(settings.trace).is_file() or "+" not in settings.trace
    trace = _single(settings) if is_one else _merged(settings)
    if settings.tenants is not None:
        trace = assign_tenants(trace, parse_shares(settings.tenants), stream(settings.seed, "tenants"))
    if settings.priorities is not None:
        trace = assign_priorities(
            trace, parse_shares(settings.priorities), stream(settings.seed, "priorities")
        )
    return trace


def _single(settings: WorkloadSettings) -> Trace:
    path = trace_file(settings)
    return _generated(settings) if path is None else _from_file(path, settings)


def _merged(settings: WorkloadSettings) -> Trace:
    """Merge whole files, in which requests that arrived together stay together, and an hour of generators."""
    whole = replace(settings, rate_per_s=None, requests=None, duration_s=None)
    parts = []
    for name in settings.trace.split("+"):
        part = replace(whole, trace=name)
        is_generated = trace_file(part) is None
        parts.append(_single(replace(part, duration_s=_MERGED_SPAN_S) if is_generated else part))
    return _sized(merge(parts, settings.trace), settings)


def notes_on(trace: Trace) -> Iterator[str]:
    """Yield notes about the requests that are played: generated ones, skipped rows."""
    if names := trace.synthetic:
        files = "its file is missing" if len(names) == 1 else "their files are missing"
        yield (
            f"{' and '.join(names)}: {files}, so lengths and arrivals are generated from published "
            "percentiles; scripts/fetch_traces downloads the traces"
        )
    if skipped := describe_skipped(trace):
        yield f"{trace.name}: {skipped}"


def trace_file(settings: WorkloadSettings) -> Path | None:
    """Return the file of the workload, or None if it is generated.

    Raises:
        TraceError: there is no such name or file.
    """
    name = settings.trace
    if name in _FILES:
        return find_file(_FILES[name], settings.folder)
    if name in RECIPES:
        return None
    path = Path(name)
    if not path.is_file():
        raise TraceError(f"no trace {name!r}: use a file, or one of {', '.join(RECIPES)}")
    return path


def find_file(filename: str, folder: Path | None = None) -> Path | None:
    """Return the file, or None. A folder that was given must have it; the default folders may have it."""
    named = folder or (Path(os.environ[TRACES_VARIABLE]) if os.environ.get(TRACES_VARIABLE) else None)
    if named is not None:
        if not (named / filename).is_file():
            raise TraceError(f"no {filename} in {named}: run scripts/fetch_traces --out {named}")
        return named / filename
    candidates = (place / filename for place in (DOWNLOAD_FOLDER, _SHARED_FOLDER))
    return next((path for path in candidates if path.is_file()), None)


def _from_file(path: Path, settings: WorkloadSettings) -> Trace:
    trace = load_trace(path)
    if settings.trace in _FILES:
        trace = replace(trace, name=settings.trace)
    return _sized(trace, settings)


def _sized(trace: Trace, settings: WorkloadSettings) -> Trace:
    count = _count(settings, settings.rate_per_s or trace.rate_per_s, otherwise=len(trace.requests))
    trace = take(trace, count, stream(settings.seed, "window"))
    return trace if settings.rate_per_s is None else scale_to_rate(trace, settings.rate_per_s)


def _generated(settings: WorkloadSettings) -> Trace:
    recipe = RECIPES[settings.trace]
    count = _count(settings, settings.rate_per_s or recipe.rate_per_s, otherwise=_DEFAULT_REQUESTS)
    trace = recipe.generate(settings.trace, count, settings.seed, settings.rate_per_s)
    return replace(trace, synthetic=(settings.trace,)) if settings.trace in _FILES else trace


def _count(settings: WorkloadSettings, rate_per_s: float | None, otherwise: int) -> int:
    if settings.duration_s is None:
        return settings.requests or otherwise
    if rate_per_s is None:
        raise TraceError(
            f"all requests of {settings.trace} arrive at once: set requests instead of duration_s"
        )
    return max(1, round(rate_per_s * settings.duration_s))
