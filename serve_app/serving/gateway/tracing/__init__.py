"""Traces of requests by OpenTelemetry, for those that its sampler takes.

`request_trace` is what a gateway does for every request: nothing. `trace_context` reads what a client says of
its own trace. `tracer` decides which requests are sampled, `sampled` draws up the spans of one of them under
the names of `names`, and `export` sends them away. Only the last three need OpenTelemetry, and are imported
where `gateway.tracing` asks for them.
"""
