"""API keys: secrets that are shown once, their salted hashes, their permissions, and key files.

A secret is `ewsjf_ID_RANDOM`. It is looked up by its id and compared by a salted hash. The id is public: it
names the key in lists, limits and the usage ledger. The random part has 256 bits, too many to guess, so one
round of a fast hash suffices. Slow password hashes protect guessable passwords, and would cost a gateway more
per request than everything else. The salt hides that two files contain the same secret.

A key file is read and replaced as a whole, so that readers see the old or the new content. Writers on one
machine are serialized by a lock on the folder. The file has mode 0600: no secrets, but private permissions.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from serve_app.errors import SettingsError
from serve_app.request import (
    MAX_FLOOR,
    MAX_TARGET_S,
    MAX_WEIGHT,
    MIN_FLOOR,
    MIN_WEIGHT,
    KeyLimits,
    KeyTerms,
    LatencyTarget,
    PriorityClass,
)

MAX_TENANT_CHARACTERS = 128

_PREFIX = "ewsjf"
_RANDOM_BYTES = 32
_ID_BYTES = 6
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_FORMAT = "ewsjf-serve keys"
_VERSION = 1

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
Limit = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(gt=0)]
TargetSeconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_TARGET_S)]


class KeysFileError(SettingsError):
    """A key file cannot be read or written; the message has the position of the error."""


class UnknownKeyError(KeysFileError):
    """A key file has no key with this id."""


def new_secret() -> tuple[str, str]:
    """Return a new id, and a secret that contains it."""
    key_id = secrets.token_hex(_ID_BYTES)
    return key_id, f"{_PREFIX}_{key_id}_{secrets.token_urlsafe(_RANDOM_BYTES)}"


def id_of(secret: bytes) -> str | None:
    """Return the id in a secret; None if it does not have the format of such a secret."""
    prefix, _, rest = secret.partition(b"_")
    key_id, separator, _ = rest.partition(b"_")
    if prefix != _PREFIX.encode() or not separator:
        return None
    return key_id.decode("latin-1")


def hashed(secret: str) -> str:
    """Return the salted hash of a secret in the format of key files."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return f"blake2b:{salt.hex()}:{_digest(secret.encode(), salt).hex()}"


def parsed_hash(text: str) -> tuple[bytes, bytes]:
    """Return salt and digest of a hash in a key file.

    Raises:
        ValueError: it has another format.
    """
    kind, _, rest = text.partition(":")
    salt, _, digest = rest.partition(":")
    found = bytes.fromhex(salt), bytes.fromhex(digest)
    if kind != "blake2b" or len(found[0]) != _SALT_BYTES or len(found[1]) != _DIGEST_BYTES:
        raise ValueError("a hash has the form blake2b:SALT:DIGEST, 16 and 32 bytes in hexadecimal digits")
    return found


def is_secret_of(secret: bytes, salt: bytes, digest: bytes) -> bool:
    """Return whether a secret has this hash, in constant time."""
    return hmac.compare_digest(_digest(secret, salt), digest)


def _digest(secret: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=_DIGEST_BYTES, salt=salt).digest()


def is_tenant_name(name: str) -> bool:
    """Return whether a name is a valid tenant: short, printable ASCII without spaces."""
    short = 0 < len(name) <= MAX_TENANT_CHARACTERS
    return short and name.isascii() and name.isprintable() and " " not in name


class KeyBudget(NamedTuple):
    """Tokens and money that a key may use in a period; None for no limit."""

    tokens: int | None
    cost: float | None


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key without its secret, from a file or a configuration.

    Attributes:
        hash: hash of the whole secret; see `hashed`.
        name: description for operators.
        weight: weight of its tenant in fair sharing; None uses `fairness.weights`.
        floor_tokens_per_s: service that its tenant gets before others; None uses `floors.tenants`.
        highest_class: highest priority class that requests may use.
        default_class: class of requests that name none; None means `default`, or the highest class if that is
            lower.
        models: model names that it may use; empty for all.
        tokens_per_day, tokens_per_month: tokens of all models that it may use in a UTC day or month.
        cost_per_day, cost_per_month: the same in money, at the prices of the models.
        ttft_target_s, tpot_target_s: latency target of its requests that state none, in seconds.
        refuse_missed: requests that are expected to miss it are rejected on arrival.
        expires_at, revoked_at: from then on, the key is rejected.
        admin: may do all that operators do: views of all tenants, keys, endpoints, and freezing tuners.
        may_act_for_tenants: `x-tenant` of its requests is trusted.
    """

    id: str
    hash: str
    tenant: str
    created_at: Moment
    name: str = ""
    weight: Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] | None = None
    floor_tokens_per_s: Annotated[float, msgspec.Meta(ge=MIN_FLOOR, le=MAX_FLOOR)] | None = None
    highest_class: PriorityClass = PriorityClass.INTERACTIVE
    default_class: PriorityClass | None = None
    models: tuple[str, ...] = ()
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent: Limit | None = None
    queued: Limit | None = None
    tokens_per_day: Limit | None = None
    tokens_per_month: Limit | None = None
    cost_per_day: Amount | None = None
    cost_per_month: Amount | None = None
    ttft_target_s: TargetSeconds | None = None
    tpot_target_s: TargetSeconds | None = None
    refuse_missed: bool = False
    expires_at: Moment | None = None
    revoked_at: Moment | None = None
    admin: bool = False
    may_act_for_tenants: bool = False

    def __post_init__(self) -> None:
        if not is_tenant_name(self.tenant):
            raise ValueError(f"tenant must be a short printable name without spaces, got {self.tenant!r}")
        if self.default_class is not None and self.default_class not in self.classes:
            raise ValueError(
                f"default_class {self.default_class} is above highest_class {self.highest_class}: lower the "
                "first or raise the second"
            )
        parsed_hash(self.hash)

    @property
    def terms(self) -> KeyTerms:
        """Terms of the key that schedulers receive with each request."""
        limits = KeyLimits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent=self.concurrent,
            queued=self.queued,
        )
        target = None
        if self.ttft_target_s is not None or self.tpot_target_s is not None or self.refuse_missed:
            target = LatencyTarget(
                ttft_s=self.ttft_target_s, tpot_s=self.tpot_target_s, refuse=self.refuse_missed
            )
        return KeyTerms(
            key_id=self.id,
            weight=self.weight,
            limits=limits,
            target=target,
            floor_tokens_per_s=self.floor_tokens_per_s,
        )

    @property
    def has_budget(self) -> bool:
        """True if a budget limits it."""
        limits = (self.tokens_per_day, self.tokens_per_month, self.cost_per_day, self.cost_per_month)
        return limits != (None, None, None, None)

    def budget(self, period: str) -> "KeyBudget":
        """Return its budget for a `day` or a `month`."""
        if period == "day":
            return KeyBudget(self.tokens_per_day, self.cost_per_day)
        return KeyBudget(self.tokens_per_month, self.cost_per_month)

    @property
    def classes(self) -> tuple[PriorityClass, ...]:
        """Classes that it may use, the highest first."""
        return tuple(each for each in PriorityClass if each.rank >= self.highest_class.rank)

    @property
    def class_of_unnamed(self) -> PriorityClass:
        """Class of requests that name none."""
        return self.default_class or max(
            self.highest_class, PriorityClass.DEFAULT, key=lambda each: each.rank
        )

    def shown(self) -> dict[str, Any]:
        """Return its fields without the hash, and its status, as lists of keys show them."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        del document["hash"]
        return {**document, "status": self.status()}

    def status(self, now: datetime | None = None) -> str:
        """Return `valid`, `expired` or `revoked`."""
        now = now or datetime.now(UTC)
        if self.revoked_at is not None and self.revoked_at <= now:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "expired"
        return "valid"


class _KeysDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    version: int
    keys: tuple[KeyRecord, ...]


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Read the keys of a file, in its order.

    Raises:
        KeysFileError: the file does not exist, or is invalid.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise KeysFileError(
            f"the keys in {path} cannot be read: {exc.strerror}; `ewsjf keys` writes them"
        ) from exc
    try:
        document = msgspec.json.decode(data, type=_KeysDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise KeysFileError(f"{path} is not a file of keys: {exc}") from exc
    if (document.format, document.version) != (_FORMAT, _VERSION):
        found = f"format {document.format!r}, version {document.version}"
        raise KeysFileError(f"{path} has {found}, expected {_FORMAT!r}, version {_VERSION}")
    ids = [key.id for key in document.keys]
    if unfit := next((each for each in ids if not (each.isascii() and each.isalnum())), None):
        raise KeysFileError(f"{path} has the id {unfit!r}: an id must consist of letters and digits")
    if twice := next((each for each in ids if ids.count(each) > 1), None):
        raise KeysFileError(f"{path} has the key {twice} twice, the second at `$.keys[{_last(ids, twice)}]`")
    return document.keys


def changed_keys(
    path: Path, change: Callable[[tuple[KeyRecord, ...]], Sequence[KeyRecord]]
) -> tuple[KeyRecord, ...]:
    """Change the keys of a file, which is created if necessary, and return the new ones.

    Raises:
        KeysFileError: the file cannot be read or written.
    """
    # Replace the target of a symbolic link, not the link.
    path = path.resolve()
    try:
        with _locked(path.parent):
            keys = tuple(change(read_keys(path) if path.exists() else ()))
            document = _KeysDocument(format=_FORMAT, version=_VERSION, keys=keys)
            _replace(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    except OSError as exc:
        raise KeysFileError(f"the keys in {path} cannot be written: {exc.strerror}") from exc
    return keys


def create_key(path: Path, **permissions: Any) -> tuple[KeyRecord, str]:
    """Add a key to a file, and return it with its secret, which is stored nowhere.

    Args:
        permissions: fields of `KeyRecord` besides its id, hash and creation time.

    Raises:
        KeysFileError: the file cannot be read or written.
        ValueError: a permission is out of range or contradicts another.
    """
    key_id, secret = new_secret()
    fields = {"id": key_id, "hash": hashed(secret), "created_at": _now(), **permissions}
    # Converted, because constructors of msgspec check no types and ranges.
    record = msgspec.convert(fields, KeyRecord)
    changed_keys(path, lambda keys: [*keys, record])
    return record, secret


def change_key(path: Path, key_id: str, **permissions: Any) -> KeyRecord:
    """Change permissions of a key in a file, and return it.

    Raises:
        KeysFileError: the file cannot be read or written, or has no such key.
        ValueError: a permission is out of range or contradicts another.
    """
    return _changed(path, key_id, lambda key: _with(key, permissions))


def revoke_key(path: Path, key_id: str) -> KeyRecord:
    """Revoke a key of a file, and return it. A revoked key keeps the time of its first revocation.

    Raises:
        KeysFileError: the file cannot be read or written, or has no such key.
    """
    return _changed(path, key_id, lambda key: _with(key, {"revoked_at": key.revoked_at or _now()}))


def _changed(path: Path, key_id: str, change: Callable[[KeyRecord], KeyRecord]) -> KeyRecord:
    def changed(keys: tuple[KeyRecord, ...]) -> Sequence[KeyRecord]:
        if key_id not in {key.id for key in keys}:
            raise UnknownKeyError(f"{path} has no key {key_id}: `keys list` shows its keys")
        return [change(key) if key.id == key_id else key for key in keys]

    read_keys(path)
    return next(key for key in changed_keys(path, changed) if key.id == key_id)


def _with(key: KeyRecord, permissions: Mapping[str, Any]) -> KeyRecord:
    return msgspec.convert({**msgspec.structs.asdict(key), **permissions}, KeyRecord)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _last(ids: Sequence[str], key_id: str) -> int:
    return len(ids) - 1 - list(reversed(ids)).index(key_id)
