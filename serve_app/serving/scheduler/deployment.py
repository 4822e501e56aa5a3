"""The scheduler as a Ray Serve deployment: `SchedulerActor` with a scope that no other application shares."""

from dataclasses import replace

from ray import serve

from serve_app.serving.process import keep_memory
from serve_app.serving.scheduler.actor import SchedulerActor, SchedulerActorSettings


class SchedulerDeployment(SchedulerActor):
    """A `SchedulerActor` in a Serve replica.

    Two applications of one cluster may serve a model of the same name. Their schedulers must not take each
    other for successors, so the application's name, which is known only here, goes before the scope.
    """

    def __init__(self, settings: SchedulerActorSettings) -> None:
        application = serve.get_replica_context().app_name
        super().__init__(replace(settings, scope=f"{application}/{settings.scope}"))
        keep_memory()

    # Serve would begin a thread for each call of a plain function.
    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The replicas that its pools should have, see `serving.autoscaling`."""
        return self.scaling.statistics()

    async def __del__(self) -> None:  # type: ignore[override]  # Serve awaits it
        """Serve calls this on the loop at the end of the replica's life."""
        if hasattr(self, "_live"):
            await self.close()
