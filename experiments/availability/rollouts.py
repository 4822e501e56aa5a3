"""Rollouts: an application is redeployed with other settings under traffic.

There is one application for each case. Steady streamed requests of nearly one length run all the time, and
long streams are opened just before the change. Changes are deployed as by `serve deploy`.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import uvloop

from experiments.availability.deaths import LOG_DELAY_S
from experiments.common.application import Application, serve_config, served_application
from experiments.common.audit import NO_LIMIT, Ended, SteadyTraffic, ends_of
from experiments.common.errors import ExperimentError
from experiments.common.experiment import Context, Experiment, Measurement
from experiments.common.provenance import generated
from experiments.common.redeployment import changed_args, redeploy, replica_processes
from serve_app.core.settings_base import NOT_NEGATIVE, POSITIVE, at_least, settings

_TIMEOUT_S = 180.0
_LENGTHS = 8
# Gateways read the file every two seconds; a busy machine gets more time.
_KNOWN_AFTER_S = 5.0
_REJECTED_WITHIN_S = 30.0


@settings
class RolloutCase:
    """One kind of change.

    Attributes:
        what: description of the change.
        changes: values by their path below `args`, such as `models.0.scheduler.max_waiting`; without any,
            nothing is deployed.
        streams: number of long streams that are open during the change.
        rotations: number of replacements of the clients' key.
    """

    what: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    streams: Annotated[int, at_least(0)] = 0
    rotations: Annotated[int, at_least(0)] = 0


@settings
class RolloutSettings:
    """Settings of the part.

    Attributes:
        before_s: span of steady requests before the change, for comparison.
        stream_tokens: of each long stream.
        args: of the first application.
    """

    cases: tuple[RolloutCase, ...]
    rate_per_s: Annotated[float, POSITIVE]
    before_s: Annotated[float, POSITIVE]
    after_s: Annotated[float, NOT_NEGATIVE]
    stream_tokens: Annotated[int, at_least(1)]
    args: Mapping[str, Any]


@dataclass(slots=True)
class RotatedKey:
    """API key of all clients, rotated with `ewsjf keys`; one is valid at a time, except during a rotation.

    Attributes:
        path: of the key file of the gateways.
        secret: current secret of clients; empty while they need none.
        rejected_after_s: time from each old key's revocation to its first rejection.
    """

    path: Path
    secret: str = ""
    rejected_after_s: list[float] = field(default_factory=list)

    def create(self) -> None:
        """Add a key to the file; clients use it from now on."""
        self.secret = self._run("create", "--tenant", "app").strip()

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        return {"authorization": f"Bearer {self.secret}"} if self.secret else {}

    async def rotate(self, http: httpx.AsyncClient) -> None:
        """Add a key, let clients use it once gateways have read it, and revoke the previous one.

        Raises:
            ExperimentError: a gateway still accepts the old one after a while.
        """
        old, before = RotatedKey(self.path, self.secret), self.headers
        fresh = RotatedKey(self.path)
        await asyncio.to_thread(fresh.create)
        await asyncio.sleep(_KNOWN_AFTER_S)
        self.secret = fresh.secret
        await asyncio.to_thread(old.revoke)
        revoked_at = time.monotonic()
        while (await http.get("/v1/models", headers=before)).status_code != 401:
            if time.monotonic() > revoked_at + _REJECTED_WITHIN_S:
                raise ExperimentError(f"a revoked key is taken after {_REJECTED_WITHIN_S:.0f} s")
            await asyncio.sleep(0.1)
        self.rejected_after_s.append(time.monotonic() - revoked_at)

    def revoke(self) -> None:
        """Revoke this key."""
        self._run("revoke", self.secret.split("_")[1])

    def _run(self, *words: str) -> str:
        command = [sys.executable, "-m", "serve_app", "keys", *words, "--file", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ExperimentError(f"keys {words[0]}: {done.stderr.strip()}")
        return done.stdout


@dataclass(slots=True)
class RolloutPlay:
    """One application under traffic and a change."""

    settings: RolloutSettings
    case: RolloutCase
    served: Application
    config: dict[str, Any]
    key: RotatedKey
    traffic: SteadyTraffic = field(init=False)
    streams: list[Ended] = field(default_factory=list)
    changed_at: float = 0.0
    complete_at: float = 0.0

    async def run(self) -> None:
        """Send requests from before the change until some time after it."""
        async with httpx.AsyncClient(base_url=self.served.url, timeout=_TIMEOUT_S, limits=NO_LIMIT) as http:
            rate_per_s = self.settings.rate_per_s
            self.traffic = SteadyTraffic(
                "steady", rate_per_s, lambda: http, _LENGTHS, lambda: self.key.headers
            )
            await self.traffic.run_beside(self._change(http))

    async def _change(self, http: httpx.AsyncClient) -> None:
        await asyncio.sleep(self.settings.before_s)
        tokens = self.settings.stream_tokens
        streams = [
            asyncio.create_task(self.traffic.request(f"stream-{number}", tokens + number))
            for number in range(self.case.streams)
        ]
        if streams:
            await asyncio.sleep(2.0)
        self.changed_at = time.monotonic()
        if self.case.changes:
            await asyncio.to_thread(redeploy, self.served, self.config)
        for _ in range(self.case.rotations):
            await self.key.rotate(http)
        self.complete_at = time.monotonic()
        self.streams = await asyncio.gather(*streams)
        await asyncio.sleep(self.settings.after_s)


def play(settings: RolloutSettings, context: Context) -> Iterator[Measurement]:
    """Measure each kind of change with a new application."""
    for case in settings.cases:
        key = {"what": case.what}
        if context.has(key):
            continue
        with contextlib.ExitStack() as stack:
            key_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "keys.json"
            client_key, args = RotatedKey(key_file), settings.args
            if case.rotations:
                client_key.create()
                args = changed_args(args, {"gateway.keys_file": str(key_file)})
            served = stack.enter_context(served_application(serve_config("rollouts", args)))
            before = replica_processes(served)
            port = int(served.url.rsplit(":", 1)[1])
            changed = serve_config("rollouts", changed_args(args, case.changes), port=port)
            played = RolloutPlay(settings, case, served, changed, client_key)
            uvloop.run(played.run())
            time.sleep(LOG_DELAY_S)
            figures = figures_of(played, before, replica_processes(served))
        yield Measurement(key=key, figures=figures, seeds=(0,), traces=generated("steady traffic"))


def figures_of(
    played: RolloutPlay, before: Mapping[str, list[int]], after: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Return the ends of requests, their durations before and during the change, and replaced processes."""
    steady = played.traffic.ended
    calm = [one for one in steady if one.ended_s < played.changed_at]
    during = [one for one in steady if calm and one.ended_s >= played.changed_at]
    at_gateway = _times_at_gateways(played)
    outlived = sum(one.ended_s > played.complete_at for one in played.streams)
    return {
        **ends_of([*steady, *played.streams], played.served.log_lines("gateway"), ""),
        "before_s": _percentiles(calm),
        "during_s": _percentiles(during),
        "during_at_gateways_s": _shares([at_gateway[one.name] for one in during if one.name in at_gateway]),
        "client_late_s": _shares(played.traffic.late_s),
        "rejected_after_s": played.key.rejected_after_s,
        "took_s": played.complete_at - played.changed_at,
        "replaced": sorted(name for name, pids in before.items() if not set(pids) & set(after.get(name, ()))),
        "processes": {name: [len(pids), len(after.get(name, ()))] for name, pids in before.items()},
        "streams": len(played.streams),
        "streams_that_outlived_it": outlived,
        "slowest_stream_s": max((one.ended_s - one.started_s for one in played.streams), default=0.0),
    }


def _times_at_gateways(played: RolloutPlay) -> dict[str, float]:
    """Return the times from arrival to end at the gateway, by request: without the client."""
    found = (
        re.search(r"event=concluded outcome=completed .* e2e_s=(\S+) .*client_request_id=(\S+)", line)
        for line in played.served.log_lines("gateway")
    )
    return {one[2]: float(one[1]) for one in found if one}


def _percentiles(ended: list[Ended]) -> dict[str, float]:
    return _shares([one.ended_s - one.started_s for one in ended])


def _shares(values: list[float]) -> dict[str, float]:
    took = sorted(values) or [0.0]
    return {"p50": took[len(took) // 2], "p99": took[int(0.99 * (len(took) - 1))], "worst": took[-1]}


EXPERIMENT = Experiment(settings=RolloutSettings, play=play)
