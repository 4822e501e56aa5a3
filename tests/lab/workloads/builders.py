"""Traces for tests."""

from serve_app.lab.workloads import Trace, TraceRequest


def trace(*arrivals_s: float, name: str = "t") -> Trace:
    """Return requests at these times; the n-th has n prompt tokens, which identify it."""
    requests = tuple(
        TraceRequest(arrival_s=at, prompt_tokens=number, output_tokens=5)
        for number, at in enumerate(arrivals_s, start=1)
    )
    return Trace(name=name, source="made for a test", requests=requests)
