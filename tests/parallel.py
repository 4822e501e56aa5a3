"""Which tests share a process when `scripts/test` runs them in two: those that serve an application do.

They wait most of their time, for processes of Ray, and share one application. The other process goes through
the other files meanwhile, and helps with what is left. So it is with real engines, whose starts take half a
minute each, mostly on one core.
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
    """Gives a process all tests with applications, or the next file."""

    def _split_scope(self, nodeid: str) -> str:
        return "applications" if serves_an_application(nodeid) else nodeid.partition("::")[0]


def serves_an_application(nodeid: str) -> bool:
    """Whether the test may start processes of Ray."""
    return nodeid.startswith(_APPLICATIONS)


def applications_first(items: list[pytest.Item]) -> None:
    """Put the longest piece of work before the others, which keep their order."""
    items.sort(key=lambda item: not serves_an_application(item.nodeid))
