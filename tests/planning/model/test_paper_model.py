import math
from dataclasses import replace

import pytest

from serve_app.planning.model.paper_model import A100, H100
from tests.planning.builders import mix


def test_slots_are_those_of_the_papers() -> None:
    # 16 at 64K and 128 at 8K, where memory and the setting agree.
    assert A100.slots(65_536) == 16
    assert A100.slots(8_192) == 128
    assert H100.slots(8_192) == 128
    assert replace(A100, kv_blocks=16_384).slots(8_192) == 32


def test_an_iteration_grows_with_sequences_and_their_length() -> None:
    assert A100.iteration_s(8_192, 16) == pytest.approx(0.008 + 16 * 0.00065)
    assert A100.iteration_s(1_024, 128) == pytest.approx(0.008 + 16 * 0.00065)


def test_a_pool_serves_prompts_in_chunks_and_then_token_by_token() -> None:
    pool = A100.pool(mix((1_000, 98)), 65_536)
    iteration_s = A100.iteration_s(1_098, 16)
    assert pool.service_s == pytest.approx((2 + 98) * iteration_s)
    assert pool.throughput_per_s == pytest.approx(16 / pool.service_s)
    assert pool.service_cv2 == 0.0


def test_instances_are_the_fewest_below_the_cap_and_the_limit() -> None:
    pool = A100.pool(mix((1_000, 98), (3_000, 400)), 65_536)
    rate = 100.0
    count = pool.instances(rate, 2.0)
    assert count >= math.ceil(rate / (0.85 * pool.throughput_per_s))
    assert pool.p99_wait_s(rate, count) + pool.prefill_p99_s <= 2.0
    assert pool.instances(rate, 2.0, utilisation_cap=0.5) > count


def test_smaller_contexts_need_fewer_instances() -> None:
    lengths = mix((1_000, 98), (3_000, 400))
    whole, short = (A100.pool(lengths, context).instances(1_000.0, 2.0) for context in (65_536, 8_192))
    assert short < whole
