import msgspec

from serve_app.core.commands import Conclude, Dispatch
from serve_app.core.events import DispatchFailed, DispatchFailure, Woke
from serve_app.core.request import PredictedWait
from serve_app.errors import Conclusion, Outcome
from serve_app.request import PriorityClass
from serve_app.serving.scheduler.gauges import replica_figures
from serve_app.serving.scheduler.journal import Entry
from serve_app.serving.scheduler.metrics import SchedulerMetrics
from tests import builders
from tests.serving.scheduler.journals import pass_to

DISPATCH = Dispatch(
    request_id="r1",
    gateway_id="g1",
    replica_id="s1",
    pool="long",
    length_queue="all",
    estimated_tokens=50,
    queue_wait_s=0.3,
)


def test_counters_carry_class_pool_outcome_and_failure() -> None:
    metrics = SchedulerMetrics("m")
    driver = builders.ManualDriver()
    driver.arrive("r1", priority=PriorityClass.BATCH)
    scheduled = driver.find("r1")
    at_home = msgspec.structs.replace(DISPATCH, pool="short")
    conclude = Conclude(request_id="r1", gateway_id="g1", conclusion=Conclusion(Outcome.EXPIRED))
    spilled = Entry(driver.scheduler, 0.0, Woke(), [DISPATCH], requests=[scheduled])
    home = Entry(driver.scheduler, 0.0, Woke(), [at_home], requests=[scheduled])
    failure = DispatchFailed("r1", "s1", DispatchFailure.BUSY)
    failed = Entry(driver.scheduler, 0.0, failure, [conclude], requests=[scheduled])
    for entry in (spilled, home, failed):
        pass_to(metrics, entry)
    text = metrics.exposition([])
    for line in (
        'ewsjf_dispatches_total{model="m",pool="long"} 1.0',
        'ewsjf_dispatches_total{model="m",pool="short"} 1.0',
        'ewsjf_spills_total{model="m",pool="long"} 1.0',
        'ewsjf_put_backs_total{failure="busy",model="m"} 1.0',
        'ewsjf_requests_concluded_total{class="batch",model="m",outcome="expired"} 1.0',
        'ewsjf_queue_wait_seconds_bucket{class="batch",le="0.25",model="m",pool="long"} 0.0',
        'ewsjf_queue_wait_seconds_bucket{class="batch",le="0.5",model="m",pool="long"} 1.0',
    ):
        assert line in text, line
    # One bound fewer, because there may be a hundred length queues.
    (first, *_) = (
        line for line in text.splitlines() if line.startswith("ewsjf_length_queue_wait_seconds_bucket")
    )
    assert 'le="0.005"' in first


def test_gauges_show_the_moment_and_forget_replicas_that_left() -> None:
    metrics = SchedulerMetrics("m")
    report = builders.report(waiting=2, kv_usage_ratio=0.5)
    driver = builders.ManualDriver()
    driver.join("s1")
    for number in range(3):
        driver.arrive(f"r{number}")
    text = metrics.exposition(replica_figures(driver.scheduler, {"s1": (builders.spec("s1"), report)}))
    for line in (
        'ewsjf_requests_in_flight{model="m",pool="short",replica="s1"} 3.0',
        'ewsjf_replica_waiting{model="m",pool="short",replica="s1"} 2.0',
        'ewsjf_replica_kv_usage_ratio{model="m",pool="short",replica="s1"} 0.5',
    ):
        assert line in text, line
    assert "s1" not in metrics.exposition([])


def test_the_error_of_predicted_waits_is_counted_with_its_sign() -> None:
    driver = builders.ManualDriver()
    driver.arrive("r1")
    entry = driver.scheduler.find("r1")
    assert entry is not None
    metrics = SchedulerMetrics("m")
    sent = Entry(driver.scheduler, 0.0, Woke(), [DISPATCH], requests=[entry])
    pass_to(metrics, sent)
    assert "error_seconds_count{" not in metrics.exposition([]), "nothing had been predicted"
    entry.dispatched_at = 5.0
    entry.prediction = PredictedWait(kind=(1, 6, False, False), at=1.0, uncorrected_s=2.0, wait_s=3.2)
    pass_to(metrics, sent)
    text = metrics.exposition([])
    for line in (
        'ewsjf_queue_wait_prediction_error_seconds_bucket{class="default",le="-1.0",model="m"} 0.0',
        'ewsjf_queue_wait_prediction_error_seconds_bucket{class="default",le="-0.5",model="m"} 1.0',
    ):
        assert line in text, line


def test_the_mean_error_of_predicted_waits_is_relative_to_the_waits_of_a_class() -> None:
    driver = builders.ManualDriver()
    driver.arrive("r1")
    entry = driver.scheduler.find("r1")
    assert entry is not None
    metrics = SchedulerMetrics("m")
    for predicted_s, waited_s in ((25.0, 11.0), (1.0, 9.0), (0.1, 0.9)):
        entry.prediction = PredictedWait((1, 6, False, False), 1.0, predicted_s, predicted_s)
        entry.dispatched_at = 1.0 + waited_s
        pass_to(metrics, Entry(driver.scheduler, 0.0, Woke(), [DISPATCH], requests=[entry]))
    # Predictions and waits of less than a second do not count.
    assert metrics.predictions(0.0) == {
        "default": {"requests": 2, "predicted_s": 13.0, "waited_s": 10.0, "error_s": 11.0}
    }
    figures = metrics.prediction_errors(0.0)
    assert (figures.name, dict(figures)) == ("ewsjf_queue_wait_prediction_error_ratio", {("default",): 1.1})
    assert metrics.predictions(3_600.0) == {}
