"""Whether an engine still answers: requests were sent there, and nothing comes back.

Question: has an engine hung? One that hung while it was idle states no requests and fails no check, since its
front end is another process, and only who sent requests there knows better. A sign of life is the first token
or the end of any answer, or a report that the engine has computed. An engine that owes first tokens and gives
no sign for `limit_s` is taken to hang. Nothing follows for the requests that it has; it is sent no others.
When it has none any more, it is sent one at a time, until one of them is answered.

What it may be wrong about: a server without metrics that takes longer than the limit for one prompt. So
nothing is refused for it either; requests wait as they do for a server that is busy.
"""


class AnswerWatch:
    """The watch of one replica; all times in seconds.

    Attributes:
        hangs: it owes first tokens, and has given no sign for the limit.
    """

    __slots__ = ("_limit_s", "_owed", "_silent_since", "_told", "hangs")

    def __init__(self) -> None:
        self.hangs = False
        self._told = False
        self._limit_s: float | None = None
        self._owed = 0
        self._silent_since: float | None = None

    def __repr__(self) -> str:
        return f"<AnswerWatch owed={self._owed}{' hangs' if self.hangs else ''}>"

    def join(self, limit_s: float | None) -> None:
        """The replica has joined, or joined again; what it owes it still owes.

        Args:
            limit_s: None for an engine that is watched by others.
        """
        self.hangs, self._limit_s, self._silent_since = False, limit_s, None

    def on_dispatch(self, now: float) -> None:
        """It was sent a request whose first token will be told."""
        self._owed += 1
        if self._silent_since is None:
            self._silent_since = now

    def on_end(self) -> None:
        """It owes one first token less, for whatever reason."""
        self._owed -= 1
        if not self._owed:
            self._silent_since = None

    def on_sign(self, now: float) -> None:
        """It computes."""
        self.hangs = False
        self._silent_since = now if self._owed else None

    def look(self, now: float) -> float | None:
        """How long it has been silent when it is found to hang, 0 when that is over; None without news."""
        if self._owed and self._silent_since is None:
            self._silent_since = now
        silent_s = 0.0 if self._silent_since is None else now - self._silent_since
        if self._limit_s is not None and silent_s > self._limit_s:
            self.hangs = True
        if self.hangs == self._told:
            return None
        self._told = self.hangs
        return silent_s if self.hangs else 0.0
