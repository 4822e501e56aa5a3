"""The context limit of an engine that does not tell it, learned from what it refuses and what it serves.

Question: which requests are too long for it? A refusal mostly states the limit in its words. Where it does
not, the refused request is longer than the limit, and every request that was served is not. So the limit lies
between the longest served and the shortest refused.

Lengths of served requests are counted by engines, those of refused ones are estimates:
- The estimate of a refused request is an upper one, since the limit is below the request's real length.
- When another engine serves the request afterwards, its count takes the place of all estimates.
- Whatever was learned, and is contradicted by a longer request that is served, is forgotten.

What is learned is for the choice of a pool only. Nothing is refused by it, so a limit that is learned too low
costs a detour at worst. A limit that an engine tells, or that is configured, is never changed.
"""


class LearnedContext:
    """What is known of one engine's limit; see above. All lengths in tokens, prompt and answer together."""

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
        """The longest request that is sent there if another engine could take it; None for any."""
        if self._stated is not None:
            return self._stated
        refused = [each for each in (self._estimated, self._counted) if each is not None]
        return max(min(refused) - 1, self._served, 1) if refused else None

    def on_refusal(self, tokens: int, stated_tokens: int | None) -> None:
        """A request of this length, estimated, was refused as too long.

        Args:
            stated_tokens: the limit, where the refusal states it.
        """
        if stated_tokens is not None:
            self._stated = stated_tokens
        elif tokens > self._served:
            self._estimated = tokens if self._estimated is None else min(tokens, self._estimated)

    def on_counted(self, tokens: int) -> None:
        """A request that was refused here has been served elsewhere, and had this length."""
        self._estimated = None
        if tokens > self._served:
            self._counted = tokens if self._counted is None else min(tokens, self._counted)

    def on_served(self, tokens: int) -> None:
        """A request of this length was served."""
        self._served = max(self._served, tokens)
        self._stated = None if self._stated is not None and tokens > self._stated else self._stated
        self._estimated = (
            None if self._estimated is not None and tokens >= self._estimated else self._estimated
        )
        self._counted = None if self._counted is not None and tokens >= self._counted else self._counted
