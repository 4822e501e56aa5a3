"""Log lines about replicas and pools, for commands that change no request."""

import logging

from serve_app.routing.adaptive_b_short import BShortChanged
from serve_app.scheduling.commands import Command, ContextLearned, EngineSilent, ReportFresh, ReportStale
from serve_app.serving.scheduler.journal import Entry

logger = logging.getLogger("ray.serve")


class ChangeLog:
    """Writes a line for each of these commands."""

    def __init__(self, model: str) -> None:
        self._model = model

    def on_entry(self, entry: Entry) -> None:
        """Write what has changed, if anything has."""
        if len(entry.commands) > len(entry.dispatched) + len(entry.concluded):
            for command in entry.commands:
                self._write(command)

    def _write(self, command: Command) -> None:
        match command:
            case ReportStale(replica_id=replica_id, age_s=age_s):
                logger.warning("event=report_stale replica=%s age_s=%.2f", replica_id, age_s)
            case ReportFresh(replica_id=replica_id):
                logger.info("event=report_fresh replica=%s", replica_id)
            case EngineSilent(replica_id=replica_id, silent_s=silent_s) if silent_s:
                logger.warning("event=engine_silent replica=%s silent_s=%.1f", replica_id, silent_s)
            case EngineSilent(replica_id=replica_id):
                logger.info("event=engine_answers replica=%s", replica_id)
            case ContextLearned(replica_id=replica_id, context_tokens=context_tokens):
                logger.info("event=context_learned replica=%s context_tokens=%s", replica_id, context_tokens)
            case BShortChanged():
                logger.info(
                    "event=b_short_moved model=%s was=%d now=%d short_load=%.3f long_load=%.3f speed=%.2f",
                    self._model,
                    command.was_tokens,
                    command.b_short_tokens,
                    command.short_load,
                    command.long_load,
                    command.speed_ratio,
                )
