"""What one request owes to the replica that it runs on."""


class EngineShare:
    """The account of one request on one replica.

    Attributes:
        since: where the common clock stood when it came.
        prefill_s: what its prefill is expected to take beyond the common time; 0 once that is paid.
        prefills: prefills under way on the replica when it came, its own included.
    """

    __slots__ = ("prefill_s", "prefills", "since")

    def __init__(self, since: float, prefill_s: float, prefills: int) -> None:
        self.since = since
        self.prefill_s = prefill_s
        self.prefills = prefills

    def __repr__(self) -> str:
        return f"<EngineShare since {self.since}, prefill {self.prefill_s} s>"
