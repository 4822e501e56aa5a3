"""An application whose tuner is wrong: its search likes what serves badly.

Everything else is `serve_app.app`: the same scheduler, the same loop, the same roll-out.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.serve import Application

from serve_app import app
from serve_app.serving.tuner.deployment import TunerDeployment
from serve_app.serving.tuner.parameter_tuner import Searcher
from serve_app.tuning.online.parameter_search import SearchResult, SearchTask
from serve_app.tuning.search.comparison import Comparison
from serve_app.tuning.search.optimiser import Proposal
from serve_app.tuning.search.study import Finding

AWFUL = {
    "a_u": 0.01,
    "b_u": 5.0,
    "max_long_prefills": 8,
    "max_longest_prefills": 8,
    "short_work_share": 0.6,
    "target_waiting": 16,
}
"""Values that serve badly: no order matters in a long engine queue, and long prefills are not limited."""


async def poisoned(task: SearchTask) -> SearchResult:
    """A search that is sure of what is awful."""
    await asyncio.sleep(1.0)
    sure = Comparison(mean=0.2, low=0.1, high=0.3, windows=12)
    finding = Finding(
        best=Proposal(1, {**task.plan.space.current, **AWFUL}),
        search=sure,
        confirmation=sure,
        confident=True,
        reason="the search is poisoned",
        trials=2,
    )
    return SearchResult(finding=finding, seconds=1.0)


class PoisonedTunerDeployment(TunerDeployment):
    """The tuner with that search."""

    @staticmethod
    def searcher() -> Searcher | None:
        """That search."""
        return poisoned


def build_app(args: Mapping[str, Any]) -> Application:
    """The application of `serve_app.app`, with the poisoned tuner."""
    vars(app)["TunerDeployment"] = PoisonedTunerDeployment
    return app.build_app(args)
