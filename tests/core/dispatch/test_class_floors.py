from serve_app.core.dispatch.promotion import ClassFloors, ClassFloorSettings
from serve_app.request import PriorityClass

INTERACTIVE, _, BATCH = PriorityClass


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


def test_a_class_with_a_request_beyond_its_bound_gets_the_share_of_promotions() -> None:
    floors = ClassFloors(ClassFloorSettings(default_share=0.0, batch_share=0.05), promoted_share=0.2)
    got = {INTERACTIVE: 0, BATCH: 0}
    for _ in range(1_000):
        priority = (floors.owed() or [INTERACTIVE])[0]
        floors.on_dispatch(priority, [INTERACTIVE, BATCH], {BATCH})
        got[priority] += 1
    assert 150 <= got[BATCH] <= 200


def test_credit_is_bounded() -> None:
    floors = ClassFloors(ClassFloorSettings(batch_share=0.5))
    for _ in range(1_000):
        floors.on_dispatch(INTERACTIVE, [BATCH])
    spent = 0
    while floors.owed():
        floors.on_dispatch(BATCH, [])
        spent += 1
    assert spent == 2
