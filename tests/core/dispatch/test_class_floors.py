from serve_app.core.dispatch.starvation import ClassFloors, ClassFloorSettings
from serve_app.request import PriorityClass

INTERACTIVE, DEFAULT, BATCH = PriorityClass


def test_a_waiting_lower_class_gets_its_floor_share() -> None:
    floors = ClassFloors(ClassFloorSettings(default_share=0.0, batch_share=0.05))
    got = {INTERACTIVE: 0, BATCH: 0}
    for _ in range(1_000):
        priority = (floors.owed() or [INTERACTIVE])[0]
        floors.on_dispatch(priority, [INTERACTIVE, BATCH])
        got[priority] += 1
    assert 45 <= got[BATCH] <= 50


def test_nothing_is_owed_to_a_class_that_does_not_wait() -> None:
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
