"""Context learning: applies `observed.learned_context` to the replicas of a ledger, and reports changes."""

from serve_app.core.commands import ContextLearned
from serve_app.core.request import ScheduledRequest
from serve_app.core.routing.ledger import ReplicaLedger
from serve_app.core.routing.observed.learned_context import LearnedContext
from serve_app.request import Usage


class ContextLearning:
    """Updates the learned context limits of a ledger, and reports changes."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger

    def on_rejection(self, scheduled: ScheduledRequest, stated_tokens: int | None) -> list[ContextLearned]:
        """Learn from a rejection as too long by the replica of a request."""
        assert scheduled.replica_id is not None
        if (context := self._context(scheduled.replica_id)) is None:
            return []
        before = context.limit_tokens
        estimated = scheduled.estimate.prompt_tokens + _requested_output(scheduled)
        context.on_rejection(estimated, stated_tokens)
        scheduled.too_long_for += (scheduled.replica_id,)
        return self._changed(scheduled.replica_id, context, before)

    def on_completion(self, scheduled: ScheduledRequest, usage: Usage) -> list[ContextLearned]:
        """Learn from a completed request and its engine's token counts."""
        # Engines count only the sum of several prompts or choices.
        if scheduled.request.shape.prompts != 1 or scheduled.request.spec.choices != 1:
            return []
        changed: list[ContextLearned] = []
        # The answer counts as one token: an engine that shifts its context may generate without limit.
        served = usage.prompt_tokens + min(1, usage.output_tokens)
        requested = usage.prompt_tokens + _requested_output(scheduled)
        if scheduled.replica_id is not None and (context := self._context(scheduled.replica_id)) is not None:
            before = context.limit_tokens
            context.on_served(served)
            changed += self._changed(scheduled.replica_id, context, before)
        for replica_id in scheduled.too_long_for:
            if (context := self._context(replica_id)) is not None:
                before = context.limit_tokens
                context.on_counted(requested)
                changed += self._changed(replica_id, context, before)
        return changed

    def _context(self, replica_id: str) -> LearnedContext | None:
        state = self._ledger.get(replica_id)
        return None if state is None else state.context

    def _changed(self, replica_id: str, context: LearnedContext, before: int | None) -> list[ContextLearned]:
        if context.limit_tokens == before:
            return []
        self._ledger.contexts.update(self._ledger[replica_id])
        return [ContextLearned(replica_id=replica_id, context_tokens=context.limit_tokens)]


def _requested_output(scheduled: ScheduledRequest) -> int:
    """Return the output tokens that an engine must have capacity for: the client's limit, if any."""
    return scheduled.request.spec.max_output_tokens or 0
