"""The way to a tracer: OpenTelemetry is imported only where `gateway.tracing` asks for it."""

import os

from serve_app.errors import SettingsError
from serve_app.serving.gateway.tracing.request_trace import RequestTracer

# The standard ways to switch tracing off from outside.
_OFF = {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "none"}


def made_tracer(gateway_id: str) -> RequestTracer | None:
    """The tracer that the environment describes; None where it switches tracing off.

    Raises:
        SettingsError: OpenTelemetry is not installed, or the environment asks for what it has not.
    """
    if any(os.environ.get(name, "").strip().lower() == value for name, value in _OFF.items()):
        return None
    try:
        from serve_app.serving.gateway.tracing.export import otlp_exporter  # noqa: PLC0415
        from serve_app.serving.gateway.tracing.tracer import GatewayTracer  # noqa: PLC0415

        return GatewayTracer(gateway_id, otlp_exporter())
    except ImportError as exc:
        raise SettingsError(
            f"gateway.tracing is true, but {exc.name or exc} is not installed: "
            "pip install 'ewsjf-serve[tracing]', or leave gateway.tracing out"
        ) from exc


def check_tracing() -> None:
    """Refuse what `made_tracer` would refuse.

    Raises:
        SettingsError: see there.
    """
    tracer = made_tracer("check")
    if tracer is not None:
        tracer.close(0.0)
