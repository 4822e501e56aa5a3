"""Executor of blocking calls that may hang, such as those to a network file system."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Executor with daemon threads, so that a call that never returns does not block the exit of the process.

    Python joins the threads of a `ThreadPoolExecutor` at exit, also those of `asyncio.to_thread`. Threads are
    started when calls need them.

    Args:
        most: maximum number of threads.
        name: name of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0

    def __repr__(self) -> str:
        return f"<DaemonThreads {self._name} threads={self._threads}>"

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in one of the threads, in the order of submission."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and self._threads < self._most:
            self._threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT
        """End each thread after its calls, without waiting."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                self._idle.release()
                call = self._calls.get()
            if call is None:
                return
            call()
