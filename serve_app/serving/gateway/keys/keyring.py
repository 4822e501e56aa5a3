"""All keys of a gateway, and who calls with which.

Without any key configured everyone is let in and `x-tenant` is believed: that is a laptop, or a gateway
behind another one that asks for keys. As soon as one key is configured, or a file of keys, every call under
`/v1` and to `/tokenize` needs one, a call is its key's tenant's, and `x-tenant` counts only with a key that
may act for tenants.

Only admins may look at others' requests, also without keys: callers with a key that has `admin`, and whoever
has the application's own admin key (`serve_app.access`).

Keys of the configuration are looked up by their SHA-256 digest, so neither the memory of the process holds
them in clear nor does the time of a look-up tell how much of a guess was right. Keys of a file are found by
their id, and compared in constant time.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping

from serve_app.access import admin_key_of
from serve_app.errors import Outcome, SettingsError
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.keys.caller import Caller
from serve_app.serving.gateway.keys.file_keys import FileKeys
from serve_app.serving.gateway.keys.settings import ApiKey


class Keyring:
    """All keys of a gateway.

    Args:
        keys: of the configuration.
        environment: holds the application's own admin key, and secrets that keys name.
        file_keys: of the file of keys, if there is one.

    Raises:
        SettingsError: a secret is missing, or two entries share one.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey],
        environment: Mapping[str, str] = os.environ,
        file_keys: FileKeys | None = None,
    ) -> None:
        self._callers: dict[bytes, Caller] = {}
        self._file_keys = file_keys
        own = admin_key_of(environment)
        self._admins = {_digest(own.encode()): _ADMIN} if own else {}
        for key in keys:
            digest = _digest(key.secret(environment).encode())
            if digest in self._callers:
                raise SettingsError(f"the key of tenant {key.tenant} is given twice: one key, one entry")
            self._callers[digest] = Caller(key.permissions, is_admin=key.admin)
        self._asks = bool(self._callers) or file_keys is not None

    def __repr__(self) -> str:
        return f"<Keyring keys={len(self._callers)} {self._file_keys!r}>"

    def close(self) -> None:
        """Watch no file any more."""
        if self._file_keys is not None:
            self._file_keys.close()

    def caller(self, authorization: bytes | None, api_key: bytes | None = None) -> Caller:
        """Who is calling.

        Args:
            authorization: value of the `Authorization` header.
            api_key: value of `x-api-key`, where Anthropic's clients have it; counts without a bearer's key.

        Raises:
            RequestRefused: keys are configured and this is none of them, or one that is no longer valid.
        """
        if not self._asks and ((authorization is None and api_key is None) or not self._admins):
            return _ANYONE
        scheme, _, given = (authorization or b"").partition(b" ")
        secret = given if scheme.lower() == b"bearer" else api_key
        if secret is not None:
            found = self._caller_with(secret.strip())
            if found is not None:
                return found
        if not self._asks:
            return _ANYONE
        if secret is not None:
            message = (
                "the API key is not known here: check the key sent as Authorization: Bearer or x-api-key"
            )
        else:
            message = "an API key is needed: send it as Authorization: Bearer KEY, or as x-api-key"
        raise RequestRefused(Outcome.REJECTED_UNAUTHORISED, message)

    def _caller_with(self, secret: bytes) -> Caller | None:
        found = self._file_keys.caller(secret) if self._file_keys is not None else None
        if found is not None:
            return found
        digest = _digest(secret)
        return self._callers.get(digest) or self._admins.get(digest)


_ANYONE = Caller()
_ADMIN = Caller(is_admin=True)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
