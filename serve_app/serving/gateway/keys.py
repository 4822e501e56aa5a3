"""Authentication: keys of the configuration, keys of a file, and the caller that each key makes.

Without any key configured everyone is let in and `x-tenant` is believed: that is a laptop, or a gateway
behind another one that asks for keys. As soon as one key is configured, or a file of keys, every call under
`/v1` and to `/tokenize` needs one, a call is its key's tenant's, and `x-tenant` counts only with a key that
may act for tenants.

Only admins may look at others' requests, also without keys: callers with a key that has `admin`, and whoever
has the application's own admin key (`serve_app.serving.access`).

Keys of the configuration are looked up by their SHA-256 digest, so neither the memory of the process holds
them in clear nor does the time of a look-up tell how much of a guess was right. They have no limits, and stay
until a deployment. Keys of a file are found by their id, and compared in constant time.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from serve_app.core.settings_base import ADVANCED, settings
from serve_app.errors import Outcome, SettingsError
from serve_app.request import KeyTerms, PriorityClass
from serve_app.serving.access import ADMIN_KEY_VARIABLE, admin_key_of
from serve_app.serving.api_keys import (
    MAX_TENANT_CHARACTERS,
    KeyRecord,
    KeysFileError,
    hashed,
    id_of,
    is_secret_of,
    is_tenant_name,
    parsed_hash,
    read_keys,
)
from serve_app.serving.gateway.answer.responses import ForbiddenError, RequestRefused

logger = logging.getLogger("ray.serve")

DEFAULT_TENANT = "default"
POLL_S = 2.0
"""Between two looks at a file of keys."""


@settings
class Secret:
    """A secret of the configuration, given in exactly one of three ways.

    Attributes:
        key: the secret itself; fit for a laptop, since settings are shown in dashboards and logs.
        env: name of an environment variable of the gateway that holds the secret.
        file: path of a file that holds the secret (a mounted Kubernetes secret).
    """

    key: str | None = field(default=None, repr=False)
    env: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        given = [place for place in ("key", "env", "file") if getattr(self, place)]
        if len(given) != 1:
            raise SettingsError(
                f"{self.purpose} needs exactly one of key, env, file; got {' and '.join(given) or 'none'}"
            )

    @property
    def purpose(self) -> str:
        """The secret's name in messages."""
        return "a secret"

    def secret(self, environment: Mapping[str, str] = os.environ) -> str:
        """Read the secret.

        Raises:
            SettingsError: the environment variable or file is missing or empty.
        """
        if self.key:
            return self.key
        if self.env:
            found, place = environment.get(self.env, ""), f"environment variable {self.env}"
        else:
            path = self.file or ""
            place = f"file {path}"
            try:
                found = Path(path).read_text(encoding="utf-8")
            except OSError as exc:
                raise SettingsError(f"{self.purpose} cannot be read from {path}: {exc.strerror}") from exc
        if not found.strip():
            raise SettingsError(f"{self.purpose} is empty: put it into {place}")
        return found.strip()


@settings
class ApiKey(Secret):
    """One API key and what it allows. Its secret is given in exactly one of three ways.

    Attributes:
        tenant: whose requests these are.
        highest_class: no request of this key may be of a class above it.
        default_class: class of a request that names none; null is `default`, or the highest class if that is
            lower.
        may_act_for_tenants: `x-tenant` of this caller is believed (an application with tenants of its own).
        admin: may look at everybody's place in the queue (`/debug/queue`), and stop the tuner.
    """

    tenant: str
    highest_class: PriorityClass = PriorityClass.INTERACTIVE
    default_class: Annotated[PriorityClass | None, ADVANCED] = None
    may_act_for_tenants: bool = False
    admin: bool = False

    def __post_init__(self) -> None:
        try:
            self.record(self.key or "unread")
        except ValueError as exc:
            raise SettingsError(f"gateway.keys: {exc}") from exc

    @property
    def purpose(self) -> str:
        """The secret's name in messages."""
        return f"the key of tenant {self.tenant}"

    def record(self, secret: str) -> KeyRecord:
        """Return the key as a file would have it. All keys of a tenant in a configuration count as one.

        Raises:
            ValueError: its settings contradict each other.
        """
        return KeyRecord(
            id=f"config/{self.tenant}",
            hash=hashed(secret),
            tenant=self.tenant,
            created_at=datetime.now(UTC),
            highest_class=self.highest_class,
            default_class=self.default_class,
            admin=self.admin,
            may_act_for_tenants=self.may_act_for_tenants,
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """The result of authentication.

    Attributes:
        key: None where no keys are configured, and for the application's own admin key.
        is_admin: may look at everybody's requests, and stop tuners.
        key_terms: those of the key, made once.
    """

    key: KeyRecord | None = None
    is_admin: bool = False
    key_terms: KeyTerms | None = None

    @classmethod
    def with_key(cls, key: KeyRecord) -> "Caller":
        """Return the caller that a key makes."""
        return cls(key, key.admin, key.terms)

    @property
    def default_class(self) -> PriorityClass:
        """Class of a request that names none."""
        return PriorityClass.DEFAULT if self.key is None else self.key.class_of_unnamed

    def tenant(self, header: bytes | None, user: str | None) -> str:
        """Whose request it is.

        Without keys: `x-tenant`, or else the end user that the body names, or else "default". With a key: its
        tenant, or `x-tenant` when the key may act for tenants.

        Raises:
            RequestRefused: the tenant's name is malformed, or the key may not act for it.
        """
        named = None if header is None else header.decode("latin-1")
        if named is not None and not is_tenant_name(named):
            raise RequestRefused(
                Outcome.REJECTED_INVALID,
                f"x-tenant: {named[:MAX_TENANT_CHARACTERS]!r} is not a tenant name: use 1 to "
                f"{MAX_TENANT_CHARACTERS} printable ASCII characters without spaces",
                param="x-tenant",
            )
        if self.key is None:
            return named or _tenant_of_user(user)
        if named is None or named == self.key.tenant:
            return self.key.tenant
        if not self.key.may_act_for_tenants:
            raise ForbiddenError(
                f"this API key may not act for tenant {named}: leave x-tenant out, or use a key that may",
                param="x-tenant",
            )
        return named

    def check_admin(self) -> None:
        """Refuse whoever may not see other tenants' requests.

        Raises:
            RequestRefused: the key is no admin's, or there is none.
        """
        if self.is_admin:
            return
        if self.key is not None:
            raise ForbiddenError("this API key may not look at the queue: use one with admin: true")
        raise RequestRefused(
            Outcome.REJECTED_UNAUTHORISED,
            "this needs an admin's key: send Authorization: Bearer KEY with a key that has admin: true, "
            f"or with the application's own ({ADMIN_KEY_VARIABLE}), which `status` and `doctor` find by "
            "themselves on the machine of `serve`",
        )

    def check_class(self, priority: PriorityClass, source: str) -> None:
        """Refuse a class that the key does not allow; `source` names where the request asked for it.

        Raises:
            RequestRefused: the class is not allowed.
        """
        if self.key is not None and priority not in self.key.classes:
            allowed = ", ".join(self.key.classes)
            raise ForbiddenError(
                f"this API key may not use the class {priority} ({source}); it may use: {allowed}",
                param=source,
            )

    def may_use(self, model: str) -> bool:
        """Whether its key allows a model."""
        return self.key is None or not self.key.models or model in self.key.models

    def check_model(self, model: str) -> None:
        """Refuse a model that the key does not allow.

        Raises:
            ForbiddenError: it does not.
        """
        if self.key is None or self.may_use(model):
            return
        allowed = ", ".join(sorted(self.key.models))
        raise ForbiddenError(
            f"this API key may not use the model {model[:100]!r}; it may use: {allowed}", param="model"
        )

    def terms(self, tenant: str) -> KeyTerms | None:
        """What schedulers are told of its key, for a request of this tenant."""
        terms = self.key_terms
        if self.key is None or terms is None or terms.weight is None or tenant == self.key.tenant:
            return terms
        # The weight of a key is that of its own tenant.
        return replace(terms, weight=None)


def _tenant_of_user(user: str | None) -> str:
    """The end user as a tenant; users may be named freely, so an unfit name is taken by its digest."""
    if not user:
        return DEFAULT_TENANT
    if is_tenant_name(user):
        return user
    return "user-" + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class FileKeys:
    """The keys of a file by id. The file is read again whenever it changes.

    A thread looks at the file every two seconds, so requests never wait for a file system, and a busy event
    loop delays no revocation. A file that cannot be read keeps the keys of before, and is logged with the
    place of the mistake: a slip of the pen must not lock everybody out.

    Args:
        poll_s: between two looks at the file.

    Raises:
        KeysFileError: the file cannot be read now, at the start.
    """

    def __init__(self, path: Path, poll_s: float = POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s
        self._seen = self._mark()
        self._entries = _entries(read_keys(path))
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="keys-file", daemon=True).start()

    def __repr__(self) -> str:
        return f"<FileKeys {self._path} keys={len(self._entries)}>"

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def caller(self, secret: bytes) -> Caller | None:
        """Whose key it is; None when it is none of these.

        Raises:
            RequestRefused: the key has expired or was revoked. Only who has the whole secret is told.
        """
        key_id = id_of(secret)
        entry = None if key_id is None else self._entries.get(key_id)
        if entry is None or not is_secret_of(secret, entry.salt, entry.digest):
            return None
        if entry.expires_at is not None or entry.revoked_at is not None:
            entry.check_validity(time.time())
        return entry.caller

    def _watch(self) -> None:
        while not self._closed.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        mark = self._mark()
        if mark == self._seen:
            return
        # Noted first: what is written while the file is read is a change that the next look finds.
        self._seen = mark
        try:
            entries = _entries(read_keys(self._path))
        except KeysFileError as exc:
            logger.error(  # noqa: TRY400 - the message says all
                "event=keys_file_broken path=%s reason=%r action=%r",
                self._path,
                str(exc),
                f"the {len(self._entries)} keys read before stay in force",
            )
        else:
            self._entries = entries
            logger.info("event=keys_file_read path=%s keys=%d", self._path, len(entries))

    def _mark(self) -> tuple[int, int, int] | None:
        """What changes with the file; None while there is none."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 - one call a look
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


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
            secret = key.secret(environment)
            digest = _digest(secret.encode())
            if digest in self._callers:
                raise SettingsError(f"the key of tenant {key.tenant} is given twice: one key, one entry")
            self._callers[digest] = Caller.with_key(key.record(secret))
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


@dataclass(frozen=True, slots=True)
class _FileKey:
    """One key, ready to be compared; times are seconds since 1970."""

    salt: bytes
    digest: bytes
    caller: Caller
    expires_at: float | None
    revoked_at: float | None

    def check_validity(self, now: float) -> None:
        for word, since in (("was revoked", self.revoked_at), ("has expired", self.expires_at)):
            if since is not None and since <= now:
                day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(since))
                raise RequestRefused(
                    Outcome.REJECTED_UNAUTHORISED, f"this API key {word} ({day}): ask for a new one"
                )


def _entries(records: tuple[KeyRecord, ...]) -> dict[str, _FileKey]:
    return {
        record.id: _FileKey(
            *parsed_hash(record.hash),
            Caller.with_key(record),
            _seconds(record.expires_at),
            _seconds(record.revoked_at),
        )
        for record in records
    }


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
