"""TCP relay that imitates bad networks."""

import asyncio
import contextlib
from collections.abc import Callable

_CHUNK_BYTES = 65_536


class Relay:
    """Forwards connections to a server.

    Attributes:
        delay_s: delay of every piece of data.
        partitioned: nothing passes, neither data nor ends of connections. Data sent in the partition arrives
            after it, as in TCP.
        mute_up: data from clients is lost without notice.
        mute_down: the same for data from the server.
        rejects: new connections are reset at once.
        accepted: connections so far.
    """

    def __init__(self, target: Callable[[], tuple[str, int]]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._whole = asyncio.Event()
        self._whole.set()
        self.delay_s = 0.0
        self.mute_up = False
        self.mute_down = False
        self.rejects = False
        self.accepted = 0

    @property
    def partitioned(self) -> bool:
        return not self._whole.is_set()

    @partitioned.setter
    def partitioned(self, partitioned: bool) -> None:
        if partitioned:
            self._whole.clear()
        else:
            self._whole.set()

    @property
    def port(self) -> int:
        """Return the port for clients."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)

    def cut(self) -> None:
        """Break every connection, then heal."""
        self.mute_up = self.mute_down = False
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def heal(self) -> None:
        """Work normally again. Mute connections cannot recover, so they break."""
        muted = self.mute_up or self.mute_down
        self.delay_s, self.rejects, self.partitioned = 0.0, False, False
        if muted:
            self.cut()

    async def stop(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.rejects:
            writer.transport.abort()
            return
        await self._whole.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target())
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for pump in (
            self._pump(reader, far_writer, lambda: self.mute_up),
            self._pump(far_reader, writer, lambda: self.mute_down),
        ):
            task = asyncio.get_running_loop().create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, muted: Callable[[], bool]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(self.delay_s)
                await self._whole.wait()
                if not muted():
                    writer.write(data)
        await self._whole.wait()
        if muted():
            # As with a host that vanished: the peer's connection stays half-open.
            return
        writer.close()
        self._writers.discard(writer)
