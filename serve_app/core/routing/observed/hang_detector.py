"""Liveness of an engine, observed from its requests.

An engine that hung while idle reports no requests and passes health checks, because its front end is another
process, so only its requests can show it. A sign of life is the first token or the end of any answer, or a
report that the engine has computed. An engine with outstanding first tokens and no sign of life for
`limit_s` is considered hung. Its requests are not affected, but it receives no others. Once it has none, it
receives one at a time, until one of them is answered.

False positives: a server without metrics that takes longer than the limit for one prompt. For that reason no
request is rejected because of a hang; requests wait as for a busy server.
"""


class HangDetector:
    """Detects whether a replica hangs: first tokens are outstanding and the time limit has passed."""

    __slots__ = ("_limit_s", "_no_progress_since", "_outstanding", "_reported", "hangs")

    def __init__(self) -> None:
        self.hangs = False
        self._reported = False
        self._limit_s: float | None = None
        self._outstanding = 0
        self._no_progress_since: float | None = None

    def __repr__(self) -> str:
        return f"<HangDetector outstanding={self._outstanding}{' hangs' if self.hangs else ''}>"

    def join(self, limit_s: float | None) -> None:
        """Reset a replica that has joined, except for outstanding first tokens. None disables detection."""
        self.hangs, self._limit_s, self._no_progress_since = False, limit_s, None

    @property
    def outstanding(self) -> int:
        """Number of first tokens that are outstanding."""
        return self._outstanding

    def on_dispatch(self, now: float) -> None:
        """Count a dispatched request whose first token will be reported."""
        self._outstanding += 1
        if self._no_progress_since is None:
            self._no_progress_since = now

    def on_end(self) -> None:
        """Remove an outstanding first token, for any reason."""
        self._outstanding -= 1
        if not self._outstanding:
            self._no_progress_since = None

    def on_progress(self, now: float) -> None:
        """Record that the engine computes."""
        self.hangs = False
        self._no_progress_since = now if self._outstanding else None

    def is_silent_since(self, at: float) -> bool:
        """Return whether first tokens are outstanding, without a sign of life since that time."""
        return self._no_progress_since is not None and self._no_progress_since <= at

    def check(self, now: float) -> float | None:
        """Return the seconds without progress when a hang starts, 0 at its end, None without a change."""
        if self._outstanding and self._no_progress_since is None:
            self._no_progress_since = now
        no_progress_s = 0.0 if self._no_progress_since is None else now - self._no_progress_since
        if self._limit_s is not None and no_progress_s > self._limit_s:
            self.hangs = True
        if self.hangs == self._reported:
            return None
        self._reported = self.hangs
        return no_progress_s if self.hangs else 0.0
