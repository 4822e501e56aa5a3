"""Running servers: their discovery, and the configuration in front of them.

`serve --endpoints` runs it, and `init --servers` writes it to a file.
"""

import asyncio
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import yaml

from serve_app.cli.command import warn
from serve_app.cli.http_client import ConnectionFailedError, request
from serve_app.engines.adapters import PageResponse, identify
from serve_app.errors import EngineError, ServeAppError, SettingsError
from serve_app.serving.access import is_loopback

SHORT_CONTEXT = 8_192
"""Maximum boundary of the short pool. At least four fifths of most traffic fit into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server, and what it reports.

    Attributes:
        url: address without `/v1`.
        models: served names, the base model before its adapters.
        max_model_len: context limit in tokens; None if it is not reported, and learned from rejections.
    """

    url: str
    models: tuple[str, ...]
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """OpenAI-compatible servers with vLLM's metrics.

    Attributes:
        api_key_env: environment variable with their API key.
        is_observed: whether the scheduler only observes at first.
    """

    found: tuple[Server, ...]
    api_key_env: str | None = None
    is_observed: bool = False


# -- discovery of running servers --------------------------------------------------------------------------


class SilentServerError(ServeAppError):
    """Nothing answers at the address of a server."""


def discover_servers(urls: Iterable[str], api_key_env: str | None) -> tuple[Server, ...]:
    """Query each server for its models and limits.

    One that does not answer is assumed to equal the others if these are equal to each other, with a warning.

    Args:
        api_key_env: environment variable with their API key.

    Raises:
        SilentServerError: a server does not answer, and it is unknown what it serves.
        ServeAppError: a server rejects the key, or cannot be used.
    """
    api_key = None
    if api_key_env is not None and not (api_key := os.environ.get(api_key_env)):
        raise SettingsError(
            f"the environment variable {api_key_env} is not set: export the servers' API key in it"
        )
    found: list[Server] = []
    silent: dict[str, SilentServerError] = {}
    for url in urls:
        try:
            found.append(_ask(url, api_key))
        except SilentServerError as exc:
            silent[url.rstrip("/").removesuffix("/v1")] = exc
    different = {(server.models, server.max_model_len) for server in found}
    if silent and len(different) != 1:
        reason = "the servers that respond differ" if found else "no server responds"
        raise SilentServerError(
            f"{'; '.join(map(str, silent.values()))}. What it serves is unknown, because {reason}: "
            "start it first"
        )
    for url, error in silent.items():
        warn(f"{error}; it receives requests once it responds")
        found.append(replace(found[0], url=url))
    return tuple(found)


def _ask(given: str, api_key: str | None) -> Server:
    if not given.startswith(("http://", "https://")):
        raise SettingsError(f"the URL of a server must begin with http:// or https://, got {given!r}")
    url = given.rstrip("/").removesuffix("/v1")

    async def get(path: str) -> PageResponse:
        return _page(f"{url}{path}", api_key)

    try:
        # `get` blocks instead of awaiting, so pages are fetched one by one.
        found = asyncio.run(identify(get))
    except EngineError as exc:
        raise ServeAppError(f"{url}{exc}") from exc
    names = tuple(listing.model for listing in found.models)
    if not names:
        raise ServeAppError(f"{url} serves no model")
    return Server(url=url, models=names, max_model_len=found.limits.max_model_len)


def _page(url: str, api_key: str | None) -> PageResponse:
    try:
        answer = request(url, api_key)
    except ConnectionFailedError as exc:
        reason = getattr(exc.__cause__, "reason", exc.__cause__)
        # Any other reason, such as an unknown host, is more likely to be a mistake in the URL.
        is_silent = isinstance(reason, ConnectionRefusedError | TimeoutError)
        kind = SilentServerError if is_silent else ServeAppError
        raise kind(f"{url} does not respond: {exc}") from exc
    if answer.is_denied:
        raise ServeAppError(
            f"{url} returned {answer}: pass --api-key-env with the environment variable that holds its key"
        )
    return PageResponse(200 if answer.is_success else answer.status, answer.body, {})


# -- pools in front of running servers ---------------------------------------------------------------------


def remote_models(servers: Servers) -> str:
    """Return the list `models`: one pool per model and context, ordered by increasing context."""
    of_model: dict[str, list[Server]] = {}
    for server in servers.found:
        of_model.setdefault(server.models[0], []).append(server)
    return "".join(_model(name, found, servers) for name, found in of_model.items())


def _model(name: str, found: list[Server], servers: Servers) -> str:
    pools: dict[int | None, list[Server]] = {}
    for server in sorted(found, key=lambda server: server.max_model_len or math.inf):
        pools.setdefault(server.max_model_len, []).append(server)
    common = set.intersection(*(set(server.models) for server in found))
    aliases = tuple(alias for alias in found[0].models if alias in common - {name})
    return "".join(_lines(name, aliases, pools, servers))


def _lines(
    name: str, aliases: tuple[str, ...], pools: Mapping[int | None, list[Server]], servers: Servers
) -> Iterator[str]:
    yield "# The name that the servers use: request bodies are forwarded unchanged.\n"
    yield f"- name: {scalar(name)}\n"
    if aliases:
        yield f"  aliases: {flow(aliases)}\n"
    yield "  pools:\n"
    contexts = [context for context in pools if context is not None]
    names = _NAMES.get(len(pools)) or tuple(
        "longer" if context is None else f"up-to-{context}" for context in pools
    )
    if len(pools) > 1:
        yield _SHORTER_FIRST
    for pool, (context, found) in zip(names, pools.items(), strict=True):
        yield _remote_pool(pool, context, found, servers)
    if len(pools) > 1 or servers.is_observed:
        yield "  scheduler:\n"
    if servers.is_observed:
        yield "    # Requests are not scheduled until `ewsjf mode active`.\n    active_share: 0.0\n"
    if len(pools) > 1:
        # With more than two pools, contexts are the boundaries. The first pool's boundary has to be set
        # explicitly.
        boundary = min(SHORT_CONTEXT, *contexts) if len(pools) == len(_NAMES) else min(contexts)
        yield (
            "    routing:\n"
            f"      # Prompt plus output tokens up to which {names[0]} is the home pool of a request.\n"
            f"      b_short_tokens: {boundary}\n"
        )


def _remote_pool(name: str, context: int | None, found: list[Server], servers: Servers) -> str:
    key = f"          api_key_env: {scalar(servers.api_key_env)}\n" if servers.api_key_env else ""
    urls = "".join(f"            - {scalar(server.url)}\n" for server in found)
    limit = "not reported, so learned from rejections" if context is None else f"{context:,} tokens"
    return _POOL.format(name=name, urls=urls, key=key, context=limit)


_NAMES = {1: ("all",), 2: ("short", "long")}

_SHORTER_FIRST = """\
    # Pools are listed by increasing context. Requests in the first one never wait behind a long prefill.
"""

_POOL = """\
    - name: {name}
      engine:
        remote:
          # Limits are read from each server (context now: {context}).
          # Servers can be added here, or discovered by DNS, from a file or in Kubernetes, also at run time:
          # see docs/put-in-front.md.
          endpoints:
{urls}{key}"""


def scalar(text: str) -> str:
    """Format a text, quoted only if YAML needs it."""
    return yaml.safe_dump(text, width=10_000).removesuffix("\n...\n").removesuffix("\n")


def flow(texts: tuple[str, ...]) -> str:
    """Format a list on one line."""
    return yaml.safe_dump(list(texts), default_flow_style=True, width=10_000).strip()


# -- file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """Listen address of the application, and its start command.

    Attributes:
        start: command that starts it.
        insecure: whether it needs no keys even if other machines can reach it.
    """

    host: str
    port: int
    start: str
    insecure: bool = False


def configuration(servers: Servers, place: ListenAddress) -> str:
    """Return the complete file."""
    text = _FRAME.format(
        start=place.start,
        host=scalar(place.host),
        port=place.port,
        models=textwrap.indent(remote_models(servers), " " * 8),
    )
    if is_loopback(place.host):
        return text
    return text + textwrap.indent(_INSECURE if place.insecure else _KEYS, " " * 6)


_FRAME = """\
# In front of running servers, which need no changes.
#   {start}
# Gateways listen on this address; Ray Serve runs no proxy.
proxy_location: Disabled
http_options:
  # Listen on loopback only. Other addresses, such as 0.0.0.0, require keys next to `models`:
  # gateway: {{keys: [{{tenant: app, env: EWSJF_API_KEY_APP}}]}}
  host: {host}
  port: {port}
logging_config:
  # The gateway writes its own log line per request.
  enable_access_log: false
applications:
  - name: ewsjf
    route_prefix: /
    import_path: serve_app.app:build_app
    args:
      models:
{models}      # Where learned state is persisted. Without it, every start learns from scratch.
      # state_uri: /var/lib/ewsjf
      # One gateway handles some thousand requests/s. Ray only counts num_cpus and enforces no limit.
      gateways: {{replicas: 1, num_cpus: 0.2}}
"""

KEY_VARIABLE = "EWSJF_API_KEY_APP"
_KEYS = f"""\
gateway:
  # Set this environment variable of `serve` to the secret. Each key has a tenant, and optionally classes.
  keys: [{{tenant: app, env: {KEY_VARIABLE}, may_act_for_tenants: true}}]
"""
_INSECURE = """\
gateway:
  # Clients need no key: a proxy in front has to authenticate them.
  insecure: true
"""
