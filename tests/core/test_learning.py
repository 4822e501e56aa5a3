"""Learning from events, observed in later decisions."""

from typing import Any

import pytest

from serve_app.core.commands import Command, Dispatch
from serve_app.core.events import Finished, FirstToken
from serve_app.errors import Outcome
from serve_app.request import PromptShape, Usage
from tests.builders import ManualDriver, dispatched, one_replica

ROOMY = {"max_model_len": 8_000, "kv_tokens": 1_000_000}


def answered(
    driver: ManualDriver, request_id: str, *, first_token_s: float, usage: Usage | None = None, **fields: Any
) -> list[Command]:
    """Run one request on an idle replica, from arrival to end."""
    driver.report("r1")
    commands = driver.arrive(request_id, **fields)
    driver.feed(FirstToken(request_id), after_s=first_token_s)
    driver.feed(Finished(request_id, Outcome.COMPLETED, usage))
    return commands


def estimated(commands: list[Command]) -> int:
    (command,) = commands
    assert isinstance(command, Dispatch)
    return command.estimated_tokens


def test_the_prefill_cost_is_learned_from_single_prefills() -> None:
    driver = one_replica(limits=ROOMY)
    cost = driver.scheduler.prefill_costs.of("only")
    assert cost.seconds(1_000) == pytest.approx(0.13), "the prior"
    for number in range(100):
        tokens = 500 + 1_000 * (number % 2)
        answered(driver, f"r{number}", first_token_s=1e-3 * tokens, prompt_tokens=tokens)
    cost = driver.scheduler.prefill_costs.of("only")
    assert cost.observations == 100
    assert cost.seconds(1_000) == pytest.approx(1.0, rel=0.1)


def test_concurrent_prefills_are_not_learned_from() -> None:
    driver = one_replica(limits=ROOMY)
    for number in range(20):
        for name in ("a", "b"):
            driver.arrive(f"{name}{number}", prompt_tokens=500)
        for name in ("a", "b"):
            driver.feed(FirstToken(f"{name}{number}"), after_s=3.0)
            driver.feed(Finished(f"{name}{number}", Outcome.COMPLETED))
    assert driver.scheduler.prefill_costs.shared.observations == 0


def test_an_engine_that_proves_slow_makes_the_same_wait_count_for_less() -> None:
    # A head of 190 tokens has waited two seconds when one of 100 arrives. At the prior's speed that is 40
    # times its own prefill, enough to go first; on slow engines it is little.
    first = {}
    for name, seconds_per_token in (("fast", 1e-4), ("slow", 1e-2)):
        driver = one_replica(limits={**ROOMY, "max_num_seqs": 1}, policy="ewsjf-paper")
        for number in range(40):
            tokens = 500 + 1_000 * (number % 2)
            seconds = 0.03 + seconds_per_token * tokens
            answered(driver, f"t{number}", first_token_s=seconds, prompt_tokens=tokens)
        driver.report("r1")
        # One in the batch and three in the engine's queue.
        assert all(dispatched(driver.arrive(f"f{number}", prompt_tokens=10)) for number in range(4))
        driver.arrive("older", prompt_tokens=190)
        driver.report("r1", running=3, after_s=2.0)
        driver.arrive("fresh", prompt_tokens=100)
        ((first[name], _),) = dispatched(driver.feed(Finished("f0", Outcome.COMPLETED)))
    assert first == {"fast": "older", "slow": "fresh"}


def test_answer_lengths_are_learned_from_completed_answers() -> None:
    driver = one_replica(limits=ROOMY)
    fields: dict[str, Any] = {"prompt_tokens": 100, "max_output_tokens": None}
    before = estimated(answered(driver, "first", first_token_s=0.1, **fields))
    for number in range(300):
        usage = Usage(prompt_tokens=100, output_tokens=20)
        answered(driver, f"r{number}", first_token_s=0.1, usage=usage, **fields)
    after = estimated(driver.arrive("last", **fields))
    assert after < before / 2
    assert 120 <= after < 200


def test_bytes_per_token_are_learned_from_completed_answers() -> None:
    driver = one_replica(limits=ROOMY)
    text = PromptShape(text_bytes=4_000)
    before = estimated(answered(driver, "first", first_token_s=0.1, shape=text))
    for number in range(300):
        usage = Usage(prompt_tokens=2_000, output_tokens=10)
        answered(driver, f"r{number}", first_token_s=0.1, usage=usage, shape=text)
    after = estimated(driver.arrive("last", shape=text))
    assert before < 1_500
    assert 1_900 < after < 2_500


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_nothing_is_learned_from_an_interrupted_answer(outcome: Outcome) -> None:
    driver = one_replica(limits=ROOMY)
    fields: dict[str, Any] = {"prompt_tokens": 100, "max_output_tokens": None}
    before = driver.scheduler.estimator.state()
    for number in range(300):
        driver.arrive(f"r{number}", **fields)
        driver.feed(FirstToken(f"r{number}"))
        driver.feed(Finished(f"r{number}", outcome, Usage(prompt_tokens=100, output_tokens=1)))
    assert driver.scheduler.estimator.state() == before


@pytest.mark.parametrize(("earlier", "most"), [(100, 1.3), (0, 6.0)])
def test_a_tenants_odd_prompts_teach_others_within_bounds(earlier: int, most: float) -> None:
    driver = one_replica(limits=ROOMY)
    prose, tiny = PromptShape(text_bytes=8_000, messages=1), PromptShape(text_bytes=40, messages=1)
    before = estimated(answered(driver, "before", first_token_s=0.1, shape=prose, tenant="other"))

    def ask(tenant: str, size: PromptShape, tokens: int, number: int) -> None:
        usage = Usage(prompt_tokens=tokens, output_tokens=10)
        answered(driver, f"{tenant}{number}", first_token_s=0.1, usage=usage, shape=size, tenant=tenant)

    for number in range(earlier):
        ask("other", prose, 1_900, number)
    for number in range(300):
        # Its prompts are where no gateway sees them.
        ask("odd", tiny, 10_000, number)
        ask("odd", prose, 30_000, 1_000 + number)
    after = estimated(driver.arrive("after", shape=prose, tenant="other"))
    assert before * 0.8 < after < before * most
    # Where the odd ones came first, one ordinary prompt corrects them, however many they were.
    ask("other", prose, 1_900, 1_000)
    ask("odd", prose, 30_000, 2_000)
    assert before * 0.8 < estimated(driver.arrive("again", shape=prose, tenant="other")) < before * 1.3
