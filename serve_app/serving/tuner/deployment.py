"""The tuner as a Ray Serve deployment of one replica: Ray places it, and replaces it when it dies.

Without a persisted state, it starts when its scheduler has enough requests to learn from
(`serving.autoscaling`). An application without traffic then runs one process less.
"""

import os
from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from serve_app.serving.scheduler.tuning_endpoint import Observed, PartitionUpdate
from serve_app.serving.state.store import StateStore
from serve_app.serving.tuner.actor import TunerActor
from serve_app.serving.tuner.parameter_tuner import Worker
from serve_app.tuning.rollout import Retune
from serve_app.tuning.settings import TunerSettings

# Options for `serve.deployment`, besides its scale. The tuner has no open requests at its end.
TUNER_DEPLOYMENT_OPTIONS: Mapping[str, Any] = {
    "graceful_shutdown_timeout_s": 5.0,
    "graceful_shutdown_wait_loop_s": 0.1,
}


# Of at most 19. Low enough that health checks are answered on a busy machine.
_NICENESS = 10


class TunerDeployment:
    """Serve deployment that runs one `TunerActor`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it, which mypy cannot know
        self,
        model: str,
        settings: TunerSettings,
        scheduler: DeploymentHandle[Any],
        state_uri: str | None = None,
    ) -> None:
        # Requests have priority; a search may use the remaining CPU time.
        os.nice(_NICENESS)
        store = None if state_uri is None else StateStore(state_uri, "tuner", model)
        self._tuner = TunerActor(model, settings, _Calls(scheduler), store, self.worker())

    @staticmethod
    def worker() -> Worker | None:
        """Return the worker for `ParameterTuner`; overridden in tests of failing searches."""
        return None

    async def check_health(self) -> None:
        """Raise if the tuner must be replaced."""
        await self._tuner.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_tuner"):
            self._tuner.stop()


class _Calls:
    """`SchedulerCalls` over the handle of a scheduler."""

    def __init__(self, scheduler: DeploymentHandle[Any]) -> None:
        self._scheduler = scheduler

    async def observed(self, *, outcomes: bool) -> Observed:
        observed: Observed = await self._scheduler.observed.remote(outcomes=outcomes)
        return observed

    async def apply_partition(self, update: PartitionUpdate) -> None:
        await self._scheduler.apply_partition.remote(update)

    async def retune(self, order: Retune) -> None:
        await self._scheduler.retune.remote(order)

    async def freeze_tuning(self, reason: str) -> None:
        await self._scheduler.freeze_tuning.remote(reason)

    async def show_tuner(self, document: Mapping[str, Any]) -> None:
        await self._scheduler.show_tuner.remote(document)
