"""Residency that reads the caches of simulated engines."""

import pytest

from experiments.agents import baselines
from experiments.agents.baselines import LOOPS
from experiments.agents.closed_loop import MakeLoop, ProgramLoop, ProgramResult
from experiments.agents.exact_residency import ExactResidency
from serve_app.core.programs.program import Conversation
from serve_app.core.programs.residency import Residency
from serve_app.engines.model.model import EngineSequence
from serve_app.lab.simulation.simulation import SimulatedReplica, Timeline
from tests.builders import ManualDriver
from tests.core.programs.builders import fleet as scheduler_fleet
from tests.experiments import agents
from tests.experiments.agents import fleet, generated
from tests.lab.simulation.builders import plan

KV_TOKENS = 8_000
BLOCK = 16
GENERATED = generated(10, 11)


def blocks(first: int, tokens: int) -> tuple[int, ...]:
    return tuple(range(first, first + tokens // BLOCK))


class EngineWithResidency:
    """An engine, a replica of the same size, and the residency that compares them."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.engine = SimulatedReplica(
            plan("s1", "only", kv_tokens=KV_TOKENS, max_model_len=KV_TOKENS), self.timeline, lambda _: None
        )
        self.driver: ManualDriver = scheduler_fleet("s1", kv_tokens=KV_TOKENS)
        self.state = self.driver.scheduler.ledger["s1"]
        self.submitted: dict[str, tuple[int, ...]] = {}
        self.residency = ExactResidency(
            self.driver.scheduler.programs.capacity, {"s1": self.engine}, self.submitted
        )

    def compute(self, hashes: tuple[int, ...]) -> None:
        sequence = EngineSequence(
            str(hashes[0]), BLOCK * len(hashes) - 1, 1, self.timeline.now, block_hashes=hashes
        )
        self.engine.accept(sequence)
        self.timeline.run()

    def in_gap(self, session: str, hashes: tuple[int, ...]) -> Conversation:
        """Return a conversation whose last turn has ended on the replica."""
        self.submitted[session] = hashes
        made = Conversation("t1", session, 0.0, session=session, context_tokens=BLOCK * len(hashes))
        assert self.residency.locate(made) is None
        made.replica_id = "s1"
        self.compute(hashes)
        self.residency.of("s1").retire(made, made.context_tokens, 100.0)
        return made


def test_a_context_that_the_engine_has_evicted_is_on_no_replica() -> None:
    setup = EngineWithResidency()
    first, second = (setup.in_gap(name, blocks(at, 3_200)) for name, at in (("a", 0), ("b", 1_000)))
    setup.residency.evict(setup.state)
    assert first.replica_id == second.replica_id == "s1"
    # The model does not know of these tokens.
    setup.compute(blocks(5_000, 4_800))
    setup.residency.evict(setup.state)
    assert [first.replica_id, second.replica_id] == [None, "s1"]
    assert setup.residency.locate(first) is None


def test_a_context_of_which_the_end_is_evicted_needs_less_room() -> None:
    setup = EngineWithResidency()
    one = setup.in_gap("a", blocks(0, 6_400))
    before = setup.residency.room(setup.state, 1.0)
    setup.compute(blocks(5_000, 3_200))
    after = setup.residency.room(setup.state, 2.0)
    assert one.replica_id == "s1"
    assert after - before == pytest.approx(1_600, abs=2 * BLOCK)


def test_a_context_that_the_model_considers_evicted_is_found_if_its_room_is_free() -> None:
    setup = EngineWithResidency()
    one = setup.in_gap("a", blocks(0, 3_200))
    setup.residency.evict(setup.state)
    setup.residency.of("s1").remove(one)
    one.replica_id = None
    assert setup.residency.locate(one) == "s1"
    setup.residency.of("s1").admitted = KV_TOKENS - 3_000
    assert setup.residency.locate(one) is None


# Programs


def play(kv_tokens: int, loop: MakeLoop = LOOPS["exact-caches"], programs: int = 10) -> ProgramResult:
    return agents.play(GENERATED[:programs], loop=loop, fleet=fleet(kv_tokens, replicas=1), concurrency=8)


def test_in_a_large_cache_exact_knowledge_changes_nothing() -> None:
    exact = play(4_000_000, programs=5)
    assert exact.records == play(4_000_000, ProgramLoop, programs=5).records


class _Observer(ExactResidency):
    """Compares the model with the engines, and leaves it as it is."""

    believed = cached = 0.0

    def locate(self, conversation: Conversation) -> str | None:
        hashes, session = self._arrived.get(conversation.session), conversation.session
        self._arrived[session] = self._submitted[session]
        if hashes is not None and conversation.replica_id is not None:
            _Observer.believed += conversation.context_tokens
            _Observer.cached += self._cached("all-1", hashes) * conversation.context_tokens
        return conversation.replica_id

    room = Residency.room
    evict = Residency.evict


def test_the_model_agrees_with_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "ExactResidency", _Observer)
    small = play(300_000)
    assert small.prefill_tokens > 1.2 * small.ideal_prefill_tokens
    assert _Observer.cached == pytest.approx(_Observer.believed, rel=0.01)
