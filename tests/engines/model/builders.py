"""Builders for engine model tests."""

from collections.abc import Iterable, Sequence

from serve_app.engines.model import EngineModel, EngineModelSettings, EngineSequence, StepOutcome
from serve_app.engines.model.step_time import StepTimeModel
from serve_app.lab.simulation.vllm_scheduler import VllmModel

# Round numbers for mental arithmetic: a step with D decoding sequences and P prompt tokens takes 10 ms (or 2
# ms without decoding) + D ms + P * 0.1 ms.
STEP_TIME = StepTimeModel(
    decode_base_s=0.010, decode_per_sequence_s=0.001, prefill_base_s=0.002, prefill_per_token_s=0.0001
)


def settings(**values: object) -> EngineModelSettings:
    """Return settings with a small context and plenty of blocks."""
    defaults: dict[str, object] = {"max_model_len": 4_096, "kv_tokens": 65_536}
    return EngineModelSettings(**(defaults | values))  # type: ignore[arg-type]


def model(**values: object) -> EngineModel:
    """Return an engine model with round step times."""
    return EngineModel(settings(**values), STEP_TIME)


def sequence(
    name: str = "s",
    prompt: int = 32,
    output: int = 4,
    *,
    at: float = 0.0,
    priority: int = 0,
    hashes: Sequence[int] = (),
) -> EngineSequence:
    return EngineSequence(
        sequence_id=name,
        prompt_tokens=prompt,
        target_tokens=output,
        arrived_at=at,
        priority=priority,
        block_hashes=hashes,
    )


def step(engine: EngineModel | VllmModel, now: float | None = None) -> StepOutcome:
    """Run one whole step."""
    assert engine.begin_step(0.0 if now is None else now) is not None
    return engine.end_step()


def run_until_idle(
    engine: EngineModel | VllmModel,
    arrivals: Iterable[EngineSequence] = (),
    *,
    max_steps: int = 1,
    most_outcomes: int | None = None,
) -> list[StepOutcome]:
    """Feed arrivals in order of time and step until the engine is idle or there are so many outcomes."""
    pending = list(arrivals)[::-1]
    outcomes: list[StepOutcome] = []
    now = 0.0
    while True:
        ends_at = (
            engine.ends_at if engine.ends_at is not None else engine.begin_step(now, max_steps=max_steps)
        )
        if pending and (ends_at is None or pending[-1].arrived_at <= ends_at):
            now = pending[-1].arrived_at
            engine.add(pending.pop(), now)
        elif ends_at is None:
            return outcomes
        else:
            now = ends_at
            outcomes.append(engine.end_step())
            if len(outcomes) == most_outcomes:
                return outcomes


def names(sequences: Iterable[EngineSequence]) -> list[str]:
    """Return the IDs of the sequences."""
    return [each.sequence_id for each in sequences]


def held_blocks(engine: EngineModel) -> int:
    """Count the blocks that sequences hold, by sequence rather than through the pool."""
    batcher = engine._batcher
    block_size = engine.settings.block_size
    private = 0
    named: set[object] = set()
    for each in batcher.running:
        computed = each.computed_tokens
        if each in batcher.decoding:
            computed = batcher.decoding.computed_tokens(each)
        private += -(-computed // block_size) - len(each.named_blocks)
        named.update(each.named_blocks)
    return private + len(named)
