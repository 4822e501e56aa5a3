"""The forecast of a replica's KV cache, compared with sums over its requests, and admission by its peak."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.events import Finished, FirstToken
from serve_app.core.routing.estimation.estimate import TokenEstimate
from serve_app.core.routing.estimation.output_length import LengthCurve, OutputEstimate, bucket_of
from serve_app.core.routing.replica_state import KvForecast, KvUse
from serve_app.errors import Outcome
from serve_app.request import Usage
from tests.builders import ONE_POOL, ManualDriver, dispatched

HALF_BLOCK = 8


class Known(OutputEstimate):
    """An answer of known length."""

    def ends(self, age: float) -> tuple[float, ...]:
        return (self.expected,)


def use(prompt_tokens: int, output_tokens: int, *, choices: int = 1, known: bool = True) -> KvUse:
    output = (Known if known else OutputEstimate)(
        output_tokens, float(output_tokens), float(output_tokens), longest=float(output_tokens)
    )
    estimate = TokenEstimate(
        prompt_tokens=prompt_tokens,
        least_prompt_tokens=prompt_tokens,
        expected_prompt_tokens=prompt_tokens,
        max_output_tokens=output_tokens,
        expected_output_tokens=choices * output_tokens,
        least_output_tokens=output_tokens,
        output=output,
    )
    return KvUse(estimate, choices, "only")


def forecast(*uses: KvUse) -> KvForecast:
    made = KvForecast()
    made.activate()
    for each in uses:
        made.add(each)
    return made


def test_one_request_has_its_peak_at_its_end() -> None:
    assert forecast(use(100, 64)).peak() == 100 + 64 + HALF_BLOCK


def test_the_use_grows_with_each_iteration_whether_the_peak_is_forecast_or_not() -> None:
    made = forecast(use(100, 64), use(200, 640, choices=2))
    made.deactivate()
    made.advance(10.0, 1.0)
    assert made.used() == 100 + 10 + 200 + 2 * 10 + 3 * HALF_BLOCK


def test_the_peak_is_below_the_final_sizes_if_answers_end_at_different_times() -> None:
    # At the end of the short answer both use 100 + 64, afterwards only the long one grows.
    made = forecast(use(100, 64), use(100, 128))
    assert made.peak() == 2 * (100 + 64 + HALF_BLOCK)
    assert made.peak() < 164 + 228


def test_known_lengths_have_no_spread_and_unknown_ones_do() -> None:
    assert forecast(use(100, 2_000)).spread == 0.0
    assert forecast(use(100, 2_000, known=False)).spread > 100


def test_an_answer_that_outlives_a_point_is_expected_to_become_longer() -> None:
    made = forecast(slow := use(100, 2_000, known=False))
    before = sum(point * weight for point, weight in slow.points.items())
    made.advance(300, 1.0)
    assert sum(slow.points.values()) == pytest.approx(1.0)
    assert min(slow.points) > 300
    assert sum(point * weight for point, weight in slow.points.items()) > before


def test_an_answer_past_its_limit_counts_at_its_limit() -> None:
    made = forecast(use(100, 64))
    made.advance(10_000, 1.0)
    assert made.peak() <= 100 + 64 + 2 * HALF_BLOCK + 8


def test_a_forecast_that_was_not_needed_before_knows_the_ages() -> None:
    made = KvForecast()
    made.add(use(100, 128))
    made.advance(64, 1.0)
    made.add(use(100, 128))
    assert made.peak() == 0
    made.activate()
    assert made.peak() == 2 * (100 + HALF_BLOCK) + 128 + 64
    made.deactivate()
    assert made.peak() == 0


requests = st.tuples(st.integers(1, 2_000), st.integers(1, 1_000), st.integers(1, 3), st.booleans())


@given(st.lists(st.tuples(requests, st.floats(0, 200), st.booleans()), max_size=30))
def test_the_peak_is_the_largest_sum_over_the_points(
    history: list[tuple[tuple[int, int, int, bool], float, bool]],
) -> None:
    made = forecast()
    running: list[KvUse] = []
    for (prompt, output, choices, known), iterations, ends in history:
        made.advance(made.clock + iterations, 1.0)
        made.add(one := use(prompt, output, choices=choices, known=known))
        running.append(one)
        if ends:
            made.remove(running.pop(len(running) // 2))
    points = {point for each in running for point in each.points}
    sums = [
        sum(
            weight * (each.prompt_tokens + each.choices * (at - each.start))
            for each in running
            for point, weight in each.points.items()
            if point >= at
        )
        for at in points
    ]
    assert made.peak() == pytest.approx(max(sums, default=0), abs=1.001)
    variance = sum(each.variance for each in running)
    assert made.spread == pytest.approx(math.sqrt(variance), abs=1e-3, rel=1e-6)


def curve(lengths: list[int]) -> LengthCurve:
    made = LengthCurve()
    for length in lengths:
        made.observe(bucket_of(length), was_cut=False)
    return made


def test_answers_that_were_all_cut_off_have_finite_ends_without_a_limit() -> None:
    cut = LengthCurve()
    for _ in range(60):
        cut.observe(bucket_of(100), was_cut=True)
    assert set(cut.ends(0.0, math.inf)) == {1_024.0}
    assert set(cut.ends(0.0, 100.0)) == {100.0}
    assert min(cut.ends(2_000.0, math.inf)) > 2_000


def test_the_ends_of_an_answer_are_the_quartiles_of_those_that_are_longer() -> None:
    learned = curve([100] * 50 + [400] * 50)
    assert [end < 200 for end in learned.ends(0.0, math.inf)] == [True, True, False, False]
    assert all(300 < end < 500 for end in learned.ends(200.0, math.inf))
    assert learned.ends(5_000.0, math.inf)[0] > 5_000
    assert learned.ends(0.0, 150.0) == (*learned.ends(0.0, math.inf)[:2], 150.0, 150.0)


# -- admission by the forecast peak -----------------------------------------------------------------------

PROMPT, OUTPUT, TPOT_S = 1_000, 1_000, 0.03


class Steady(ManualDriver):
    """One replica that receives a request every three seconds. Answers run to their limit of 1,000 tokens."""

    def __init__(self, kv_tokens: int) -> None:
        super().__init__(routing=ONE_POOL)
        self.join("e", "only", max_model_len=4_000, kv_tokens=kv_tokens, max_num_seqs=64)
        self.report("e", tpot_s=TPOT_S)

    def begin(self, request_id: str) -> bool:
        """Send a request. Return whether it was dispatched at once."""
        sent = dispatched(self.arrive(request_id, prompt_tokens=PROMPT, max_output_tokens=OUTPUT))
        self.feed(FirstToken(request_id))
        return bool(sent)

    def end(self, request_id: str) -> None:
        usage = Usage(prompt_tokens=PROMPT, output_tokens=OUTPUT)
        self.feed(Finished(request_id, Outcome.COMPLETED, usage))

    def learn(self) -> None:
        """Let sixty answers run to their limit, one after the other."""
        for number in range(60):
            self.begin(f"learn {number}")
            self.end(f"learn {number}")

    def second(self) -> None:
        self.now += 1.0
        self.report("e", tpot_s=TPOT_S)


def test_answers_that_end_one_after_the_other_need_less_than_their_final_sizes() -> None:
    steady = Steady(kv_tokens=17_000)
    steady.learn()
    sent = []
    for number in range(10):
        sent.append(steady.begin(f"r{number}"))
        for _ in range(3):
            steady.second()
    assert all(sent)
    state = steady.scheduler.ledger["e"]
    # Ten final sizes of 2,000 tokens. When the first answer ends, the ages are 1,000, 900 and so on.
    assert state.held_tokens == 10 * (PROMPT + OUTPUT) > state.kv_budget
    assert 15_500 <= state.peak_tokens <= 16_500


def test_answers_that_begin_together_need_their_final_sizes() -> None:
    steady = Steady(kv_tokens=17_000)
    steady.learn()
    assert [steady.begin(f"r{number}") for number in range(10)] == [True] * 8 + [False] * 2


def test_unknown_lengths_need_a_margin() -> None:
    unknown, known = Steady(kv_tokens=17_000), Steady(kv_tokens=17_000)
    known.learn()
    for steady in (unknown, known):
        for number in range(7):
            steady.arrive(f"r{number}", prompt_tokens=1_700, max_output_tokens=500)
            steady.feed(FirstToken(f"r{number}"))
    # Seven answers of 220 tokens on average are expected, or of 500 if all run to their limit.
    expected = 7 * 1_700
    spread = unknown.scheduler.ledger["e"].kv.spread
    assert known.scheduler.ledger["e"].kv.spread == 0
    assert spread > 7**0.5 * 100
    assert unknown.scheduler.ledger["e"].peak_tokens > expected + 0.7 * spread


class SharedInstructions(Steady):
    """Requests whose prompts are nearly all common instructions, of which the engine holds one copy."""

    BLOCKS = tuple(range(7))  # 896 tokens

    def admitted(self, kv_usage_ratio: float | None) -> int:
        """Return how many of twenty requests are dispatched, with reports of this use after each."""
        self.learn()
        sent = 0
        for number in range(20):
            arrived = self.arrive(
                f"r{number}",
                prompt_tokens=PROMPT,
                max_output_tokens=OUTPUT,
                prefix=(*self.BLOCKS, 100 + number),
            )
            sent += bool(dispatched(arrived))
            self.feed(FirstToken(f"r{number}"))
            self.report("e", kv_usage_ratio=kv_usage_ratio)
        return sent


def test_requests_that_share_instructions_are_admitted_while_the_engine_has_room() -> None:
    # Eight whole requests fit. Each one but the first shares 896 tokens, so thirteen fit.
    assert SharedInstructions(kv_tokens=17_000).admitted(kv_usage_ratio=None) == 8
    assert SharedInstructions(kv_tokens=17_000).admitted(kv_usage_ratio=2_000 / 17_000) == 13


def test_what_the_engine_reports_as_used_is_not_shared() -> None:
    assert SharedInstructions(kv_tokens=17_000).admitted(kv_usage_ratio=0.9) == 8


def test_requests_without_a_common_prefix_count_in_full_whatever_is_reported() -> None:
    steady = Steady(kv_tokens=17_000)
    steady.learn()
    sent = []
    for number in range(10):
        sent.append(steady.begin(f"r{number}"))
        steady.report("e", kv_usage_ratio=0.0)
    assert sum(sent) == 8
