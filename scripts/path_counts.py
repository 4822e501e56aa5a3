"""Count what one streamed chat request passes through: files, types, Python calls, hand-overs.

    .venv/bin/python scripts/path_counts.py            # the summary
    .venv/bin/python scripts/path_counts.py --list     # and the files with their calls, and the types
    .venv/bin/python scripts/path_counts.py --json     # the same for a program

One process, one event loop: a gateway that listens, a live scheduler behind a real control channel, a replica
and a scripted engine, as `tests/serving/gateway/fleet.py` builds them. A raw client sends requests over a
socket. The first ones warm up; each of the next ones is traced from its first byte until the scheduler has
handled its end. Load reports and heartbeats are left out. The trace with the fewest calls is reported. The
answer has four pieces, and no optional feature is on: no keys, no traces, no comments, no programs.

How to read it:

- A *part* is what would be another process. Each callback of the event loop belongs to one part, by the
  files that it enters: `serving/gateway` (or the client of the channel), `serving/scheduler` (or `core`), or
  the replica and its engine, which are not reported. A callback in shared files alone belongs to the part
  whose objects it uses.
- *files* counts files of `serve_app` in which a function ran. Modules that are only imported do not count.
- *types* counts classes of `serve_app` of which an object was constructed: seen by their `__init__`, or by a
  call of the class on a line that ran (which over-counts a branch on the same line). Messages that the
  decoder constructs are listed as received. Enumerations do not count.
- *calls* counts calls of Python functions and properties, without comprehensions. *hand-overs* counts the
  changes of file from a caller to the function that it calls: all of them, and the different pairs.
- *callbacks* counts the entries from the event loop.
- *fields* are those of the largest types on the path.

It cannot show time, what C code does, or paths of other requests. Python 3.11 or newer.
"""

import argparse
import ast
import asyncio
import enum
import inspect
import json
import logging
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "serve_app"
WARM_UP, TRACED = 5, 5
BODY = json.dumps(
    {
        "model": "tiny",
        "stream": True,
        "max_tokens": 4,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "Say something short about queues."},
        ],
    }
).encode()

GATEWAY, SCHEDULER, REPLICA, CHANNEL = "gateway", "scheduler", "replica", "channel"
# The part of a callback, by what it enters: the first mark that matches any of its files.
MARKS = (
    (REPLICA, ("tests/serving/gateway/builders", "serving/pool/", "channel/replica_client", "path_counts")),
    (GATEWAY, ("serving/gateway/", "channel/gateway_client")),
    (
        SCHEDULER,
        ("serving/scheduler/", "channel/gateway_sessions", "channel/replica_registry", f"{PACKAGE}/core/"),
    ),
)

# Types whose presence marks a callback that concerns no request.
BACKGROUND = {"Report", "ReplicaReported", "ReplicaReport"}


# The trace


class Tree:
    """One callback of the event loop."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.edges: Counter[tuple[str, str]] = Counter()
        self.types: dict[type, object] = {}
        self.received: set[type] = set()
        self.objects: set[int] = set()
        self.foreign: set[str] = set()

    def is_background(self) -> bool:
        """Whether it only handles load reports, or only signs of life."""
        seen = {kind.__name__ for kind in self.received | self.types.keys()}
        if seen & BACKGROUND:
            return True
        return seen == {"Heartbeat"} and all("/serving/channel/" in path for path in self.files)

    def part(self) -> str | None:
        """Return the part that its files belong to; None if it entered shared files alone."""
        if self.is_background():
            return REPLICA
        paths = self.files | self.foreign
        for part, marks in MARKS:
            if any(mark in path for path in paths for mark in marks):
                return part
        return None


LineTracer = Callable[[FrameType, str, object], Any]


class Tracer:
    """A `sys.settrace` function that records callbacks."""

    def __init__(self) -> None:
        self.trees: list[Tree] = []
        self.kept: list[object] = []
        self._sources: dict[str, dict[int, list[str]]] = {}
        self._root_code = asyncio.events.Handle._run.__code__  # noqa: SLF001
        self._prefix = str(ROOT / PACKAGE) + os.sep
        self._tests = str(ROOT / "tests") + os.sep

    def __call__(self, frame: FrameType, event: str, _argument: object) -> LineTracer | None:
        """Record the call of a function of the project; return what records its lines."""
        if event != "call":
            return None
        code = frame.f_code
        if code is self._root_code:
            self.trees.append(Tree())
            return None
        name = code.co_filename
        if name.startswith(self._prefix):
            return self._enter(frame, code, name[len(str(ROOT)) + 1 :])
        if not self.trees:
            return None
        if name.startswith(self._tests):
            self.trees[-1].foreign.add(name[len(str(ROOT)) + 1 :])
        elif name.startswith("<"):
            self._enter_generated(frame, code)
        return None

    def _enter(self, frame: FrameType, code: CodeType, path: str) -> LineTracer:
        if not self.trees:
            self.trees.append(Tree())
        tree = self.trees[-1]
        tree.files.add(path)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in names:
            value = frame.f_locals.get(name)
            kind = type(value)
            if name == "self":
                self.kept.append(value)
                tree.objects.add(id(value))
            elif kind.__module__.startswith(PACKAGE) and hasattr(kind, "__struct_fields__"):
                tree.received.add(kind)
        if code.co_name == "<module>" or code.co_name.endswith(("comp>", "genexpr>")):
            return self._line
        tree.calls[path] += 1
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename.startswith("<"):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename.startswith(self._prefix):
            before = caller.f_code.co_filename[len(str(ROOT)) + 1 :]
            if before != path:
                tree.edges[before, path] += 1
        if code.co_name in ("__init__", "__post_init__"):
            self._construct(tree, frame.f_locals.get("self"))
        return self._line

    def _enter_generated(self, frame: FrameType, code: CodeType) -> None:
        """Record a constructor that dataclasses or named tuples have generated."""
        tree = self.trees[-1]
        if code.co_name == "__init__" and str(frame.f_globals.get("__name__", "")).startswith(PACKAGE):
            instance = frame.f_locals.get("self")
            self._construct(tree, instance)
            tree.calls[_file_of(type(instance))] += 1
        elif (
            code.co_name == "<lambda>"
            and isinstance(kind := frame.f_locals.get("_cls"), type)
            and kind.__module__.startswith(PACKAGE)
        ):
            tree.types.setdefault(kind, None)
            tree.calls[_file_of(kind)] += 1

    def _construct(self, tree: Tree, instance: object) -> None:
        kind = type(instance)
        if kind.__module__.startswith(PACKAGE):
            tree.types[kind] = instance
            self.kept.append(instance)

    def _line(self, frame: FrameType, event: str, _argument: object) -> LineTracer:
        if event == "line":
            candidates = self._candidates(frame.f_code.co_filename).get(frame.f_lineno)
            for dotted in candidates or ():
                kind = _resolve(dotted, frame)
                if (
                    isinstance(kind, type)
                    and kind.__module__.startswith(PACKAGE)
                    and not issubclass(kind, enum.Enum)
                ):
                    self.trees[-1].types.setdefault(kind, None)
        return self._line

    def _candidates(self, path: str) -> dict[int, list[str]]:
        """The calls of what looks like a class, by the line on which their name stands."""
        found = self._sources.get(path)
        if found is None:
            found = defaultdict(list)
            for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                    dotted = ast.unparse(node.func)
                    if dotted.rsplit(".", 1)[-1].lstrip("_")[:1].isupper() and "(" not in dotted:
                        found[node.func.lineno].append(dotted)
            self._sources[path] = found
        return found


def _resolve(dotted: str, frame: FrameType) -> object:
    first, *rest = dotted.split(".")
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in rest:
        value = getattr(value, name, None)
    return value


def _file_of(kind: type) -> str:
    return kind.__module__.replace(".", "/") + ".py"


class Part:
    """What a part did in one request."""

    def __init__(self, trees: list[Tree]) -> None:
        self.callbacks = sum(bool(tree.calls) for tree in trees)
        self.files: set[str] = set()
        self.calls: Counter[str] = Counter()
        self.edges: Counter[tuple[str, str]] = Counter()
        self.types: dict[type, object] = {}
        received: set[type] = set()
        for tree in trees:
            self.files |= tree.files
            self.calls += tree.calls
            self.edges += tree.edges
            for kind, instance in tree.types.items():
                if self.types.get(kind) is None:
                    self.types[kind] = instance
            received |= tree.received
        self.received = received - self.types.keys()


def parts_of(trees: list[Tree]) -> dict[str, Part]:
    """Divide callbacks among parts; those in shared files go to the part whose objects they use."""
    of_object: dict[int, str] = {}
    by_part: defaultdict[str, list[Tree]] = defaultdict(list)
    undecided = []
    for tree in trees:
        if not tree.calls:
            continue
        part = tree.part()
        if part is None:
            undecided.append(tree)
            continue
        by_part[part].append(tree)
        for key in tree.objects:
            of_object.setdefault(key, part)
    for tree in undecided:
        owners = {of_object[key] for key in tree.objects if key in of_object}
        by_part[owners.pop() if len(owners) == 1 else CHANNEL].append(tree)
    return {part: Part(found) for part, found in by_part.items()}


# The request


async def send_request(port: int) -> bytes:
    """Send the request on a new connection; return the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(BODY)}\r\nconnection: close\r\n\r\n"
    )
    writer.write(head.encode() + BODY)
    answer = await reader.read(-1)
    writer.close()
    return answer


async def trace_requests() -> list[dict[str, Part]]:
    """Run the fleet; return the parts of each traced request."""
    from tests.serving.gateway.builders import Engine  # noqa: PLC0415 - needs the path of the project
    from tests.serving.gateway.fleet import fleet_of  # noqa: PLC0415

    found = []
    async with fleet_of([Engine(token_delay_s=0.002)]) as fleet:
        for number in range(WARM_UP + TRACED):
            await asyncio.sleep(0.05)
            tracer = Tracer()
            if number >= WARM_UP:
                sys.settrace(tracer)
            try:
                answer = await send_request(fleet.port)
                # The end reaches the scheduler after the answer has reached the client.
                await asyncio.sleep(0.03)
            finally:
                sys.settrace(None)
            if b"data: [DONE]" not in answer:
                raise SystemExit(f"the request failed: {answer[:400]!r}")
            if number >= WARM_UP:
                found.append(parts_of(tracer.trees))
    return found


# The report


def fields_of(kind: type, instance: object) -> int:
    """Return the number of attributes of an object."""
    names: set[str] = set(getattr(kind, "__struct_fields__", ()))
    for base in kind.__mro__:
        if base.__module__.startswith(PACKAGE):
            names |= set(inspect.get_annotations(base))
            names |= {slot for slot in base.__dict__.get("__slots__", ()) if isinstance(slot, str)}
    return len(names | set(getattr(instance, "__dict__", {})))


def measured() -> dict[str, Part]:
    """Return the parts of the request with the fewest calls."""
    traces = asyncio.run(trace_requests())
    return min(traces, key=lambda each: sum(sum(p.calls.values()) for n, p in each.items() if n != REPLICA))


def summary(parts: dict[str, Part]) -> dict[str, Any]:
    """Return the counts of each part and of all, and the largest types."""
    shown = [parts[name] for name in (GATEWAY, SCHEDULER, CHANNEL) if name in parts]
    kinds = {kind: instance for part in shown for kind, instance in part.types.items()}
    received = {kind for part in shown for kind in part.received} - kinds.keys()
    largest = sorted(
        ((fields_of(kind, each), kind.__qualname__) for kind, each in kinds.items()), reverse=True
    )
    rows = {
        name: {
            "callbacks": part.callbacks,
            "files": len(part.files),
            "types": len(part.types),
            "received": len(part.received),
            "calls": sum(part.calls.values()),
            "hand_overs": sum(part.edges.values()),
            "pairs": len(part.edges),
        }
        for name, part in parts.items()
        if name != REPLICA
    }
    rows["all"] = {
        "callbacks": sum(part.callbacks for part in shown),
        "files": len(set().union(*(part.files for part in shown))),
        "types": len(kinds),
        "received": len(received),
        "calls": sum(sum(part.calls.values()) for part in shown),
        "hand_overs": sum(sum(part.edges.values()) for part in shown),
        "pairs": len({pair for part in shown for pair in part.edges}),
    }
    return {"parts": rows, "largest_types": [{"type": name, "fields": count} for count, name in largest[:8]]}


def main() -> None:
    """Print the counts."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print files with their calls, and types")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    logging.disable(logging.WARNING)
    parts = measured()
    found = summary(parts)
    shown = {name: parts[name] for name in (GATEWAY, SCHEDULER, CHANNEL) if name in parts}
    if arguments.json:
        found["files"] = {name: dict(sorted(part.calls.items())) for name, part in shown.items()}
        found["types"] = {name: sorted(map(_name_of, part.types)) for name, part in shown.items()}
        print(json.dumps(found, indent=1))
        return
    print("One streamed chat request, from its first byte to its last record")
    columns = ("callbacks", "files", "types", "received", "calls", "hand_overs", "pairs")
    print(f"{'part':12}" + "".join(f"{name:>12}" for name in columns))
    for name, row in found["parts"].items():
        print(f"{name:12}" + "".join(f"{row[column]:12,}" for column in columns))
    largest = ", ".join(f"{each['type']} {each['fields']}" for each in found["largest_types"])
    print(f"largest types by fields: {largest}")
    if arguments.list:
        for name, part in shown.items():
            print(f"\n{name}: calls by file")
            for path in sorted(part.files | part.calls.keys()):
                print(f"  {part.calls[path]:5} {path}")
            print(f"{name}: types constructed", *sorted(map(_name_of, part.types)), sep="\n        ")
            print(f"{name}: messages received", *sorted(map(_name_of, part.received)), sep="\n        ")


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


if __name__ == "__main__":
    main()
