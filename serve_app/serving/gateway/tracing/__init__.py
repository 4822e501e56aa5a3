"""Traces of requests by OpenTelemetry, for those that its sampler takes.

`request_trace` is what a gateway does for every request, which is nothing. It reads what a client says of its
own trace, and finds the tracer. `tracer` decides which requests are sampled and draws up their spans under
the names of `names`. Only `tracer` needs OpenTelemetry, and is imported where `gateway.tracing` asks for it.
"""
