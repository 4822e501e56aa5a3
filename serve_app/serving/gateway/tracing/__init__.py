"""OpenTelemetry traces of requests that are sampled.

`request_trace` has the names of spans and attributes, the no-op trace of requests that are not sampled,
parses the client's trace context and creates the tracer. `tracer` samples requests, and creates and exports
their spans. It alone needs OpenTelemetry, and is imported only if `gateway.tracing` is set.
"""
