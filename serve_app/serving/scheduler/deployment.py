"""The scheduler as a Ray Serve deployment: `SchedulerActor` with a scope unique to the application."""

from dataclasses import replace

from ray import serve

from serve_app.serving.memory import tune_memory
from serve_app.serving.scheduler.actor import SchedulerActor, SchedulerActorSettings
from serve_app.serving.watchdog import start_watchdog

# All requests wait while the scheduler is halted, and its replacement loses none of them.
_HALTED_S = 0.5


class SchedulerDeployment(SchedulerActor):
    """A `SchedulerActor` in a Serve replica.

    Two applications of a cluster may serve models of the same name. Their schedulers must not supersede each
    other, so the application's name, which is known only here, is prepended to the scope.
    """

    def __init__(self, settings: SchedulerActorSettings) -> None:
        application = serve.get_replica_context().app_name
        super().__init__(replace(settings, scope=f"{application}/{settings.scope}"))
        tune_memory()
        self._watchdog = start_watchdog(_HALTED_S)

    # A coroutine, because Serve runs each call of a plain function in a thread.
    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the desired replicas of its pools and of its tuner; see `serving.autoscaling`."""
        return self.scaling_statistics()

    async def __del__(self) -> None:  # type: ignore[override]  # Serve awaits it
        """Close; Serve calls this on the event loop at the end of the replica's life."""
        if hasattr(self, "_live"):
            await self.close()
