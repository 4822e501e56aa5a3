"""Replays of recorded minutes, in a process beside the gateway that takes only what others leave."""

import asyncio
import os
import sys
from typing import Any

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRefused

# A replay takes about 0.7 ms of CPU time for each request, and there are two dozen.
TIME_LIMIT_S = 120.0
_RETRY_S = 10.0
_MODULE = "serve_app.counterfactuals"


class Replays:
    """Runs one at a time.

    Args:
        module: what is run; it reads a recording and writes a JSON object.
    """

    def __init__(self, module: str = _MODULE, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._module, self._time_limit_s = module, time_limit_s
        self._is_busy = False

    async def what_if(self, recording: str) -> dict[str, Any]:
        """What would have been.

        Raises:
            RequestRefused: another replay runs, this one takes too long, or nothing can be said.
        """
        if self._is_busy:
            raise RequestRefused(
                Outcome.REJECTED_QUEUE_FULL,
                "this gateway replays another request now: ask again in some seconds",
                retry_after_s=_RETRY_S,
            )
        self._is_busy = True
        try:
            answer = await self._run(recording.encode())
        finally:
            self._is_busy = False
        if "error" in answer:
            raise RequestRefused(Outcome.REJECTED_INVALID, answer["error"], code="not_replayable", status=409)
        return answer

    async def _run(self, recording: bytes) -> dict[str, Any]:
        # Modules of a working directory that Ray has shipped are found by the path of this process alone.
        path = os.pathsep.join(place for place in sys.path if place)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            async with asyncio.timeout(self._time_limit_s):
                output, errors = await process.communicate(recording)
        except TimeoutError as error:
            raise RequestRefused(
                Outcome.FAILED,
                f"the replay takes longer than {self._time_limit_s:g} s: `python -m serve_app explain ID "
                "--what-if` replays where you call it, without a limit",
                code="replay_timeout",
                status=504,
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            found: dict[str, Any] = msgspec.json.decode(output, type=dict[str, Any])
        except msgspec.DecodeError as error:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise RequestRefused(
                Outcome.FAILED, f"the replay failed: {last}", code="replay_failed", status=500
            ) from error
        return found
