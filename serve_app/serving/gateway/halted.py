"""Detection of replicas that are halted with their connections open, and release of what waits for them.

A process that is stopped, or whose node hangs, still acknowledges TCP segments, so nothing tells its clients.
Two signs together do: the scheduler has closed the replica, because its reports are missing, and the replica
answers no request for its health. Then requests without any part of their answer return to the queue, for
another replica. Answers that have begun may continue, so they end later, with an error event. While no
scheduler is connected, all replicas count as closed, and the second sign alone decides.
"""

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable, Collection

from serve_app.serving.channel.scheduler_client import ServerAddress
from serve_app.serving.gateway.upstream.pool import UpstreamPool
from serve_app.serving.gateway.upstream.response import UpstreamError

logger = logging.getLogger("ray.serve")

# Silence of an answer before its replica is suspected. Prefills of long prompts are silent for longer.
_SILENT_S = 2.0
_PROBE_TIMEOUT_S = 2.0
# Failed probes in succession until requests without an answer are released, and until begun answers end.
_RELEASE_AFTER, _END_AFTER = 2, 15


class HaltWatch:
    """Watch over the replicas for which requests of one gateway wait; `check` runs with every sweep.

    Args:
        open_servers: returns the servers that the schedulers consider healthy.
    """

    def __init__(self, upstream: UpstreamPool, open_servers: Callable[[], Collection[ServerAddress]]) -> None:
        self._upstream = upstream
        self._open_servers = open_servers
        self._probes: dict[ServerAddress, asyncio.Task[None]] = {}
        upstream.on_sweep = self.check

    def __repr__(self) -> str:
        return f"<HaltWatch probing {len(self._probes)}>"

    def check(self) -> None:
        """Start to probe replicas that are closed and silent; end the probes of others."""
        silent = self._upstream.silent(_SILENT_S)
        suspects = silent.difference(self._open_servers()) if silent else silent
        for address in self._probes.keys() - suspects:
            self._probes.pop(address).cancel()
        for address in suspects - self._probes.keys():
            # In an empty context, because Ray Serve cancels the tasks of a request with it.
            self._probes[address] = asyncio.get_running_loop().create_task(
                self._probe(address), context=contextvars.Context()
            )

    def close(self) -> None:
        """End all probes."""
        for task in self._probes.values():
            task.cancel()
        self._probes.clear()

    async def _probe(self, address: ServerAddress) -> None:
        failed = 0
        while failed < _END_AFTER:
            began = asyncio.get_running_loop().time()
            failed = 0 if await self._responds(address) else failed + 1
            if failed in {_RELEASE_AFTER, _END_AFTER}:
                released = self._upstream.give_up(address, begun=failed == _END_AFTER)
                if released:
                    logger.error("event=replica_halted replica=%s:%d requests=%d", *address[:2], released)
            passed_s = asyncio.get_running_loop().time() - began
            await asyncio.sleep(max(0.0, _PROBE_TIMEOUT_S - passed_s))

    async def _responds(self, address: ServerAddress) -> bool:
        """Return whether the server sends any HTTP response."""
        head = f"GET /health HTTP/1.1\r\nhost: {address.name or address.host}\r\ncontent-length: 0\r\n\r\n"
        with contextlib.suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                response = await self._upstream.send(address, head.encode(), b"")
                response.close()
                return True
        return False
