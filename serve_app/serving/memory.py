"""How a process that serves many requests keeps its memory: gives little back, and looks for few cycles."""

import contextlib
import ctypes
import gc

# Python looks for cycles whenever so many more objects have been made than freed; its own 700 are made by two
# requests, which hardly ever leave a cycle. Looks at older objects come as much later.
_YOUNG_OBJECTS, _OLDER_PER_YOUNG, _OLDEST_PER_OLDER = 20_000, 20, 20
# Of glibc's `mallopt`, as its header numbers them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# glibc would give the memory of a long body back to the system, and take it again page by page for the next.
_KEPT_BYTES = 64 * 1024 * 1024
# The most that glibc takes for this.
_LONGEST_KEPT_BYTES = 32 * 1024 * 1024


def keep_memory() -> None:
    """Tune this process; to be called once, when all modules have been imported.

    It may keep 64 MiB more than it needs. On systems without glibc only Python is tuned.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _OLDER_PER_YOUNG, _OLDEST_PER_OLDER)
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _LONGEST_KEPT_BYTES)
