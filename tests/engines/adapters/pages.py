"""Servers as a table of their control pages."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

from serve_app.engines.adapters import Get, PageAnswer

RECORDED = Path(__file__).parents[1] / "recorded"


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


def server(pages: Mapping[str, object], *, log: list[str] | None = None) -> Get:
    """A server with these pages: bytes, what becomes JSON, or a status. All other paths answer 404."""

    async def get(path: str) -> PageAnswer:
        if log is not None:
            log.append(path)
        page = pages.get(path, 404)
        if isinstance(page, int):
            return PageAnswer(page, b'{"error": "no such page"}', {})
        return PageAnswer(200, page if isinstance(page, bytes) else json.dumps(page).encode(), {})

    return get


def models(*names: str, owner: str, **more: object) -> dict[str, object]:
    """A list of models as `/v1/models` gives it."""
    entries = [{"id": name, "object": "model", "owned_by": owner, **more} for name in names]
    return {"object": "list", "data": entries}


def page_of(pages: Mapping[str, object], path: str) -> bytes:
    """The body of one page of a server."""

    async def body() -> bytes:
        return (await server(pages)(path)).body

    return asyncio.run(body())
