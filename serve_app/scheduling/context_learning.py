"""What requests teach of the context limits of replicas that do not tell theirs; see `learned_context`."""

from serve_app.request import Usage
from serve_app.routing.ledger import ReplicaLedger
from serve_app.routing.observed.learned_context import LearnedContext
from serve_app.scheduling.commands import ContextLearned
from serve_app.scheduling.request import ScheduledRequest


class ContextLearning:
    """Feeds the learned limits of a ledger, and tells which have changed."""

    def __init__(self, ledger: ReplicaLedger) -> None:
        self._ledger = ledger

    def on_refusal(self, scheduled: ScheduledRequest, stated_tokens: int | None) -> list[ContextLearned]:
        """The replica that a request runs on has refused it as too long."""
        assert scheduled.replica_id is not None
        if (context := self._context(scheduled.replica_id)) is None:
            return []
        before = context.limit_tokens
        estimated = scheduled.estimate.prompt_tokens + _asked_output(scheduled)
        context.on_refusal(estimated, stated_tokens)
        scheduled.too_long_for += (scheduled.replica_id,)
        return self._changed(scheduled.replica_id, context, before)

    def on_completion(self, scheduled: ScheduledRequest, usage: Usage) -> list[ContextLearned]:
        """A request is complete, and its engine has counted it."""
        # Of several prompts in one request only the sum is counted.
        if scheduled.request.shape.prompts != 1 or scheduled.request.spec.choices != 1:
            return []
        changed: list[ContextLearned] = []
        # The answer counts for one token: an engine that shifts its context may generate without end.
        served = usage.prompt_tokens + min(1, usage.output_tokens)
        asked = usage.prompt_tokens + _asked_output(scheduled)
        if scheduled.replica_id is not None and (context := self._context(scheduled.replica_id)) is not None:
            before = context.limit_tokens
            context.on_served(served)
            changed += self._changed(scheduled.replica_id, context, before)
        for replica_id in scheduled.too_long_for:
            if (context := self._context(replica_id)) is not None:
                before = context.limit_tokens
                context.on_counted(asked)
                changed += self._changed(replica_id, context, before)
        return changed

    def _context(self, replica_id: str) -> LearnedContext | None:
        state = self._ledger.get(replica_id)
        return None if state is None else state.context

    def _changed(self, replica_id: str, context: LearnedContext, before: int | None) -> list[ContextLearned]:
        if context.limit_tokens == before:
            return []
        self._ledger.on_context_learned(replica_id)
        return [ContextLearned(replica_id=replica_id, context_tokens=context.limit_tokens)]


def _asked_output(scheduled: ScheduledRequest) -> int:
    """The answer that an engine has to make room for: what the client asks for, and else whatever is left."""
    return scheduled.request.spec.max_output_tokens or 0
