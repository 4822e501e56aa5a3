"""Plays one trace on the engine model and on vLLM's scheduler, and compares the steps and the requests."""

from dataclasses import dataclass, replace

from experiments.engine_model.traces import EngineTrace
from serve_app.engines.model import EngineSequence, StepOutcome
from serve_app.lab.simulation.simulation import EngineKind

Step = tuple[int, int, tuple[str, ...]]
"""Prefill tokens, decoding sequences, and the IDs of preempted sequences."""


@dataclass(frozen=True, slots=True)
class Played:
    """A trace that an engine has played."""

    steps: list[Step]
    sequences: list[EngineSequence]
    hits_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A trace on both engines. Pairs have the model's value first, then vLLM's.

    Attributes:
        first_difference: the trace and the first step that differs; empty if none does.
        ttft_s, tpot_s: of each request that both have served.
    """

    steps: int
    identical_steps: int
    first_difference: str
    hits_tokens: tuple[int, int]
    preemptions: tuple[int, int]
    ttft_s: list[tuple[float, float]]
    tpot_s: list[tuple[float, float]]


def compare(trace: EngineTrace, kind: EngineKind) -> Comparison:
    """Play a trace on the engine model and on vLLM's scheduler."""
    ours, real = play(trace, EngineKind.MODEL), play(trace, kind)
    both = list(zip(ours.sequences, real.sequences, strict=True))
    return Comparison(
        steps=max(len(ours.steps), len(real.steps)),
        identical_steps=sum(a == b for a, b in zip(ours.steps, real.steps, strict=False)),
        first_difference=_first_difference(trace, ours.steps, real.steps),
        hits_tokens=(ours.hits_tokens, real.hits_tokens),
        preemptions=(ours.preemptions, real.preemptions),
        ttft_s=[(a, b) for one, other in both if (a := _ttft_s(one)) and (b := _ttft_s(other))],
        tpot_s=[(a, b) for one, other in both if (a := _tpot_s(one)) and (b := _tpot_s(other))],
    )


def play(trace: EngineTrace, kind: EngineKind) -> Played:
    """Play a trace to its end, step by step."""
    engine = kind.create(trace.settings, trace.step_time)
    sequences = [replace(each, named_blocks=[], block_names=[]) for each in trace.sequences]
    arrivals = ((each.arrived_at, 0, place) for place, each in enumerate(sequences))
    events = sorted([*arrivals, *((at, 1, place) for at, place in trace.aborts)], reverse=True)
    steps: list[Step] = []
    now = 0.0
    while True:
        ends_at = engine.ends_at if engine.ends_at is not None else engine.begin_step(now)
        if events and (ends_at is None or events[-1][0] <= ends_at):
            now, is_abort, place = events.pop()
            if is_abort:
                engine.abort(sequences[place], now)
            else:
                engine.add(sequences[place], now)
        elif ends_at is None:
            break
        else:
            now = ends_at
            steps.append(_step(engine.end_step()))
    counts = engine.snapshot(now)
    return Played(steps, sequences, counts.prefix_hits_tokens, counts.preemptions)


def _step(outcome: StepOutcome) -> Step:
    preempted = tuple(sorted(each.sequence_id for each in outcome.preempted))
    return outcome.prefill_tokens, outcome.sequences, preempted


def _first_difference(trace: EngineTrace, ours: list[Step], real: list[Step]) -> str:
    # Aligned at the end with a step that never occurs, so that a longer trace differs there.
    for number, (mine, theirs) in enumerate(zip([*ours, None], [*real, None], strict=False)):
        if mine != theirs:
            return (
                f"trace {trace.name!r} differs from step {number}: the model computes {mine}, vLLM {theirs} "
                "(prefill tokens, decoding sequences, preempted)"
            )
    return ""


def _ttft_s(sequence: EngineSequence) -> float | None:
    first = sequence.first_token_at
    return None if first is None else first - sequence.arrived_at


def _tpot_s(sequence: EngineSequence) -> float | None:
    first, last, outputs = sequence.first_token_at, sequence.finished_at, sequence.target_tokens
    return None if first is None or last is None or outputs < 2 else (last - first) / (outputs - 1)
