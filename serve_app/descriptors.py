"""Open files of a process: every connection takes one, and the system limits them."""

import contextlib
import resource

# A gateway may need a connection to an engine for each of a client's, and has others. HAProxy does not start
# with fewer than two and a half.
_PER_CONNECTION = 3
_MAX_CONNECTIONS = 20_000


def most_connections() -> int:
    """How many connections of clients a process here may have, by its limit of open files."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return min(hard // _PER_CONNECTION, _MAX_CONNECTIONS)


def raise_descriptor_limit() -> None:
    """As many open files as the system allows: a waiting request holds a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
