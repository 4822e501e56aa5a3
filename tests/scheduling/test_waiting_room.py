from serve_app.scheduling.entry import Entry
from serve_app.scheduling.policies.protocol import OrderingPolicy
from serve_app.scheduling.waiting_room import WaitingRoom
from tests.builders import World, request


class ShortestFirst(OrderingPolicy):
    """Two queues by length, the shortest first in each."""

    def queue_of(self, entry: Entry) -> str:
        return "small" if entry.estimate.prompt_tokens <= 100 else "large"

    def key(self, entry: Entry) -> float:
        return float(entry.estimate.prompt_tokens)

    def score(self, head: Entry, now: float) -> float:
        return -float(head.estimate.prompt_tokens)


def entry(request_id: str, prompt_tokens: int, sequence: int, *pools: str) -> Entry:
    wanted = request(request_id, prompt_tokens=prompt_tokens)
    return Entry(wanted, World().scheduler.estimator.estimate(wanted), sequence, pools or ("short", "long"))


def heads(room: WaitingRoom, pool: str = "short", *, at_home: bool = True) -> list[str]:
    return [head.request.request_id for head in room.heads(pool, 0.0, at_home=at_home)]


def test_the_head_of_each_lane_comes_by_score_and_inside_a_lane_by_key() -> None:
    room = WaitingRoom(ShortestFirst())
    for number, length in enumerate([500, 90, 300, 20]):
        room.add(entry(f"r{length}", length, number))
    assert heads(room) == ["r20", "r300"]


def test_a_request_that_came_back_goes_before_all_others() -> None:
    room = WaitingRoom(ShortestFirst())
    room.add(entry("r20", 20, 1))
    for name, length, sequence in (("back", 90, 2), ("back-large", 900, 3)):
        returned = entry(name, length, sequence)
        returned.returned = True
        room.add(returned)
    assert heads(room) == ["back", "back-large"]


def test_equal_keys_keep_the_order_of_arrival() -> None:
    room = WaitingRoom(ShortestFirst())
    for number in range(3):
        room.add(entry(f"r{number}", 50, number))
    taken = []
    for _ in range(3):
        (head,) = room.heads("short", 0.0, at_home=True)
        taken.append(head.request.request_id)
        room.remove(head)
    assert taken == ["r0", "r1", "r2"]


def test_home_and_spill_are_asked_for_apart() -> None:
    room = WaitingRoom(ShortestFirst())
    room.add(entry("at-home", 50, 1, "short", "long"))
    room.add(entry("visitor", 50, 2, "long", "short"))
    room.add(entry("bound", 50, 3, "long"))
    assert heads(room, "short") == ["at-home"]
    assert heads(room, "short", at_home=False) == ["visitor"]
    assert heads(room, "long") == ["visitor", "bound"]


def test_one_that_leaves_and_comes_back_is_there_once() -> None:
    room = WaitingRoom(ShortestFirst())
    one = entry("r", 50, 1)
    room.add(one)
    room.remove(one)
    room.add(one)
    assert [e.request.request_id for e in room] == ["r"]
    assert len(room) == 1
    room.remove(one)
    assert heads(room) == []
    assert room.waiting_tokens == 0


def test_many_that_leave_from_the_middle_take_no_memory() -> None:
    room = WaitingRoom(ShortestFirst())
    entries = [entry(f"r{n}", 50, n) for n in range(1_000)]
    for one in entries:
        room.add(one)
    for one in entries[1:]:
        room.remove(one)
    (lane,) = room._lanes.values()
    assert len(lane._heap) < 100
    assert heads(room) == ["r0"]


def test_counts_are_by_home_pool_and_length_queue() -> None:
    room = WaitingRoom(ShortestFirst())
    room.add(entry("a", 50, 1))
    room.add(entry("b", 60, 2, "short"))
    room.add(entry("c", 500, 3))
    assert room.counts() == {("short", "small"): 2, ("short", "large"): 1}
    assert repr(room).startswith("<WaitingRoom 3 in 3 lanes")
