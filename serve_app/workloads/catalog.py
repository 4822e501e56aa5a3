"""The catalog of workloads: what a name or a path stands for, for simulator, benchmark and planner."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from serve_app.workloads.loaders import describe_skipped, load_trace
from serve_app.workloads.published import RECIPES
from serve_app.workloads.streams import stream
from serve_app.workloads.tenants import assign_priorities, assign_tenants, parse_shares
from serve_app.workloads.trace import Trace, TraceError
from serve_app.workloads.transform import scale_to_rate, take

TRACES_VARIABLE = "EWSJF_TRACES"
"""Environment variable with the folder of trace files."""

_ROOT = Path(__file__).resolve().parents[2]
DOWNLOAD_FOLDER = _ROOT / ".cache" / "traces"
"""Where `scripts/fetch_traces` stores them by default."""
_SHARED_FOLDER = _ROOT.parent / "shared" / "traces"

_FILES = {
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
}
_DEFAULT_REQUESTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSettings:
    """A workload, as given on the command line.

    Attributes:
        trace: a name (`azure-code`, `azure-conv`, `lmsys`, `paper-mix`) or the path of a trace file.
        rate_per_s: mean arrival rate; None keeps the trace's own.
        requests: how many; None for a thousand, or as many as `duration_s` takes.
        duration_s: for how long requests arrive; only one of the two can be given.
        tenants: see `tenants.parse_shares`; None keeps those of the file.
        priorities: shares of priority classes, such as `interactive=1,batch=3`; None keeps those of the file.
        folder: where trace files are; None looks in the usual places.
    """

    trace: str
    rate_per_s: float | None = None
    requests: int | None = None
    duration_s: float | None = None
    tenants: str | None = None
    priorities: str | None = None
    seed: int = 0
    folder: Path | None = None

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "requests", "duration_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise TraceError(f"{name} must be positive, got {value}")
        if self.requests is not None and self.duration_s is not None:
            raise TraceError(
                f"give requests or duration_s, not both, got {self.requests} and {self.duration_s}: "
                "with a rate each follows from the other"
            )
        if self.seed < 0:
            raise TraceError(f"seed must not be negative, got {self.seed}")


def resolve(settings: WorkloadSettings) -> Trace:
    """Read or generate the workload, cut to size, at its rate, with its tenants.

    Raises:
        TraceError: there is no such name or file, or it cannot be read.
    """
    path = trace_file(settings)
    trace = _generated(settings) if path is None else _from_file(path, settings)
    if settings.tenants is not None:
        trace = assign_tenants(trace, parse_shares(settings.tenants), stream(settings.seed, "tenants"))
    if settings.priorities is not None:
        trace = assign_priorities(
            trace, parse_shares(settings.priorities), stream(settings.seed, "priorities")
        )
    return trace


def notes_on(trace: Trace) -> Iterator[str]:
    """What a user must know of the requests that are played, a line each: generated ones, rows left out."""
    if names := trace.without_file:
        files = "its file is" if len(names) == 1 else "their files are"
        yield (
            f"{' and '.join(names)}: {files} not here, so lengths and arrivals are generated from published "
            "percentiles; scripts/fetch_traces downloads the traces"
        )
    if skipped := describe_skipped(trace):
        yield f"{trace.name}: {skipped}"


def trace_file(settings: WorkloadSettings) -> Path | None:
    """The file that the workload is read from; None when it is to be generated.

    Raises:
        TraceError: there is no such name or file.
    """
    name = settings.trace
    if name in _FILES:
        return _find(_FILES[name], settings.folder)
    if name in RECIPES:
        return None
    path = Path(name)
    if not path.is_file():
        raise TraceError(f"no trace {name!r}: give a file, or one of {', '.join(RECIPES)}")
    return path


def _find(filename: str, folder: Path | None) -> Path | None:
    """A folder that was given must have the file; the usual places may have it."""
    named = folder or (Path(os.environ[TRACES_VARIABLE]) if os.environ.get(TRACES_VARIABLE) else None)
    if named is not None:
        if not (named / filename).is_file():
            raise TraceError(f"no {filename} in {named}: run scripts/fetch_traces --out {named}")
        return named / filename
    candidates = (place / filename for place in (DOWNLOAD_FOLDER, _SHARED_FOLDER))
    return next((path for path in candidates if path.is_file()), None)


def _from_file(path: Path, settings: WorkloadSettings) -> Trace:
    trace = load_trace(path)
    if settings.trace in _FILES:
        trace = replace(trace, name=settings.trace)
    count = _count(settings, settings.rate_per_s or trace.rate_per_s, otherwise=len(trace.requests))
    trace = take(trace, count, stream(settings.seed, "window"))
    return trace if settings.rate_per_s is None else scale_to_rate(trace, settings.rate_per_s)


def _generated(settings: WorkloadSettings) -> Trace:
    recipe = RECIPES[settings.trace]
    count = _count(settings, settings.rate_per_s or recipe.rate_per_s, otherwise=_DEFAULT_REQUESTS)
    trace = recipe.generate(settings.trace, count, settings.seed, settings.rate_per_s)
    return replace(trace, without_file=(settings.trace,)) if settings.trace in _FILES else trace


def _count(settings: WorkloadSettings, rate_per_s: float | None, otherwise: int) -> int:
    if settings.duration_s is None:
        return settings.requests or otherwise
    if rate_per_s is None:
        raise TraceError(
            f"all requests of {settings.trace} arrive at once: give requests instead of duration_s"
        )
    return max(1, round(rate_per_s * settings.duration_s))
