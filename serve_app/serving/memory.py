"""Memory tuning for processes that serve many requests: return little memory, and collect cycles rarely."""

import contextlib
import ctypes
import gc

# Python collects cycles after this many net allocations. Its default of 700 is reached by two requests, which
# hardly ever leave a cycle. Collections of older generations become rarer in the same way.
_YOUNG_OBJECTS, _OLDER_PER_YOUNG, _OLDEST_PER_OLDER = 20_000, 20, 20
# Parameters of glibc's `mallopt`, as its header numbers them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# glibc would return the memory of a long body to the system, and fault it in page by page for the next one.
_KEPT_BYTES = 64 * 1024 * 1024
# Maximum of glibc for this parameter.
_LONGEST_KEPT_BYTES = 32 * 1024 * 1024


def tune_memory() -> None:
    """Tune this process; call this once, after all modules have been imported.

    The process may retain 64 MiB more than it needs. On systems without glibc only Python is tuned.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _OLDER_PER_YOUNG, _OLDEST_PER_OLDER)
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LONGEST_KEPT_BYTES)
