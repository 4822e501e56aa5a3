"""Queueing model of one pool, and the fleets that are sized by it.

- `PoolModel`: the capacity and the latencies of a pool, from the engine's step times.
- `FleetPlan`: the fleets that are compared: one worst-case pool, one with paged KV cache, and two pools.
- `size`: the smallest pools within the limits, according to the model.

`PoolModel`. Each sequence in a batch advances by one token per iteration, so iterations are the clock. At `r`
requests per second on one replica, with h chunks of prompt and o output tokens per request:

    sequences in the batch     n = r * E[h + o - 1] * t                                        (Little's law)
    prompt tokens, iteration   P: compound Poisson, r * E[h] * t chunks of the workload's own sizes
    mean iteration             t = E[max(read, compute of P and n)] + pairs + n * (per sequence + context)

The last line is the expectation of `StepTimeModel`. It has t on both sides; its smallest solution is the
operating point. The distribution of P (by FFT) matters because of the maximum: several chunks in one
iteration lengthen it, while an iteration without chunks still costs its base.

Waits for a batch slot are those of M/G/c, with c = replicas * slots and service (h + o - 1) * t. The slots
are `max_num_seqs`, or the number of mean contexts that fit into the KV cache, if smaller. A replica's
capacity is the largest rate with an operating point whose batch fits into the slots.

Not modelled: bursts (arrivals are Poisson), the scheduler's order, late binding and spill, differences
between replicas, preemption. The model gives a first guess; the simulator decides.

Requests are routed by their token budget, which is known at arrival. Without `max_tokens`, the scheduler uses
a high quantile of the outputs instead (`core.routing.estimation.output_length`). Some requests are then
routed to the long pool although they turn out to be short.

`p99_wait_s`. Waits for one of c servers follow Erlang's formulas, with a correction for general service
times:

B(c, a)     probability of blocking without a queue, by the recursion B(k) = a B(k-1) / (k + a B(k-1)), which
            divides only numbers of similar size, so it is stable for thousands of servers
C(c, a)     probability of waiting, M/M/c:  B / (1 - u (1 - B)),  u = a / c
P(W > t)    = C * exp(-(c - a) t / E[S]), M/M/c, first come first served
M/G/c       waits of M/M/c times (1 + cv^2) / 2, with cv the coefficient of variation of service times. Kimura
            studied the accuracy of this two-moment approximation (Queueing Systems 15, 1994); it is exact for
            M/M/c and for the mean of M/G/1. Here it scales the whole conditional distribution.

`FleetPlan`. The fleets:

- `worst-case-homogeneous` is the papers' baseline: a batch holds as many sequences as would fit if each had
  the longest context (16 at 64K in the papers).
- `paged-homogeneous` is the fair baseline, because vLLM allocates KV blocks only as tokens are computed: one
  pool, with the profile's number of sequences and the chunk limit of the scheduler's policy.
- `pools` are a short and a long one, each with separate settings and profile.

All three have the same scheduler and receive the same requests. Prices are GPU hours from a table, which
users can replace.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from serve_app.core.metrics.summary import Slo
from serve_app.core.routing.estimation.output_length import QUANTILE
from serve_app.core.settings_base import POSITIVE, settings
from serve_app.engines.model.model import EngineModelSettings
from serve_app.engines.model.roofline import load_profile
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.errors import SettingsError
from serve_app.lab.simulation.run import ONE_POOL, EngineChanges, FleetSettings, PoolChanges
from serve_app.lab.workloads import Trace

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class LengthMix:
    """Prompt and output lengths, request by request.

    Attributes:
        prompts, outputs: tokens, in arrays of equal length.
        allowed_outputs: output tokens in every token budget; None for the actual output.
    """

    prompts: Counts
    outputs: Counts
    allowed_outputs: int | None = None

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.outputs):
            raise ValueError(
                f"prompts and outputs must have the same number, got {len(self.prompts)} and "
                f"{len(self.outputs)} lengths"
            )

    @classmethod
    def of(cls, trace: Trace, *, output_known: bool = True) -> "LengthMix":
        """Return the lengths of a trace, with at least one output token per request."""
        prompts = np.array([one.prompt_tokens for one in trace.requests], dtype=np.int64)
        outputs = np.array([max(1, one.output_tokens) for one in trace.requests], dtype=np.int64)
        allowed = None if output_known else math.ceil(np.quantile(outputs, QUANTILE))
        return cls(prompts, outputs, allowed)

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def totals(self) -> Counts:
        """Prompt and output tokens together."""
        return self.prompts + self.outputs

    @cached_property
    def budgets(self) -> Counts:
        """Token budgets, by which requests are routed."""
        return self.totals if self.allowed_outputs is None else self.prompts + self.allowed_outputs

    def split(self, b_short_tokens: int) -> tuple["LengthMix", "LengthMix"]:
        """Return the requests with a budget of at most `b_short_tokens`, and the others; may be empty."""
        short = self.budgets <= b_short_tokens
        return self._where(short), self._where(~short)

    def _where(self, chosen: NDArray[np.bool_]) -> "LengthMix":
        return LengthMix(self.prompts[chosen], self.outputs[chosen], self.allowed_outputs)


def erlang_b(servers: int, offered: float) -> float:
    """Return the probability that all servers are busy in a system without a queue.

    Args:
        servers: c, at least 1.
        offered: load in Erlangs, `rate * E[S]`.
    """
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked


def erlang_c(servers: int, offered: float) -> float:
    """Return the probability of waiting, M/M/c; 1 if the load exceeds the servers' capacity."""
    blocked = erlang_b(servers, offered)
    utilisation = offered / servers
    if utilisation >= 1:
        return 1.0
    return blocked / (1 - utilisation * (1 - blocked))


def p99_wait_s(*, servers: int, rate_per_s: float, mean_service_s: float, service_cv2: float) -> float:
    """Return the P99 wait of M/G/c (infinite if overloaded); cv2: squared coefficient of variation."""
    longer = 0.01
    offered = rate_per_s * mean_service_s
    if offered >= servers:
        return math.inf
    waits = erlang_c(servers, offered)
    if waits <= longer:
        return 0.0
    drained_per_s = (servers - offered) / mean_service_s
    return (1 + service_cv2) / 2 * math.log(waits / longer) / drained_per_s


UTILISATION_CAP = 0.85
"""Maximum utilisation that a pool is sized for, as in the papers: waits grow steeply beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """One replica at a constant rate.

    Attributes:
        iteration_s: mean seconds of an iteration.
        sequences: mean number in the batch.
        service_s: mean time of a request in the batch.
        first_token_s: P99 over requests of the time from admission to the batch to the first token.
        tpot_s: P99 over requests of the time per output token.
    """

    rate_per_s: float
    iteration_s: float
    sequences: float
    service_s: float
    first_token_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """Performance of a pool according to the model; times are infinite if it is overloaded.

    Attributes:
        utilisation: rate over capacity.
    """

    replicas: int
    utilisation: float
    p99_ttft_s: float
    p99_tpot_s: float

    def meets(self, slo: Slo) -> bool:
        """Return whether both P99 limits hold below the utilisation cap."""
        return (
            self.utilisation <= UTILISATION_CAP
            and (slo.ttft_s is None or self.p99_ttft_s <= slo.ttft_s)
            and (slo.tpot_s is None or self.p99_tpot_s <= slo.tpot_s)
        )


_Floats = NDArray[np.float64]

# Size of the grid of prompt tokens per iteration.
_BINS = 1_024
_PLACES: _Floats = np.arange(_BINS, dtype=np.float64)
# Longer iterations do not count as an operating point.
_MAX_ITERATION_S = 5.0
# Relative tolerance. Solutions are no finer than the grid.
_TOLERANCE = 1e-4
# Maximum steps towards a solution. One that needs more is at the limit of the engine's capacity.
_MAX_STEPS = 80
# Share of the KV cache that sequences may fill. The rest accounts for rounding to blocks.
_KV_FILL = 0.97


class PoolModel:
    """One kind of replica with one mix of requests.

    Args:
        engine: its limits, with the chunk limit.
        mix: lengths of the requests in this pool.
    """

    def __init__(self, step_time: StepTimeModel, engine: EngineModelSettings, mix: LengthMix) -> None:
        if not len(mix):
            raise ValueError(
                "a pool without requests cannot be modelled: choose another boundary between the pools"
            )
        self._step = step_time
        self.engine = engine
        self.mix = mix
        self._chunk = min(
            engine.long_prefill_token_threshold or engine.max_num_batched_tokens,
            engine.max_num_batched_tokens,
        )
        prompts = mix.prompts.astype(float)
        outputs = mix.outputs.astype(float)
        self._chunks: _Floats = np.ceil(prompts / self._chunk)
        self._iterations: _Floats = self._chunks + outputs - 1
        self._mean_iterations = float(self._iterations.mean())
        self._mean_chunks = float(self._chunks.mean())
        self._prompts, self._outputs = prompts, outputs
        self._mean_prompt = float(prompts.mean())
        # On average a sequence holds half its prompt while prefilling, and half its output while decoding.
        decoding = np.maximum(outputs - 1, 0.0)
        held = self._chunks * prompts / 2 + decoding * (prompts + outputs / 2)
        self._held_tokens = float(held.sum() / self._iterations.sum())
        self._decode_ratio = float(decoding.sum() / self._iterations.sum())
        self._context = float((decoding * (prompts + outputs / 2)).sum() / max(decoding.sum(), 1.0))
        self._per_sequence_s = (
            step_time.decode_per_sequence_s + self._context * step_time.decode_per_context_token_s
        )
        self._pairs_per_token = float((prompts * (prompts + 1) / 2).sum() / prompts.sum())
        self._chunk_sizes, self._chunk_weights = self._chunks_by_size()
        self._chunk_moments = tuple(float(self._chunk_weights @ self._chunk_sizes**power) for power in (1, 2))

    @cached_property
    def slots(self) -> int:
        """Sequences in one replica's batch: `max_num_seqs`, or fewer if the KV cache is smaller."""
        by_memory = int(_KV_FILL * self.engine.kv_tokens / self._held_tokens)
        return max(1, min(self.engine.max_num_seqs, by_memory))

    @cached_property
    def capacity_per_s(self) -> float:
        """Requests per second at which one replica's batch is full, or its iterations grow without bound."""
        low, high = 0.0, 1.0
        while self._batch_at(high) <= self.slots:
            low, high = high, 2 * high
        for _ in range(18):
            middle = (low + high) / 2
            low, high = (middle, high) if self._batch_at(middle) <= self.slots else (low, middle)
        return low

    def at_rate(self, rate_per_s: float) -> OperatingPoint | None:
        """Return the operating point of one replica, or None if it is overloaded."""
        solved = self._iteration_s(rate_per_s)
        if solved is None:
            return None
        prompt_tokens, probability = self._tokens_per_iteration(rate_per_s * solved)
        sequences = rate_per_s * self._mean_iterations * solved
        times = self._step_s(prompt_tokens, sequences)
        mean_s = float(probability @ times)
        deviation_s = math.sqrt(max(0.0, float(probability @ times**2) - mean_s**2))
        return OperatingPoint(
            rate_per_s=rate_per_s,
            iteration_s=solved,
            sequences=sequences,
            service_s=self._mean_iterations * solved,
            first_token_s=self._p99_first_token_s(prompt_tokens, probability, sequences, solved),
            tpot_s=self._p99_tpot_s(solved, deviation_s, sequences),
        )

    def performance(self, rate_per_s: float, replicas: int) -> Performance:
        """Return the pool's latencies if `replicas` share that rate."""
        point = self.at_rate(rate_per_s / replicas)
        utilisation = rate_per_s / replicas / self.capacity_per_s if self.capacity_per_s else math.inf
        if point is None or utilisation >= 1:
            return Performance(
                replicas=replicas,
                utilisation=utilisation,
                p99_ttft_s=math.inf,
                p99_tpot_s=math.inf,
            )
        wait_s = p99_wait_s(
            servers=replicas * self.slots,
            rate_per_s=rate_per_s,
            mean_service_s=point.service_s,
            service_cv2=float(self._iterations.var() / self._mean_iterations**2),
        )
        return Performance(
            replicas=replicas,
            utilisation=utilisation,
            p99_ttft_s=wait_s + point.first_token_s,
            p99_tpot_s=point.tpot_s,
        )

    def mean_iterations(self, mix: LengthMix) -> float:
        """Return the mean number of iterations that requests of a mix spend in this engine's batch."""
        return float(np.mean(np.ceil(mix.prompts / self._chunk) + mix.outputs - 1))

    # -- the operating point ------------------------------------------------------------------------------

    def _batch_at(self, rate_per_s: float) -> float:
        solved = self._iteration_s(rate_per_s)
        return math.inf if solved is None else rate_per_s * self._mean_iterations * solved

    def _iteration_s(self, rate_per_s: float) -> float | None:
        """Return the smallest t with t = E[step | t], approached from below; None if there is none.

        The excess of a step over t is positive at 0 and falls towards the solution, mostly along a convex
        curve. There a chord through two points below the solution ends below it. The experts of a mixture
        bend the curve the other way at first: where the excess rises, t grows by all of it, which does not
        pass the solution either. A chord that has passed it is halved.
        """
        before, seconds = 0.0, self._expected_step_s(rate_per_s, 0.0)
        excess_before = seconds
        for _ in range(_MAX_STEPS):
            excess = self._expected_step_s(rate_per_s, seconds) - seconds
            if excess < -_TOLERANCE * seconds:
                seconds = (before + seconds) / 2
                continue
            if excess < _TOLERANCE * seconds:
                return seconds
            slope = (excess - excess_before) / (seconds - before)
            before, excess_before = seconds, excess
            seconds += excess if slope > -1e-3 else excess / -slope
            if seconds > _MAX_ITERATION_S:
                return None
        return None

    def _expected_step_s(self, rate_per_s: float, seconds: float) -> float:
        """Return the mean step if steps last `seconds`."""
        if rate_per_s * seconds * self._mean_prompt > self.engine.max_num_batched_tokens:
            return math.inf
        sequences = rate_per_s * self._mean_iterations * seconds
        prompt_tokens, probability = self._tokens_per_iteration(rate_per_s * seconds)
        return float(probability @ self._step_s(prompt_tokens, sequences))

    def _step_s(self, prompt_tokens: _Floats, sequences: float) -> _Floats:
        """Compute `StepTimeModel.step_s` for iterations with these prompt tokens and the mean batch."""
        step = self._step
        decoding = sequences * self._decode_ratio
        base = np.where(prompt_tokens > 0, max(step.decode_base_s, step.prefill_base_s), step.decode_base_s)
        if step.expert_read_s:
            routed = 1 - (1 - step.expert_share) ** (prompt_tokens + decoding)
            base = base + step.expert_read_s * routed
        computed = prompt_tokens * step.prefill_per_token_s + decoding * step.decode_compute_s
        pairs = prompt_tokens * self._pairs_per_token * step.prefill_per_pair_s
        times: _Floats = np.maximum(base, computed) + pairs + decoding * self._per_sequence_s
        return times

    def _tokens_per_iteration(self, requests: float) -> tuple[_Floats, _Floats]:
        """Return values and probabilities of prompt tokens per iteration, for a mean of `requests` arrivals.

        The characteristic function of a compound Poisson sum is exp(m (phi - 1)), with m the mean number of
        chunks and phi that of one chunk's size.
        """
        chunks = requests * self._mean_chunks
        weights, (mean_size, mean_square) = self._chunk_weights, self._chunk_moments
        mean, spread = chunks * mean_size, math.sqrt(chunks * mean_square)
        width = (mean + 8 * spread + 2 * self._chunk) / _BINS
        # A size between two bins is divided between them, so that the mean is the same on every grid.
        places = self._chunk_sizes / width
        below = places.astype(np.int64)
        upper = weights * (places - below)
        one = np.bincount(below, weights=weights - upper, minlength=_BINS)
        one += np.bincount(below + 1, weights=upper, minlength=_BINS)
        several = np.fft.irfft(np.exp(chunks * (np.fft.rfft(one) - 1)), _BINS)
        probability: _Floats = np.clip(several, 0.0, None)
        return _PLACES * width, probability / float(probability.sum())

    def _chunks_by_size(self) -> tuple[_Floats, _Floats]:
        """Return the chunk sizes, and the share of each among all chunks."""
        last = self._prompts - (self._chunks - 1) * self._chunk
        sizes, counts = np.unique(last, return_counts=True)
        whole = float((self._chunks - 1).sum())
        weights: _Floats = np.append(counts.astype(float), whole)
        return np.append(sizes, float(self._chunk)), weights / weights.sum()

    # -- latencies ----------------------------------------------------------------------------------------

    def _p99_first_token_s(
        self, prompt_tokens: _Floats, probability: _Floats, sequences: float, iteration_s: float
    ) -> float:
        """Return half an iteration at arrival plus one per chunk, each lengthened by the chunk."""
        sizes = np.linspace(1.0, self._chunk, 17)
        with_chunk = [float(probability @ self._step_s(prompt_tokens + size, sequences)) for size in sizes]
        own = np.interp(self._prompts / self._chunks, sizes, with_chunk)
        return iteration_s / 2 + float(np.quantile(self._chunks * own, 0.99))

    def _p99_tpot_s(self, mean_s: float, deviation_s: float, sequences: float) -> float:
        """Return the P99 of a mixture of normal distributions. With more iterations their mean varies less.

        The batch size is Poisson, and assumed to be constant during a request.
        """
        batch_variance = sequences * self._decode_ratio * self._per_sequence_s**2
        steps, counts = np.unique(self._outputs[self._outputs > 1] - 1, return_counts=True)
        if not len(steps):
            return mean_s
        spread = np.sqrt(deviation_s**2 / steps + batch_variance)
        weights = counts / counts.sum()
        low, high = mean_s, mean_s + 10 * float(spread.max())
        for _ in range(50):
            middle = (low + high) / 2
            below = float(weights @ _normal_cdf((middle - mean_s) / np.maximum(spread, 1e-12)))
            low, high = (middle, high) if below < 0.99 else (low, middle)
        return high


def _normal_cdf(values: _Floats) -> _Floats:
    return np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in values])


_DATA = resources.files("serve_app.lab.planning") / "gpu_costs.yaml"


@settings
class GpuCost:
    """Price of one kind of GPU.

    Attributes:
        usd_per_hour: price of one GPU.
        source: of the price, such as a list price, a contract or an estimate.
        date: year and month of the price.
    """

    usd_per_hour: Annotated[float, POSITIVE]
    source: str
    date: str


_ADAPTER = TypeAdapter(dict[str, GpuCost])


class CostTable:
    """Prices of engines by the GPUs that they need."""

    def __init__(self, costs: Mapping[str, GpuCost]) -> None:
        self.costs = dict(costs)

    @classmethod
    def load(cls, path: Path | None = None) -> "CostTable":
        """Load a table from a file, or the built-in one.

        Raises:
            SettingsError: the file does not contain such a table.
        """
        try:
            text = _DATA.read_text("utf-8") if path is None else path.read_text("utf-8")
            return cls(_ADAPTER.validate_python(yaml.safe_load(text)))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise SettingsError(f"{path} is not a table of GPU costs: {error}") from error

    def gpu_of(self, profile: str) -> str:
        """Return the GPU of a profile, from its name `model-gpu-tpN`.

        Raises:
            SettingsError: the table has no GPU of that name.
        """
        name = Path(profile).name.removesuffix(".yaml").removesuffix(".yml")
        for part in reversed(name.split("-")):
            if part in self.costs:
                return part
        raise SettingsError(
            f"no cost for the GPU of profile {profile!r}: name it model-gpu-tpN with one of the GPUs "
            f"{', '.join(sorted(self.costs))}, or add its GPU in a cost table (--costs FILE)"
        )

    def usd_per_hour(self, profile: str) -> float:
        """Return the price of one engine of a profile, with all its GPUs."""
        return load_profile(profile).gpus * self.costs[self.gpu_of(profile)].usd_per_hour


WORST_CASE = "worst-case-homogeneous"
PAGED = "paged-homogeneous"
POOLS = "pools"

_PAPER_CONTEXT = 65_536

ReplicaCounts = Mapping[str, int]
"""Replicas by pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """The engines of one pool.

    Attributes:
        profile: name or path of their profile.
        engine: changes of their settings.
    """

    profile: str
    engine: EngineChanges = field(default_factory=EngineChanges)

    def __str__(self) -> str:
        changes = {name: value for name, value in asdict(self.engine).items() if value is not None}
        return " ".join([self.profile, *(f"{name}={value}" for name, value in changes.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A kind of fleet, without numbers of replicas.

    Attributes:
        name: one of the three above.
        pools: one pool, or `short` and `long` in this order.
        b_short_tokens: largest token budget of the short pool.
    """

    name: str
    pools: Mapping[str, PoolPlan]
    b_short_tokens: int = 8_192

    def settings(self, counts: ReplicaCounts) -> FleetSettings:
        """Return the fleet with these replicas, for the simulator."""
        first = next(iter(self.pools.values()))
        return FleetSettings(
            profile=first.profile,
            replicas={pool: counts[pool] for pool in self.pools},
            b_short_tokens=self.b_short_tokens,
            by_pool={
                pool: PoolChanges(profile=plan.profile, engine=plan.engine)
                for pool, plan in self.pools.items()
            },
        )

    def usd_per_hour(self, counts: ReplicaCounts, costs: CostTable) -> float:
        """Return the price of all replicas."""
        return sum(counts[pool] * costs.usd_per_hour(plan.profile) for pool, plan in self.pools.items())

    def gpus(self, counts: ReplicaCounts) -> int:
        """Return the GPUs of all replicas."""
        return sum(counts[pool] * load_profile(plan.profile).gpus for pool, plan in self.pools.items())

    def models(self, mix: LengthMix) -> dict[str, PoolModel]:
        """Return the queueing model of each pool for its part of the mix, with the policy's chunk limit."""
        parts = dict(zip(self.pools, mix.split(self.b_short_tokens), strict=False))
        if len(self.pools) == 1:
            parts = dict.fromkeys(self.pools, mix)
        plans = self.settings(dict.fromkeys(self.pools, 1)).plans(isolated=True)
        return {plan.pool: PoolModel(plan.step_time, plan.engine, parts[plan.pool]) for plan in plans}

    def as_json(self) -> dict[str, Any]:
        """Return profiles and changes by pool."""
        return {
            "b_short_tokens": self.b_short_tokens if len(self.pools) > 1 else None,
            "pools": {pool: asdict(plan) for pool, plan in self.pools.items()},
        }


def worst_case_slots(profile: str) -> int:
    """Return the sequences that fit into the KV cache at the longest context: the papers' `max_num_seqs`.

    The longest context is the profile's, or the papers' 64K if that is shorter.
    """
    engine = load_profile(profile)
    context = min(engine.max_model_len, _PAPER_CONTEXT)
    return max(1, min(engine.max_num_seqs, engine.kv_tokens // context))


def worst_case_fleet(profile: str, slots: int) -> FleetPlan:
    """Return one pool whose batches hold `slots` sequences."""
    return FleetPlan(
        name=WORST_CASE,
        pools={ONE_POOL: PoolPlan(profile=profile, engine=EngineChanges(max_num_seqs=slots))},
    )


def paged_fleet(pool: PoolPlan) -> FleetPlan:
    """Return one pool with paged KV cache."""
    return FleetPlan(name=PAGED, pools={ONE_POOL: pool})


def split_fleet(short: PoolPlan, long: PoolPlan, b_short_tokens: int) -> FleetPlan:
    """Return a short and a long pool."""
    return FleetPlan(name=POOLS, pools={"short": short, "long": long}, b_short_tokens=b_short_tokens)


# Limits that this many replicas do not meet are not achievable with the engine.
_MAX_REPLICAS = 1_000_000
# A replica below this share of its capacity is practically idle, so more replicas change nothing.
_IDLE = 1e-3
_NO_LIMITS = Slo(ttft_s=None, tpot_s=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedPool:
    """A pool, sized by the model.

    Attributes:
        within_limits: False if no number of replicas meets the limits in this pool alone. It then has the
            smallest number below the utilisation cap. The limits are those of all requests together, so a
            fleet with such a pool may still meet them.
    """

    performance: Performance
    within_limits: bool

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.performance.replicas


def sized_pool(model: PoolModel, rate_per_s: float, slo: Slo) -> SizedPool:
    """Return the smallest pool within the limits, or else the smallest below the utilisation cap."""
    performance = smallest_pool(model, rate_per_s, slo)
    if performance is not None:
        return SizedPool(performance=performance, within_limits=True)
    unlimited = smallest_pool(model, rate_per_s, _NO_LIMITS)
    assert unlimited is not None, "every engine has some capacity"
    return SizedPool(performance=unlimited, within_limits=False)


def smallest_pool(model: PoolModel, rate_per_s: float, slo: Slo) -> Performance | None:
    """Return the smallest pool that meets the P99 limits, according to the model.

    More replicas never raise a latency, so the number is found by doubling and bisection.

    Args:
        rate_per_s: rate of the requests in this pool.
        slo: P99 limits; a limit that is None is ignored.

    Returns:
        None if no number meets them, because even a nearly idle engine is too slow.
    """

    def meets(replicas: int) -> bool:
        return model.performance(rate_per_s, replicas).meets(slo)

    # Fewer replicas exceed the utilisation cap.
    low = max(0, math.ceil(rate_per_s / (UTILISATION_CAP * model.capacity_per_s) - 1e-9) - 1)
    high = low + 1
    while not meets(high):
        if high > _MAX_REPLICAS or rate_per_s / high < _IDLE * model.capacity_per_s:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return model.performance(rate_per_s, high)


def size(plan: FleetPlan, mix: LengthMix, rate_per_s: float, slo: Slo) -> dict[str, SizedPool]:
    """Size every pool of a fleet for its share of the requests."""
    return {
        pool: sized_pool(model, rate_per_s * len(model.mix) / len(mix), slo)
        for pool, model in plan.models(mix).items()
    }
