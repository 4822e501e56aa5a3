"""A client of programs, and a fleet with caches for few of their contexts."""

from typing import Any

from serve_app.core.commands import Command, Conclude, Dispatch
from serve_app.core.dispatch.backpressure import BackpressureSettings
from serve_app.core.events import Finished, Woke
from serve_app.core.programs.program import Conversation
from serve_app.core.programs.program_scheduler import ProgramScheduler
from serve_app.core.programs.residency import ReplicaContexts
from serve_app.errors import Outcome
from serve_app.request import ProgramHint, TurnEnd, Usage
from tests.builders import ONE_POOL, ManualDriver

KV_TOKENS = 100_000
_MAX_MODEL_LEN = 90_000


class ProgramDriver(ManualDriver):
    """A scheduler on a manual clock, with requests that are turns of programs."""

    @property
    def programs(self) -> ProgramScheduler:
        return self.scheduler.programs

    def join_fleet(self, replica_id: str, kv_tokens: int | None = KV_TOKENS) -> list[Command]:
        return self.join(replica_id, "only", max_model_len=_MAX_MODEL_LEN, kv_tokens=kv_tokens)

    def start_turn(
        self,
        request_id: str,
        session: str,
        *,
        prompt_tokens: int = 60_000,
        program: str | None = None,
        parent: str | None = None,
        **fields: Any,
    ) -> list[Command]:
        """Submit a turn of a stated session."""
        hint = ProgramHint(session=session, program=program, parent=parent)
        return self.arrive(request_id, prompt_tokens=prompt_tokens, program=hint, **fields)

    def end_turn(
        self,
        request_id: str,
        *,
        context: int = 60_000,
        ending: TurnEnd | None = TurnEnd.TOOLS,
        after_s: float = 0.0,
    ) -> list[Command]:
        """Complete a turn after which its conversation has `context` tokens."""
        usage = Usage(prompt_tokens=context - 10, output_tokens=10, ending=ending)
        return self.feed(Finished(request_id, Outcome.COMPLETED, usage), after_s=after_s)

    def wake(self) -> list[Command]:
        """Feed the next wake-up that the scheduling of programs asks for."""
        at = self.programs.next_at()
        assert at is not None
        self.now = at
        return self.feed(Woke())

    def contexts(self, replica_id: str = "s1") -> ReplicaContexts:
        return self.programs.residency.of(replica_id)

    def conversation(self, session: str) -> Conversation:
        """Return the only conversation of a stated session."""
        (found,) = (
            each
            for program in self.programs.table.programs()
            for each in program.conversations
            if each.session == session
        )
        return found


def fleet(*replica_ids: str, kv_tokens: int = KV_TOKENS, **changes: Any) -> ProgramDriver:
    """Return a scheduler with one pool of replicas whose reports do not expire."""
    patient = BackpressureSettings(report_limit_s=1e6)
    driver = ProgramDriver(**{"routing": ONE_POOL, "backpressure": patient, **changes})
    for replica_id in replica_ids:
        driver.join_fleet(replica_id, kv_tokens)
    return driver


def causes(commands: list[Command]) -> dict[str, float]:
    """Return the seconds of the only reported wait, by cause."""
    (waited,) = (
        command.waited
        for command in commands
        if isinstance(command, Dispatch | Conclude) and command.waited is not None
    )
    return {cause.value: nanoseconds / 1e9 for cause, nanoseconds in waited.causes.items()}
