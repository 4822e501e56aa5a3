"""Reference decisions: the commands of fourteen small simulations, each as one hash.

A change of the structure must leave all of them; one that means to change decisions writes new hashes, and
says why. `scripts/decisions` compares and writes them. Times are rounded to microseconds and other numbers to
six digits, so that machines with other floating-point units agree. Fields of commands are named here one by
one, so that a new field changes no hash.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core import events as ev
from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.decision_log import Decision
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.routing.replica import ReplicaSpec
from serve_app.core.settings import QueueTimeouts
from serve_app.errors import Outcome
from serve_app.lab.simulation.simulation import ReplicaPlan, SimulatedRequest, Simulation
from serve_app.request import LatencyTarget, PriorityClass, ProgramHint, Usage
from serve_app.tuning import LearnedPartitions, StrategicSettings
from tests.builders import key, report, request, spec
from tests.lab.simulation.builders import STEP_TIME, plan

HASHES = Path(__file__).with_suffix(".json")
_FIELDS = (
    *("request_id", "replica_id", "pool", "length_queue", "estimated_tokens", "queue_wait_s", "passed"),
    *("engine_priority", "rate_limits", "waited", "conclusion", "dispatched", "age_s", "silent_s"),
    "context_tokens",
)
_KEYS = (
    key("k0", weight=2.0, requests_per_minute=200),
    key("k1", tokens_per_minute=20_000),
    key("k2", concurrent=2),
    key("k3", queued=1),
)
_SHORT = [plan("s1", "short", max_model_len=1_000), plan("s2", "short", max_model_len=1_000)]
_LONG = [plan("l1", "long", max_model_len=4_000)]
_ONE = [plan("a", "only", max_model_len=4_000), plan("b", "only", max_model_len=4_000)]
_MID = [plan("m1", "mid", max_model_len=2_000)]
_ONE_POOL = RoutingSettings(pools=("only",))
_TWO_POOLS = RoutingSettings(b_short_tokens=600)
_THREE_POOLS = RoutingSettings(pools=("short", "mid", "long"), b_short_tokens=600)


def _traffic(
    seed: int, rate_per_s: float, fields: Callable[[int, random.Random], Mapping[str, Any]] | None = None
) -> list[SimulatedRequest]:
    """Return requests of three tenants: mostly short, some long."""
    rng, now, made = random.Random(seed), 0.0, []
    for number in range(400):
        now += rng.expovariate(rate_per_s)
        prompt = rng.randint(16, 300) if rng.random() < 0.8 else rng.randint(600, 3_000)
        stated: dict[str, Any] = {
            "tenant": f"t{rng.randint(0, 2)}",
            "text_bytes": prompt * rng.randint(3, 5),
            "arrived_at": now,
            "expires_at": now + 20.0,
        }
        stated |= fields(number, rng) if fields is not None else {}
        output = rng.randint(1, 120)
        made.append(
            SimulatedRequest(
                request(f"r{number}", prompt_tokens=prompt, max_output_tokens=150, **stated),
                output_tokens=output,
            )
        )
    return made


def _simulated(
    plans: Sequence[ReplicaPlan],
    requests: list[SimulatedRequest],
    routing: RoutingSettings,
    *,
    learns: bool = False,
    **settings: Any,
) -> Iterator[Decision]:
    log: list[Decision] = []
    learner = LearnedPartitions(StrategicSettings(window=50)).learner() if learns else None
    made = SchedulerSettings(
        model="m", routing=routing, queue_timeout_s=QueueTimeouts(default=20.0), max_waiting=60, **settings
    )
    Simulation(made, plans, on_decision=log.append, learner=learner).run(requests)
    return iter(log)


def _storm() -> Iterator[Decision]:
    """Feed random events to replicas that fail in all ways, come and go."""
    rng, now = random.Random(14), 0.0
    scheduler = Scheduler(SchedulerSettings(model="m", routing=_TWO_POOLS))
    replicas = [spec("s1"), spec("s2"), spec("l1", "long", max_model_len=4_000)]
    running: dict[str, str] = {}
    events: list[ev.Event] = [ev.ReplicaJoined(each) for each in replicas]
    for number in range(3_000):
        now += rng.expovariate(20.0)
        events.append(_random_event(number, now, rng, running, replicas))
        for event in events:
            commands = tuple(scheduler.handle(event, now))
            for command in commands:
                if isinstance(command, Dispatch):
                    running[command.request_id] = command.replica_id
            yield Decision(now, event, commands)
        events.clear()


def _random_event(
    number: int, now: float, rng: random.Random, running: dict[str, str], replicas: list[ReplicaSpec]
) -> ev.Event:
    chance, replica = rng.random(), rng.choice(replicas)
    if chance < 0.35:
        prompt = rng.choice((40, 300, 900, 2_500))
        return ev.Arrived(request(f"r{number}", prompt_tokens=prompt, arrived_at=now, expires_at=now + 30.0))
    if chance < 0.7 and running:
        request_id = rng.choice(sorted(running))
        if chance < 0.5:
            return ev.FirstToken(request_id)
        replica_id = running.pop(request_id)
        if chance < 0.6:
            return ev.Finished(request_id, Outcome.COMPLETED, Usage(prompt_tokens=50, output_tokens=9))
        return ev.DispatchFailed(request_id, replica_id, rng.choice(list(ev.DispatchFailure)), "it failed")
    if chance < 0.71:
        return ev.ReplicaLost(replica.replica_id)
    if chance < 0.75:
        return ev.ReplicaJoined(replica)
    held = sum(each == replica.replica_id for each in running.values())
    return ev.ReplicaReported(replica.replica_id, report(received=None, running=held))


def _classes(number: int, rng: random.Random) -> Mapping[str, Any]:
    batch = number % 2 == 0
    return {
        "priority": PriorityClass.BATCH if batch else rng.choice(tuple(PriorityClass)),
        "revocable": batch,
        "expires_at": float("inf") if batch else 1e6,
    }


def _program(number: int, _: random.Random) -> Mapping[str, Any]:
    session = number % 12
    blocks = tuple(range(session * 1_000, session * 1_000 + 1 + number // 12))
    return {"program": ProgramHint(session=f"p{session}"), "prefix": blocks, "messages": 2}


def _key(number: int, _: random.Random) -> Mapping[str, Any]:
    return {"key": _KEYS[number % 4]}


def _target(number: int, rng: random.Random) -> Mapping[str, Any]:
    if number % 2:
        return {}
    return {"target": LatencyTarget(ttft_s=rng.choice((0.3, 1.0, 3.0)), tpot_s=0.05, refuse=number % 4 == 0)}


def _unlike() -> list[ReplicaPlan]:
    slow = replace(STEP_TIME, decode_base_s=0.08, prefill_per_token_s=0.0004)
    return [_ONE[0], replace(_ONE[1], step_time=slow), replace(_ONE[1], replica_id="c", reports_load=False)]


def _silent() -> list[ReplicaPlan]:
    return [replace(each, reports_load=False) for each in _ONE]


SIMULATIONS: Mapping[str, Callable[[], Iterator[Decision]]] = {
    "fcfs": lambda: _simulated([*_SHORT, *_LONG], _traffic(1, 20.0), _TWO_POOLS, policy="fcfs"),
    "ewsjf": lambda: _simulated([*_SHORT, *_LONG], _traffic(2, 16.0), _TWO_POOLS, learns=True),
    "sjf-aging": lambda: _simulated([*_SHORT, *_LONG], _traffic(3, 16.0), _TWO_POOLS, policy="sjf-aging"),
    "one pool": lambda: _simulated(_ONE, _traffic(4, 12.0), _ONE_POOL),
    "two pools": lambda: _simulated([*_SHORT, *_LONG], _traffic(5, 30.0), _TWO_POOLS),
    "three pools": lambda: _simulated([*_SHORT, *_MID, *_LONG], _traffic(6, 25.0), _THREE_POOLS),
    "programs": lambda: _simulated(_ONE, _traffic(7, 10.0, _program), _ONE_POOL),
    "latency targets": lambda: _simulated(_ONE, _traffic(8, 12.0, _target), _ONE_POOL),
    "keys": lambda: _simulated(_ONE, _traffic(9, 12.0, _key), _ONE_POOL),
    "batch": lambda: _simulated(_ONE, _traffic(10, 14.0, _classes), _ONE_POOL),
    "observe": lambda: _simulated(_ONE, _traffic(11, 14.0), _ONE_POOL, active_share=0.3),
    "unlike replicas": lambda: _simulated(_unlike(), _traffic(12, 16.0), _ONE_POOL),
    "silent replicas": lambda: _simulated(_silent(), _traffic(13, 16.0), _ONE_POOL),
    "put-back storm": _storm,
}


def digest_of(log: Iterator[Decision]) -> tuple[str, dict[str, int]]:
    """Return the hash of a simulation's commands, and how many there are of each kind."""
    digest, kinds = hashlib.sha256(), dict[str, int]()
    for decision in log:
        for command in decision.commands:
            kind = _kind(command)
            kinds[kind] = kinds.get(kind, 0) + 1
            fields = {name: getattr(command, name) for name in _FIELDS if hasattr(command, name)}
            line = [f"{decision.now:.6f}", type(command).__name__, _rounded(msgspec.to_builtins(fields))]
            digest.update(json.dumps(line, sort_keys=True).encode() + b"\n")
    return digest.hexdigest(), dict(sorted(kinds.items()))


def _kind(command: Command) -> str:
    return command.conclusion.outcome if isinstance(command, Conclude) else type(command).__name__


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
