from serve_app.core.dispatch.starvation import ClassFloors, ClassFloorSettings, Promotion, PromotionSettings
from serve_app.request import PriorityClass
from tests.builders import scheduled_request

INTERACTIVE, DEFAULT, BATCH = PriorityClass


def test_the_oldest_request_beyond_its_starvation_bound_is_promoted() -> None:
    promotion = Promotion(PromotionSettings(default_s=10.0))
    heads = [scheduled_request(arrived_at=at) for at in (95.0, 80.0, 70.0)]
    assert promotion.first(heads, 100.0) is heads[2]
    assert promotion.first(heads, 79.0) is None


def test_each_class_has_its_own_limit() -> None:
    promotion = Promotion(PromotionSettings(interactive_s=1.0, default_s=50.0))
    heads = [
        scheduled_request(arrived_at=80.0),
        scheduled_request(arrived_at=98.0, priority=PriorityClass.INTERACTIVE),
    ]
    assert promotion.first(heads, 100.0) is heads[1]


def test_under_overload_promotions_are_a_share_of_all_dispatches() -> None:
    promotion = Promotion(PromotionSettings(default_s=1.0, promoted_share=0.2))
    promoted = 0
    for _ in range(1_000):
        preferred, starved = scheduled_request(arrived_at=0.5), scheduled_request(arrived_at=0.0)
        first = promotion.first([preferred, starved], 100.0) if promotion.is_due else preferred
        assert first is not None
        promoted += first is starved
        promotion.on_dispatch(first, 100.0)
    # Both heads are beyond their starvation bound: whichever is first while a promotion is due uses it.
    assert 190 <= promoted <= 260


def test_a_waiting_lower_class_gets_its_floor_share() -> None:
    floors = ClassFloors(ClassFloorSettings(default_share=0.0, batch_share=0.05))
    got = {INTERACTIVE: 0, BATCH: 0}
    for _ in range(1_000):
        priority = (floors.owed() or [INTERACTIVE])[0]
        floors.on_dispatch(priority, [INTERACTIVE, BATCH])
        got[priority] += 1
    assert 45 <= got[BATCH] <= 50


def test_a_class_without_queued_requests_is_owed_no_dispatch() -> None:
    floors = ClassFloors(ClassFloorSettings())
    for _ in range(1_000):
        floors.on_dispatch(INTERACTIVE, [INTERACTIVE])
    assert floors.owed() == []


def test_credit_is_bounded() -> None:
    floors = ClassFloors(ClassFloorSettings(batch_share=0.5))
    for _ in range(1_000):
        floors.on_dispatch(INTERACTIVE, [BATCH])
    spent = 0
    while floors.owed():
        floors.on_dispatch(BATCH, [])
        spent += 1
    assert spent == 2
