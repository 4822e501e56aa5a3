"""What one request owes to the replica that it runs on."""


class ReplicaTime:
    """The time of one replica since it last had nothing to do.

    Attributes:
        at: when it was last looked at.
        pot_s: time that is not divided yet.
        owed_s: prefills that are not paid.
        common_s: the common clock.
        requests: how many are on the replica.
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
        """Put the time since the last look into the pot, and divide what no prefill needs."""
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
        time: of the replica.
        since: where the common clock stood when it came.
        compute_s: of its prompt.
        read_s: of the weights, in the steps that its prompt passes in.
        prefills: prefills under way on the replica when it came, its own included.
        owed_s: what its prefill keeps of the pot; 0 once that is paid.
        paid_s: for its prefill.
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
        """What its prompt adds to its steps, with so many prefills under way."""
        return max(0.0, self.compute_s - self.read_s / prefills)

    def pay(self, seconds: float) -> None:
        """Its prefill has ended, and has taken so much, if there was so much time."""
        time = self.time
        paid = min(seconds, time.pot_s)
        self.paid_s += paid
        time.pot_s -= paid
        # Sums of floats: not less than nothing is owed.
        time.owed_s = max(0.0, time.owed_s - self.owed_s)
        self.owed_s = self.compute_s = 0.0
