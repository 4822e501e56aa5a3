"""A pool replica's end of the control channel: registration, and reports of load and draining."""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from serve_app.core.routing.replica import ReplicaReport, ReplicaSpec
from serve_app.errors import ChannelError, EngineError
from serve_app.serving.channel.connector import Connector, Locate
from serve_app.serving.channel.link import Link
from serve_app.serving.channel.messages import EngineFailed, Register, Report, Role, Welcome
from serve_app.serving.channel.scheduler_client import ReplicaAddress
from serve_app.serving.channel.settings import ChannelSettings

logger = logging.getLogger("ray.serve")

# An engine's error may quote a whole log, and frames are limited.
_MAX_REASON_CHARS = 1_000
# Maximum interval between reports, also if nothing has changed.
_MAX_REPORT_INTERVAL_S = 0.5


class ReplicaClient:
    """Reporter of one replica's state to the scheduler.

    Args:
        address: `max_model_len` is set to that of the spec, also after each change.
        locate: finds the scheduler; in production a call on a Ray handle.
        load: returns the replica's current load. If it raises `EngineError`, the scheduler is notified at
            once and sends no requests until the replica registers again. While it hangs or fails otherwise,
            no reports are sent, and the scheduler stops sending requests once the last report is too old.
        interval_factor: returns how many times `report_interval_s` the next call of `load` has to wait.
    """

    def __init__(
        self,
        spec: ReplicaSpec,
        address: ReplicaAddress,
        locate: Locate,
        load: Callable[[], Awaitable[ReplicaReport]],
        settings: ChannelSettings,
        interval_factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._register = _registration(spec, address)
        self._load = load
        self._settings = settings
        self._interval_factor = interval_factor
        self._loop = asyncio.get_running_loop()
        self._connector = Connector(Role.REPLICA, spec.replica_id, locate, settings, self)
        self._link: Link | None = None
        self._report: ReplicaReport | None = None
        self._reported_at = 0.0
        self._load_works = True
        # Why the engine does not answer; empty while it does.
        self._engine_failure = ""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "connected" if self._link else "disconnected"
        return f"<ReplicaClient {self._register.spec.replica_id} {state}>"

    @property
    def is_connected(self) -> bool:
        """True if a scheduler is connected."""
        return self._link is not None

    def start(self) -> None:
        """Start connecting and reporting; the replica must be ready for requests."""
        self._connector.start()
        self._task = self._loop.create_task(self._report_on(), context=contextvars.Context())

    def change(self, spec: ReplicaSpec) -> None:
        """Register again with changed limits."""
        self._register = _registration(spec, self._register.address)
        if self._link is not None and not self._engine_failure:
            self._link.send(self._register)
            self._report = None
            self._wake.set()

    def report_now(self) -> None:
        """Report at once after a change, such as the start of draining."""
        self._wake.set()

    async def close(self) -> None:
        """Send `Bye` and stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._connector.close()

    # Called by the connector.

    def on_connected(self, link: Link, _welcome: Welcome) -> None:
        """Register, and send the last report, so that the scheduler knows the running requests at once."""
        self._link = link
        if not self._engine_failure:
            link.send(self._register)
            if self._report is not None:
                self._send_report(self._report)
        self._wake.set()

    def on_message(self, message: Any) -> None:
        """Reject any message, because schedulers send none to replicas."""
        raise ChannelError(f"unexpected message {type(message).__name__} from the scheduler")

    def on_disconnected(self) -> None:
        """Continue without a scheduler."""
        self._link = None

    def on_heartbeat(self) -> None:
        """Do nothing, because reports have their own interval."""

    # Internals.

    async def _report_on(self) -> None:
        while True:
            if self._link is not None:
                await self._report_once()
            with contextlib.suppress(TimeoutError):
                # Not `wait_for`: it may drop a cancellation, as in the connector.
                async with asyncio.timeout(self._interval_factor() * self._settings.report_interval_s):
                    await self._wake.wait()
            self._wake.clear()

    async def _report_once(self) -> None:
        try:
            report = await self._load()
        except EngineError as error:
            self._on_engine_failure(repr(error)[:_MAX_REASON_CHARS])
            return
        except Exception:
            if self._load_works:
                logger.exception("event=load_read_failed replica=%s", self._register.spec.replica_id)
            self._load_works = False
            return
        self._load_works = True
        if self._engine_failure:
            self._on_engine_recovery()
        silent_s = self._loop.time() - self._reported_at
        # Slightly early, so that the polling interval does not lengthen the reporting interval.
        due = silent_s > _MAX_REPORT_INTERVAL_S - self._settings.report_interval_s / 2
        if report != self._report or due:
            self._send_report(report)

    def _on_engine_failure(self, reason: str) -> None:
        if self._engine_failure:
            return
        self._engine_failure, self._report = reason, None
        logger.error("event=engine_failed replica=%s reason=%r", self._register.spec.replica_id, reason)
        if self._link is not None:
            self._link.send(EngineFailed(reason))

    def _on_engine_recovery(self) -> None:
        self._engine_failure = ""
        logger.info("event=engine_recovered replica=%s", self._register.spec.replica_id)
        if self._link is not None:
            self._link.send(self._register)

    def _send_report(self, report: ReplicaReport) -> None:
        self._report, self._reported_at = report, self._loop.time()
        if self._link is not None:
            self._link.send(Report(report))


def _registration(spec: ReplicaSpec, address: ReplicaAddress) -> Register:
    # Gateways compare the length of an answer with the limit at the address, because they have no spec.
    return Register(spec, replace(address, max_model_len=spec.max_model_len))
