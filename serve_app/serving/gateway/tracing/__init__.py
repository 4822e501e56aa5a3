"""OpenTelemetry traces of requests that are sampled.

`request_trace` has the no-op trace of requests that are not sampled, parses the client's trace context and
creates the tracer. `tracer` samples requests and creates their spans, with the names in `names`, and
`exporter` exports them. Only these two need OpenTelemetry, and are imported only if `gateway.tracing` is set.
"""
