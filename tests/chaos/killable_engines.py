"""Application whose emulated engines die, and fail to start, while a file exists.

A dead engine behaves like vLLM after its core process was killed: the replica's process lives, and both
`load` and `check_health` raise `EngineError`.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.serve import Application

import serve_app.app
from serve_app.engines.emulated.engine import EmulatedEngine, EmulatedEngineSettings
from serve_app.engines.engine import EngineLimits
from serve_app.errors import EngineError
from serve_app.serving import deployments

FILE_VARIABLE = "EWSJF_TEST_ENGINES_ARE_DEAD"


class KillableEngine(EmulatedEngine):
    """Engine that dies when the file appears, and stays dead."""

    def __init__(self, settings: EmulatedEngineSettings) -> None:
        super().__init__(settings)
        self._fatal = Path(os.environ[FILE_VARIABLE])
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> EngineLimits:
        if self._fatal.exists():
            raise EngineError("the GPU has fallen off the bus")
        limits = await super().start()
        self._watch = asyncio.get_running_loop().create_task(self._stop_when_file_exists())
        return limits

    async def _stop_when_file_exists(self) -> None:
        while not self._fatal.exists():  # noqa: ASYNC110 - another process makes the file
            await asyncio.sleep(0.02)
        await super().stop()

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await super().stop()


class KillablePool(deployments.PoolDeployment):
    """Deployment whose replicas import this module, and so the patch below."""


def make_killable(self: EmulatedEngineSettings) -> EmulatedEngine:
    """Replacement for `EmulatedEngineSettings.make`."""
    return KillableEngine(self)


EmulatedEngineSettings.make = make_killable  # type: ignore[method-assign]


def build_app(args: Mapping[str, Any]) -> Application:
    """Build the application with killable engines."""
    vars(serve_app.app)["PoolDeployment"] = KillablePool
    return serve_app.app.build_app(args)
