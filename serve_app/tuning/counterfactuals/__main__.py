"""`python -m serve_app.tuning.counterfactuals`: reads a recording, and writes what would have been.

A gateway runs it beside itself, so that a replay takes nothing from it but idle time of the machine.
"""

import json
import os
import sys

from serve_app.tuning.counterfactuals.recording import RecordingError, decode_recording
from serve_app.tuning.counterfactuals.what_if import what_if

_NICENESS = 15


def main() -> int:
    """Answer once; an error is an object with `error`."""
    os.nice(_NICENESS)
    try:
        result = what_if(decode_recording(sys.stdin.buffer.read()))
    except RecordingError as error:
        result = {"error": str(error)}
    sys.stdout.write(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
