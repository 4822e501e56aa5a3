"""Closed-loop simulation of agent programs with the scheduler.

`concurrency` programs are in progress at any time; the end of one starts the next. A turn arrives when the
turns before it have ended and its gap has passed. `baselines` has other systems as subclasses of
`ProgramLoop`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from experiments.agents.programs import BLOCK_TOKENS, Program
from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Summary, summarise
from serve_app.lab.simulation.run import MODEL, DirectSimulation, FleetSettings, scheduler_settings
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation, Timeline
from serve_app.lab.workloads import engine_blocks, gateway_blocks
from serve_app.request import ProgramHint, PromptShape, Request, RequestSpec, Submission


class ProgramRun:
    """One program in progress, with the number that it has in the run."""

    def __init__(self, program: Program, number: int, tenant: str, started_at: float) -> None:
        self.program = program
        self.number = number
        self.tenant = tenant
        self.started_at = started_at
        self.ended: dict[int, float] = {}
        self.ids = program.block_ids(number)
        self._messages: dict[int, int] = {}

    @property
    def is_over(self) -> bool:
        """True if all of its turns have ended."""
        return len(self.ended) == len(self.program.turns)

    def due(self, after: int | None) -> list[tuple[int, float]]:
        """Return the turns that become due when a turn ends (None: at the start), with their times."""
        found = []
        for index, turn in enumerate(self.program.turns):
            is_next = not turn.after if after is None else after in turn.after
            if is_next and index not in self.ended and all(one in self.ended for one in turn.after):
                start = max((self.ended[one] for one in turn.after), default=self.started_at)
                found.append((index, start + turn.gap_s))
        return found

    def on_start(self, index: int) -> int:
        """Record that a turn starts. Return the number of messages in its prompt."""
        turn = self.program.turns[index]
        kept = turn.known and 2 * turn.known >= len(self.ids[turn.source])
        self._messages[turn.session] = 2 + (self._messages.get(turn.session, 0) if kept else 0)
        return self._messages[turn.session]

    def on_end(self, index: int, now: float) -> None:
        """Record the end of a turn."""
        self.ended[index] = now

    def hint(self, index: int) -> ProgramHint:
        """Return the ids that a client could state."""
        session, name = self.program.turns[index].session, f"{self.program.name}#{self.number}"
        parent = self.program.parent(session)
        return ProgramHint(
            session=f"{name}/{session}", program=name, parent=None if parent is None else f"{name}/{parent}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of a run of programs.

    Attributes:
        concurrency: number of programs in progress.
        tenants: number of tenants, to which the programs are assigned in turn.
        states_ids: whether requests state their program and session; otherwise it must be recognised.
        scheduler: settings that differ from the defaults, by dotted path.
    """

    fleet: FleetSettings
    concurrency: int = 16
    tenants: int = 1
    states_ids: bool = True
    scheduler: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Result of a run of programs.

    Attributes:
        records: all requests, in the order of their ends.
        summary: figures of the requests of programs.
        jct_s: time from the start of each program to the end of its last turn, by its number.
        prefill_tokens: prompt tokens that the engines computed, including those computed again.
        ideal_prefill_tokens: the same if nothing were ever evicted.
        prompt_tokens: prompt tokens of all turns.
        max_wait_s: longest time from the arrival of a turn to its dispatch.
    """

    records: list[RequestRecord]
    summary: Summary
    jct_s: dict[int, float]
    prefill_tokens: int
    ideal_prefill_tokens: int
    prompt_tokens: int
    max_wait_s: float


class ProgramLoop:
    """The closed loop of a run. Subclasses play other systems."""

    run_type: ClassVar[type[ProgramRun]] = ProgramRun

    def __init__(
        self, settings: LoopSettings, programs: Sequence[Program], plans: Sequence[ReplicaPlan]
    ) -> None:
        self._settings = settings
        self._programs = programs
        self._block_size = plans[0].engine.block_size
        self._next = 0
        self._turns: dict[str, tuple[ProgramRun, int, float]] = {}
        self.jct_s: dict[int, float] = {}
        self.max_wait_s = 0.0
        self.simulation = self.system(plans)

    def system(self, plans: Sequence[ReplicaPlan]) -> Simulation | DirectSimulation:
        """Return the system that serves the programs, which calls `on_end` at the end of each request."""
        settings = self._settings
        scheduler = scheduler_settings("ewsjf", settings.fleet.routing, settings.scheduler)
        return Simulation(scheduler, plans, on_end=self.on_end)

    @property
    def timeline(self) -> Timeline:
        """The clock of the run."""
        return self.simulation.timeline

    def run(self, others: Sequence[SimulatedRequest]) -> list[RequestRecord]:
        """Play all programs and other requests to their ends."""
        for _ in range(min(self._settings.concurrency, len(self._programs))):
            self._start_next()
        return self.simulation.run(others)

    def _start_next(self) -> None:
        number = self._next
        if number == len(self._programs):
            return
        self._next += 1
        tenant = f"tenant-{1 + number % self._settings.tenants}"
        # Programs do not start in the same instant: a second lies between two of them.
        first_at = float(number) if number < self._settings.concurrency else self.timeline.now
        run = self.run_type(self._programs[number], number, tenant, first_at)
        for index, due_at in run.due(None):
            self.on_due(run, index, due_at)

    def on_due(self, run: ProgramRun, index: int, due_at: float) -> None:
        """Let a turn arrive at its time."""
        self.submit(run, index, due_at)

    def submit(self, run: ProgramRun, index: int, due_at: float, replica_id: str | None = None) -> None:
        """Submit a turn to the system, and to one engine only if its replica is given."""
        turn, ids = run.program.turns[index], run.ids[index]
        messages = run.on_start(index)
        request_id = f"{run.program.name}#{run.number}/{index}"
        submission = Submission(
            request_id=request_id,
            spec=RequestSpec(
                model=MODEL,
                shape=PromptShape(text_bytes=0, prompt_tokens=turn.prompt_tokens, messages=messages),
                streamed=True,
            ),
            tenant=run.tenant,
            prefix=tuple(gateway_blocks(ids, BLOCK_TOKENS, turn.prompt_tokens)),
            bound_to=replica_id,
            program=run.hint(index) if self._settings.states_ids else None,
        )
        tokens = turn.prompt_tokens + turn.output_tokens
        self._turns[request_id] = run, index, due_at
        self.simulation.submit(
            SimulatedRequest(
                Request(submission=submission, gateway_id="g1", arrived_at=due_at),
                output_tokens=turn.output_tokens,
                block_hashes=tuple(engine_blocks(ids, BLOCK_TOKENS, tokens, self._block_size)),
                ending=turn.ending,
            )
        )

    def on_end(self, simulated: SimulatedRequest, _record: RequestRecord) -> None:
        """Process the end of a turn, which makes others due. Ignore requests without a program."""
        found = self._turns.pop(simulated.request.request_id, None)
        if found is None:
            return
        run, index, due_at = found
        now = self.timeline.now
        if simulated.sequence is not None:
            at = simulated.dispatched_at
            dispatched_at = simulated.sequence.arrived_at if at is None else at
            self.max_wait_s = max(self.max_wait_s, dispatched_at - due_at)
        run.on_end(index, now)
        self.on_turn_end(run)
        for following, at in run.due(index):
            self.on_due(run, following, at)
        if run.is_over:
            self.jct_s[run.number] = now - run.started_at
            self._start_next()

    def on_turn_end(self, run: ProgramRun) -> None:
        """Observe the end of a turn, before the next ones are due."""


MakeLoop = Callable[[LoopSettings, Sequence[Program], Sequence[ReplicaPlan]], ProgramLoop]


def play_programs(
    settings: LoopSettings,
    programs: Sequence[Program],
    others: Sequence[SimulatedRequest] = (),
    loop: MakeLoop = ProgramLoop,
) -> ProgramResult:
    """Play programs to their end.

    Args:
        others: requests without a program and without cached prefixes, which are served beside them.
        loop: closed loop, with the system that serves the programs.
    """
    play = loop(settings, programs, settings.fleet.plans())
    records = play.run(others)
    simulated = play.simulation.replicas
    replicas = list(simulated.values()) if isinstance(simulated, dict) else simulated
    return ProgramResult(
        records=records,
        summary=summarise([record for record in records if "#" in record.request_id]),
        jct_s=play.jct_s,
        prefill_tokens=sum(replica.prefilled_tokens for replica in replicas)
        - sum(one.prompt_tokens for one in others),
        ideal_prefill_tokens=sum(sum(one.ideal_prefills()) for one in programs),
        prompt_tokens=sum(turn.prompt_tokens for one in programs for turn in one.turns),
        max_wait_s=play.max_wait_s,
    )
