"""The scheduler of one model as a Ray Serve deployment of exactly one replica.

- `SchedulerDeployment`, `SchedulerActor`: the deployment, with a scope unique to the application, and the
  actor in it.
- `Incarnations`: numbers that order the schedulers of a model, independently of the nodes' clocks.
- `AdminQueries`: admins' queries, received from gateways over the control channel. Each public method is a
  query. Answers are sent as JSON, in parts if they are long.

As a deployment it is health-checked and replaced by Serve's controller, is listed in `serve status`, receives
new `user_config`, and is found by other deployments through its handle. During a rolling update two of them
may coexist briefly; their incarnation numbers decide which one schedules.

A scheduler that cannot continue exits its process, because Serve replaces a dead actor at once, but an
unhealthy one only after three failed checks.

`Incarnations`. Numbers are stored in Ray's control service (GCS), whose key-value store creates a key for one
caller only. They restart if that service loses its memory, in which case no actor of the old cluster is left.
"""

import asyncio
import contextvars
import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry
from ray import serve

from serve_app.core import Scheduler, SchedulerSettings
from serve_app.core.learned_state import STATE_KIND, learned_state, restore_state
from serve_app.core.routing.snapshot import decoded, encoded
from serve_app.core.scaling import ScalingSettings
from serve_app.core.settings_base import hot_settings, with_hot_settings
from serve_app.errors import ChannelError, SettingsError
from serve_app.serving import _ray
from serve_app.serving.autoscaling import TUNER, statistics
from serve_app.serving.channel.messages import Role, SchedulerEndpoint
from serve_app.serving.channel.settings import ChannelSettings
from serve_app.serving.deployments import ALL_AT_ONCE_PERCENT
from serve_app.serving.process import precise_clock, run_in_parts, tune_memory
from serve_app.serving.scheduler.documents import (
    SUB_QUEUES_SHOWN,
    RemoteEndpoints,
    captured,
    captured_in_full,
    most_costly,
    overview,
    slowest,
)
from serve_app.serving.scheduler.findings import findings_document
from serve_app.serving.scheduler.gauges import PersistentCosts
from serve_app.serving.scheduler.journal import DecisionLogSettings, RecentActivity
from serve_app.serving.scheduler.live_scaling import LiveScaling, ScalingState
from serve_app.serving.scheduler.live_scheduler import LiveScheduler, LiveSchedulerOptions
from serve_app.serving.scheduler.receipts import programs_named
from serve_app.serving.scheduler.tuning_endpoint import PartitionUpdate
from serve_app.serving.scheduler.usage import PersistentUsage
from serve_app.serving.state import StatePersister, StateStore
from serve_app.serving.watchdog import start_watchdog
from serve_app.tuning.rollout import Observation, Retune


class ClaimStore(Protocol):
    """Store in which a key can be created once. Calls may block on the network."""

    def make(self, key: str) -> bool:
        """Create a key, and return whether it is new."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """Return all keys with a prefix."""
        ...


class GcsClaimStore:
    """Store in Ray's control service; needs a connection to Ray."""

    def make(self, key: str) -> bool:
        """Create a key, and return whether it is new."""
        return _ray.make_key(key)

    def keys(self, prefix: str) -> list[str]:
        """Return all keys with a prefix."""
        return _ray.keys_with(prefix)


@dataclass(frozen=True, slots=True)
class Incarnations:
    """Incarnations of one model's scheduler; `scope` is unique to model and application in the cluster."""

    store: ClaimStore
    scope: str

    def claim(self) -> int:
        """Claim the next number exclusively."""
        number = self.newest() + 1
        while not self.store.make(self._key(number)):
            number += 1
        return number

    def newest(self) -> int:
        """Return the highest claimed number; 0 before the first."""
        prefix = self._key("")
        # Claims of a few bytes are never deleted, because that could issue a number twice.
        claims = (key.removeprefix(prefix) for key in self.store.keys(prefix))
        # Others are of a model whose name begins with this one's, as `qwen/qwen3` does with `qwen`.
        return max((int(claim) for claim in claims if "/" not in claim), default=0)

    def _key(self, number: int | str) -> str:
        return f"incarnation/{self.scope}/{number}"


_encoder = msgspec.json.Encoder()


@dataclass(slots=True, eq=False, kw_only=True)
class AdminQueries:
    """Answers to admins' queries about a live scheduler.

    Attributes:
        previous_costs: costs counted by its predecessors.
        live_scaling, persistent_usage: of its process.
        save: persists the learned state.
    """

    live: LiveScheduler
    previous_costs: PersistentCosts
    live_scaling: LiveScaling
    persistent_usage: PersistentUsage
    save: Callable[[], Awaitable[None]]

    @property
    def _model(self) -> str:
        return self.live.core.settings.model

    async def answer(self, query: str, arguments: bytes) -> bytes:
        """Return the answer as JSON.

        Raises:
            ChannelError: the query is unknown, or the scheduler has ended.
            SettingsError: an argument is invalid.
        """
        if query not in _QUERIES:
            raise ChannelError(f"unknown query {query!r}")
        found = await getattr(self, query)(**msgspec.json.decode(arguments, type=dict[str, Any]))
        # In a thread, because some answers have megabytes and must not delay grants.
        return await asyncio.to_thread(_encoder.encode, found)

    async def status(self) -> dict[str, Any]:
        """Return the numbers of waiting requests, the replicas and their reports."""
        return self.live.status()

    async def queue(self) -> dict[str, Any]:
        """Return what is queued, for how long and why."""
        return self.live.queue()

    async def overview(self) -> dict[str, Any]:
        """Return this model's data for the dashboard."""
        live = self.live
        status, queue = live.status(), live.queue(SUB_QUEUES_SHOWN)
        found = overview(status, queue, live.activity.document())
        found["findings"] = findings_document(status, queue)
        found["slowest"] = slowest(live.history, live.now())
        return {**found, "scaling": await self.scaling(), "costs": most_costly(await self.costs())}

    async def costs(self) -> dict[str, Any]:
        """Return the costs of each tenant: engine time and imposed delay."""
        costs = self.previous_costs.plus(self.live.core)
        return {"model": self._model, **costs.document(self.live_scaling.gpus())}

    async def scaling(self) -> dict[str, Any]:
        """Return the desired replicas of each pool, and why."""
        return self.live_scaling.status()

    async def usage(self) -> dict[str, Any]:
        """Return the usage of each API key by day."""
        return self.persistent_usage.shown()

    async def spent(self, keys: list[str]) -> dict[str, Any]:
        """Return what API keys have used in the current day and month."""
        return self.persistent_usage.ledger.spent(keys)

    async def receipt(self, request_id: str) -> dict[str, Any]:
        """Return the receipt of a request; empty if it is unknown."""
        return await self.live.receipts.document(request_id, self.live.now())

    async def program(self, program: str) -> dict[str, Any]:
        """Return where the time of the programs with an id went."""
        live = self.live
        return await programs_named(program, live.core, live.history, live.now())

    async def capture(self, *, full: bool = False) -> list[dict[str, Any]]:
        """Return recently completed requests as lines of a trace without text, or `captured_in_full`."""
        return (
            await run_in_parts(captured_in_full(self.live.history)) if full else captured(self.live.history)
        )

    async def mode(self) -> dict[str, Any]:
        """Return the scheduled share of the traffic, and times to first token of both parts."""
        return {"model": self._model, **self.live.mode.describe()}

    async def change_mode(self, active_share: float) -> None:
        """Schedule another share of the requests; persisted with the learned state."""
        self.live.mode.change(active_share)
        await self.save()

    async def freeze(self, reason: str) -> None:
        """Freeze the tuner with a reason, or thaw it with an empty one."""
        if reason:
            self.live.tuner.freeze(reason)
        else:
            self.live.tuner.thaw()


# Gateways may call them by name.
_QUERIES = frozenset(
    name for name, each in vars(AdminQueries).items() if inspect.iscoroutinefunction(each)
) - {"answer"}

logger = logging.getLogger("ray.serve")

# Options for `serve.deployment`, besides its one replica: a single writer whose loss is detected within a
# second. Nothing needs draining, because the gateways hold the requests. Calls on its handle are rare.
SCHEDULER_DEPLOYMENT_OPTIONS: Mapping[str, Any] = {
    "max_ongoing_requests": 1_000,
    # Serve notices a dead process by the next check, and until then all requests wait.
    "health_check_period_s": 0.5,
    # Serve replaces a process after three failed checks in a row. Requests wait while a scheduler hangs, and
    # its replacement loses none of them, so it is better early than late.
    "health_check_timeout_s": 3.0,
    "graceful_shutdown_timeout_s": 5.0,
    "graceful_shutdown_wait_loop_s": 0.1,
    # The successor starts before this one ends, so that requests do not wait for a process to start.
    "max_surge_percent": ALL_AT_ONCE_PERCENT,
}

# Time to send final messages and log lines.
_FINAL_MESSAGES_S = 0.2
# Settings that define the scheduler: for another model or other pools, a new process is started.
_COLD = ("model",)
_SCALING = "scaling"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerActorSettings:
    """Settings of the actor.

    Attributes:
        scope: unique to this application and model in the cluster; key of incarnations and learned state.
        state_uri: folder of learned state, see `StateStore`; None disables persistence.
        state_interval_s: interval of writes.
        scaling: the pools, for autoscaling.
        tuner_after: number of requests after which the tuner starts; None if it runs anyway or never. A
            running scheduler does not change it.
    """

    scheduler: SchedulerSettings
    channel: ChannelSettings
    scope: str
    decision_log: DecisionLogSettings | None = None
    state_uri: str | None = None
    state_interval_s: float = 30.0
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    tuner_after: int | None = None

    def hot(self) -> dict[str, Any]:
        """Return the settings that can change while the actor runs; see `SchedulerActor.reconfigure`."""
        scheduler = hot_settings(self.scheduler, _COLD)
        return {**scheduler, _SCALING: hot_settings(self.scaling, ())}

    def cold(self) -> tuple[object, ...]:
        """Return the settings that need a new process."""
        scheduler = self.scheduler
        fixed = (scheduler.model, scheduler.routing.pools, sorted(self.scaling.pools))
        persistence = self.decision_log, self.state_uri, self.state_interval_s
        return (*fixed, self.channel, self.scope, *persistence, self.tuner_after is None)

    def with_hot(self, given: Mapping[str, Any]) -> "SchedulerActorSettings":
        """Return a copy with other hot settings.

        Raises:
            SettingsError: a setting is unknown, cold or out of range.
        """
        own = {name: value for name, value in given.items() if name != _SCALING}
        changed = replace(
            self,
            scheduler=with_hot_settings(self.scheduler, own, _COLD),
            scaling=with_hot_settings(self.scaling, given.get(_SCALING, {}), ()),
        )
        if changed.cold() != self.cold():
            raise SettingsError(
                f"user_config names other pools than the {', '.join(self.scheduler.routing.pools)} of this "
                "scheduler: set them in the args of the application, which replaces the scheduler"
            )
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterServices:
    """Dependencies of the actor on the cluster, replaceable in tests.

    Attributes:
        claims: store of claimed incarnations.
        host: returns the address at which peers on all nodes reach this process.
        die: ends the process.
    """

    claims: ClaimStore
    host: Callable[[], str]
    die: Callable[[], None]


def _ray_surroundings() -> ClusterServices:
    import ray.util  # noqa: PLC0415 - tests build the actor without Ray

    return ClusterServices(claims=GcsClaimStore(), host=ray.util.get_node_ip_address, die=lambda: os._exit(1))


class _ActorState(msgspec.Struct):
    """Learned state beside that of the core; documents of older releases have no parts of it."""

    scaling: ScalingState | None = None
    costs: PersistentCosts | None = None


class SchedulerActor:
    """Actor that runs a `LiveScheduler`, and replaces it when settings change.

    Must be constructed on a running event loop. It starts all tasks in an empty context, because Serve
    cancels the tasks of a request's context with the request.
    """

    def __init__(self, settings: SchedulerActorSettings, surroundings: ClusterServices | None = None) -> None:
        self._deployed = self._settings = settings
        self._surroundings = surroundings or _ray_surroundings()
        self._incarnations = Incarnations(self._surroundings.claims, settings.scope)
        self._loop = asyncio.get_running_loop()
        self._live: LiveScheduler | None = None
        self._learned: Mapping[str, Any] | None = None
        self._earlier_costs = PersistentCosts(time.time(), (), ())
        self._registry = CollectorRegistry()
        model, uri, interval_s = settings.scheduler.model, settings.state_uri, settings.state_interval_s
        self._keeper: StatePersister | None = None
        if uri is not None:
            store = StateStore(uri, STATE_KIND, settings.scope)
            self._keeper = StatePersister(store, model, self._learned_state, interval_s, self._registry)
        self._usage = PersistentUsage(model, uri, settings.scope, interval_s, self._registry)
        self.scaling = LiveScaling(model, settings.scaling, self._registry)
        self._activity = RecentActivity(precise_clock(self._loop))
        self._needs_tuner = False
        self._endpoints = RemoteEndpoints()
        self._changing = asyncio.Lock()
        self._started = self._begin()

    def __repr__(self) -> str:
        return f"<SchedulerActor {self._settings.scope} {self._live}>"

    async def endpoint(self, role: str) -> SchedulerEndpoint:
        """Return the address of the scheduler and the secret of a role.

        Raises:
            ChannelError: this scheduler has ended; retry to reach its successor.
        """
        return (await self._current()).endpoint(Role(role))

    async def check_health(self) -> None:
        """Raise `ChannelError` if this scheduler must be replaced."""
        live = await self._current()
        if live.end_reason and not self._changing.locked():
            raise ChannelError(f"the scheduler has ended: {live.end_reason}")

    async def observed(self, *, outcomes: bool = False) -> Observation:
        """Return the observations since the last call, for the tuner."""
        return (await self._current()).tuner.observed(outcomes=outcomes)

    async def apply_partition(self, update: PartitionUpdate) -> None:
        """Apply a learned partition.

        Raises:
            ChannelError: this scheduler has ended.
        """
        live = await self._current()
        # In an empty context, because tasks of the grants that follow must outlive this call.
        contextvars.Context().run(live.tuner.apply_partition, update)

    async def retune(self, order: Retune) -> None:
        """Apply tuned values.

        Raises:
            SettingsError: the values are invalid.
            ChannelError: this scheduler has ended, or tuning is frozen.
        """
        live = await self._current()
        contextvars.Context().run(live.tuner.retune, order)

    async def freeze_tuning(self, reason: str) -> None:
        """Roll back the trial, and start none until an admin thaws the tuner."""
        live = await self._current()
        contextvars.Context().run(live.tuner.freeze, reason)

    async def show_tuner(self, document: Mapping[str, Any]) -> None:
        """Store the tuner's state document for `status`."""
        (await self._current()).tuner.store_document(document)

    async def show_endpoints(self, document: Mapping[str, Any]) -> None:
        """Store the state of a remote pool's endpoints for `status`, see `EndpointWatcher.states`."""
        self._endpoints.update(document)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Continue with other settings as a new incarnation; the gateways resubmit their requests.

        Args:
            user_config: hot settings by name; omitted ones have their deployed values.

        Raises:
            SettingsError: a setting is unknown, or cannot change in a running application.
        """
        changed = self._deployed.with_hot(user_config)
        async with self._changing:
            before, self._settings = self._settings, changed
            if changed.scaling != before.scaling:
                self.scaling.change(changed.scaling)
            if changed.scheduler == before.scheduler:
                return
            live = await self._current()
            self._learned = learned_state(live.core)
            self._earlier_costs = self._earlier_costs.plus(live.core)
            live.stop("its settings have changed")
            self._started = self._begin()
            await self._started

    def scaling_statistics(self) -> dict[str, float]:
        """Return the desired replicas of its pools and of its tuner; see `serving.autoscaling`."""
        found = self.scaling.statistics()
        if self._settings.tuner_after is not None:
            self._needs_tuner |= self._live is not None and self._live.tuner.needs_tuner
            # As a minimum, because a tuner may run that this scheduler has not met yet.
            found |= statistics({TUNER: int(self._needs_tuner)}, (TUNER,))
        return found

    async def save(self) -> None:
        """Persist learned state and usage, before the application stops."""
        if self._live is not None:
            self._live.flush()
        await self._save_learned()
        await self._usage.save()

    async def close(self) -> None:
        """Persist learned state a last time, and shut down."""
        keeper, self._keeper = self._keeper, None
        closing = [self._usage.close(), *([keeper.close()] if keeper is not None else [])]
        await asyncio.gather(*closing)
        self.shutdown()

    def shutdown(self) -> None:
        """Send pending messages, close every connection and the log."""
        self.scaling.stop()
        if not self._started.done():
            self._started.cancel()
        elif self._live is not None:
            self._live.stop("the actor was shut down")

    def __del__(self) -> None:
        """Shut down; Serve calls this on the event loop at the end of the replica's life."""
        if self._loop.is_running():
            self.shutdown()

    def _begin(self) -> asyncio.Task[None]:
        return self._loop.create_task(self._start(), context=contextvars.Context())

    async def _start(self) -> None:
        settings = self._settings
        # In a thread, because the claim uses the network and the loop is shared with Serve.
        incarnation, _, _ = await asyncio.gather(
            asyncio.to_thread(self._incarnations.claim), self._load_learned_state(), self._usage.load()
        )
        parts = LiveSchedulerOptions(
            incarnation=incarnation,
            channel=settings.channel,
            newest_incarnation=self._newest,
            on_end=self._on_end,
            decision_log=settings.decision_log,
            learned=self._learned,
            more_metrics=self._registry,
            usage_ledger=self._usage.ledger,
            activity=self._activity,
            endpoints=self._endpoints,
            tuner_after=settings.tuner_after,
        )
        live = LiveScheduler(settings.scheduler, parts)
        live.queries = AdminQueries(
            live=live,
            previous_costs=self._earlier_costs,
            live_scaling=self.scaling,
            persistent_usage=self._usage,
            save=self._save_learned,
        )
        await live.start(self._surroundings.host())
        self._live = live
        self.scaling.follow(live.core)
        if self._keeper is not None:
            self._keeper.start()
        self._usage.start()

    async def _save_learned(self) -> None:
        if self._keeper is not None:
            await self._keeper.save()

    def _learned_state(self) -> Mapping[str, Any] | None:
        live = self._live
        # A scheduler that has ended adds nothing: its successor has the same state, or its core is broken.
        if live is None or live.end_reason:
            return None
        costs = self._earlier_costs.plus(live.core)
        return learned_state(live.core) | encoded(_ActorState(self.scaling.state(), costs))

    async def _load_learned_state(self) -> None:
        """Load learned state from the store, unless a previous live scheduler of this actor has left it."""
        if self._keeper is not None and self._learned is None:
            await self._keeper.load(self._restore)

    def _restore(self, document: Mapping[str, Any]) -> None:
        """Restore the state of scaling and costs, and remember the core's if a scheduler can restore it."""
        state = decoded(document, _ActorState)
        restore_state(Scheduler(self._settings.scheduler), document)
        if state.scaling is not None:
            self.scaling.restore(state.scaling)
        self._earlier_costs = state.costs or self._earlier_costs
        self._learned = document

    async def _newest(self) -> int:
        return await asyncio.to_thread(self._incarnations.newest)

    async def _current(self) -> LiveScheduler:
        await asyncio.shield(self._started)
        assert self._live is not None, "_start sets it or raises"
        return self._live

    def _on_end(self, reason: str) -> None:
        logger.error("event=scheduler_ended scope=%s reason=%r", self._settings.scope, reason)
        self._loop.call_later(_FINAL_MESSAGES_S, self._surroundings.die)


# All requests wait while the scheduler is halted, and its replacement loses none of them.
_HALTED_S = 0.5


class SchedulerDeployment(SchedulerActor):
    """A `SchedulerActor` in a Serve replica.

    Two applications of a cluster may serve models of the same name. Their schedulers must not supersede each
    other, so the application's name, which is known only here, is prepended to the scope.
    """

    def __init__(self, settings: SchedulerActorSettings) -> None:
        application = serve.get_replica_context().app_name
        super().__init__(replace(settings, scope=f"{application}/{settings.scope}"))
        tune_memory()
        self._watchdog = start_watchdog(_HALTED_S)

    # A coroutine, because Serve runs each call of a plain function in a thread.
    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the desired replicas of its pools and of its tuner; see `serving.autoscaling`."""
        return self.scaling_statistics()

    async def __del__(self) -> None:  # type: ignore[override]  # Serve awaits it
        """Close; Serve calls this on the event loop at the end of the replica's life."""
        if hasattr(self, "_live"):
            await self.close()
