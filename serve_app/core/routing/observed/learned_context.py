"""The context limit of an engine that does not report it, learned from rejected and served requests.

A rejection usually states the limit in its message. Otherwise the rejected request is longer than the
limit, and every served request is not. The limit therefore lies between the longest served and the shortest
rejected one.

Lengths of served requests are counted by engines, those of rejected ones are estimates:
- The estimate of a rejected request is an upper one, since the limit is below the request's real length.
- If another engine serves the request later, its count replaces all estimates.
- A learned limit that a longer served request contradicts is discarded.

Learned limits only affect the choice of a pool. They reject nothing, so a limit that is too low costs a
detour at worst. A reported or configured limit is never changed.
"""


class LearnedContext:
    """The learned context limit of one engine. All lengths in tokens, prompt and answer together."""

    __slots__ = ("_counted", "_estimated", "_served", "_stated")

    def __init__(self) -> None:
        self._stated: int | None = None
        self._estimated: int | None = None
        self._counted: int | None = None
        self._served = 0

    def __repr__(self) -> str:
        return f"<LearnedContext {self.limit_tokens} served={self._served}>"

    @property
    def limit_tokens(self) -> int | None:
        """The longest request to send there if another engine could serve it; None for no limit."""
        if self._stated is not None:
            return self._stated
        rejected = [each for each in (self._estimated, self._counted) if each is not None]
        return max(min(rejected) - 1, self._served, 1) if rejected else None

    def on_rejection(self, tokens: int, stated_tokens: int | None) -> None:
        """Record a rejection as too long.

        Args:
            tokens: estimated length of the request.
            stated_tokens: the limit, if the rejection states it.
        """
        if stated_tokens is not None:
            self._stated = stated_tokens
        elif tokens > self._served:
            self._estimated = tokens if self._estimated is None else min(tokens, self._estimated)

    def on_counted(self, tokens: int) -> None:
        """Record the actual length of a request that was rejected here and served elsewhere."""
        self._estimated = None
        if tokens > self._served:
            self._counted = tokens if self._counted is None else min(tokens, self._counted)

    def on_served(self, tokens: int) -> None:
        """Record the length of a served request, and discard limits that it contradicts."""
        self._served = max(self._served, tokens)
        self._stated = None if self._stated is not None and tokens > self._stated else self._stated
        self._estimated = (
            None if self._estimated is not None and tokens >= self._estimated else self._estimated
        )
        self._counted = None if self._counted is not None and tokens >= self._counted else self._counted
