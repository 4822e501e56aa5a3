"""API keys: the caller of a request, its tenant and the priority classes that it may use.

Without any key configured everyone is let in and `x-tenant` is believed: that is a laptop, or a gateway
behind another one that asks for keys. As soon as one key is configured, every call under `/v1` and to
`/tokenize` needs one, a call is its key's tenant's, and `x-tenant` counts only with a key that may act for
tenants.

Only admins may look at others' requests, also without keys: callers with a key that has `admin`, and whoever
has the application's own admin key (`serve_app.access`).

Keys are looked up by their SHA-256 digest, so neither the memory of the process holds them in clear nor does
the time of a look-up tell how much of a guess was right.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serve_app.access import ADMIN_KEY_VARIABLE, admin_key_of
from serve_app.errors import Outcome, SettingsError
from serve_app.request import PriorityClass
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.settings_base import settings

DEFAULT_TENANT = "default"
MAX_TENANT_CHARACTERS = 128


@settings
class ApiKey:
    """One API key and what it allows. Its secret is given in exactly one of three ways.

    Attributes:
        tenant: whose requests these are.
        key: the secret itself; fit for a laptop, since settings are shown in dashboards and logs.
        env: name of an environment variable of the gateway that holds the secret.
        file: path of a file that holds the secret (a mounted Kubernetes secret).
        default_class: class of a request that names none.
        allowed_classes: classes that a request with this key may name.
        may_act_for_tenants: `x-tenant` of this caller is believed (an application with tenants of its own).
        admin: may look at everybody's place in the queue (`/debug/queue`), and stop the tuner.
    """

    tenant: str
    key: str | None = field(default=None, repr=False)
    env: str | None = None
    file: str | None = None
    default_class: PriorityClass = PriorityClass.DEFAULT
    allowed_classes: tuple[PriorityClass, ...] = tuple(PriorityClass)
    may_act_for_tenants: bool = False
    admin: bool = False

    def __post_init__(self) -> None:
        if not _is_tenant_name(self.tenant):
            raise SettingsError(f"keys[].tenant must be a short printable name, got {self.tenant!r}")
        given = [name for name in ("key", "env", "file") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise SettingsError(
                f"the key of tenant {self.tenant} needs exactly one of key, env, file; got {found}"
            )
        if self.default_class not in self.allowed_classes:
            raise SettingsError(
                f"the key of tenant {self.tenant} has default_class {self.default_class}, which its "
                f"allowed_classes leave out: add it there"
            )

    def secret(self, environment: Mapping[str, str] = os.environ) -> str:
        """The secret, from wherever it is kept.

        Raises:
            SettingsError: the environment variable or file is missing or empty.
        """
        if self.key:
            return self.key
        if self.env:
            found, place = environment.get(self.env, ""), f"environment variable {self.env}"
        else:
            found, place = _file_content(self.file or "", self.tenant), f"file {self.file}"
        if not found.strip():
            raise SettingsError(f"the key of tenant {self.tenant} is empty: put it into {place}")
        return found.strip()


@dataclass(frozen=True, slots=True)
class Caller:
    """The result of authentication.

    Attributes:
        key: None where no keys are configured, and for the application's own admin key.
        is_admin: may look at everybody's requests, and stop tuners.
    """

    key: ApiKey | None = None
    is_admin: bool = False

    @property
    def default_class(self) -> PriorityClass:
        """Class of a request that names none."""
        return PriorityClass.DEFAULT if self.key is None else self.key.default_class

    def tenant(self, header: bytes | None, user: str | None) -> str:
        """Whose request it is.

        Without keys: `x-tenant`, or else the end user that the body names, or else "default". With a key: its
        tenant, or `x-tenant` when the key may act for tenants.

        Raises:
            RequestRefused: the tenant's name is malformed, or the key may not act for it.
        """
        named = None if header is None else header.decode("latin-1")
        if named is not None and not _is_tenant_name(named):
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
            raise RequestRefused(
                Outcome.REJECTED_UNAUTHORISED,
                f"this API key may not act for tenant {named}: leave x-tenant out, or use a key that may",
                param="x-tenant",
                code="not_allowed",
            )
        return named

    def check_admin(self) -> None:
        """Refuse whoever may not see other tenants' requests.

        Raises:
            RequestRefused: the key is no admin's, or there is none.
        """
        if self.is_admin:
            return
        if self.key is None:
            raise RequestRefused(
                Outcome.REJECTED_UNAUTHORISED,
                "this needs an admin's key: send Authorization: Bearer KEY with a key that has admin: true, "
                f"or with the application's own ({ADMIN_KEY_VARIABLE}), which `status` and `doctor` find by "
                "themselves on the machine of `serve`",
            )
        raise RequestRefused(
            Outcome.REJECTED_UNAUTHORISED,
            "this API key may not look at the queue: use one with admin: true",
            code="not_allowed",
        )

    def check_class(self, priority: PriorityClass, source: str) -> None:
        """Refuse a class that the key does not allow; `source` names where the request asked for it.

        Raises:
            RequestRefused: the class is not allowed.
        """
        if self.key is not None and priority not in self.key.allowed_classes:
            allowed = ", ".join(self.key.allowed_classes)
            raise RequestRefused(
                Outcome.REJECTED_UNAUTHORISED,
                f"this API key may not use the class {priority} ({source}); it may use: {allowed}",
                param=source,
                code="not_allowed",
            )


class Keyring:
    """All keys of a gateway, by digest.

    Args:
        environment: holds the application's own admin key, and secrets that keys name.

    Raises:
        SettingsError: a secret is missing, or two entries share one.
    """

    def __init__(self, keys: Iterable[ApiKey], environment: Mapping[str, str] = os.environ) -> None:
        self._callers: dict[bytes, Caller] = {}
        own = admin_key_of(environment)
        self._admins = {_digest(own.encode()): _ADMIN} if own else {}
        for key in keys:
            digest = _digest(key.secret(environment).encode())
            if digest in self._callers:
                raise SettingsError(f"the key of tenant {key.tenant} is given twice: one key, one entry")
            self._callers[digest] = Caller(key, is_admin=key.admin)

    def __repr__(self) -> str:
        return f"<Keyring keys={len(self._callers)}>"

    def caller(self, authorization: bytes | None) -> Caller:
        """Who is calling, by the value of the `Authorization` header.

        Raises:
            RequestRefused: keys are configured and this is none of them.
        """
        if not self._callers and (authorization is None or not self._admins):
            return _ANYONE
        scheme, _, secret = (authorization or b"").partition(b" ")
        is_bearer = scheme.lower() == b"bearer"
        if is_bearer:
            digest = _digest(secret.strip())
            caller = self._callers.get(digest) or self._admins.get(digest)
            if caller is not None:
                return caller
        if not self._callers:
            return _ANYONE
        if is_bearer:
            message = "the API key is not known here: check the key sent as Authorization: Bearer"
        else:
            message = "an API key is needed: send it as Authorization: Bearer KEY"
        raise RequestRefused(Outcome.REJECTED_UNAUTHORISED, message)


_ANYONE = Caller()
_ADMIN = Caller(is_admin=True)


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _file_content(path: str, tenant: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"the key of tenant {tenant} cannot be read from {path}: {exc.strerror}") from exc


def _is_tenant_name(name: str) -> bool:
    short = 0 < len(name) <= MAX_TENANT_CHARACTERS
    return short and name.isascii() and name.isprintable() and " " not in name


def _tenant_of_user(user: str | None) -> str:
    """The end user as a tenant; users may be named freely, so an unfit name is taken by its digest."""
    if not user:
        return DEFAULT_TENANT
    if _is_tenant_name(user):
        return user
    return "user-" + _digest(user.encode("utf-8", "surrogatepass")).hex()[:16]
