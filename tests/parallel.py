"""Distribution of tests over the processes of `scripts/test`: one gets all that serve an application.

These mostly wait for Ray's processes, and share one application. The others run the other files, then help
with the rest. Tests with real engines are in the first group, too: their starts take half a minute each,
mostly on one core.
"""

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

_APPLICATIONS = (
    "tests/chaos/",
    "tests/docs/test_blocks.py::test_a_block_that_can_be_run_works",
    "tests/e2e/",
    "tests/cli/serve/",
)


class Schedule(LoadScopeScheduling):
    """Scheduler that assigns all tests with applications, or the next file, to a process."""

    def _split_scope(self, nodeid: str) -> str:
        return "applications" if serves_an_application(nodeid) else nodeid.partition("::")[0]


def serves_an_application(nodeid: str) -> bool:
    """Return whether the test may start processes of Ray."""
    return nodeid.startswith(_APPLICATIONS)


def applications_first(items: list[pytest.Item]) -> None:
    """Move the longest piece of work to the front; the others keep their order."""
    items.sort(key=lambda item: not serves_an_application(item.nodeid))
