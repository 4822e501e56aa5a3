"""Logins by OpenID Connect: verification of a login server's tokens, and its public keys.

A token is a JWT that the login server has signed. PyJWT verifies it with one of the server's public keys. The
token names its key only by id (`kid`): keys, URLs and certificates in its header are ignored. The algorithm
is that of the key, so neither `none` nor HS256 with a public key as secret is possible.

The claims of a token become a record like that of a key (`JwtSettings`, `LoginGroup`). Its id is
`login/GROUP/TENANT`, or `login/GROUP:CLASS/TENANT` if the class claim lowers the class. So limits, budgets
and usage work as for keys, and a batch that runs after its token has expired gets the current permissions of
its group.

Verified tokens are cached by their digest until they expire. A change of the public keys invalidates the
cache, so that a key that is no longer published verifies nothing.

A thread reads the public keys, so requests never wait for the login server. If it does not answer, the known
keys stay in effect and the thread retries with exponential backoff. A token with an unknown key wakes the
thread, at most once per ten seconds, and gets 503 until the thread has looked.

This module is imported only with `gateway.jwt`, because PyJWT and cryptography cost a gateway memory.
"""

import hashlib
import logging
import math
import random
import threading
import urllib.request
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import jwt
import msgspec

from serve_app.errors import Outcome, SettingsError
from serve_app.request import PriorityClass
from serve_app.serving.api_keys import MAX_TENANT_CHARACTERS, is_tenant_name
from serve_app.serving.gateway.answer.responses import ForbiddenError, RequestRejected
from serve_app.serving.gateway.keys import LOGIN_PREFIX, POLL_S, Caller
from serve_app.serving.gateway.settings import JwtSettings, LoginGroup

logger = logging.getLogger("ray.serve")

ALGORITHMS = ("RS256", "ES256", "EdDSA")
# Difference between the clocks of the login server and the gateway.
CLOCK_SKEW_S = 60
# Tokens with hundreds of groups have about 8 kB.
MAX_TOKEN_BYTES = 16 * 1024
MAX_VERIFIED = 4_096

_MAX_KEYS_BYTES = 1024 * 1024
_TIMEOUT_S = 10.0
_REFRESH_S = 300.0
# For this long after a successful read, a token with an unknown key is invalid. Then it causes a read.
_CURRENT_S = 10.0
_MAX_BACKOFF_S = 30.0

_REASONS: Mapping[type[jwt.PyJWTError], str] = {
    jwt.ExpiredSignatureError: "has expired: log in again",
    jwt.ImmatureSignatureError: "is not valid yet: compare the clocks of the login server and the gateway",
    jwt.InvalidAudienceError: "is for another audience: request one for {audience!r}",
    jwt.InvalidIssuerError: "is of another issuer: log in at {issuer!r}",
    jwt.InvalidSignatureError: "has a wrong signature: log in again",
    jwt.MissingRequiredClaimError: "lacks the claim {claim}",
}


class PublicKeys(NamedTuple):
    """The public keys of the login server by id, as read from `data` at `read_at` of the monotonic clock."""

    by_id: Mapping[str, jwt.PyJWK] = {}
    data: bytes = b""
    read_at: float = -math.inf


class _Verified(NamedTuple):
    """A verified token: its caller, when it expires in seconds since the epoch, and the keys at that time."""

    caller: Caller
    expires_at: int
    keys: Mapping[str, jwt.PyJWK]


class Logins:
    """Callers with a token of the login server.

    Args:
        before: logins with previous settings; their public keys remain if they are of the same source.

    Attributes:
        source: URL or path of the public keys.
        public_keys: as last read.

    Raises:
        SettingsError: the file of public keys cannot be read.
    """

    def __init__(self, settings: JwtSettings, before: "Logins | None" = None) -> None:
        self._settings = settings
        self.source = settings.jwks_url or settings.jwks_file or ""
        self.public_keys = PublicKeys()
        self._groups = {group.name: group for group in settings.groups}
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()
        self._failure = ""
        self._wake, self._is_closed = threading.Event(), False
        if before is not None and before.source == self.source:
            self.public_keys = before.public_keys
        elif settings.jwks_file is not None:
            self.public_keys = PublicKeys(keys_in(Path(settings.jwks_file)))

    def __repr__(self) -> str:
        return f"<Logins keys={len(self.public_keys.by_id)} verified={len(self._verified)}>"

    @property
    def issuer(self) -> str:
        """The login server, as its tokens name it."""
        return self._settings.issuer

    def start(self) -> None:
        """Start to read the public keys."""
        threading.Thread(target=self._follow, name="login-keys", daemon=True).start()

    def close(self) -> None:
        """Stop reading the public keys."""
        self._is_closed = True
        self._wake.set()

    def caller(self, token: bytes) -> Caller:
        """Return the caller with a token.

        Raises:
            RequestRejected: the token is invalid, or its key is not known yet.
        """
        digest = hashlib.sha256(token).digest()
        # Removed and added again, so the first one is the least recently used.
        found = self._verified.pop(digest, None)
        if found is None or found.keys is not self.public_keys.by_id or found.expires_at <= time():
            found = self._verify(token)
            if len(self._verified) >= MAX_VERIFIED:
                self._verified.popitem(last=False)
        self._verified[digest] = found
        return found.caller

    def caller_with(self, key_id: str) -> Caller:
        """Return the caller with the id of a verified token, for a request that may outlive the token.

        Raises:
            RequestRejected: the group is no longer configured.
        """
        member, _, tenant = key_id.removeprefix(LOGIN_PREFIX).partition("/")
        name, _, lowered = member.partition(":")
        group = self._groups.get(unquote(name))
        if group is None:
            message = f"the group {unquote(name)} of this request's login no longer exists; {self._known}"
            raise RequestRejected(Outcome.REJECTED_UNAUTHORISED, message)
        return _caller(group, tenant, PriorityClass(lowered or group.highest_class))

    def _verify(self, token: bytes) -> _Verified:
        if len(token) > MAX_TOKEN_BYTES:
            raise _invalid(f"has {len(token):,} bytes, and at most {MAX_TOKEN_BYTES:,} are accepted")
        settings, keys = self._settings, self.public_keys.by_id
        try:
            # Without the other parts, whose decoding costs more.
            header = jwt.get_unverified_header(token.partition(b".")[0] + b"..")
            if header.get("alg") not in ALGORITHMS:
                raise _invalid(f"is signed with an unknown algorithm; known: {', '.join(ALGORITHMS)}")
            key = keys.get(header.get("kid", ""))
            if key is None:
                raise self._unknown_key()
            claims = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=CLOCK_SKEW_S,
                options={"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            reason = _REASONS.get(type(error), "is malformed: log in again")
            claim = getattr(error, "claim", "")
            reason = reason.format(audience=settings.audience, issuer=settings.issuer, claim=claim)
            raise _invalid(reason) from error
        return _Verified(self._member(claims), int(claims["exp"]) + CLOCK_SKEW_S, keys)

    def _unknown_key(self) -> RequestRejected:
        if monotonic() - self.public_keys.read_at < _CURRENT_S:
            return _invalid("is signed with a key that the login server does not publish: log in again")
        if not self._failure:
            self._wake.set()
        reason = self._failure or "they are being read"
        return RequestRejected(
            Outcome.REJECTED_NO_REPLICA,
            f"this token's key is not among the known keys of {self.issuer}: {reason}; retry later",
            code="login_unavailable",
            status=503,
            retry_after_s=1.0,
        )

    def _member(self, claims: Mapping[str, Any]) -> Caller:
        """Return the caller that verified claims describe.

        Raises:
            ForbiddenError: the claims have no valid tenant, known group or known class.
        """
        settings = self._settings
        tenant = _claim(claims, settings.tenant_claim)
        if not isinstance(tenant, str) or not is_tenant_name(tenant):
            raise ForbiddenError(
                f"the claim {settings.tenant_claim} of this token is not a tenant name: it must have 1 to "
                f"{MAX_TENANT_CHARACTERS} printable ASCII characters without spaces"
            )
        held = _claim(claims, settings.groups_claim)
        held = [held] if isinstance(held, str) else held
        group = next((each for each in settings.groups if isinstance(held, list) and each.name in held), None)
        if group is None:
            raise ForbiddenError(
                f"the claim {settings.groups_claim} of this token has no group that may use this "
                f"application; {self._known}"
            )
        highest = claims.get(settings.class_claim or "", group.highest_class)
        if highest not in list(PriorityClass):
            raise ForbiddenError(
                f"the claim {settings.class_claim} of this token is not a class; classes: "
                f"{', '.join(PriorityClass)}"
            )
        return _caller(group, tenant, PriorityClass(highest), str(claims.get("sub", ""))[:128])

    @property
    def _known(self) -> str:
        return f"groups: {', '.join(self._groups)}"

    def _follow(self) -> None:
        """Read the public keys, until the logins are closed."""
        is_file, failures = self._settings.jwks_file is not None, 0
        while not self._is_closed:
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 - whatever keeps the keys from being read
                failures += 1
                pause_s = min(_MAX_BACKOFF_S, 2.0 ** min(failures, 9)) * random.uniform(0.5, 1.0)  # noqa: S311
                self._failure = f"they cannot be read ({error})"
                logger.error(  # noqa: TRY400 - the message says all
                    "event=jwks_unavailable source=%s reason=%r retry_s=%.1f action=%r",
                    self.source,
                    str(error),
                    pause_s,
                    f"the current {len(self.public_keys.by_id)} keys stay in effect",
                )
            else:
                failures, pause_s = 0, POLL_S if is_file else _REFRESH_S
            self._wake.clear()
            # After `clear`, because `close` sets this first.
            if not self._is_closed:
                self._wake.wait(pause_s)

    def _read(self) -> None:
        began, path = monotonic(), self._settings.jwks_file
        data = _fetched(self.source) if path is None else Path(path).read_bytes()
        keys = self.public_keys.by_id
        if data != self.public_keys.data:
            keys = _keys_of(data)
            logger.info("event=jwks_loaded source=%s keys=%d", self.source, len(keys))
        self.public_keys, self._failure = PublicKeys(keys, data, began), ""


def keys_in(path: Path) -> dict[str, jwt.PyJWK]:
    """Return the public keys in a file by id.

    Raises:
        SettingsError: it cannot be read, or has no usable key.
    """
    try:
        return _keys_of(path.read_bytes())
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise SettingsError(f"gateway.jwt.jwks_file {path} cannot be used: {reason}") from exc


def _keys_of(data: bytes) -> dict[str, jwt.PyJWK]:
    """Return the keys of a JSON Web Key Set that verify signatures, by id; raise `ValueError` without any."""
    try:
        listed = msgspec.json.decode(data, type=dict[str, Any])["keys"]
        # Every reader of the set could sign tokens with a private key.
        public = [each for each in listed if isinstance(each, dict) and "d" not in each]
        usable = jwt.PyJWKSet(public).keys
    except (jwt.PyJWTError, KeyError, RecursionError, TypeError, ValueError) as exc:
        raise ValueError(f"it is not a set of public keys (JWKS): {exc}") from exc
    found = {
        key.key_id: key
        for key in usable
        if isinstance(key.key_id, str)
        and key.public_key_use in (None, "sig")
        and key.algorithm_name in ALGORITHMS
    }
    if not found:
        raise ValueError(f"it has no public key with an id (kid) for {', '.join(ALGORITHMS)}")
    return found


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects are errors, because they could leave https."""

    def redirect_request(self, *_args: object) -> None:
        """Return no request."""


def _fetched(url: str) -> bytes:
    """Return what a URL has.

    Raises:
        OSError: the server does not answer, or with an error.
        ValueError: the answer is too long.
    """
    deadline = monotonic() + _TIMEOUT_S
    opener = urllib.request.build_opener(_NoRedirects)
    data = b""
    with opener.open(url, timeout=_TIMEOUT_S) as answer:
        # In pieces, because the timeout is that of each piece.
        while piece := answer.read1(_MAX_KEYS_BYTES):
            data += piece
            if len(data) > _MAX_KEYS_BYTES:
                raise ValueError(f"the answer has more than {_MAX_KEYS_BYTES:,} bytes")
            if monotonic() > deadline:
                raise TimeoutError(f"the answer takes more than {_TIMEOUT_S:g} s")
    return data


def _caller(group: LoginGroup, tenant: str, highest: PriorityClass, user: str = "") -> Caller:
    lowered = f":{highest}" if highest.rank > group.highest_class.rank else ""
    key_id = f"{LOGIN_PREFIX}{quote(group.name, safe='')}{lowered}/{tenant}"
    return Caller.with_key(group.record(key_id, tenant, highest, user))


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    if name not in claims:
        known = ", ".join(sorted(claims))[:500]
        raise ForbiddenError(f"this token has no claim {name}; its claims: {known}")
    return claims[name]


def _invalid(reason: str) -> RequestRejected:
    return RequestRejected(Outcome.REJECTED_UNAUTHORISED, f"this token {reason}")
