"""Where gateway and scheduler spend their time: `python -m experiments.overhead.profile small stream`.

py-spy samples who holds Python's lock. What uvloop does by itself, such as deferred writes, counts as its
caller's, and waiting and reading sockets do not count.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from experiments.common.config import read_settings
from experiments.common.light_endpoint import MODEL
from experiments.common.processes import process_tree, role_of
from experiments.overhead.client import load_of, started_client
from experiments.overhead.ours import started_ours
from experiments.overhead.system import OverheadSettings, started_light_engines
from serve_app.cli.command import say

_CONFIG = Path(__file__).with_name("config.yaml")
_ROLES = ("gateway", "scheduler")
_PER_S = 200
_WARM_UP_S = 2.0
# Of a path, what tells nothing: where packages and the project lie.
_PLACE = re.compile(r"\((?:/[^ ]*/)?(?:site-packages/|lib/python3\.\d+/|(?=serve_app/))")


@dataclass(frozen=True, slots=True)
class Profile:
    """What was sampled of a process: shares of its samples."""

    samples: int
    own_lines: Counter[str]
    functions: Counter[str]

    @classmethod
    def of(cls, stacks: Sequence[str]) -> "Profile":
        """Read lines such as `outer (file.py:1);inner (file.py:2) 17`."""
        own, functions, samples = Counter[str](), Counter[str](), 0
        for line in stacks:
            stack, _, count = line.rpartition(" ")
            frames = [_PLACE.sub("(", frame) for frame in stack.split(";")]
            samples += int(count)
            own[frames[-1]] += int(count)
            for function in dict.fromkeys(re.sub(r":\d+\)$", ")", frame) for frame in frames):
                functions[function] += int(count)
        return cls(samples, own, functions)

    def told(self, lines: int) -> Iterator[str]:
        """The dearest lines by themselves, and the dearest functions with all that they call."""
        for title, counter in (("own, by line", self.own_lines), ("with all it calls", self.functions)):
            yield f"  {title}"
            for name, count in counter.most_common(lines):
                yield f"    {100 * count / max(1, self.samples):5.1f} %  {name}"


def main(argv: Sequence[str] | None = None) -> int:
    """Profile a load of each kind in turn."""
    parser = argparse.ArgumentParser(prog="python -m experiments.overhead.profile", description=__doc__)
    parser.add_argument("kinds", nargs="+", metavar="KIND", help="of requests, as config.yaml names them")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load (%(default)s)")
    parser.add_argument("--lines", type=int, default=10, help="to print of each list (%(default)s)")
    args = parser.parse_args(argv)
    settings = read_settings(_CONFIG, OverheadSettings)
    with ExitStack() as stack:
        client = stack.enter_context(started_client())
        light, endpoints = stack.enter_context(started_light_engines())
        ours = stack.enter_context(started_ours(endpoints))
        processes = {role_of(one): one.pid for root in ours.meter.roots for one in process_tree(root)}
        for name in args.kinds:
            kind = settings.requests[name]
            light.tell("answer", kind.chunks, kind.pace_ms)
            clients = max(kind.clients)
            client.play(load_of(kind, ours, MODEL, clients, _WARM_UP_S))
            load = load_of(kind, ours, MODEL, clients, args.seconds + 2 * _WARM_UP_S)
            thread = threading.Thread(target=client.play, args=(load,))
            thread.start()
            time.sleep(_WARM_UP_S)
            for role, profile in _sampled({role: processes[role] for role in _ROLES}, args.seconds).items():
                say(f"{name}, {clients} clients: {role}, {profile.samples} samples")
                say("\n".join(profile.told(args.lines)))
            thread.join()
    return 0


def _sampled(pids: dict[str, int], seconds: float) -> dict[str, Profile]:
    """Profiles of several processes at the same time."""
    program = str(Path(sys.executable).with_name("py-spy"))
    with tempfile.TemporaryDirectory() as folder:
        files = {role: Path(folder) / role for role in pids}
        options = ("--duration", f"{seconds:.0f}", "--rate", str(_PER_S), "--gil", "--format", "raw")
        running = [
            subprocess.Popen(
                [program, "record", *options, "--pid", str(pid), "--output", str(files[role])],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for role, pid in pids.items()
        ]
        for process in running:
            process.wait()
        return {role: Profile.of(file.read_text().splitlines()) for role, file in files.items()}


if __name__ == "__main__":
    sys.exit(main())
