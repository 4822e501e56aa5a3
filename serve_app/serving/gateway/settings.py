"""Settings of a gateway: models, routes, access control and limits.

`JwtSettings`: logins by OpenID Connect (`logins` verifies them), with the permissions of each group of users.

`RouteSettings`. A route is a name that clients request, in front of served models. It divides its requests
among models by weight (a canary, an A/B test) and names fallbacks for requests that the chosen model does not
accept. Requests with the same session, or of the same tenant, reach the same model. A change of weights moves
only as many of them as it has to: weighted rendezvous hashing, as in "Weighted Distributed Hash Tables"
(Schindelhauer and Schomaker, 2005).
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import field, fields
from datetime import UTC, datetime
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.core.latency_targets import TargetLimits
from serve_app.core.metrics.summary import ClassTargets
from serve_app.core.settings_base import (
    ADVANCED,
    FINITE_POSITIVE,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    at_least,
    between,
    hot_settings,
    settings,
    with_hot_settings,
)
from serve_app.errors import SettingsError
from serve_app.request import MAX_FLOOR, MAX_TARGET_S, MAX_WEIGHT, MIN_FLOOR, MIN_WEIGHT, PriorityClass
from serve_app.serving.access import is_loopback
from serve_app.serving.api_keys import MAX_TENANT_CHARACTERS, KeyRecord, is_tenant_name
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


_LIMIT = at_least(1)
_TARGET = between(0.001, MAX_TARGET_S)
# Records of logins have no secret; no secret has this hash.
_NO_SECRET = f"blake2b:{'0' * 32}:{'0' * 64}"


@settings
class LoginGroup:
    """A group of users at the login server, and their permissions: those of a key in `keys_file`.

    Limits and budgets count for all members of the group in one tenant together.

    Attributes:
        name: name of the group in tokens.
        highest_class: highest priority class that requests may use.
        default_class: class of requests that name none; null means `default`, or the highest class if that is
            lower.
        models: names of models and routes that requests may use; empty for all.
        weight: weight of the tenant in fair sharing; null for that of `fairness.weights`.
        floor_tokens_per_s: service that the tenant gets before others while its requests wait, per model;
            null for that of `floors.tenants`.
        requests_per_minute: requests admitted in any 60 s, per model.
        tokens_per_minute: tokens admitted in any 60 s, per model.
        concurrent: requests queued or in flight, per model.
        queued: requests queued, per model.
        tokens_per_day: tokens in a UTC day, over all models.
        tokens_per_month: tokens in a UTC month, over all models.
        cost_per_day: cost in a UTC day, at the prices of `models[].price`.
        cost_per_month: cost in a UTC month, at the same prices.
        ttft_target_s: latency target of requests that state none, in seconds to the first token.
        tpot_target_s: the same, in seconds per output token after the first.
        refuse_missed: reject requests on arrival that are expected to miss their latency target.
        admin: allow all that operators do, as for a key.
        may_act_for_tenants: trust `x-tenant` from these users.
    """

    name: str
    highest_class: PriorityClass = PriorityClass.INTERACTIVE
    default_class: Annotated[PriorityClass | None, ADVANCED] = None
    models: tuple[str, ...] = ()
    weight: Annotated[float | None, between(MIN_WEIGHT, MAX_WEIGHT)] = None
    floor_tokens_per_s: Annotated[float | None, between(MIN_FLOOR, MAX_FLOOR)] = None
    requests_per_minute: Annotated[int | None, _LIMIT] = None
    tokens_per_minute: Annotated[int | None, _LIMIT] = None
    concurrent: Annotated[int | None, _LIMIT] = None
    queued: Annotated[int | None, _LIMIT] = None
    tokens_per_day: Annotated[int | None, _LIMIT] = None
    tokens_per_month: Annotated[int | None, _LIMIT] = None
    cost_per_day: Annotated[float | None, FINITE_POSITIVE] = None
    cost_per_month: Annotated[float | None, FINITE_POSITIVE] = None
    ttft_target_s: Annotated[float | None, _TARGET] = None
    tpot_target_s: Annotated[float | None, _TARGET] = None
    refuse_missed: bool = False
    admin: bool = False
    may_act_for_tenants: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty: it is the name of the group in tokens")
        self.record("any", "any", self.highest_class)

    def record(
        self, key_id: str, tenant: str, highest_class: PriorityClass, description: str = ""
    ) -> KeyRecord:
        """Return the permissions of a member as the record of a key.

        Args:
            highest_class: highest class of this member; that of the group if it is higher.
            description: names the user to operators.

        Raises:
            ValueError: the tenant's name is malformed, or the classes contradict each other.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if highest_class.rank > self.highest_class.rank:
            values |= {"highest_class": highest_class, "default_class": None}
        identity = {"id": key_id, "tenant": tenant, "name": description, "hash": _NO_SECRET}
        return KeyRecord(**{**values, **identity}, created_at=datetime.fromtimestamp(0, UTC))


@settings
class JwtSettings:
    """Logins by OpenID Connect: bearer tokens (JWT) of a login server, beside API keys.

    Tokens must be signed with RS256, ES256 or EdDSA.

    Attributes:
        issuer: the login server, exactly as in the claim `iss` of its tokens.
        audience: name of this application at the login server; tokens must have it in the claim `aud`.
        tenant_claim: claim that holds the tenant of a user.
        groups: groups that may use the application. The first one that a token has determines its
            permissions, and a token without any is rejected.
        jwks_url: URL of the login server's public keys (`jwks_uri` of its OpenID configuration). Gateways
            read it every five minutes, and when a token has an unknown key.
        jwks_file: absolute path of a file with these keys instead; gateways reload it when it changes.
        groups_claim: claim that holds the groups of a user, as a list or a single name.
        class_claim: claim that holds the highest priority class of a user, if it is lower than that of the
            group; null for none.
    """

    issuer: str
    audience: str
    tenant_claim: str
    groups: tuple[LoginGroup, ...]
    jwks_url: str | None = None
    jwks_file: str | None = None
    groups_claim: str = "groups"
    class_claim: str | None = None

    def __post_init__(self) -> None:
        for name in ("issuer", "audience", "tenant_claim", "groups_claim", "class_claim", "groups"):
            if getattr(self, name) in ("", ()):
                raise ValueError(f"{name} must not be empty: {_JWT_REMEDIES.get(name, 'name the claim')}")
        sources = [name for name in ("jwks_url", "jwks_file") if getattr(self, name) is not None]
        if len(sources) != 1:
            found = " and ".join(sources) or "none"
            raise ValueError(f"exactly one of jwks_url, jwks_file must be set; got {found}")
        if self.jwks_url is not None and not _is_protected(self.jwks_url):
            raise ValueError(
                f"jwks_url must be an https URL, or http on loopback, got {self.jwks_url!r}: others could "
                "replace the keys on their way"
            )
        if self.jwks_file is not None and not Path(self.jwks_file).is_absolute():
            raise ValueError(
                f"jwks_file must be an absolute path, got {self.jwks_file!r}: each gateway has its own "
                "working directory"
            )
        names = [group.name for group in self.groups]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"groups has the name {twice} twice: merge them, or rename one")


_JWT_REMEDIES = {
    "issuer": "write the login server's URL as in the claim iss of its tokens",
    "audience": "write the name of this application at the login server",
    "groups": "name at least one group that may use the application",
}


def _is_protected(url: str) -> bool:
    """Return whether nothing between here and the server can change what it sends."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))
    except ValueError:
        return False


# The block as written in a file; `GatewaySettings` adds the models, which are configured elsewhere.
@settings(block="gateway")
class GatewayConfig:
    """Access control and limits of the gateways.

    Attributes:
        keys: API keys. Without `keys`, `keys_file` and `jwt`, requests need no key (for a laptop, or behind
            a gateway that authenticates).
        keys_file: absolute path of a file with further keys, written by `ewsjf keys`; gateways
            reload it when it changes.
        jwt: tokens of a login server that are accepted in place of keys.
        insecure: without keys, accept requests on non-loopback addresses too.
        cors: web origins whose pages may call from a browser; none by default.
        routes: names in front of models: canaries, A/B tests and fallbacks.
        objectives: objectives by name, as clients of llm-d send them in `x-llm-d-inference-objective`. They
            precede the `InferenceObjective`s of the cluster, and those precede the names of classes.
        batches: files and batches of requests.
    """

    keys: tuple[ApiKey, ...] = ()
    keys_file: str | None = None
    jwt: JwtSettings | None = None
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
        """True if callers need a key or a token."""
        return bool(self.keys) or self.keys_file is not None or self.jwt is not None

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
            "gateway.keys, gateway.keys_file or gateway.jwt, or listen on 127.0.0.1, or set gateway.insecure "
            "to true if a proxy in front of it authenticates clients"
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
