"""Settings of a gateway: what it serves, to whom, and within which limits."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from serve_app.core.metrics.targets import ClassTargets
from serve_app.core.settings_base import (
    ADVANCED,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    at_least,
    hot_settings,
    settings,
    with_hot_settings,
)
from serve_app.errors import SettingsError
from serve_app.serving.access import is_loopback
from serve_app.serving.gateway.cors import CorsSettings
from serve_app.serving.gateway.keys import ApiKey
from serve_app.serving.gateway.metrics_page import MetricsKey
from serve_app.serving.gateway.request.prefix import PrefixSettings
from serve_app.serving.gateway.tracing.request_trace import check_tracing
from serve_app.serving.gateway.upstream import UpstreamSettings

MEBIBYTE = 1024 * 1024


@settings
class ServedModel:
    """One model name that clients may ask for.

    Attributes:
        name: as clients write it; the engines must serve it under the same name.
        max_model_len: the longest context of any of its pools, in tokens, shown in `/v1/models`.
        starts_on_demand: its engines may all be stopped until a request comes.
        targets: by which requests count as served well; those of its tuner's objective.
    """

    name: str
    max_model_len: int | None = None
    starts_on_demand: bool = False
    targets: ClassTargets = field(default_factory=ClassTargets)

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingsError("a model's name must not be empty")


# As a file has it: `GatewaySettings` adds the models that it serves, which stand elsewhere in the file.
@settings(block="gateway")
class WrittenGateway:
    """Who may call the gateways, and within which limits.

    Attributes:
        keys: who may call; without any and without `keys_file` everyone is let in (a laptop, or a gateway
            behind another that asks).
        keys_file: absolute path of a file of further keys, written by `python -m serve_app keys`; gateways
            read it again when it changes.
        insecure: without keys, take requests on other addresses than this machine's own, too.
        cors: which web pages may call from a browser; none by default.
    """

    keys: tuple[ApiKey, ...] = ()
    keys_file: str | None = None
    insecure: bool = False
    cors: CorsSettings = field(default_factory=CorsSettings)
    # Without one, and with keys, `/metrics` needs the key of an admin.
    metrics_key: Annotated[MetricsKey | None, ADVANCED] = None
    # OpenAI accepts about 50 MB of images in one request; text of a million tokens is a tenth of that.
    max_body_bytes: Annotated[int, at_least(1_024), ADVANCED] = 64 * MEBIBYTE
    # A body is held until its answer begins, because it may have to be sent again. A gateway that holds so
    # many bytes of them refuses more with 503. While they are parsed, bodies take about twice their length.
    max_held_body_bytes: Annotated[int, at_least(1_024), ADVANCED] = 1_024 * MEBIBYTE
    # Asks engines for a stream of chat and text completions that clients want in one piece, and assembles it.
    # Then `silence_timeout_s` bounds silence instead of the length of answers. Off, since such answers lack
    # what vLLM's streams lack: `system_fingerprint`, and fields that are null. An event of the stream, mostly
    # a token, costs the gateway a tenth of a millisecond. Requests with tools or `echo`, and other kinds of
    # answers, are left as they are.
    assemble_answers: Annotated[bool, ADVANCED] = False
    # A body may take so long, and beyond that as long as it comes at `least_body_bytes_per_s`. Whoever is
    # slower gets 408, since each body under way holds memory.
    body_grace_s: Annotated[float, POSITIVE, INTERNAL] = 30.0
    # The least rate of a body after `body_grace_s`; 64 MiB take two hours and more at this one.
    least_body_bytes_per_s: Annotated[float, POSITIVE, INTERNAL] = 8_192.0
    # A stream that waits for so long gets a comment, `: queued`, and again after each such time, so that no
    # proxy in between cuts a silent connection; many do after 60 s. With the first one the answer has begun
    # as 200, and a refusal comes as an error event. 0 sends none.
    queued_comment_s: Annotated[float, NOT_NEGATIVE.hint("0 sends none"), ADVANCED] = 25.0
    # One line per concluded request on the logger `ray.serve`; costs about as much as a scheduling decision.
    log_requests: Annotated[bool, ADVANCED] = True
    # Traces of requests by OpenTelemetry, which the extra `tracing` installs. The standard variables of the
    # gateways' environment say where spans go and which requests are sampled: `OTEL_EXPORTER_OTLP_ENDPOINT`,
    # `OTEL_TRACES_SAMPLER` and their like. A request that is sampled costs a gateway more than a decision.
    tracing: bool = False
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    upstream: Annotated[UpstreamSettings, ADVANCED] = field(default_factory=UpstreamSettings)

    def __post_init__(self) -> None:
        if self.keys_file is not None and not Path(self.keys_file).is_absolute():
            raise SettingsError(
                f"gateway.keys_file must be an absolute path, got {self.keys_file!r}: every gateway has a "
                "working directory of its own"
            )

    @property
    def asks_for_keys(self) -> bool:
        """Whether callers need a key."""
        return bool(self.keys) or self.keys_file is not None

    def check_tracing(self) -> None:
        """Refuse traces where this Python cannot make them.

        Raises:
            SettingsError: they are asked for, and OpenTelemetry is missing or told what it does not know.
        """
        if self.tracing:
            check_tracing()

    def check_exposure(self, host: str) -> None:
        """Refuse to let in everybody who reaches an address that others than this machine can reach.

        Args:
            host: on which HTTP requests are taken.

        Raises:
            SettingsError: there are no keys, and nobody has said that this is meant.
        """
        if self.asks_for_keys or self.insecure or is_loopback(host):
            return
        raise SettingsError(
            f"http_options.host {host} lets in everyone who reaches this machine, and no keys are set: set "
            "gateway.keys or gateway.keys_file, or listen on 127.0.0.1, or set gateway.insecure to true if "
            "something in front of it asks for keys"
        )


@settings(block="gateway")
class GatewaySettings(WrittenGateway):
    """Settings of one gateway.

    Attributes:
        models: what it serves; each has its own scheduler.
    """

    models: tuple[ServedModel, ...]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise SettingsError("gateway.models is empty: name at least one model")
        if len(set(names)) != len(names):
            raise SettingsError(f"gateway.models names a model twice: {', '.join(names)}")


# What needs a new process: the models that it connects to, its connections to replicas, and its tracer.
_COLD = ("models", "upstream", "tracing")


def gateway_hot(settings: GatewaySettings) -> dict[str, Any]:
    """What may change while a gateway runs."""
    return hot_settings(settings, _COLD)


def gateway_cold(settings: GatewaySettings) -> tuple[object, ...]:
    """What needs a new process."""
    return tuple(getattr(settings, name) for name in _COLD)


def with_hot_gateway(settings: GatewaySettings, given: Mapping[str, Any]) -> GatewaySettings:
    """The same with other hot settings.

    Raises:
        SettingsError: one is unknown, cold or out of range.
    """
    return with_hot_settings(settings, given, _COLD)
