"""Whoever calls, once that is known: the tenant of its requests, and what it may do."""

import hashlib
from dataclasses import dataclass, replace

from serve_app.access import ADMIN_KEY_VARIABLE
from serve_app.api_keys.record import MAX_TENANT_CHARACTERS, is_tenant_name
from serve_app.errors import Outcome
from serve_app.rate_limits import KeyTerms
from serve_app.request import PriorityClass
from serve_app.serving.gateway.answer.responses import ForbiddenError, RequestRefused

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPermissions:
    """What an API key allows, wherever it is kept.

    Attributes:
        terms: what schedulers are told of it.
        default_class: class of a request that names none.
        models: names that it may ask for; None for all.
        may_act_for_tenants: `x-tenant` of this caller is believed.
    """

    tenant: str
    terms: KeyTerms
    default_class: PriorityClass = PriorityClass.DEFAULT
    allowed_classes: tuple[PriorityClass, ...] = tuple(PriorityClass)
    models: frozenset[str] | None = None
    may_act_for_tenants: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """The result of authentication.

    Attributes:
        key: None where no keys are configured, and for the application's own admin key.
        is_admin: may look at everybody's requests, and stop tuners.
    """

    key: KeyPermissions | None = None
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
        if self.key is not None and priority not in self.key.allowed_classes:
            allowed = ", ".join(self.key.allowed_classes)
            raise ForbiddenError(
                f"this API key may not use the class {priority} ({source}); it may use: {allowed}",
                param=source,
            )

    def may_use(self, model: str) -> bool:
        """Whether its key allows a model."""
        return self.key is None or self.key.models is None or model in self.key.models

    def check_model(self, model: str) -> None:
        """Refuse a model that the key does not allow.

        Raises:
            ForbiddenError: it does not.
        """
        if self.key is None or self.key.models is None or model in self.key.models:
            return
        allowed = ", ".join(sorted(self.key.models))
        raise ForbiddenError(
            f"this API key may not use the model {model[:100]!r}; it may use: {allowed}", param="model"
        )

    def terms(self, tenant: str) -> KeyTerms | None:
        """What schedulers are told of its key, for a request of this tenant."""
        if self.key is None:
            return None
        terms = self.key.terms
        # The weight of a key is that of its own tenant.
        return terms if terms.weight is None or tenant == self.key.tenant else replace(terms, weight=None)


def _tenant_of_user(user: str | None) -> str:
    """The end user as a tenant; users may be named freely, so an unfit name is taken by its digest."""
    if not user:
        return DEFAULT_TENANT
    if is_tenant_name(user):
        return user
    return "user-" + hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()[:16]
