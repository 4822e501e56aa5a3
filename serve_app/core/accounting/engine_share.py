"""Accounts of the engine time that one request uses on its replica (see `costs`)."""


class ReplicaTime:
    """The time of one replica since it was last idle.

    Attributes:
        at: time of the last update, in seconds.
        undivided_s: time not yet divided.
        reserved_s: excess of the prefills in progress.
    """

    __slots__ = ("at", "common_s", "requests", "reserved_s", "undivided_s")

    def __init__(self, now: float) -> None:
        self.at = now
        self.undivided_s = 0.0
        self.reserved_s = 0.0
        self.common_s = 0.0
        self.requests = 0

    def __repr__(self) -> str:
        return f"<ReplicaTime at {self.at}: undivided {self.undivided_s} s, {self.requests} requests>"

    def advance(self, now: float) -> None:
        """Add the time since the last update, and divide what is not reserved for prefills in progress."""
        undivided_s, reserved_s = self.undivided_s + now - self.at, self.reserved_s
        self.at = now
        if undivided_s > reserved_s:
            self.common_s += (undivided_s - reserved_s) / self.requests
            self.undivided_s = reserved_s
        else:
            self.undivided_s = undivided_s


class EngineShare:
    """The account of one request on one replica.

    Attributes:
        since: common clock at its dispatch, in seconds.
        compute_s: time to compute its prompt.
        read_s: time to read the weights in the steps that its prompt takes.
        prefills: prefills in progress on the replica at its dispatch, this one included.
        reserved_s: undivided time reserved for its prefill; 0 once that is charged.
        charged_s: time charged for its prefill.
    """

    __slots__ = ("charged_s", "compute_s", "prefills", "read_s", "reserved_s", "since", "time")

    def __init__(self, time: ReplicaTime, compute_s: float, read_s: float, prefills: int) -> None:
        self.time = time
        self.since = time.common_s
        self.compute_s = compute_s
        self.read_s = read_s
        self.prefills = prefills
        self.charged_s = 0.0
        self.reserved_s = reserved_s = self.excess_s(prefills)
        time.reserved_s += reserved_s

    def __repr__(self) -> str:
        return f"<EngineShare since {self.since}, reserved {self.reserved_s} s, charged {self.charged_s} s>"

    def excess_s(self, prefills: float) -> float:
        """Return the time that the prompt adds to its steps if `prefills` prefills share them."""
        return max(0.0, self.compute_s - self.read_s / prefills)

    def charge(self, seconds: float) -> None:
        """Charge `seconds` for the completed prefill, at most the undivided time."""
        time = self.time
        charged = min(seconds, time.undivided_s)
        self.charged_s += charged
        time.undivided_s -= charged
        # Rounding errors of the sums could make this negative.
        time.reserved_s = max(0.0, time.reserved_s - self.reserved_s)
        self.reserved_s = self.compute_s = 0.0
