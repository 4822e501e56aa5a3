"""What does scheduling programs instead of requests gain for coding agents, and what does it cost others?

Plays recorded coding sessions in a closed loop: a turn starts when those before it have ended and its tools
have run, so a slow system sees fewer requests. Baselines get the same programs in the same order, on engines
with the same prefix cache (blocks, least recently used first, answers included).

The recorded file is not a part of the project. Without it, programs are generated from its percentiles, and
the rows say so.

Gaps longer than `max_gap_s` are cut, because most of a session's time is its user's: the time to completion
would consist of it, and engines would idle. `long gaps` plays them as recorded.

The cost of decisions is measured on a scheduler alone: the time of `handle` for the arrival, first token and
end of a turn, with many programs in a gap, over the same without programs.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from operator import call
from typing import Any

from experiments.agents.baselines import LOOPS
from experiments.agents.closed_loop import LoopSettings, ProgramLoop, play_programs
from experiments.agents.programs import (
    Program,
    generate_programs,
    load_programs,
    shuffled,
    with_gaps_up_to,
    within,
)
from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import TraceSource, file_source
from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core import events as ev
from serve_app.core.metrics.summary import Distribution
from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.core.settings import ProgramsSettings
from serve_app.core.settings_base import settings
from serve_app.errors import Outcome
from serve_app.lab.simulation.run import (
    ONE_POOL,
    Disclosure,
    EngineChanges,
    FleetSettings,
    at_rate,
    choose_trace,
    requests_of,
)
from serve_app.lab.simulation.simulation import SimulatedRequest
from serve_app.lab.workloads import TraceChoice, find_file
from serve_app.request import (
    ProgramHint,
    PromptShape,
    Request,
    RequestSpec,
    Submission,
    TurnEnd,
    Usage,
)

_RECORDED = "coding_agents.jsonl.gz"
_CONTEXT_TOKENS = 204_800


@settings
class Case:
    """Programs on a fleet.

    Attributes:
        count: number of programs in a run.
        max_gap_s: longest gap; None as recorded.
        policies: names in `AgentsSettings.policies`.
        seeds: number of runs, with the seeds 0, 1, ...
        beside_per_s: rate of interactive requests of the mix beside the programs; 0 for none.
    """

    profile: str
    kv_tokens: int
    policies: tuple[str, ...]
    replicas: int = 1
    concurrency: int = 16
    count: int = 40
    max_gap_s: float | None = 60.0
    seeds: int = 3
    tenants: int = 4
    beside_per_s: float = 0.0


@settings
class Policy:
    """The scheduler with changes to its settings, or a baseline.

    Attributes:
        baseline: name in `baselines.LOOPS`; None for the scheduler.
        states_ids: whether requests state their program and session; otherwise it must be recognised.
    """

    baseline: str | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    states_ids: bool = True


@settings
class AgentsSettings:
    """Settings of the experiment.

    Attributes:
        cases, policies: by their names in the tables.
        only: names of the cases to play; empty for all.
        count, concurrency: replace those of every case; None for their own.
        beside_requests: number of interactive requests beside programs.
        idle_programs: numbers of programs in a gap while the cost of decisions is measured.
    """

    cases: Mapping[str, Case]
    policies: Mapping[str, Policy]
    only: tuple[str, ...] = ()
    count: int | None = None
    concurrency: int | None = None
    beside_requests: int = 2_000
    idle_programs: tuple[int, ...] = (0, 10_000)
    timed_turns: int = 2_000


def play(given: AgentsSettings, context: Context) -> Iterator[Measurement]:
    """Measure every case with each of its policies, then the cost of decisions."""
    changes = {name: getattr(given, name) for name in ("count", "concurrency") if getattr(given, name)}
    cases = {
        name: replace(case, **changes)
        for name, case in given.cases.items()
        if not given.only or name in given.only
    }
    source = _source()
    cells = [
        Cell(
            key={"case": name, "policy": policy},
            runs=[
                partial(_figures, case, given.policies[policy], seed, given.beside_requests)
                for seed in range(case.seeds)
            ],
            seeds=range(case.seeds),
            traces=[source],
        )
        for name, case in cases.items()
        for policy in case.policies
    ]
    yield from play_cells("agents", cells, call, context)
    for programs in given.idle_programs:
        yield Measurement(
            key={"cost": "decisions", "programs": programs},
            figures={"us_per_turn": decision_us(programs, given.timed_turns)},
        )


def _source() -> TraceSource:
    file = find_file(_RECORDED)
    return TraceSource(name="coding-agents") if file is None else file_source(file)


def _programs(case: Case, seed: int) -> list[Program]:
    file = find_file(_RECORDED)
    drawn = generate_programs(4 * case.count, seed) if file is None else shuffled(load_programs(file), seed)
    # Chosen among those that fit, so that every run has as many.
    chosen = shuffled(within(drawn, min(_CONTEXT_TOKENS, case.kv_tokens)), seed, case.count)
    return chosen if case.max_gap_s is None else with_gaps_up_to(chosen, case.max_gap_s)


def _figures(case: Case, policy: Policy, seed: int, beside_requests: int) -> dict[str, float | None]:
    fleet = FleetSettings(
        profile=case.profile,
        replicas={ONE_POOL: case.replicas},
        engine=EngineChanges(kv_tokens=case.kv_tokens, max_model_len=_CONTEXT_TOKENS),
    )
    result = play_programs(
        LoopSettings(
            fleet=fleet,
            concurrency=case.concurrency,
            tenants=case.tenants,
            states_ids=policy.states_ids,
            scheduler=policy.scheduler,
        ),
        _programs(case, seed),
        list(_interactive(case, seed, beside_requests)),
        LOOPS[policy.baseline] if policy.baseline else ProgramLoop,
    )
    jct = Distribution.of(result.jct_s.values())
    ttft = result.summary.ttft_s.all
    others = Distribution.of(
        record.ttft_s
        for record in result.records
        if "#" not in record.request_id and record.ttft_s is not None
    )
    return {
        "jct_mean_s": jct.mean,
        "jct_p50_s": jct.p50,
        "jct_p99_s": jct.p99,
        "prefill_over_ideal": result.prefill_tokens / result.ideal_prefill_tokens,
        "hit_ratio": 1 - result.prefill_tokens / result.prompt_tokens,
        "ttft_p50_s": ttft.p50,
        "ttft_p99_s": ttft.p99,
        "max_wait_s": result.max_wait_s,
        "jain_tenants": result.summary.jain_tenants,
        "makespan_s": result.summary.makespan_s,
        "others_ttft_p50_s": others.p50,
        "others_ttft_p99_s": others.p99,
    }


def _interactive(case: Case, seed: int, requests: int) -> Iterator[SimulatedRequest]:
    if not case.beside_per_s:
        return
    choice = TraceChoice(name="paper-mix", requests=requests, priorities="interactive=1")
    trace = at_rate(choose_trace(choice, seed), case.beside_per_s)
    # They start once the programs are in progress.
    later = tuple(replace(one, arrival_s=one.arrival_s + 300.0) for one in trace.requests)
    yield from requests_of(replace(trace, requests=later), Disclosure(), 16)


# The cost of decisions


def decision_us(programs: int, turns: int) -> float:
    """Return the microseconds of one turn in the scheduler, with so many programs in a gap.

    With 0, the same requests are scheduled without their programs.
    """
    scheduler = _scheduler(enabled=programs > 0)
    now = 0.0
    for number in range(programs):
        now += 0.01
        _turn(scheduler, number, 0, now)
    best = float("inf")
    for attempt in range(3):
        began = time.perf_counter()
        for number in range(turns):
            now += 0.01
            _turn(scheduler, number, 1 + attempt, now)
        best = min(best, time.perf_counter() - began)
    return best / turns * 1e6


def _scheduler(*, enabled: bool) -> Scheduler:
    scheduler = Scheduler(SchedulerSettings(model="m", programs=ProgramsSettings(enabled=enabled)))
    for number in range(16):
        spec = ReplicaSpec(
            replica_id=f"r{number}",
            pool="short",
            max_model_len=_CONTEXT_TOKENS,
            kv_tokens=1_600_000,
            max_num_seqs=256,
        )
        scheduler.handle(ev.ReplicaJoined(spec), 0.0)
    return scheduler


def _turn(scheduler: Scheduler, number: int, turn: int, now: float) -> None:
    if number % 50 == 0:
        for replica in range(16):
            report = ReplicaReport(received=None, waiting=0, running=0, kv_usage_ratio=0.1)
            scheduler.handle(ev.ReplicaReported(f"r{replica}", report), now)
    request_id = f"p{number}/{turn}"
    prompt = 2_000 + 500 * turn
    # As many blocks of 128 tokens as the prompt has.
    prefix = tuple(hash((number, place)) for place in range(prompt // 128))
    submission = Submission(
        request_id=request_id,
        spec=RequestSpec(
            model="m", shape=PromptShape(text_bytes=0, prompt_tokens=prompt, messages=2 + 2 * turn)
        ),
        prefix=prefix,
        program=ProgramHint(session=f"p{number}"),
    )
    scheduler.handle(ev.Arrived(Request(submission=submission, gateway_id="g", arrived_at=now)), now)
    scheduler.handle(ev.FirstToken(request_id), now)
    usage = Usage(prompt_tokens=prompt, output_tokens=200, ending=TurnEnd.TOOLS)
    scheduler.handle(ev.Finished(request_id, Outcome.COMPLETED, usage), now)


EXPERIMENT = Experiment(settings=AgentsSettings, play=play)
