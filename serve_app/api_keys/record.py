"""One API key as a file has it."""

from datetime import UTC, datetime
from typing import Annotated

import msgspec

from serve_app.api_keys.secret import parsed_hash
from serve_app.rate_limits import KeyLimits, KeyTerms
from serve_app.request import PriorityClass

MAX_TENANT_CHARACTERS = 128

Moment = Annotated[datetime, msgspec.Meta(tz=True)]
Limit = Annotated[int, msgspec.Meta(ge=1)]


def is_tenant_name(name: str) -> bool:
    """Whether a name is fit for a tenant: short, printable, without spaces."""
    short = 0 < len(name) <= MAX_TENANT_CHARACTERS
    return short and name.isascii() and name.isprintable() and " " not in name


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key without its secret.

    Attributes:
        hash: of the whole secret, see `secret`.
        name: for people.
        weight: of its tenant in the fair sharing; None leaves it to `fairness.weights`.
        highest_class: no request of this key may be of a class above it.
        models: names that it may ask for; empty for all.
        expires_at, revoked_at: from then on it is refused.
        admin: may look at everybody's requests, and stop tuners.
        may_act_for_tenants: `x-tenant` of its requests is believed.
    """

    id: str
    hash: str
    tenant: str
    created_at: Moment
    name: str = ""
    weight: Annotated[float, msgspec.Meta(gt=0)] | None = None
    highest_class: PriorityClass = PriorityClass.INTERACTIVE
    models: tuple[str, ...] = ()
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    concurrent: Limit | None = None
    queued: Limit | None = None
    expires_at: Moment | None = None
    revoked_at: Moment | None = None
    admin: bool = False
    may_act_for_tenants: bool = False

    def __post_init__(self) -> None:
        if not (self.id.isascii() and self.id.isalnum()):
            raise ValueError(f"id must consist of letters and digits, got {self.id!r}")
        if not is_tenant_name(self.tenant):
            raise ValueError(f"tenant must be a short printable name without spaces, got {self.tenant!r}")
        parsed_hash(self.hash)

    @property
    def limits(self) -> KeyLimits:
        """Its limits."""
        return KeyLimits(
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            concurrent=self.concurrent,
            queued=self.queued,
        )

    @property
    def terms(self) -> KeyTerms:
        """What schedulers are told of it."""
        return KeyTerms(key_id=self.id, weight=self.weight, limits=self.limits)

    @property
    def classes(self) -> tuple[PriorityClass, ...]:
        """The classes that it may use, the highest first."""
        return tuple(each for each in PriorityClass if each.rank >= self.highest_class.rank)

    def status(self, now: datetime | None = None) -> str:
        """`valid`, `expired` or `revoked`."""
        now = now or datetime.now(UTC)
        if self.revoked_at is not None and self.revoked_at <= now:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "expired"
        return "valid"
