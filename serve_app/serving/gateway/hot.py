"""Which settings of a gateway change while it runs."""

from collections.abc import Mapping
from typing import Any

from serve_app.serving.gateway.settings import GatewaySettings
from serve_app.serving.hot import hot_settings, with_hot_settings

_COLD = ("models", "upstream")


def gateway_hot(settings: GatewaySettings) -> dict[str, Any]:
    """What may change while a gateway runs."""
    return hot_settings(settings, _COLD)


def gateway_cold(settings: GatewaySettings) -> tuple[object, ...]:
    """What needs a new process: the models that it connects to, and its connections to replicas."""
    return tuple(getattr(settings, name) for name in _COLD)


def with_hot_gateway(settings: GatewaySettings, given: Mapping[str, Any]) -> GatewaySettings:
    """The same with other hot settings.

    Raises:
        SettingsError: one is unknown, cold or out of range.
    """
    return with_hot_settings(settings, given, _COLD)
