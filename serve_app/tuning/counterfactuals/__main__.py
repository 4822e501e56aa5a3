"""`python -m serve_app.tuning.counterfactuals`: reads a recording and writes the what-if result.

A gateway runs it as a separate process, so that a replay uses only idle time of the machine.
"""

import json
import os
import sys

from serve_app.tuning.counterfactuals.recording import RecordingError, decode_recording
from serve_app.tuning.counterfactuals.what_if import what_if

_NICENESS = 15


def main() -> int:
    """Answer one recording. An error is an object with the field `error`."""
    os.nice(_NICENESS)
    try:
        result = what_if(decode_recording(sys.stdin.buffer.read()))
    except RecordingError as error:
        result = {"error": str(error)}
    sys.stdout.write(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
