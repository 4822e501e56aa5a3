"""Streams with a target for the time per output token, beside prompts of 64,000 tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from serve_app.core.metrics.summary import Distribution
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import (
    ONE_POOL,
    Disclosure,
    EngineChanges,
    FleetSettings,
    requests_of,
    scheduler_settings,
)
from serve_app.lab.simulation.simulation import SimulatedRequest, Simulation
from serve_app.lab.workloads import Trace, TraceRequest, stream
from serve_app.request import LatencyTarget

STATED, NOT_STATED = "targets", "without targets"


@settings
class PaceSettings:
    """The case.

    Attributes:
        chunks: most tokens of one prompt in an iteration, one case each.
        share: of the short requests that state the target.
    """

    chunks: tuple[int, ...] = (2_048, 8_192)
    tpot_s: float = 0.03
    share: float = 0.3
    short_per_s: float = 12.0
    long_per_s: float = 0.12
    long_tokens: int = 64_000
    replicas: int = 4
    requests: int = 3_000


@dataclass(frozen=True, slots=True)
class PaceRun:
    """One run."""

    settings: PaceSettings
    chunk: int
    variant: str
    seed: int

    def play(self) -> Mapping[str, float | None]:
        """Run all requests, and return the figures of those with a target and of the others."""
        case = self.settings
        engine = EngineChanges(
            max_model_len=131_072,
            long_prefill_token_threshold=self.chunk,
            max_num_batched_tokens=max(8_192, self.chunk),
        )
        fleet = FleetSettings(
            profile="llama31-8b-h100-tp1", replicas={ONE_POOL: case.replicas}, engine=engine
        )
        plans = fleet.plans()
        rng = stream(self.seed, "targets pace")
        requests = list(requests_of(self._trace(rng), Disclosure(), plans[0].engine.block_size))
        short = [each for each in requests if each.prompt_tokens < case.long_tokens]
        chosen = {each.request.request_id for each in short if rng.random() < case.share}
        if self.variant == STATED:
            target = LatencyTarget(tpot_s=case.tpot_s)
            requests = [
                with_target(each, target) if each.request.request_id in chosen else each for each in requests
            ]
        simulation = Simulation(scheduler_settings("ewsjf", fleet.routing, {}), plans)
        records = simulation.run(requests)[len(requests) // 10 :]
        paces = [one.tpot_s for one in records if one.request_id in chosen and one.tpot_s is not None]
        short_ones = [one for one in records if one.prompt_tokens < case.long_tokens]
        others = [one for one in short_ones if one.request_id not in chosen]
        long = [one for one in records if one.prompt_tokens >= case.long_tokens]
        pace = Distribution.of(paces)
        return {
            "met": sum(each <= case.tpot_s for each in paces) / len(paces),
            "tpot_mean_s": pace.mean,
            "tpot_p99_s": pace.p99,
            "others_tpot_s": Distribution.of(one.tpot_s for one in others if one.tpot_s is not None).mean,
            "others_ttft_p99_s": Distribution.of(one.ttft_s for one in others if one.ttft_s is not None).p99,
            "long_ttft_s": Distribution.of(one.ttft_s for one in long if one.ttft_s is not None).mean,
        }

    def _trace(self, rng: np.random.Generator) -> Trace:
        case = self.settings
        rate_per_s = case.short_per_s + case.long_per_s
        requests = []
        for at in np.cumsum(rng.exponential(1 / rate_per_s, case.requests)):
            is_long = rng.random() < case.long_per_s / rate_per_s
            requests.append(
                TraceRequest(
                    arrival_s=float(at),
                    prompt_tokens=case.long_tokens if is_long else int(rng.integers(50, 400)),
                    output_tokens=int(rng.integers(100, 400)),
                )
            )
        return Trace(name="pace", source="generated", requests=tuple(requests))


def with_target(simulated: SimulatedRequest, target: LatencyTarget) -> SimulatedRequest:
    """Return the request with a target."""
    request = simulated.request
    submission = msgspec.structs.replace(request.submission, target=target)
    return replace(simulated, request=replace(request, submission=submission))
