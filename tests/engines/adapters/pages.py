"""Servers defined by a table of their control pages."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

from serve_app.engines.adapters import Get, PageResponse

RECORDED = Path(__file__).parents[1] / "recorded"


def recorded(name: str) -> bytes:
    return (RECORDED / name).read_bytes()


def server(pages: Mapping[str, object], *, log: list[str] | None = None) -> Get:
    """Return a server with these pages: bytes, a JSON value, or a status. Other paths answer 404."""

    async def get(path: str) -> PageResponse:
        if log is not None:
            log.append(path)
        page = pages.get(path, 404)
        if isinstance(page, int):
            return PageResponse(page, b'{"error": "no such page"}')
        return PageResponse(200, page if isinstance(page, bytes) else json.dumps(page).encode())

    return get


def models(*names: str, owner: str, **more: object) -> dict[str, object]:
    """Return a model list as `/v1/models` answers it."""
    entries = [{"id": name, "object": "model", "owned_by": owner, **more} for name in names]
    return {"object": "list", "data": entries}


def page_of(pages: Mapping[str, object], path: str) -> bytes:
    """Return the body of one page of a server."""

    async def body() -> bytes:
        return (await server(pages)(path)).body

    return asyncio.run(body())
