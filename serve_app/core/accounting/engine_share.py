"""Accounts of the engine time that one request uses on its replica (see `costs`)."""


class ReplicaTime:
    """The time of one replica since it was last idle.

    Attributes:
        at: time of the last update, in seconds.
        pot_s: time not yet divided.
        owed_s: excess of the unpaid prefills.
    """

    __slots__ = ("at", "common_s", "owed_s", "pot_s", "requests")

    def __init__(self, now: float) -> None:
        self.at = now
        self.pot_s = 0.0
        self.owed_s = 0.0
        self.common_s = 0.0
        self.requests = 0

    def __repr__(self) -> str:
        return f"<ReplicaTime at {self.at}: pot {self.pot_s} s, {self.requests} requests>"

    def advance(self, now: float) -> None:
        """Add the time since the last update to the pot, and divide what the unpaid prefills do not need."""
        pot_s, owed_s = self.pot_s + now - self.at, self.owed_s
        self.at = now
        if pot_s > owed_s:
            self.common_s += (pot_s - owed_s) / self.requests
            self.pot_s = owed_s
        else:
            self.pot_s = pot_s


class EngineShare:
    """The account of one request on one replica.

    Attributes:
        since: common clock at its dispatch, in seconds.
        compute_s: time to compute its prompt.
        read_s: time to read the weights in the steps that its prompt takes.
        prefills: prefills in progress on the replica at its dispatch, this one included.
        owed_s: time in the pot reserved for its prefill; 0 once that is paid.
        paid_s: time paid for its prefill.
    """

    __slots__ = ("compute_s", "owed_s", "paid_s", "prefills", "read_s", "since", "time")

    def __init__(self, time: ReplicaTime, compute_s: float, read_s: float, prefills: int) -> None:
        self.time = time
        self.since = time.common_s
        self.compute_s = compute_s
        self.read_s = read_s
        self.prefills = prefills
        self.paid_s = 0.0
        self.owed_s = owed_s = self.excess_s(prefills)
        time.owed_s += owed_s

    def __repr__(self) -> str:
        return f"<EngineShare since {self.since}, owes {self.owed_s} s, has paid {self.paid_s} s>"

    def excess_s(self, prefills: float) -> float:
        """Return the time that the prompt adds to its steps if `prefills` prefills share them."""
        return max(0.0, self.compute_s - self.read_s / prefills)

    def pay(self, seconds: float) -> None:
        """Charge `seconds` for the completed prefill, at most what the pot holds."""
        time = self.time
        paid = min(seconds, time.pot_s)
        self.paid_s += paid
        time.pot_s -= paid
        # Rounding errors of the sums could make this negative.
        time.owed_s = max(0.0, time.owed_s - self.owed_s)
        self.owed_s = self.compute_s = 0.0
