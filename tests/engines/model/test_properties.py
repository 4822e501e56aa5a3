"""Engine model invariants, and equality with a plain implementation of the rules."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from serve_app.engines.model import (
    EngineModel,
    EngineModelSettings,
    EngineSequence,
    SchedulingPolicy,
    SequenceState,
)
from tests.engines.model.builders import STEP_TIME, held_blocks, names, run_until_idle
from tests.engines.model.reference import PlainEngine, PlainSequence

MAX_MODEL_LEN = 96


@dataclass(frozen=True)
class Arrival:
    prompt: int
    output: int
    gap_s: float
    priority: int
    prefix: int
    aborted_after_steps: int | None


engines = st.builds(
    lambda blocks, seqs, budget, threshold, policy, caching, full: EngineModelSettings(
        max_model_len=MAX_MODEL_LEN,
        kv_tokens=MAX_MODEL_LEN + 4 * blocks,
        block_size=4,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + budget,
        long_prefill_token_threshold=threshold,
        scheduling_policy=policy,
        prefix_caching=caching,
        full_prompt_must_fit=full,
    ),
    blocks=st.integers(0, 30),
    seqs=st.integers(1, 8),
    budget=st.integers(0, 40),
    threshold=st.sampled_from([0, 1, 5, 17]),
    policy=st.sampled_from(SchedulingPolicy),
    caching=st.booleans(),
    full=st.booleans(),
)
arrivals = st.lists(
    st.builds(
        Arrival,
        prompt=st.integers(1, 64),
        output=st.integers(0, 32),
        # Irregular gaps, so that no arrival coincides with the end of a step, where rounding would decide.
        gap_s=st.sampled_from([0.0, 0.0, 0.0031415927, 0.0207728134, 0.1057192837]),
        priority=st.integers(-1, 1),
        prefix=st.integers(0, 3),
        aborted_after_steps=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    ),
    min_size=1,
    max_size=14,
)
# Under priorities, two sequences that arrived together may preempt each other for ever if only one of them
# fits, by the rule that vLLM has. Other runs end long before.
MOST_STEPS = 5_000
searching = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def sequences_of(items: list[Arrival]) -> list[EngineSequence]:
    made: list[EngineSequence] = []
    now = 0.0
    for index, item in enumerate(items):
        now += item.gap_s
        # Prompts with the same prefix number share half of their blocks. Those with 3 share all blocks and
        # their answers, like turns of one conversation. Prefix 0 shares nothing. Only answers of prefix 1
        # have no hashes.
        blocks = item.prompt // 4 if item.prefix == 1 else (item.prompt + item.output) // 4
        common = (0, item.prompt // 8, item.prompt // 8, blocks)[item.prefix]
        shared = [item.prefix * 1_000 + block for block in range(common)]
        hashes = [*shared, *(10_000 * (index + 1) + block for block in range(len(shared), blocks))]
        made.append(
            EngineSequence(
                str(index), item.prompt, item.output, now, priority=item.priority, block_hashes=hashes
            )
        )
    return made


def drive(
    engine: EngineModel,
    items: list[Arrival],
    after_begin: Callable[[], None],
) -> list[EngineSequence]:
    """Run to the end with the given aborts; `after_begin` checks the engine during steps."""
    pending = sequences_of(items)
    everything = list(pending)
    deadlines = {each: item.aborted_after_steps for each, item in zip(pending, items, strict=True)}
    steps_seen = dict.fromkeys(pending, 0)
    now, steps = 0.0, 0
    while True:
        ends_at = engine.ends_at if engine.ends_at is not None else engine.begin_step(now)
        if pending and (ends_at is None or pending[0].arrived_at <= ends_at):
            now = pending[0].arrived_at
            engine.add(pending.pop(0), now)
            continue
        if ends_at is None:
            return everything
        after_begin()
        for each, deadline in deadlines.items():
            if each.state is not SequenceState.NEW:
                steps_seen[each] += 1
                if deadline is not None and steps_seen[each] > deadline:
                    engine.abort(each, now)
        after_begin()
        now, steps = ends_at, steps + 1
        assume(steps < MOST_STEPS)
        outcome = engine.end_step()
        assert outcome.prefill_tokens + outcome.sequences <= engine.settings.max_num_batched_tokens
        assert all(each.finished_at == now for each in outcome.finished)


@searching
@given(engines, arrivals)
def test_blocks_are_conserved_and_sequences_end_exactly_once(
    limits: EngineModelSettings, items: list[Arrival]
) -> None:
    engine = EngineModel(limits, STEP_TIME)

    def blocks_are_conserved() -> None:
        found = engine.snapshot(engine.ends_at or 0.0)
        assert found.kv_usage_ratio == pytest.approx(held_blocks(engine) / limits.kv_blocks)
        assert found.running <= limits.max_num_seqs

    for each, item in zip(drive(engine, items, blocks_are_conserved), items, strict=True):
        if each.state is SequenceState.FINISHED:
            assert each.output_tokens == item.output
            assert each.finished_at is not None
            assert each.scheduled_at is not None
            assert each.arrived_at <= each.scheduled_at < each.finished_at
            # An embedding has no first token.
            assert (each.first_token_at is not None) is (item.output > 0)
        else:
            assert each.state is SequenceState.ABORTED
            assert item.aborted_after_steps is not None
    assert engine.snapshot(0.0).kv_usage_ratio == 0.0
    assert not engine.has_work


@searching
@given(engines, arrivals)
def test_runs_of_steps_give_what_single_steps_give(limits: EngineModelSettings, items: list[Arrival]) -> None:
    alone, in_runs = sequences_of(items), sequences_of(items)
    first, second = EngineModel(limits, STEP_TIME), EngineModel(limits, STEP_TIME)
    run_until_idle(first, alone, most_outcomes=MOST_STEPS)
    assume(not first.has_work)
    run_until_idle(second, in_runs, max_steps=1_000)
    assert asdict(first.snapshot(1e9)) == pytest.approx(asdict(second.snapshot(1e9)))
    for one, other in zip(alone, in_runs, strict=True):
        assert one.first_token_at == pytest.approx(other.first_token_at, abs=1e-9)
        assert one.finished_at == pytest.approx(other.finished_at, abs=1e-9)
        assert one.preemptions == other.preemptions
        assert one.cached_tokens == other.cached_tokens


@searching
@given(engines, arrivals)
def test_every_step_is_the_one_that_the_plain_rules_give(
    limits: EngineModelSettings, items: list[Arrival]
) -> None:
    limits = replace(limits, prefix_caching=False)
    engine, plain = EngineModel(limits, STEP_TIME), PlainEngine(limits)
    pending = made = sequences_of(items)
    # Two arrive before every step, so that both engines receive them at the same point.
    number = steps = 0
    while pending or engine.has_work:
        for each in pending[:2]:
            engine.add(each, each.arrived_at)
            plain.add(
                PlainSequence(
                    each.sequence_id,
                    each.prompt_tokens,
                    each.target_tokens,
                    each.priority,
                    number,
                    each.arrived_at,
                )
            )
            number += 1
        pending = pending[2:]
        steps += 1
        assume(steps < MOST_STEPS)
        engine.begin_step(100.0)
        outcome = engine.end_step()
        expected = plain.step()
        while not expected.tokens and expected.preempted:
            again = plain.step()
            expected.tokens, expected.finished = again.tokens, again.finished
            expected.preempted += again.preempted
        assert outcome.prefill_tokens + outcome.sequences == sum(expected.tokens.values())
        assert names(outcome.preempted) == expected.preempted
        assert set(names(outcome.finished)) == expected.finished
        used = engine.snapshot(100.0).kv_usage_ratio
        assert used == pytest.approx(1 - plain.free / limits.kv_blocks)
        running = {SequenceState.PREFILLING, SequenceState.DECODING}
        assert {each.sequence_id for each in made if each.state in running} == {
            each.name for each in plain.running
        }
        waiting = {each.sequence_id for each in made if each.state is SequenceState.WAITING}
        assert waiting == {each.name for each in plain.waiting}


@searching
@given(engines, arrivals)
def test_no_sequence_is_overtaken_under_first_come_first_served(
    limits: EngineModelSettings, items: list[Arrival]
) -> None:
    limits = replace(limits, scheduling_policy=SchedulingPolicy.FCFS)
    made = sequences_of(items)
    run_until_idle(EngineModel(limits, STEP_TIME), made)
    scheduled = [each.scheduled_at for each in made if each.scheduled_at is not None]
    assert len(scheduled) == len(made)
    assert scheduled == sorted(scheduled)
