"""Asks servers that run already what they serve."""

import asyncio
import os
import urllib.error
from collections.abc import Iterable

from serve_app.command import fetched
from serve_app.engines.adapters import PageAnswer, identify
from serve_app.errors import EngineError, ServeAppError, SettingsError
from serve_app.first_config.fleet import Server


def ask_servers(urls: Iterable[str], api_key_env: str | None) -> tuple[Server, ...]:
    """What each server says of itself.

    Args:
        api_key_env: environment variable with their key.

    Raises:
        ServeAppError: one does not answer, refuses, or cannot be used.
    """
    api_key = None
    if api_key_env is not None and not (api_key := os.environ.get(api_key_env)):
        raise SettingsError(
            f"the environment variable {api_key_env} is not set: export the servers' key there"
        )
    return tuple(_ask(url, api_key) for url in urls)


def _ask(given: str, api_key: str | None) -> Server:
    if not given.startswith(("http://", "https://")):
        raise SettingsError(
            f"{given!r} is no address of a server: begin it with http:// (the file to write stands before "
            "--servers)"
        )
    url = given.rstrip("/").removesuffix("/v1")

    async def get(path: str) -> PageAnswer:
        return _page(f"{url}{path}", api_key)

    try:
        # Nothing waits in it: pages are got one by one.
        found = asyncio.run(identify(get))
    except EngineError as exc:
        raise ServeAppError(f"{url}{exc}") from exc
    names = tuple(listing.model for listing in found.models)
    if not names:
        raise ServeAppError(f"{url} serves no model")
    if found.limits.max_model_len is None:
        raise ServeAppError(
            f"{url} does not state its max_model_len: write its pool by hand, with "
            "engine.remote.max_model_len"
        )
    return Server(url=url, models=names, max_model_len=found.limits.max_model_len)


def _page(url: str, api_key: str | None) -> PageAnswer:
    try:
        return PageAnswer(200, fetched(url, api_key), {})
    except urllib.error.HTTPError as exc:
        if exc.code in {401, 403}:
            hint = ": name the variable with its key by --api-key-env"
            raise ServeAppError(f"{url} answered {exc.code} {exc.reason}{hint}") from exc
        return PageAnswer(exc.code, exc.read(), {})
    except OSError as exc:
        reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
        raise ServeAppError(f"{url} does not answer: {reason}") from exc
