"""Traces of one engine, by class: requests, aborts and the engine's limits.

Every class has one thing that makes scheduling harder. All values are random, from the number of the trace.
Those of `RECORDED` are successive parts of a published trace, at random rates, or of its generated lengths
without the file.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from serve_app.engines.model import EngineModelSettings, EngineSequence, SchedulingPolicy
from serve_app.engines.model.roofline import load_profile
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.simulation.run import choose_trace, fit
from serve_app.lab.workloads import TraceChoice, scale_to_rate

PROFILE = "llama31-8b-rtx4090-tp1"
RECORDED = ("azure-conv", "azure-code")
_MAX_MODEL_LEN = 4_096
_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceClass:
    """Ranges of the traces of one class; each trace draws from them.

    Attributes:
        limits: fixed settings of the engine.
        seqs, budget: limits of the batch: `max_num_seqs` and `max_num_batched_tokens`.
        kv_tokens: capacity of the KV cache.
        thresholds: `long_prefill_token_threshold`.
        shared: share of requests that continue an earlier prompt, or repeat it.
        outputs: maximum number of sequences per prompt (`n`).
        priorities: number of priority values.
        aborted: share of requests that are aborted.
    """

    limits: Mapping[str, Any] = field(default_factory=dict)
    seqs: tuple[int, int] = (64, 256)
    budget: tuple[int, int] = (1_024, 4_096)
    kv_tokens: tuple[int, int] = (60_000, 120_000)
    thresholds: tuple[int, ...] = (0,)
    shared: float = 0.0
    outputs: int = 1
    priorities: int = 1
    aborted: float = 0.0


_PRESSURE = (4_352, 9_000)
CLASSES: Mapping[str, TraceClass] = {
    "roomy": TraceClass(),
    "small batches": TraceClass(seqs=(4, 12), budget=(64, 512)),
    "long prefills": TraceClass(thresholds=(64, 128, 512), budget=(256, 2_048), seqs=(8, 64)),
    "prefixes": TraceClass(shared=0.8),
    "prefixes, KV pressure": TraceClass(shared=0.8, kv_tokens=_PRESSURE),
    "KV pressure": TraceClass(kv_tokens=_PRESSURE),
    "KV pressure, first chunk": TraceClass(
        kv_tokens=_PRESSURE, limits={"full_prompt_must_fit": False}, shared=0.3
    ),
    "priorities": TraceClass(
        limits={"scheduling_policy": SchedulingPolicy.PRIORITY}, priorities=3, kv_tokens=_PRESSURE, shared=0.3
    ),
    "aborts": TraceClass(aborted=0.3, kv_tokens=_PRESSURE, shared=0.5),
    "several outputs": TraceClass(outputs=4, kv_tokens=(4_352, 20_000), shared=0.3),
}


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """Requests of one engine, by arrival.

    Attributes:
        aborts: times of aborts, with the number of the sequence.
    """

    name: str
    settings: EngineModelSettings
    step_time: StepTimeModel
    sequences: tuple[EngineSequence, ...]
    aborts: tuple[tuple[float, int], ...]


def engine_trace(name: str, number: int, requests: int) -> EngineTrace:
    """Return one trace of a class."""
    if name in RECORDED:
        return _recorded(name, number, requests)
    kind, rng = CLASSES[name], _rng(name, number)
    seqs = rng.randint(*kind.seqs)
    settings = EngineModelSettings(
        max_model_len=_MAX_MODEL_LEN,
        kv_tokens=rng.randint(*kind.kv_tokens),
        block_size=_BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=max(seqs, rng.randint(*kind.budget)),
        long_prefill_token_threshold=rng.choice(kind.thresholds),
        **kind.limits,
    )
    step_time = load_profile(PROFILE).step_time
    made = _Requests(kind, rng, mean_gap_s=rng.uniform(0.08, 0.8))
    sequences: list[EngineSequence] = []
    while len(sequences) < requests:
        sequences += made.request()
    aborts = sorted(
        (sequence.arrived_at + rng.expovariate(0.3), place)
        for place, sequence in enumerate(sequences)
        if rng.random() < kind.aborted
    )
    return EngineTrace(f"{name} {number}", settings, step_time, tuple(sequences), tuple(aborts))


def _recorded(name: str, number: int, requests: int) -> EngineTrace:
    rng, profile = _rng(name, number), load_profile(PROFILE)
    trace = fit(choose_trace(TraceChoice(name=name), 0), profile.max_model_len).trace
    begin = number * requests % (len(trace.requests) - requests + 1)
    part = replace(trace, requests=trace.requests[begin : begin + requests])
    part = scale_to_rate(part, rng.uniform(1.0, 6.0))
    first_s = part.requests[0].arrival_s
    sequences = tuple(
        EngineSequence(str(place), one.prompt_tokens, one.output_tokens, one.arrival_s - first_s)
        for place, one in enumerate(part.requests)
    )
    return EngineTrace(f"{name} {number}", profile.model_settings(), profile.step_time, sequences, ())


def _rng(name: str, number: int) -> random.Random:
    return random.Random(f"{name} {number}")  # noqa: S311 - a simulation, no secret


class _Requests:
    """Poisson arrivals in bursts and pauses, of short and long prompts."""

    def __init__(self, kind: TraceClass, rng: random.Random, mean_gap_s: float) -> None:
        self._kind, self._rng, self._mean_gap_s = kind, rng, mean_gap_s
        self._now = 0.0
        self._fresh, self._ids = count(1), count()
        # Hashes of earlier prompts with their answers.
        self._earlier: list[list[int]] = []

    def request(self) -> list[EngineSequence]:
        """Return the sequences of the next request: one, or several of one prompt."""
        rng, kind = self._rng, self._kind
        self._now += rng.expovariate(1 / self._mean_gap_s) if rng.random() < 0.7 else 0.001 * rng.random()
        prompt = round(min(_MAX_MODEL_LEN // 2, max(1, rng.lognormvariate(5.5, 1.2))))
        prefix: list[int] = []
        if self._earlier and rng.random() < kind.shared:
            prefix = rng.choice(self._earlier[-30:])
            # A quarter repeats whole blocks, of which the last one is computed again.
            own = 0 if rng.random() < 0.25 else rng.randint(1, 200)
            prefix = prefix[: _MAX_MODEL_LEN // 2 // _BLOCK]
            prompt = max(1, len(prefix) * _BLOCK + own)
        priority = rng.randrange(kind.priorities)
        outputs = rng.randint(1, kind.outputs)
        shared = prefix + [next(self._fresh) for _ in range(prompt // _BLOCK - len(prefix))]
        made = []
        for _ in range(outputs):
            answer = round(min(1_000, max(1, rng.lognormvariate(4.3, 1.0))))
            blocks = shared + [next(self._fresh) for _ in range((prompt + answer) // _BLOCK - len(shared))]
            hashes = blocks if kind.shared else shared if kind.outputs > 1 else []
            made.append(
                EngineSequence(str(next(self._ids)), prompt, answer, self._now, priority, tuple(hashes))
            )
        if kind.shared:
            self._earlier.append(blocks)
        return made
