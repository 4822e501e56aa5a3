"""Admin API for the keys in `gateway.keys_file`. Secrets are returned once, at their creation.

GET     /admin/keys      all keys with their status and what they have used today and this month
POST    /admin/keys      creates a key, and returns it with its secret
POST    /admin/keys/ID   changes limits and permissions of a key
DELETE  /admin/keys/ID   revokes a key

All gateways, and `ewsjf keys`, use the same file. Gateways notice a change within seconds.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from serve_app.errors import Outcome
from serve_app.serving.api_keys import (
    KeyRecord,
    KeysFileError,
    change_key,
    create_key,
    read_keys,
    revoke_key,
)
from serve_app.serving.gateway.answer.responses import RequestRejected, encode, send_json
from serve_app.serving.gateway.audit import audit
from serve_app.serving.gateway.budgets import PERIODS, Budgets
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.request.incoming import IncomingRequest
from serve_app.serving.gateway.request.reader import RequestReader
from serve_app.serving.gateway.router import HttpRoute

KEYS_PATH = "/admin/keys"
_KEY = KEYS_PATH + "/{key_id}"

_FIXED = frozenset({"id", "hash", "created_at", "revoked_at", "status"})
_PERMISSIONS = frozenset(KeyRecord.__struct_fields__) - _FIXED

T = TypeVar("T")


class KeyAdmin:
    """The `/admin/keys` API.

    Args:
        path: the file of keys; None if none is configured.
    """

    def __init__(self, reader: RequestReader, budgets: Budgets, path: Path | None) -> None:
        self._reader, self._budgets, self._path = reader, budgets, path

    def change(self, path: Path | None) -> None:
        """Use another file."""
        self._path = path

    def routes(self) -> Iterator[HttpRoute]:
        """Yield the routes of this API."""
        listed = "API keys of the file, with what they have used; for admins"
        yield HttpRoute("GET", KEYS_PATH, self._serve, listed)
        yield HttpRoute("POST", KEYS_PATH, self._serve, "create an API key; for admins")
        yield HttpRoute("POST", _KEY, self._serve, "change an API key; for admins")
        yield HttpRoute("DELETE", _KEY, self._serve, "revoke an API key; for admins")

    async def _serve(self, incoming: IncomingRequest, key_id: str = "") -> None:
        """List, create, change or revoke keys."""
        caller = self._reader.authenticate(incoming)
        caller.check_admin()
        if self._path is None:
            message = (
                "there is no file of keys: set gateway.keys_file, and create the first key by `ewsjf keys`"
            )
            raise RequestRejected(Outcome.REJECTED_INVALID, message, code="no_keys_file", status=409)
        method = incoming.method
        if method == "DELETE":
            await self._revoke(self._path, key_id, incoming, caller)
        elif method == "POST":
            await self._write(self._path, key_id, incoming, caller)
        else:
            await self._list(self._path, incoming)

    async def _list(self, path: Path, incoming: IncomingRequest) -> None:
        keys = await _in_thread(lambda: read_keys(path))
        await self._budgets.read([key.id for key in keys])
        listed = [{**key.shown(), "used": self._used(key.id)} for key in keys]
        await send_json(incoming.send, 200, encode({"file": str(path), "keys": listed}), [])

    def _used(self, key_id: str) -> dict[str, dict[str, float]]:
        spent = {period: self._budgets.spent(key_id, period) for period in PERIODS}
        return {period: {"tokens": tokens, "cost": cost} for period, (tokens, cost) in spent.items()}

    async def _write(self, path: Path, key_id: str, incoming: IncomingRequest, caller: Caller) -> None:
        permissions = await self._permissions(incoming)
        if key_id:
            record = await _in_thread(lambda: change_key(path, key_id, **permissions))
            answer: dict[str, Any] = record.shown()
        elif not permissions.get("tenant"):
            message = "a key belongs to a tenant: name one"
            raise RequestRejected(Outcome.REJECTED_INVALID, message, param="tenant")
        else:
            record, secret = await _in_thread(lambda: create_key(path, **permissions))
            answer = {**record.shown(), "secret": secret}
        audit("key_changed" if key_id else "key_created", caller, incoming, key=record.id, **permissions)
        await send_json(incoming.send, 200, encode(answer), [])

    async def _revoke(self, path: Path, key_id: str, incoming: IncomingRequest, caller: Caller) -> None:
        record = await _in_thread(lambda: revoke_key(path, key_id))
        audit("key_revoked", caller, incoming, key=record.id, tenant=record.tenant)
        await send_json(incoming.send, 200, encode(record.shown()), [])

    async def _permissions(self, incoming: IncomingRequest) -> Mapping[str, Any]:
        example = '{"tenant": "app", "tokens_per_day": 1000000}'
        permissions = await self._reader.document(incoming, dict[str, Any], example)
        for name in permissions.keys() - _PERMISSIONS:
            known = ", ".join(sorted(_PERMISSIONS))
            message = f"a key has no permission {name[:100]!r}; permissions: {known}"
            raise RequestRejected(Outcome.REJECTED_INVALID, message, param=name[:100])
        return permissions


async def _in_thread(work: Callable[[], T]) -> T:
    """Run work on the key file, which may be on a slow file system.

    Raises:
        RequestRejected: it failed.
    """
    try:
        return await asyncio.to_thread(work)
    except KeysFileError as error:
        is_missing = "has no key" in str(error)
        raise RequestRejected(
            Outcome.REJECTED_INVALID, str(error), code="keys_file", status=404 if is_missing else 409
        ) from error
    except (msgspec.ValidationError, ValueError) as error:
        raise RequestRejected(Outcome.REJECTED_INVALID, f"the key is not valid: {error}") from error
