import pytest

from serve_app.request import PriorityClass
from serve_app.scheduling.dispatch.promotion import Promotion, PromotionSettings
from serve_app.scheduling.request import ScheduledRequest
from tests.builders import Simulation, request


def scheduled(
    request_id: str, arrived_at: float, priority: PriorityClass = PriorityClass.DEFAULT
) -> ScheduledRequest:
    wanted = request(request_id, arrived_at=arrived_at, priority=priority)
    return ScheduledRequest(wanted, Simulation().scheduler.estimator.estimate(wanted), 1, ("only",))


def test_whoever_has_waited_too_long_goes_first_the_oldest_of_them() -> None:
    promotion = Promotion(PromotionSettings(default_s=10.0))
    heads = [scheduled("new", 95.0), scheduled("old", 80.0), scheduled("oldest", 70.0)]
    assert promotion.first(heads, 100.0) is heads[2]
    assert promotion.first(heads, 79.0) is None


def test_each_class_has_its_own_patience() -> None:
    promotion = Promotion(PromotionSettings(interactive_s=1.0, default_s=50.0))
    heads = [scheduled("default", 80.0), scheduled("interactive", 98.0, PriorityClass.INTERACTIVE)]
    assert promotion.first(heads, 100.0) is heads[1]


def test_under_overload_promotions_are_a_share_of_all_dispatches() -> None:
    promotion = Promotion(PromotionSettings(default_s=1.0, promoted_share=0.2))
    promoted = 0
    for _ in range(1_000):
        preferred, overdue = scheduled("preferred", 0.5), scheduled("overdue", 0.0)
        first = promotion.first([preferred, overdue], 100.0) if promotion.is_due else preferred
        assert first is not None
        promoted += first is overdue
        promotion.on_dispatch(first, 100.0)
    # Both heads are overdue: whichever goes first while a promotion is due uses it up.
    assert 190 <= promoted <= 260


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"promotion\.promoted_share must be above 0"):
        PromotionSettings(promoted_share=0.0)
    with pytest.raises(ValueError, match=r"promotion\.batch_s must be positive, got 0"):
        PromotionSettings(batch_s=0.0)
