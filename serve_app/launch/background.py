"""A call in a thread of its own, whose result is asked for later."""

import threading
from collections.abc import Callable
from typing import Any


class InBackground:
    """Starts the call at once.

    Args:
        call: what to call, without arguments.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the call has returned or raised."""
        return not self._thread.is_alive()

    def result(self) -> Any:
        """The result once it is there; raises what the call raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as exc:  # noqa: BLE001 - for whoever asks for the result
            self._error = exc
