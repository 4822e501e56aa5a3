"""TTFT and TPOT at long prompts, beside the bytes and operations that the data sheets imply."""

import random
import statistics
from collections.abc import Callable, Mapping

import pytest

from serve_app.engines.model import EngineModel
from serve_app.engines.model.roofline import load_profile
from tests.engines.model.builders import run_until_idle, sequence
from tests.engines.model.reference import PlainEngine, PlainSequence

# A 70B model with 80 layers, 64 heads and 8 KV heads of 128, in 16 bits.
LAYERS, HIDDEN = 80, 8_192
PARAMETERS = 69.5e9
KV_BYTES = 2 * 80 * 8 * 128 * 2
PAIR_FLOPS = 4 * 80 * 64 * 128
# Four H100, by the data sheet. The shares of the peaks are those of `gpus.yaml`.
BYTES_PER_S = 4 * 3.35e12 * 0.83
FLOPS = 4 * 989.4e12 * 0.58
ATTENTION_FLOPS = 4 * 989.4e12 * 0.36
LINK_BYTES_PER_S = 450e9 * 0.18
# Short kernels and two all-reduces per layer, and work outside the layers.
FIXED_S = LAYERS * (40e-6 + 2 * 10e-6) + 0.5e-3
TOKEN_S = 2 * PARAMETERS / FLOPS + 2 * LAYERS * (2 * 3 / 4 * HIDDEN * 2) / LINK_BYTES_PER_S
LONGEST = 131_072

# Seconds of a step by its sequences: the tokens that it computes, and those computed before, of each.
Step = Callable[[list[tuple[int, int]]], float]


def by_data_sheet(tokens: list[tuple[int, int]]) -> float:
    return max(2 * PARAMETERS / BYTES_PER_S + FIXED_S, TOKEN_S * sum(new for new, _ in tokens)) + context_s(
        tokens
    )


def by_measured_short_steps(tokens: list[tuple[int, int]]) -> float:
    """Return the measured time of a step with short contexts, and the computed time of the others."""
    decoding = sum(new == 1 for new, _ in tokens)
    per_sequence_s = 0.34e-3 - 576 * KV_BYTES / BYTES_PER_S
    prompt_tokens = sum(new for new, _ in tokens if new > 1)
    return max(28.8e-3, TOKEN_S * prompt_tokens) + decoding * per_sequence_s + context_s(tokens)


def context_s(tokens: list[tuple[int, int]]) -> float:
    """Return the seconds to read the contexts of decoding sequences, and to attend to those of prompts."""
    read = sum(known for new, known in tokens if new == 1)
    pairs = sum(new * (known + new / 2) for new, known in tokens if new > 1)
    return read * KV_BYTES / BYTES_PER_S + pairs * PAIR_FLOPS / ATTENTION_FLOPS


def requests(count: int, rate_per_s: float) -> list[tuple[float, int, int]]:
    """Return arrivals, prompts and outputs like Mooncake's: a mean of 10,500 tokens and a heavy tail."""
    rng, now, drawn = random.Random(7), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate_per_s)
        prompt = min(LONGEST - 1_024, int(rng.lognormvariate(8.8, 1.1)))
        drawn.append((now, max(prompt, 16), rng.randint(50, 400)))
    return drawn


def expected(engine: PlainEngine, drawn: list[tuple[float, int, int]], step_s: Step) -> tuple[float, float]:
    """Return mean TTFT and TPOT of an engine without a model of step times."""
    sequences = {
        str(number): PlainSequence(str(number), prompt, output, 0, number)
        for number, (_, prompt, output) in enumerate(drawn)
    }
    pending = list(zip(drawn, sequences.values(), strict=True))[::-1]
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    now = 0.0
    while pending or engine.running or engine.waiting:
        if not engine.running and not engine.waiting:
            now = max(now, pending[-1][0][0])
        while pending and pending[-1][0][0] <= now:
            engine.add(pending.pop()[1])
        step = engine.step()
        now += step_s([(new, sequences[name].computed - new) for name, new in step.tokens.items()])
        for name in step.tokens:
            if sequences[name].outputs:
                first.setdefault(name, now)
                last[name] = now
    return means({name: (at, last[name]) for name, at in first.items()}, drawn)


def means(
    times: Mapping[str, tuple[float, float]], drawn: list[tuple[float, int, int]]
) -> tuple[float, float]:
    ttft_s = [times[str(number)][0] - arrived for number, (arrived, _, _) in enumerate(drawn)]
    tpot_s = [
        (times[str(number)][1] - times[str(number)][0]) / (output - 1)
        for number, (_, _, output) in enumerate(drawn)
    ]
    return statistics.fmean(ttft_s), statistics.fmean(tpot_s)


@pytest.mark.parametrize(
    ("name", "step_s"),
    [("llama3-70b-h100-tp4", by_data_sheet), ("llama2-70b-h100-tp4", by_measured_short_steps)],
)
def test_long_prompts_take_what_their_bytes_and_operations_take(name: str, step_s: Step) -> None:
    profile = load_profile(name)
    limits = profile.model_settings(max_model_len=LONGEST)
    drawn = requests(80, 0.35)
    assert 8_000 < statistics.fmean(prompt for _, prompt, _ in drawn) < 14_000
    assert max(prompt for _, prompt, _ in drawn) > 100_000
    played = [
        sequence(str(number), prompt, output, at=arrived)
        for number, (arrived, prompt, output) in enumerate(drawn)
    ]
    run_until_idle(EngineModel(limits, profile.step_time), played)
    times = {each.sequence_id: (each.first_token_at or 0.0, each.finished_at or 0.0) for each in played}
    assert means(times, drawn) == pytest.approx(expected(PlainEngine(limits), drawn, step_s), rel=0.10)
