"""Engine capacity: the calculation against known cases, and its typical lengths against named workloads."""

from dataclasses import replace

import numpy as np
import pytest

from roofline_profiles import engine_setup
from serve_app.engines.model.roofline import (
    TYPICAL_TOKENS,
    EngineSetup,
    capacity,
    kv_tokens,
    max_context,
    memory_share,
    min_tensor_parallel,
    typical_tokens,
)
from serve_app.errors import SettingsError
from serve_app.lab.workloads import RECIPES


def large(gpus: int = 2, **changes: object) -> EngineSetup:
    return replace(engine_setup("llama3-70b", "h100", gpus), **changes)  # type: ignore[arg-type]


def totals(workload: str) -> np.ndarray:
    requests = RECIPES[workload].generate(workload, 5_000, 1).requests
    return np.array([one.prompt_tokens + one.output_tokens for one in requests])


def test_a_70b_model_on_two_cards_of_80_gb_holds_no_long_context_and_on_four_it_does() -> None:
    held = capacity(large())
    assert 25_000 < held.kv_tokens < 35_000
    assert max_context(held) <= held.kv_tokens < max_context(held) + 1_024
    assert capacity(large(4)).kv_tokens > 400_000
    assert min_tensor_parallel(large(), 131_072) == 4
    assert min_tensor_parallel(large(), 10**9) is None


def test_gpus_that_cannot_divide_the_heads_are_not_proposed() -> None:
    setup = large()
    odd = replace(setup, model=replace(setup.model, heads=6, kv_heads=6, max_context_len=131_072))
    assert min_tensor_parallel(replace(odd, tensor_parallel=1), 10**9) is None
    assert min_tensor_parallel(replace(odd, tensor_parallel=1), 1_024) == 2


def test_sequences_share_the_cache() -> None:
    held = capacity(large())
    assert held.sequences(1_000) == held.kv_tokens // 1_000
    assert held.sequences(held.kv_tokens + 1) == 0


def test_a_cache_of_half_the_bytes_holds_twice_the_tokens() -> None:
    setup = large()
    halved = replace(setup, model=replace(setup.model, kv_bytes=1.0))
    assert kv_tokens(halved) == pytest.approx(2 * kv_tokens(setup), abs=2_000)


def test_a_cache_that_is_given_in_bytes_needs_its_room_beside_the_weights() -> None:
    small = engine_setup("llama31-8b", "h100", 1)
    given = replace(small, kv_cache_memory_bytes=13_107_200_000, gpu_memory_utilization=0.3)
    assert kv_tokens(given) == 100_000
    # 16 GB of weights, 13 GB of cache and the use of CUDA and activations, of 85 GB.
    assert 0.35 < memory_share(given) < 0.40
    assert memory_share(small) == small.gpu_memory_utilization
    too_much = replace(small, kv_cache_memory_bytes=10**12)
    assert kv_tokens(too_much) < 600_000
    assert memory_share(too_much) > 1
    with pytest.raises(SettingsError, match="do not fit"):
        kv_tokens(replace(small, kv_cache_memory_bytes=1_000_000))


def test_the_usual_length_is_that_of_azures_conversations() -> None:
    found = totals("azure-conv")
    assert np.mean(found[found <= 8_192]) == pytest.approx(TYPICAL_TOKENS, rel=0.05)
    assert typical_tokens() == TYPICAL_TOKENS
    assert typical_tokens(at_most=512) == 512
