from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engines.model.step_time import StepTimeModel, attended_pairs

MODEL = StepTimeModel(
    decode_base_s=0.010,
    decode_per_sequence_s=0.001,
    decode_per_context_token_s=1e-6,
    prefill_base_s=0.002,
    prefill_per_token_s=1e-4,
    prefill_per_pair_s=1e-8,
)


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        pytest.param({}, 0.0, id="an empty step"),
        pytest.param(
            {"sequences": 4, "context_tokens": 4_000},
            0.010 + 0.004 + 0.004,
            id="decoding reads the weights and every context",
        ),
        pytest.param(
            {"prefill_tokens": 100, "attended_pairs": 5_050},
            0.010 + 5.05e-5,
            id="a prefill grows with tokens and attended pairs",
        ),
        pytest.param({"prefill_tokens": 19}, 0.002, id="few tokens are computed during the reading"),
        pytest.param({"prefill_tokens": 99, "sequences": 1}, 0.010 + 0.001, id="and so beside decoding"),
        pytest.param({"prefill_tokens": 150, "sequences": 1}, 0.015 + 0.001, id="more outlast the reading"),
    ],
)
def test_the_seconds_of_a_step(step: dict[str, int], seconds: float) -> None:
    assert MODEL.step_s(**step) == pytest.approx(seconds)


def test_each_token_attends_to_all_before_it_and_itself() -> None:
    assert attended_pairs(0, 3) == 1 + 2 + 3
    assert attended_pairs(10, 2) == 11 + 12


@given(start=st.integers(0, 500), first=st.integers(0, 500), second=st.integers(0, 500))
def test_chunks_attend_to_as_many_pairs_as_the_whole(start: int, first: int, second: int) -> None:
    whole = attended_pairs(start, first + second)
    assert attended_pairs(start, first) + attended_pairs(start + first, second) == whole


@given(steps=st.integers(1, 300), sequences=st.integers(1, 64), context=st.integers(1, 100_000))
def test_a_run_of_decode_steps_takes_as_long_as_its_steps(steps: int, sequences: int, context: int) -> None:
    one_by_one = sum(
        MODEL.step_s(sequences=sequences, context_tokens=context + step * sequences) for step in range(steps)
    )
    assert MODEL.decode_run_s(steps, sequences=sequences, context_tokens=context) == pytest.approx(one_by_one)


def test_a_chunk_is_what_is_computed_while_a_decode_step_reads_the_weights() -> None:
    # 10 ms at 0.1 ms per token: 100, of which one whole 64.
    assert MODEL.chunk_tokens() == 64
    assert replace(MODEL, prefill_per_token_s=2e-5).chunk_tokens() == 448
    assert replace(MODEL, prefill_per_token_s=1e-2).chunk_tokens() == 64
    assert replace(MODEL, prefill_per_token_s=0.0).chunk_tokens() == 0


def test_a_long_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    seconds = MODEL.prefill_s(2_500, max_num_batched_tokens=1_000)
    assert seconds == pytest.approx(0.25 + attended_pairs(0, 2_500) * 1e-8)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"decode_per_sequence_s": -1.0}, "decode_per_sequence_s must not be negative, got -1.0"),
        ({"prefill_per_token_s": float("nan")}, "prefill_per_token_s .* got nan"),
        ({"decode_base_s": 0.0, "decode_per_sequence_s": 0.0}, "a decode step must take time"),
        ({"prefill_base_s": 0.0, "prefill_per_token_s": 0.0}, "a prefill must take time"),
    ],
)
def test_coefficients_that_make_no_sense_are_rejected(values: dict[str, float], complaint: str) -> None:
    good = {
        "decode_base_s": 0.01,
        "decode_per_sequence_s": 0.001,
        "prefill_base_s": 0.001,
        "prefill_per_token_s": 0.0,
    }
    with pytest.raises(ValueError, match=complaint):
        StepTimeModel(**(good | values))


def test_decoded_tokens_are_computed_while_the_weights_are_read() -> None:
    model = replace(MODEL, decode_per_sequence_s=0.0, decode_per_context_token_s=0.0, decode_compute_s=2e-4)
    assert model.step_s(sequences=50) == pytest.approx(0.010)
    assert model.step_s(sequences=100) == pytest.approx(0.020)
    assert model.step_s(sequences=100, prefill_tokens=100) == pytest.approx(0.020 + 0.010)


def test_experts_are_read_as_far_as_tokens_are_routed_to_them() -> None:
    model = replace(MODEL, expert_read_s=0.080, expert_share=0.25)
    assert model.step_s(prefill_tokens=1) == pytest.approx(0.002 + 0.080 * 0.25)
    assert model.step_s(sequences=2) - MODEL.step_s(sequences=2) == pytest.approx(0.080 * (1 - 0.75**2))
    assert model.step_s() == 0.0


@pytest.mark.parametrize(("share", "read_s"), [(1.5, 0.1), (0.0, 0.1), (0.5, 0.0)])
def test_experts_need_both_a_share_and_a_time(share: float, read_s: float) -> None:
    with pytest.raises(ValueError, match=rf"expert_share \({share}\) must be between 0 and 1"):
        replace(MODEL, expert_share=share, expert_read_s=read_s)
