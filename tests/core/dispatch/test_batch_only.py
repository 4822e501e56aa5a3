from serve_app.core.dispatch.backpressure import BATCH_ONLY_AFTER_S, BATCH_ONLY_FACTOR, BackpressureSettings
from serve_app.core.dispatch.starvation import ClassFloorSettings
from serve_app.core.events import Cancelled, Woke
from serve_app.request import PriorityClass
from tests.builders import ManualDriver, dispatched, one_replica

BATCH = PriorityClass.BATCH
# No growth by pace and a long engine queue, so only the rules for batch work apply.
BACKPRESSURE = BackpressureSettings(lag_factor=0.0, target_waiting=1_000)
PROMPT = 100


def make_driver(backpressure: BackpressureSettings = BACKPRESSURE) -> ManualDriver:
    return one_replica(
        limits={"kv_tokens": 500_000, "max_num_seqs": 1_000},
        class_floors=ClassFloorSettings(batch_share=0.0),
        backpressure=backpressure,
    )


def batch_sent(driver: ManualDriver, name: str) -> int:
    """Return how many of many batch requests are dispatched at once."""
    return sum(
        len(dispatched(driver.arrive(f"{name}{number}", priority=BATCH, prompt_tokens=PROMPT)))
        for number in range(100)
    )


def expected(driver: ManualDriver, times: int) -> int:
    """Count requests up to and including the one that exceeds the prefill limit."""
    per_request_s = PROMPT * driver.scheduler.prefill_costs.shared.per_token_s
    return int(times * BACKPRESSURE.batch_prefill_s / per_request_s + 1e-9) + 1


def test_batch_work_alone_fills_iterations() -> None:
    driver = make_driver()
    assert batch_sent(driver, "b") == expected(driver, BATCH_ONLY_FACTOR) > expected(driver, 1)


def test_batch_work_beside_higher_classes_gets_less() -> None:
    driver = make_driver()
    driver.arrive("i", prompt_tokens=1)
    assert batch_sent(driver, "b") <= expected(driver, 1)
    assert repr(driver.scheduler._batch_only) == "<BatchOnlyMode off>"


def test_batch_work_gets_more_some_time_after_the_last_interactive_request() -> None:
    driver = make_driver()
    driver.arrive("i", prompt_tokens=1)
    driver.feed(Cancelled("i"))
    before = batch_sent(driver, "b")
    driver.now += BATCH_ONLY_AFTER_S - 0.5
    driver.report("r1", received=before, waiting=before)
    assert dispatched(driver.feed(Woke())) == []
    driver.now += 0.6
    more = dispatched(driver.feed(Woke()))
    assert before + len(more) == expected(driver, BATCH_ONLY_FACTOR)


def test_a_long_running_interactive_request_limits_batch_work() -> None:
    driver = make_driver()
    driver.arrive("i", prompt_tokens=1)
    driver.now += 10 * BATCH_ONLY_AFTER_S
    driver.report("r1", received=1)
    assert batch_sent(driver, "b") <= expected(driver, 1)


def test_a_batch_prefill_limit_of_zero_dispatches_one_request_alone() -> None:
    driver = make_driver(BackpressureSettings(lag_factor=0.0, batch_prefill_s=0.0))
    assert batch_sent(driver, "b") == 1
