"""Closed-loop simulation of agent programs, with the scheduler or with a baseline.

`concurrency` programs are in progress at any time; the end of one starts the next. A turn arrives when the
turns before it have ended and its gap has passed.

There are two baselines: `direct` has no scheduler, and `prefix-affinity` is the scheduler without its
knowledge of programs. Any other name is a policy of the scheduler. `experiments/agents/baselines.py` has
further baselines as subclasses of `ProgramLoop`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from serve_app.core.metrics.record import RequestRecord
from serve_app.core.metrics.summary import Distribution, Summary, SummaryRules, percentile, summarise
from serve_app.core.settings_base import POSITIVE, at_least, settings
from serve_app.engines.model.step_time import attended_pairs
from serve_app.errors import SettingsError
from serve_app.lab.simulation.baselines import SIMULATED_POLICIES
from serve_app.lab.simulation.direct import DirectSimulation
from serve_app.lab.simulation.fleet import FleetSettings
from serve_app.lab.simulation.run import DIRECT, ORACLE, SloByLength
from serve_app.lab.simulation.scheduler_settings import scheduler_settings
from serve_app.lab.simulation.simulation import (
    ReplicaPlan,
    SimulatedRequest,
    Simulation,
    SimulationSettings,
    Timeline,
)
from serve_app.lab.simulation.workload import MODEL
from serve_app.lab.workloads.blocks import engine_blocks, gateway_blocks
from serve_app.lab.workloads.catalog import find_file
from serve_app.lab.workloads.programs import BLOCK_TOKENS, Program, Programs, generate_programs, load_programs
from serve_app.request import ProgramHint, PromptShape, Request, RequestSpec, Submission

PREFIX_AFFINITY = "prefix-affinity"
PROGRAM_POLICIES = (DIRECT, PREFIX_AFFINITY, *(name for name in SIMULATED_POLICIES if name != ORACLE))
"""All policies that can play programs. The oracle does not know the answers of programs."""


# The closed loop


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


@settings
class ProgramSettings:
    """All inputs of a run of programs.

    Attributes:
        concurrency: number of programs in progress.
        tenants: number of tenants, to which the programs are assigned in turn.
        states_ids: whether requests state their program and session; otherwise it must be recognised.
        scheduler: settings that differ from the defaults, by dotted path.
    """

    policy: str
    fleet: FleetSettings
    concurrency: Annotated[int, at_least(1)] = 16
    tenants: Annotated[int, at_least(1)] = 1
    states_ids: bool = True
    seed: int = 0
    scheduler: Mapping[str, object] = field(default_factory=dict)
    report_interval_s: Annotated[float, POSITIVE] = 0.2
    label: str = ""

    def __post_init__(self) -> None:
        if self.policy not in PROGRAM_POLICIES:
            names = ", ".join(PROGRAM_POLICIES)
            raise SettingsError(f"no policy {self.policy!r} for programs: choose one of {names}")

    @property
    def name(self) -> str:
        """Name of the policy in results."""
        return self.label or self.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramChoice:
    """Choice of programs.

    Attributes:
        name: a file, or `coding-agents`: recorded sessions if their file is in a folder of traces, otherwise
            generated ones.
        count: number of programs; None for all of a file, or the generator's default.
        max_gap_s: longest gap; None for no limit.
        folder: folder of trace files; None for the default folders.
    """

    name: str
    count: int | None = None
    max_gap_s: float | None = None
    folder: Path | None = None

    @property
    def file(self) -> Path | None:
        """The file to read; None if the programs are generated."""
        return find_file(_RECORDED, self.folder) if self.name == CODING_AGENTS else Path(self.name)


CODING_AGENTS = "coding-agents"
_RECORDED = "coding_agents.jsonl.gz"
_GENERATED_COUNT = 64


def choose_programs(choice: ProgramChoice, seed: int) -> Programs:
    """Return the programs of one seed, in the order in which they start.

    Raises:
        TraceError: there is no such file, or it cannot be read.
    """
    if choice.file is None:
        found = generate_programs(choice.count or _GENERATED_COUNT, seed)
    else:
        found = load_programs(choice.file).shuffled(seed, choice.count)
    return found if choice.max_gap_s is None else found.with_gaps_up_to(choice.max_gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Result of a run of programs.

    Attributes:
        records: all requests, in the order of their ends.
        summary: figures of the requests of programs.
        jct_s: time from the start of each program to the end of its last turn, by its number.
        slowdown: the same over the time that the program would take alone on an idle engine.
        prefill_tokens: prompt tokens that the engines computed, including those computed again.
        ideal_prefill_tokens: the same if nothing were ever evicted.
        prompt_tokens: prompt tokens of all turns.
        max_wait_s: longest time from the arrival of a turn to its dispatch.
    """

    settings: ProgramSettings
    programs: Programs
    records: list[RequestRecord]
    summary: Summary
    jct_s: dict[int, float]
    slowdown: dict[int, float]
    prefill_tokens: int
    ideal_prefill_tokens: int
    prompt_tokens: int
    max_wait_s: float

    def as_json(self) -> dict[str, object]:
        """Return `metrics.programs` of a run in the JSON output."""
        return {
            "completed": len(self.jct_s),
            "jct_s": _figures(self.jct_s.values()),
            "slowdown": _figures(self.slowdown.values()),
            "prefill_tokens": self.prefill_tokens,
            "ideal_prefill_tokens": self.ideal_prefill_tokens,
            "prompt_tokens": self.prompt_tokens,
            "hit_ratio": 1 - self.prefill_tokens / self.prompt_tokens,
            "max_wait_s": self.max_wait_s,
        }


def _figures(values: Iterable[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    p90 = percentile(ordered, 90) if ordered else None
    return {**Distribution.of(ordered).as_json(), "p90": p90}


def alone_times(programs: Programs, plan: ReplicaPlan) -> list[float]:
    """Return the seconds that each program takes alone on an idle engine that never evicts anything."""
    return [_alone_s(program, plan) for program in programs.programs]


def _alone_s(program: Program, plan: ReplicaPlan) -> float:
    ended: list[float] = []
    for turn, computed in zip(program.turns, program.ideal_prefills(), strict=True):
        cached, seconds = turn.prompt_tokens - computed, 0.0
        for start in range(cached, turn.prompt_tokens, plan.engine.max_num_batched_tokens):
            chunk = min(plan.engine.max_num_batched_tokens, turn.prompt_tokens - start)
            pairs = attended_pairs(start, chunk)
            seconds += plan.step_time.step_s(prefill_tokens=chunk, attended_pairs=pairs)
        decoding = turn.output_tokens - 1
        seconds += plan.step_time.decode_run_s(decoding, sequences=1, context_tokens=turn.prompt_tokens)
        ended.append(max((ended[one] for one in turn.after), default=0.0) + turn.gap_s + seconds)
    return max(ended)


class ProgramLoop:
    """The closed loop of a run. Subclasses play other systems."""

    run_type: ClassVar[type[ProgramRun]] = ProgramRun

    def __init__(self, settings: ProgramSettings, programs: Programs, plans: Sequence[ReplicaPlan]) -> None:
        self._settings = settings
        self._programs = programs.programs
        self._block_size = plans[0].engine.block_size
        self._next = 0
        self._turns: dict[str, tuple[ProgramRun, int, float]] = {}
        self.jct_s: dict[int, float] = {}
        self.max_wait_s = 0.0
        self.simulation = self.system(plans)

    def system(self, plans: Sequence[ReplicaPlan]) -> Simulation | DirectSimulation:
        """Return the system that serves the programs, which calls `on_end` at the end of each request."""
        if self._settings.policy == DIRECT:
            return DirectSimulation(plans, on_end=self.on_end)
        return self.scheduled(plans)

    def scheduled(self, plans: Sequence[ReplicaPlan]) -> Simulation:
        """Return the simulation of the scheduler."""
        settings, policy, changes = self._settings, self._settings.policy, dict(self._settings.scheduler)
        if policy == PREFIX_AFFINITY:
            policy, changes = "ewsjf", {**changes, "programs.enabled": False}
        scheduler = scheduler_settings(policy, settings.fleet.routing, changes)
        environment = SimulationSettings(
            report_interval_s=settings.report_interval_s, reports_when_idle=False
        )
        return Simulation(scheduler, plans, environment, on_end=self.on_end)

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


def play_programs(
    settings: ProgramSettings,
    programs: Programs,
    others: Sequence[SimulatedRequest] = (),
    loop: type[ProgramLoop] = ProgramLoop,
) -> ProgramResult:
    """Play programs to their end.

    Args:
        others: requests without a program and without cached prefixes, which are served beside them.
        loop: closed loop, with the system that serves the programs.

    Raises:
        SettingsError: a setting is unknown or out of range.
        TraceError: no program fits the engines.
    """
    plans = settings.fleet.plans()
    programs = programs.within(min(plan.engine.max_model_len for plan in plans))
    play = loop(settings, programs, plans)
    records = play.run(others)
    of_programs = [record for record in records if "#" in record.request_id]
    alone_s = alone_times(programs, plans[0])
    simulated = play.simulation.replicas
    replicas = list(simulated.values()) if isinstance(simulated, dict) else simulated
    return ProgramResult(
        settings=settings,
        programs=programs,
        records=records,
        summary=summarise(of_programs, SummaryRules(slo=SloByLength())),
        jct_s=play.jct_s,
        slowdown={number: jct_s / alone_s[number] for number, jct_s in play.jct_s.items()},
        prefill_tokens=sum(replica.prefilled_tokens for replica in replicas)
        - sum(one.counted_tokens for one in others),
        ideal_prefill_tokens=sum(sum(one.ideal_prefills()) for one in programs.programs),
        prompt_tokens=sum(turn.prompt_tokens for one in programs.programs for turn in one.turns),
        max_wait_s=play.max_wait_s,
    )
