"""Authentication: keys of the configuration and of a file, tokens, their callers, and their budgets.

Without any configured key, all requests are accepted and `x-tenant` is trusted: for a laptop, or a gateway
behind another one that authenticates. With a configured key or a file of keys, every call except probes and
the pages of the dashboard needs a key and belongs to the key's tenant. `x-tenant` then counts only with a key
that may act for tenants.

Views of other tenants' requests are always restricted to admins: callers with a key that has `admin`, and
callers with the application's own admin key (`serve_app.serving.access`).

Configured keys are looked up by their SHA-256 digest. Process memory therefore holds no plaintext keys, and
the time of a look-up reveals nothing about partial guesses. They have no limits, and change only with a
deployment. Keys of a file are found by id and compared in constant time. A secret that is no known key and
has the form of a JWT is a token of the login server (`logins`).

`Budgets` limit tokens and money per day and month (UTC), over all models. The schedulers count what each key
has used (`scheduler.usage`), and survive a gateway. Each gateway reads the counts of the keys that are in use
about once per second, and rejects requests of a key whose budget is spent. Requests in flight, and those of
the last second, are completed and may exceed it.

A scheduler that does not respond counts with its last answer, in the day and month of that answer. Before its
first one, it counts nothing: a budget must not stop all traffic because one scheduler is being replaced.

All requests of a key that was idle wait for one read, because the counts may have changed since its last one.
"""

import asyncio
import contextvars
import hashlib
import logging
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace

from serve_app.core.admission.key_limits import TokenPrices
from serve_app.core.settings_base import ADVANCED, settings
from serve_app.errors import Outcome, SettingsError
from serve_app.request import KeyTerms, PriorityClass, Usage
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
from serve_app.serving.channel.scheduler_client import SchedulerQueries
from serve_app.serving.gateway.answer.responses import ForbiddenError, RequestRejected, header_text

if TYPE_CHECKING:
    from serve_app.serving.gateway.logins import Logins

logger = logging.getLogger("ray.serve")

_INTERVAL_S = 1.0
_RESPONSE_TIMEOUT_S = 1.0
# A key that has sent nothing for this long is no longer watched.
_IDLE_S = 60.0

PERIODS = ("day", "month")
_NEVER: tuple[date, Mapping[str, Mapping[str, list[int]]]] = (date.min, {})


class BudgetExceeded(RequestRejected):
    """The budget of a key is used up; a retry is useful only once it resets."""

    may_retry = False

    def __init__(self, message: str, reset_s: float) -> None:
        # OpenAI's code for an account without credit, which its SDKs do not retry.
        super().__init__(
            Outcome.REJECTED_RATE_LIMITED, message, code="insufficient_quota", retry_after_s=reset_s
        )


class Budgets:
    """Spending of the keys with a budget, as read from the schedulers.

    Args:
        prices: by model name; a model without prices costs nothing.
    """

    def __init__(self, queries: Mapping[str, SchedulerQueries], prices: Mapping[str, TokenPrices]) -> None:
        self._queries, self._prices = queries, prices
        # Time of the last request, by key.
        self._watched: dict[str, float] = {}
        # Date and counts by period and model name, by scheduler and key.
        self._counts: dict[str, dict[str, tuple[date, Mapping[str, Mapping[str, list[int]]]]]] = {}
        # Reads of keys that were idle.
        self._reads: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Budgets watched={len(self._watched)}>"

    async def check(self, key: KeyRecord) -> None:
        """Check the budgets of a key.

        Raises:
            BudgetExceeded: one is used up.
        """
        if key.id not in self._watched:
            self._reads[key.id] = _independent(self.read([key.id]))
            self._reads[key.id].add_done_callback(lambda _: self._reads.pop(key.id, None))
        self._watched[key.id] = monotonic()
        if self._task is None:
            self._task = _independent(self._watch())
        if (read := self._reads.get(key.id)) is not None:
            # Shielded, because other requests wait for it, too.
            await asyncio.shield(read)
        for period in PERIODS:
            tokens, cost = self.spent(key.id, period)
            limits = key.budget(period)
            if limits.tokens is not None and tokens >= limits.tokens:
                raise _exceeded(f"{limits.tokens:,} tokens per {period}", f"{tokens:,}", period)
            if limits.cost is not None and cost >= limits.cost:
                raise _exceeded(f"{limits.cost:.6g} per {period}", f"{cost:.6g}", period)

    async def read(self, keys: Sequence[str]) -> None:
        """Read what keys have used from all schedulers."""
        await asyncio.gather(*(self._read_one(model, each, keys) for model, each in self._queries.items()))

    def spent(self, key_id: str, period: str) -> tuple[int, float]:
        """Return the tokens and the cost of a key in the current day or month."""
        tokens, cost, today = 0, 0.0, datetime.now(UTC).date()
        begins = today.replace(day=1) if period == "month" else today
        for counts in self._counts.values():
            read_on, by_period = counts.get(key_id, _NEVER)
            if read_on < begins:
                continue
            for model, figures in by_period.get(period, {}).items():
                used, price = tokens_of(figures), self._prices.get(model)
                tokens += used.prompt_tokens + used.output_tokens
                cost += 0.0 if price is None else price.of(used)
        return tokens, cost

    def close(self) -> None:
        """Stop reading."""
        for task in (self._task, *self._reads.values()):
            if task is not None:
                task.cancel()

    async def _watch(self) -> None:
        while self._watched:
            await asyncio.sleep(_INTERVAL_S)
            idle_since = monotonic() - _IDLE_S
            self._watched = {key: at for key, at in self._watched.items() if at >= idle_since}
            await self.read(list(self._watched))
        self._task = None

    async def _read_one(self, model: str, scheduler: SchedulerQueries, keys: Sequence[str]) -> None:
        try:
            answer = await asyncio.wait_for(scheduler.query("spent", keys=list(keys)), _RESPONSE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever keeps one scheduler from answering
            logger.debug("event=budget_unread model=%s reason=%r", model, error)
        else:
            today = datetime.now(UTC).date()
            self._counts.setdefault(model, {}).update({key: (today, answer.get(key, {})) for key in keys})


def _independent(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Start a task in an empty context, because Ray Serve cancels a request's tasks with the request."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


def tokens_of(figures: list[int]) -> Usage:
    """Convert the counts of a row of the usage ledger: requests, prompt, cached and output tokens."""
    _, prompt, cached, generated = figures
    return Usage(prompt_tokens=prompt, cached_tokens=cached, output_tokens=generated)


def _exceeded(limit: str, spent: str, period: str) -> BudgetExceeded:
    now = datetime.now(UTC)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    reset = today + timedelta(days=1)
    if period == "month":
        # The 32nd day after a first is in the next month.
        reset = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    return BudgetExceeded(
        f"this API key has a budget of {limit} and has used {spent}: it resets at {reset:%Y-%m-%d %H:%M} UTC",
        (reset - now).total_seconds(),
    )


DEFAULT_TENANT = "default"
POLL_S = 2.0
"""Interval between checks of a key file, in seconds."""
LOGIN_PREFIX = "login/"
"""Start of the ids of callers with a token."""


@settings
class Secret:
    """A configured secret, given in exactly one of three ways.

    Attributes:
        key: the secret itself; only for a laptop, because settings appear in dashboards and logs.
        env: name of the gateway's environment variable that holds the secret.
        file: path of a file that holds the secret, such as a mounted Kubernetes secret.
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
        """Name of the secret in messages."""
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
    """An API key and its permissions. Its secret is given in exactly one of three ways.

    Attributes:
        tenant: tenant of the requests with this key.
        highest_class: highest priority class that requests may use.
        default_class: class of requests that name none; null means `default`, or the highest class if that is
            lower.
        may_act_for_tenants: trust `x-tenant` from this caller (an application with its own tenants).
        admin: allow all that operators do: views of all tenants (`/debug`, the dashboard, `/metrics`), keys,
            endpoints, the scheduled share, and freezing the tuner.
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
        """Name of the secret in messages."""
        return f"the key of tenant {self.tenant}"

    def record(self, secret: str) -> KeyRecord:
        """Return the key as a record like those of files. All configured keys of a tenant share one id.

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
    """Result of authentication.

    Attributes:
        key: None without configured keys, and for the application's own admin key.
        is_admin: may do all that operators do, see `ApiKey.admin`.
        key_terms: precomputed terms of the key.
        default_class: class of requests that name none.
    """

    key: KeyRecord | None = None
    is_admin: bool = False
    key_terms: KeyTerms | None = None
    default_class: PriorityClass = PriorityClass.DEFAULT

    @classmethod
    def with_key(cls, key: KeyRecord) -> "Caller":
        """Return the caller that a key identifies."""
        return cls(key, key.admin, key.terms, key.class_of_unnamed)

    @property
    def may_act_for_tenants(self) -> bool:
        """Whether its requests may be for other tenants."""
        return self.key is None or self.key.may_act_for_tenants

    def has_id(self, key_id: str) -> bool:
        """Return whether its key has this id."""
        return self.key is not None and self.key.id == key_id

    def if_valid(self) -> "Caller":
        """Return this caller; raise `RequestRejected` if its key has expired or was revoked."""
        if self.key is not None:
            for word, since in (("was revoked", self.key.revoked_at), ("has expired", self.key.expires_at)):
                if since is not None and since <= datetime.now(UTC):
                    moment = f"{since.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
                    raise RequestRejected(
                        Outcome.REJECTED_UNAUTHORISED, f"this API key {word} ({moment}): request a new one"
                    )
        return self

    def tenant(self, header: bytes | None, user: str | None) -> str:
        """Return the tenant of a request.

        Without keys: `x-tenant`, else the end user named in the body, else "default". With a key: its tenant,
        or `x-tenant` if the key may act for tenants.

        Raises:
            RequestRejected: the tenant's name is malformed, or the key may not act for it.
        """
        named = None if header is None else header_text(header)
        if named is not None and not is_tenant_name(named):
            raise RequestRejected(
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
                f"this API key may not act for tenant {named}: omit x-tenant, or use a key that may",
                param="x-tenant",
            )
        return named

    def check_admin(self) -> None:
        """Raise `RequestRejected` unless the caller is an admin."""
        if self.is_admin:
            return
        if self.key is not None:
            raise ForbiddenError("this API key has no admin rights: use one with admin: true")
        raise RequestRejected(
            Outcome.REJECTED_UNAUTHORISED,
            "this endpoint needs an admin key: send Authorization: Bearer KEY with a key that has admin: "
            f"true, or the application's own ({ADMIN_KEY_VARIABLE}), which the commands read "
            "automatically on the machine of `serve`",
        )

    def may_use_class(self, priority: PriorityClass) -> bool:
        """Return whether the key allows a class."""
        return self.key is None or priority.rank >= self.key.highest_class.rank

    def check_class(self, priority: PriorityClass, source: str) -> None:
        """Raise `ForbiddenError` unless the key allows a class; `source` is where the request named it."""
        if self.key is not None and not self.may_use_class(priority):
            allowed = ", ".join(self.key.classes)
            raise ForbiddenError(
                f"this API key may not use the class {priority} ({source}); it may use: {allowed}",
                param=source,
            )

    def may_use(self, model: str) -> bool:
        """Return whether the key allows a model."""
        return self.key is None or not self.key.models or model in self.key.models

    def check_model(self, model: str) -> None:
        """Raise `ForbiddenError` unless the key allows a model."""
        if self.key is None or self.may_use(model):
            return
        allowed = ", ".join(sorted(self.key.models))
        raise ForbiddenError(
            f"this API key may not use the model {model[:100]!r}; it may use: {allowed}", param="model"
        )

    def terms(self, tenant: str) -> KeyTerms | None:
        """Return the terms of the key for the scheduler, for a request of `tenant`."""
        terms = self.key_terms
        if self.key is None or terms is None or tenant == self.key.tenant:
            return terms
        if terms.weight is None and terms.floor_tokens_per_s is None:
            return terms
        # Weight and floor of a key apply to its own tenant only.
        return replace(terms, weight=None, floor_tokens_per_s=None)


def _tenant_of_user(user: str | None) -> str:
    """Return the end user as a tenant; a name that is not a valid tenant is replaced by its digest."""
    if not user:
        return DEFAULT_TENANT
    if is_tenant_name(user):
        return user
    return "user-" + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Keyring:
    """All keys of a gateway: those of the configuration by digest, those of a file by id; and tokens.

    The file is reloaded when it changes. A thread checks it, so requests never wait for a file system, and a
    busy event loop does not delay revocations. If the file cannot be read, the previous keys stay in effect
    and the error is logged with its position: a typo must not lock all clients out.

    Args:
        keys: keys of the configuration.
        environment: holds the application's own admin key, and secrets that keys refer to.
        path: file of keys, if there is one.
        poll_s: interval between checks of the file, in seconds.
        logins: verifies tokens; None accepts none. The keyring starts and closes it.

    Raises:
        KeysFileError: the file cannot be read at the start.
        SettingsError: a secret is missing, or two entries share one.
    """

    def __init__(
        self,
        keys: Iterable[ApiKey],
        environment: Mapping[str, str] = os.environ,
        path: Path | None = None,
        poll_s: float = POLL_S,
        logins: "Logins | None" = None,
    ) -> None:
        self.logins = logins
        self._by_digest: dict[bytes, Caller] = {}
        self._by_id: dict[str, Caller] = {}
        self._closed = threading.Event()
        fingerprint = None
        if path is not None:
            # Taken before reading, so that the first check finds changes made during the read.
            fingerprint = _fingerprint(path)
            self._by_id = _callers_in(path)
        for key in keys:
            secret = key.secret(environment)
            digest = _digest(secret.encode())
            if digest in self._by_digest:
                raise SettingsError(f"the key of tenant {key.tenant} occurs twice: use one entry per key")
            self._by_digest[digest] = Caller.with_key(key.record(secret))
        self._requires = bool(self._by_digest) or path is not None or logins is not None
        if own := admin_key_of(environment):
            self._by_digest.setdefault(_digest(own.encode()), _ADMIN)
        if path is not None:
            watch = (path, fingerprint, poll_s)
            threading.Thread(target=self._watch, args=watch, name="keys-file", daemon=True).start()
        if logins is not None:
            logins.start()

    def __repr__(self) -> str:
        return f"<Keyring configured={len(self._by_digest)} file={len(self._by_id)}>"

    def close(self) -> None:
        """Stop watching the file and the keys of the login server."""
        self._closed.set()
        if self.logins is not None:
            self.logins.close()

    def caller(self, authorization: bytes | None, api_key: bytes | None = None) -> Caller:
        """Return the caller of a request.

        Args:
            authorization: value of the `Authorization` header.
            api_key: value of `x-api-key`, as Anthropic's clients send it; used only without a bearer token.

        Raises:
            RequestRejected: keys are configured, and the request has none, an unknown one or an invalid one.
                That a key has expired or was revoked is reported only for the complete secret. The same for
                tokens.
        """
        scheme, _, given = (authorization or b"").partition(b" ")
        secret = given if scheme.lower() == b"bearer" else api_key
        if secret is not None and (found := self._identified(secret.strip())) is not None:
            return found
        if not self._requires:
            return _ANYONE
        if secret is not None:
            if self.logins is not None and _is_token(secret.strip()):
                return self.logins.caller(secret.strip())
            message = "unknown API key: check the key sent as Authorization: Bearer or x-api-key"
        else:
            message = "an API key is required: send it as Authorization: Bearer KEY, or as x-api-key"
        if self.logins is not None:
            message += f"; or send a token of {self.logins.issuer} as Authorization: Bearer TOKEN"
        raise RequestRejected(Outcome.REJECTED_UNAUTHORISED, message)

    def caller_with(self, key_id: str) -> Caller:
        """Return the caller with a key id; the empty id is of callers without a key.

        Raises:
            RequestRejected: there is no such key, or it is no longer valid.
        """
        if not key_id:
            return _ANYONE
        if (found := self._by_id.get(key_id)) is not None:
            return found.if_valid()
        if self.logins is not None and key_id.startswith(LOGIN_PREFIX):
            return self.logins.caller_with(key_id)
        # Configured keys of a tenant share an id; the request may be for another tenant.
        configured = [each for each in self._by_digest.values() if each.has_id(key_id)]
        if not configured:
            message = f"the API key {key_id} of this request no longer exists"
            raise RequestRejected(Outcome.REJECTED_UNAUTHORISED, message)
        return max(configured, key=lambda each: each.may_act_for_tenants)

    def _identified(self, secret: bytes) -> Caller | None:
        found = self._by_id.get(id_of(secret) or "")
        if found is not None and found.key is not None and is_secret_of(secret, *parsed_hash(found.key.hash)):
            return found.if_valid()
        return self._by_digest.get(_digest(secret))

    def _watch(self, path: Path, last: tuple[int, int, int] | None, poll_s: float) -> None:
        while not self._closed.wait(poll_s):
            fingerprint = _fingerprint(path)
            if fingerprint == last:
                continue
            last = fingerprint
            try:
                self._by_id = _callers_in(path)
            except KeysFileError as exc:
                logger.error(  # noqa: TRY400 - the message says all
                    "event=keys_file_invalid path=%s reason=%r action=%r",
                    path,
                    str(exc),
                    f"the current {len(self._by_id)} keys stay in effect",
                )
            else:
                logger.info("event=keys_file_loaded path=%s keys=%d", path, len(self._by_id))


_ANYONE = Caller()
_ADMIN = Caller(is_admin=True)


def _callers_in(path: Path) -> dict[str, Caller]:
    return {record.id: Caller.with_key(record) for record in read_keys(path)}


def _is_token(secret: bytes) -> bool:
    """Return whether a secret has the form of a signed JWT: three parts, the first of them a JSON object."""
    return secret.startswith(b"eyJ") and secret.count(b".") == 2


def _fingerprint(path: Path) -> tuple[int, int, int] | None:
    """Return a fingerprint of the file's state; None if there is no file."""
    try:
        found = os.stat(path)  # noqa: PTH116 - one call a look
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
