"""Program on a terminal of a given width, as a user sees it."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown_on_terminal(*arguments: str, columns: int, timeout_s: float = 120) -> str:
    """Return what `python ARGUMENTS` writes to standard output, with a terminal attached."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    program = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env={**environment, "TERM": "xterm"},
    )
    os.close(theirs)
    pieces = []
    # Reading fails when the program's end of the terminal is closed.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 1 << 16):
            pieces.append(piece)
    os.close(ours)
    assert program.wait(timeout_s) == 0
    return _CONTROL.sub("", b"".join(pieces).decode()).replace("\r\n", "\n")
