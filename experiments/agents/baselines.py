"""Systems that the program scheduler is compared with, as closed loops.

- `round-robin`, `least-load`, `session-hash`, `kv-overlap`: routers without a scheduler.
- `tool-pause`: pauses programs between two turns, see `ToolPause`.
- `oracle`: admits only as many programs as fit, and knows how large they will become, see `Fits`.
- `exact-caches`: the program scheduler with the true contents of the caches, see `ExactResidency`.

The last two need knowledge that no gateway has.
"""

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments.agents.closed_loop import LoopSettings, MakeLoop, ProgramLoop, ProgramRun
from experiments.agents.exact_residency import ExactResidency
from experiments.agents.programs import BLOCK_TOKENS, Program
from experiments.common.load_balancers import RoundRobin
from serve_app.core.metrics.record import RequestRecord
from serve_app.lab.simulation.run import DirectSimulation
from serve_app.lab.simulation.simulation import (
    Phase,
    ReplicaPlan,
    SimulatedReplica,
    SimulatedRequest,
    Simulation,
)
from serve_app.lab.workloads import engine_blocks

# Routers


class SessionHash(DirectSimulation):
    """The engine of the session's hash, whatever its load."""

    def choose(self, able: Sequence[SimulatedReplica], simulated: SimulatedRequest) -> SimulatedReplica:
        """Return the engine of the session."""
        hint = simulated.request.submission.program
        return able[zlib.crc32((hint.session if hint else "").encode()) % len(able)]


class KvOverlap(DirectSimulation):
    """The least `prefill blocks + active blocks`, including the request's own blocks that are not cached.

    This is Dynamo's router, with its default weight of the overlap (1.0) and temperature (0):
    https://docs.nvidia.com/dynamo/latest/components/router/README.html. It learns cached blocks from events
    of the engines; here it reads them from the engines themselves, without delay.
    """

    def choose(self, able: Sequence[SimulatedReplica], simulated: SimulatedRequest) -> SimulatedReplica:
        """Return the engine with the lowest cost."""
        return min(self.in_turn(able), key=lambda replica: self._cost(replica, simulated))

    def _cost(self, replica: SimulatedReplica, simulated: SimulatedRequest) -> int:
        """Return the tokens to prefill and the tokens in use on an engine, with this request."""
        prompt_tokens, block_size = simulated.prompt_tokens, replica.model.settings.block_size
        prompt_blocks = simulated.block_hashes[: prompt_tokens // block_size]
        prefill = prompt_tokens - block_size * replica.model.cached_blocks(prompt_blocks)
        active = prompt_tokens
        for other, where in self.live.values():
            if where is replica and other.sequence is not None:
                active += other.prompt_tokens
                if other.sequence.first_token_at is None:
                    prefill += other.prompt_tokens - other.sequence.computed_tokens
        return prefill + active


class _Routed(ProgramLoop):
    """Turns go to a router."""

    def __init__(self, router: type[DirectSimulation], *args: Any) -> None:
        self._router = router
        super().__init__(*args)

    def system(self, plans: Sequence[ReplicaPlan]) -> DirectSimulation:
        """Return the router."""
        return self._router(plans, on_end=self.on_end)


# Gates: which programs may start their next turn, and on which engine


class GatedRun(ProgramRun):
    """A program behind a gate.

    Attributes:
        running: indices of its turns in progress.
        due_at: time at which its next turn was due; only meaningful while one waits.
    """

    def __init__(self, program: Program, number: int, tenant: str, started_at: float) -> None:
        super().__init__(program, number, tenant, started_at)
        self.due_at = started_at
        self.running: set[int] = set()
        self._contexts: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        """Its working set: the last contexts of all its conversations, in tokens."""
        return sum(self._contexts.values()) or self.program.turns[0].prompt_tokens

    @property
    def largest_tokens(self) -> int:
        """Its largest working set, if all conversations are as long as they become."""
        longest: dict[int, int] = {}
        for turn in self.program.turns:
            tokens = turn.prompt_tokens + turn.output_tokens
            longest[turn.session] = max(longest.get(turn.session, 0), tokens)
        return sum(longest.values())

    def on_start(self, index: int) -> int:
        """Record the context of the turn as well."""
        turn = self.program.turns[index]
        self.running.add(index)
        self._contexts[turn.session] = turn.prompt_tokens + turn.output_tokens
        return super().on_start(index)

    def on_end(self, index: int, now: float) -> None:
        """Record the end of a turn."""
        self.running.discard(index)
        super().on_end(index, now)


class Fits:
    """The oracle: a program runs on one engine to its end, and starts when its largest working set fits."""

    def __init__(self, plans: Sequence[ReplicaPlan]) -> None:
        self._free = {plan.replica_id: float(plan.engine.kv_tokens) for plan in plans}
        self._held: dict[GatedRun, tuple[str, int]] = {}

    def place(self, run: GatedRun, now: float) -> str | None:
        """Admit a program if any engine has room for its largest working set."""
        del now
        if run not in self._held:
            emptiest = max(self._free, key=lambda name: self._free[name])
            tokens = run.largest_tokens
            is_idle = all(where != emptiest for where, _ in self._held.values())
            if tokens > self._free[emptiest] and not is_idle:
                return None
            self._free[emptiest] -= tokens
            self._held[run] = emptiest, tokens
        return self._held[run][0]

    def on_turn_end(self, run: GatedRun) -> None:
        """Release what a completed program held."""
        if run.is_over:
            where, tokens = self._held.pop(run)
            self._free[where] += tokens


class ToolPause:
    """ThunderAgent's rule: pause programs between turns while the working sets exceed the cache.

    Above 95 % of an engine's KV cache, programs without a turn in progress are paused, the largest first,
    down to 80 %. A paused or new program starts its next turn where it fits below 85 %, or after 30 minutes.

    Source: arXiv 2602.13692, with the thresholds of
    https://docs.nvidia.com/dynamo/dev/components/thunder-agent-scheduler. Here the rule is applied at each
    start and end of a turn instead of every five seconds.
    """

    _PAUSE, _TARGET, _RESUME, _TIMEOUT_S = 0.95, 0.80, 0.85, 1_800.0

    def __init__(self, plans: Sequence[ReplicaPlan]) -> None:
        self._capacity = {plan.replica_id: plan.engine.kv_tokens for plan in plans}
        self._on: dict[str, set[GatedRun]] = {plan.replica_id: set() for plan in plans}

    def place(self, run: GatedRun, now: float) -> str | None:
        """Resume a program on the least used engine if it fits there."""
        for name, runs in self._on.items():
            if run in runs:
                return name
        name = min(self._on, key=lambda one: self._use(one) / self._capacity[one])
        fits = self._use(name) + run.tokens <= self._RESUME * self._capacity[name]
        if not (fits or not self._on[name] or now - run.due_at >= self._TIMEOUT_S):
            return None
        self._on[name].add(run)
        return name

    def on_turn_end(self, run: GatedRun) -> None:
        """Pause programs on the engine if it has too many."""
        name = next(one for one, runs in self._on.items() if run in runs)
        if run.is_over:
            self._on[name].remove(run)
        if self._use(name) <= self._PAUSE * self._capacity[name]:
            return
        idle = (one for one in self._on[name] if not one.running)
        for one in sorted(idle, key=lambda each: (-each.tokens, each.number)):
            if self._use(name) <= self._TARGET * self._capacity[name]:
                break
            self._on[name].remove(one)

    def _use(self, name: str) -> int:
        return sum(run.tokens for run in self._on[name])


class _Gated(ProgramLoop):
    """Turns wait at a gate."""

    run_type = GatedRun

    def __init__(
        self,
        gate: type[ToolPause | Fits],
        settings: LoopSettings,
        programs: Sequence[Program],
        plans: Sequence[ReplicaPlan],
    ) -> None:
        super().__init__(settings, programs, plans)
        self._gate = gate(plans)
        self._waiting: list[tuple[float, GatedRun, int]] = []

    def system(self, plans: Sequence[ReplicaPlan]) -> DirectSimulation:
        """Return engines without a scheduler."""
        return DirectSimulation(plans, on_end=self.on_end)

    def on_due(self, run: ProgramRun, index: int, due_at: float) -> None:
        """Let a turn arrive at its time; the gate decides then whether it starts."""
        assert isinstance(run, GatedRun)
        self.timeline.schedule(due_at, Phase.ARRIVAL, lambda: self._arrive(run, index))

    def on_turn_end(self, run: ProgramRun) -> None:
        """Notify the gate."""
        assert isinstance(run, GatedRun)
        self._gate.on_turn_end(run)

    def on_end(self, simulated: SimulatedRequest, record: RequestRecord) -> None:
        """Open the gate after the end of a turn."""
        super().on_end(simulated, record)
        self._open()

    def _arrive(self, run: GatedRun, index: int) -> None:
        run.due_at = self.timeline.now
        self._waiting.append((self.timeline.now, run, index))
        self._open()

    def _open(self) -> None:
        left = []
        for due_at, run, index in sorted(self._waiting, key=lambda one: (one[1].tokens, one[0])):
            replica_id = self._gate.place(run, self.timeline.now)
            if replica_id is None:
                left.append((due_at, run, index))
            else:
                self.submit(run, index, due_at, replica_id)
        self._waiting = left


class ExactCachesLoop(ProgramLoop):
    """The program scheduler with the true contents of the caches."""

    def __init__(
        self, settings: LoopSettings, programs: Sequence[Program], plans: Sequence[ReplicaPlan]
    ) -> None:
        # Block hashes of the latest turn of each session.
        self._submitted: dict[str, Sequence[int]] = {}
        super().__init__(settings, programs, plans)

    def system(self, plans: Sequence[ReplicaPlan]) -> Simulation | DirectSimulation:
        """Return a simulation whose scheduler reads the caches of its engines."""
        simulation = super().system(plans)
        assert isinstance(simulation, Simulation)
        programs = simulation.scheduler.programs
        programs.residency = ExactResidency(programs.capacity, simulation.replicas, self._submitted)
        return simulation

    def submit(self, run: ProgramRun, index: int, due_at: float, replica_id: str | None = None) -> None:
        """Remember the block hashes of prompt and answer."""
        turn = run.program.turns[index]
        tokens = turn.prompt_tokens + turn.output_tokens
        hashes = tuple(engine_blocks(run.ids[index], BLOCK_TOKENS, tokens, self._block_size))
        self._submitted[run.hint(index).session] = hashes
        super().submit(run, index, due_at, replica_id)


LOOPS: Mapping[str, MakeLoop] = {
    "round-robin": partial(_Routed, RoundRobin),
    "least-load": partial(_Routed, DirectSimulation),
    "session-hash": partial(_Routed, SessionHash),
    "kv-overlap": partial(_Routed, KvOverlap),
    "tool-pause": partial(_Gated, ToolPause),
    "oracle": partial(_Gated, Fits),
    "exact-caches": ExactCachesLoop,
}
"""All of them by name."""
