"""Admission by the forecast peak of a replica's KV cache."""

from serve_app.core.events import Finished, FirstToken
from serve_app.errors import Outcome
from serve_app.request import Usage
from tests.builders import ONE_POOL, ManualDriver, dispatched

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
