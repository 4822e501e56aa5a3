"""Settings of a gateway: models, routes, access control and limits.

`RouteSettings`. A route is a name that clients request, in front of served models. It divides its requests
among models by weight (a canary, an A/B test) and names fallbacks for requests that the chosen model does not
accept. Requests with the same session, or of the same tenant, reach the same model. A change of weights moves
only as many of them as it has to: weighted rendezvous hashing, as in "Weighted Distributed Hash Tables"
(Schindelhauer and Schomaker, 2005).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import field
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.core.latency_targets import TargetLimits
from serve_app.core.metrics.summary import ClassTargets
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
from serve_app.serving.api_keys import MAX_TENANT_CHARACTERS, is_tenant_name
from serve_app.serving.gateway.batches.settings import BatchSettings
from serve_app.serving.gateway.keys import ApiKey
from serve_app.serving.gateway.metrics_page import MetricsKey
from serve_app.serving.gateway.request.fields import ObjectiveSettings
from serve_app.serving.gateway.request.measure import PrefixSettings
from serve_app.serving.gateway.router import CorsSettings
from serve_app.serving.gateway.tracing.request_trace import check_tracing
from serve_app.serving.gateway.upstream import UpstreamSettings


@settings
class RouteSettings:
    """A model name that clients may request, and the models that serve it.

    Attributes:
        name: name in requests. It may be the name of a model, which then receives only what the route sends.
        models: models by weight. With weights of 9 and 1, the second one serves a tenth of the requests.
        fallbacks: models to try in this order if the chosen one is saturated or unavailable, or if the
            request exceeds its context. Once a part of an answer was sent, the request is not moved.
        sticky_by: requests that stay with one model: those with the same `x-session-id` or session header of
            an agent (without one, the same end user in the body), or those of the same tenant.
        fallback_after_s: longest wait in the queue of a model while a fallback remains; by default the queue
            timeout.
        latency_target: latency target of requests that state none.
    """

    name: str
    models: Mapping[str, float]
    fallbacks: tuple[str, ...] = ()
    sticky_by: Annotated[Literal["session", "tenant"], ADVANCED] = "session"
    fallback_after_s: Annotated[float | None, POSITIVE, ADVANCED] = None
    latency_target: TargetLimits = field(default_factory=TargetLimits)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty: it is the name that clients send")
        for model, weight in self.models.items():
            if not 0 <= weight < math.inf:
                raise ValueError(
                    f"route {self.name}: the weight of {model} must be 0 or more, got {weight:g}"
                )
        if not any(self.models.values()):
            raise ValueError(f"route {self.name}: give at least one of its models a weight above 0")

    @property
    def members(self) -> tuple[str, ...]:
        """All of its models, fallbacks last."""
        return tuple(dict.fromkeys((*self.models, *self.fallbacks)))

    def check(self, served: Collection[str]) -> None:
        """Raise `SettingsError` if a model of the route is not served."""
        for model in self.members:
            if model not in served:
                close = get_close_matches(model, served, 1)
                remedy = f"did you mean {close[0]!r}?" if close else f"models: {', '.join(served)}"
                raise SettingsError(f"gateway.routes: {self.name} has the unknown model {model!r}; {remedy}")

    def order(self, subject: str, ready: Collection[str] = ()) -> tuple[str, ...]:
        """Return the model for a subject, followed by the fallbacks.

        Args:
            ready: models to choose from; without any that has a weight, all are.
        """
        weights = {model: weight for model, weight in self.models.items() if weight and model in ready}
        weights = weights or dict(self.models)
        chosen = max(weights, key=lambda model: _score(subject, model, weights[model]))
        return tuple(dict.fromkeys((chosen, *self.fallbacks)))

    def subject(self, session: str, user: str | None, tenant: str, request_id: str) -> str:
        """Return the part of a request that selects its model."""
        return tenant if self.sticky_by == "tenant" else session or user or request_id


def _score(subject: str, model: str, weight: float) -> float:
    if not weight:
        return -math.inf
    key = f"{len(model)} {model} {subject}".encode("utf-8", "surrogatepass")
    digest = int.from_bytes(blake2b(key, digest_size=6).digest(), "big")
    # Between 0 and 1, both excluded.
    return -weight / math.log((2 * digest + 1) / 2**49)


MEBIBYTE = 1024 * 1024


@settings
class ServedModel:
    """A model name that clients may request.

    Attributes:
        name: name in requests; the engines must serve the model under the same name.
        max_model_len: longest context of any of its pools, in tokens; shown in `/v1/models`.
        starts_on_demand: all of its engines may be stopped until a request arrives.
        targets: latency targets by class, the same as in the objective of its tuner.
        price: price of its tokens; None if it has none.
        resume_streams: whether another engine continues a stream whose replica dies or drains.
        inference_pools: its sources of endpoints that are InferencePools, whose objectives requests can name.
    """

    name: str
    max_model_len: int | None = None
    starts_on_demand: bool = False
    targets: ClassTargets = field(default_factory=ClassTargets)
    price: TokenPrices | None = None
    resume_streams: bool = False
    inference_pools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise SettingsError("a model's name must not be empty")


# The block as written in a file; `GatewaySettings` adds the models, which are configured elsewhere.
@settings(block="gateway")
class GatewayConfig:
    """Access control and limits of the gateways.

    Attributes:
        keys: API keys. Without `keys` and `keys_file`, requests need no key (for a laptop, or behind a
            gateway that authenticates).
        keys_file: absolute path of a file with further keys, written by `ewsjf keys`; gateways
            reload it when it changes.
        insecure: without keys, accept requests on non-loopback addresses too.
        cors: web origins whose pages may call from a browser; none by default.
        routes: names in front of models: canaries, A/B tests and fallbacks.
        objectives: objectives by name, as clients of llm-d send them in `x-llm-d-inference-objective`. They
            precede the `InferenceObjective`s of the cluster, and those precede the names of classes.
        batches: files and batches of requests.
    """

    keys: tuple[ApiKey, ...] = ()
    keys_file: str | None = None
    insecure: bool = False
    cors: CorsSettings = field(default_factory=CorsSettings)
    routes: tuple[RouteSettings, ...] = ()
    objectives: Mapping[str, ObjectiveSettings] = field(default_factory=dict)
    batches: BatchSettings = field(default_factory=BatchSettings)
    # Key of a scraper for `/metrics`. Without one, an admin key is required if keys are configured.
    metrics_key: Annotated[MetricsKey | None, ADVANCED] = None
    # Largest request body. OpenAI accepts about 50 MB of images per request; a million tokens are a tenth.
    max_body_bytes: Annotated[int, at_least(1_024), ADVANCED] = 64 * MEBIBYTE
    # Total bytes of bodies in memory; beyond it, requests are rejected with 503. A body is held until its
    # answer begins, because it may have to be sent again. Parsing needs about twice its length.
    max_held_body_bytes: Annotated[int, at_least(1_024), ADVANCED] = 1_024 * MEBIBYTE
    # Request a stream from the engine for non-streamed chat and text completions, and assemble the answer.
    # `silence_timeout_s` then bounds the time between tokens, not that of the whole answer. Off by default,
    # because assembled answers lack what vLLM's streams omit: `system_fingerprint`, and fields that are null.
    # Each event of the stream, mostly one token, costs the gateway about 0.1 ms. Requests with tools or
    # `echo`, and other kinds of answers, are not assembled.
    assemble_answers: Annotated[bool, ADVANCED] = False
    # Time to receive a body; after it, the body must arrive at `min_body_bytes_per_s` or more. Slower
    # clients get 408, because each body that is being received holds memory.
    body_grace_s: Annotated[float, POSITIVE, INTERNAL] = 30.0
    # Minimum rate of a body after `body_grace_s`. At this rate 64 MiB take more than two hours.
    min_body_bytes_per_s: Annotated[float, POSITIVE, INTERNAL] = 8_192.0
    # Interval of `: queued` comments in streams that wait, so that no proxy closes a silent connection; many
    # do after 60 s. The first comment sends status 200, so later rejections are error events. 0 disables it.
    queue_comment_interval_s: Annotated[float, NOT_NEGATIVE.hint("0 sends none"), ADVANCED] = 25.0
    # Log a line per concluded request on logger `ray.serve`; costs as much as a scheduling decision.
    log_requests: Annotated[bool, ADVANCED] = True
    # Trace requests with OpenTelemetry (extra `tracing`). The standard environment variables of the gateways,
    # such as `OTEL_EXPORTER_OTLP_ENDPOINT` and `OTEL_TRACES_SAMPLER`, select the exporter and the sampling. A
    # sampled request costs a gateway more than a scheduling decision.
    tracing: bool = False
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    upstream: Annotated[UpstreamSettings, ADVANCED] = field(default_factory=UpstreamSettings)

    def __post_init__(self) -> None:
        if self.keys_file is not None and not Path(self.keys_file).is_absolute():
            raise SettingsError(
                f"gateway.keys_file must be an absolute path, got {self.keys_file!r}: each gateway has "
                "its own working directory"
            )
        if unfit := [name for name in self.objectives if not is_tenant_name(name)]:
            raise SettingsError(
                f"the objective {unfit[0]!r} does not fit into a header: use 1 to {MAX_TENANT_CHARACTERS} "
                "printable ASCII characters without spaces"
            )

    @property
    def requires_keys(self) -> bool:
        """True if callers need a key."""
        return bool(self.keys) or self.keys_file is not None

    @property
    def keys_path(self) -> Path | None:
        """Path of the file of keys, if there is one."""
        return None if self.keys_file is None else Path(self.keys_file)

    def check_tracing(self) -> None:
        """Raise `SettingsError` if tracing is enabled, but OpenTelemetry is missing or misconfigured."""
        if self.tracing:
            check_tracing()

    def check_exposure(self, host: str) -> None:
        """Raise `SettingsError` if other machines can reach `host`, without keys and without `insecure`."""
        if self.requires_keys or self.insecure or is_loopback(host):
            return
        raise SettingsError(
            f"http_options.host {host} is reachable from other machines and no keys are set: set "
            "gateway.keys or gateway.keys_file, or listen on 127.0.0.1, or set gateway.insecure to true if "
            "a proxy in front of it authenticates clients"
        )


@settings(block="gateway")
class GatewaySettings(GatewayConfig):
    """Settings of one gateway.

    Attributes:
        models: the served names with their models; the names of one model share its scheduler.
    """

    models: tuple[ServedModel, ...]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise SettingsError("gateway.models is empty: name at least one model")
        if len(set(names)) != len(names):
            raise SettingsError(f"gateway.models names a model twice: {', '.join(names)}")
        routes = [route.name for route in self.routes]
        if twice := next((name for name in routes if routes.count(name) > 1), None):
            raise SettingsError(f"gateway.routes has the name {twice} twice: merge them, or rename one")
        for route in self.routes:
            route.check(names)


# Settings that need a new process, because they define connections, the tracer and the storage of batches.
_COLD = ("models", "upstream", "tracing", "batches")


def gateway_hot(settings: GatewaySettings) -> dict[str, Any]:
    """Return the settings that can change while a gateway runs."""
    return hot_settings(settings, _COLD)


def gateway_cold(settings: GatewaySettings) -> tuple[object, ...]:
    """Return the settings that need a new process."""
    return tuple(getattr(settings, name) for name in _COLD)


def with_hot_gateway(settings: GatewaySettings, given: Mapping[str, Any]) -> GatewaySettings:
    """Return a copy with other hot settings.

    Raises:
        SettingsError: a setting is unknown, cold or out of range.
    """
    return with_hot_settings(settings, given, _COLD)
