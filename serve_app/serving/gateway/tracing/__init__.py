"""OpenTelemetry traces of requests that are sampled.

`request_trace` has the names of spans and attributes, parses the client's trace context and creates the
tracer. `tracer` samples requests, and creates and exports their spans. It alone needs OpenTelemetry, and is
imported only if `gateway.tracing` is set. The `trace` of a request that is not sampled is None.
"""
