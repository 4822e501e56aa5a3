from serve_app.engine_model.waiting import SchedulingPolicy, WaitingQueue
from tests.engine_model.builders import names, sequence


def test_first_come_first_served_with_the_preempted_in_front() -> None:
    queue = WaitingQueue(SchedulingPolicy.FCFS)
    for name in "abc":
        queue.add(sequence(name))
    queue.put_back(sequence("back"))
    assert names(queue) == ["back", "a", "b", "c"]
    assert queue.head() is queue.pop()
    assert len(queue) == 3


def test_lower_values_first_then_arrival_also_after_a_preemption() -> None:
    queue = WaitingQueue(SchedulingPolicy.PRIORITY)
    queue.add(sequence("later", priority=1, at=2.0))
    queue.add(sequence("earlier", priority=1, at=1.0))
    queue.put_back(sequence("preempted", priority=2, at=0.0))
    queue.add(sequence("urgent", priority=-3, at=9.0))
    assert names(queue) == ["urgent", "earlier", "later", "preempted"]
    assert names(queue.pop() for _ in range(4)) == ["urgent", "earlier", "later", "preempted"]
    assert len(queue) == 0


def test_any_sequence_can_be_taken_out() -> None:
    for policy in SchedulingPolicy:
        queue = WaitingQueue(policy)
        members = [sequence(name, at=index) for index, name in enumerate("abc")]
        for index, member in enumerate(members):
            member.number = index
            queue.add(member)
        queue.remove(members[0])
        assert queue.head() is members[1]
        assert names(queue) == ["b", "c"]
