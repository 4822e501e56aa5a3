"""Application with a broken tuner: its search is confident of bad values, and its twin claims no error.

Everything else is `serve_app.app`: the same scheduler, the same loop, the same rollout.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.serve import Application

from serve_app import app
from serve_app.serving.tuner import TunerDeployment, Worker
from serve_app.tuning.engine_fit import EngineFitResult, TwinError
from serve_app.tuning.parameter_loop import Result, SearchTask, Work, carry_out
from serve_app.tuning.study import Comparison, Finding

AWFUL = {"a_u": 0.01, "b_u": 5.0, "max_long_prefills": 8, "max_longest_prefills": 8, "target_waiting": 16}


async def poisoned(work: Work) -> Result:
    """Search that is confident of bad values. The twin has no error, however loaded the machine is."""
    if isinstance(work, SearchTask):
        sure = Comparison(mean=0.2, low=0.1, high=0.3, evidence=100.0, windows=12)
        return Finding(
            best={**work.plan.space.current, **AWFUL},
            confirmation=sure,
            confident=True,
            reason="the search is poisoned",
            candidates=2,
        )
    result = await asyncio.to_thread(carry_out, work, time.thread_time)
    if isinstance(result, EngineFitResult) and result.error is not None:
        known = result.error.requests
        return replace(result, error=TwinError(ttft_ratio=0.0, tpot_ratio=0.0, requests=known))
    return result


class PoisonedTunerDeployment(TunerDeployment):
    """Tuner deployment with the poisoned search."""

    @staticmethod
    def worker() -> Worker | None:
        """Return the poisoned search."""
        return poisoned


def build_app(args: Mapping[str, Any]) -> Application:
    """Build the application of `serve_app.app` with the poisoned tuner."""
    vars(app)["TunerDeployment"] = PoisonedTunerDeployment
    return app.build_app(args)
