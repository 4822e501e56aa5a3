"""API keys in the configuration itself: the simple case. They have no limits, and stay until a deployment."""

import os
from collections.abc import Mapping
from dataclasses import field

from serve_app.api_keys.record import is_tenant_name
from serve_app.errors import SettingsError
from serve_app.rate_limits import KeyTerms
from serve_app.request import PriorityClass
from serve_app.serving.gateway.keys.caller import KeyPermissions
from serve_app.serving.gateway.keys.secret import check_one_place, read_secret
from serve_app.settings_base import settings


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
        if not is_tenant_name(self.tenant):
            raise SettingsError(f"keys[].tenant must be a short printable name, got {self.tenant!r}")
        check_one_place(self, self._name)
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
        return read_secret(self, self._name, environment)

    @property
    def _name(self) -> str:
        return f"the key of tenant {self.tenant}"

    @property
    def permissions(self) -> KeyPermissions:
        """What it allows. All keys of a tenant in a configuration are counted as one."""
        return KeyPermissions(
            tenant=self.tenant,
            terms=KeyTerms(key_id=f"config/{self.tenant}"),
            default_class=self.default_class,
            allowed_classes=self.allowed_classes,
            may_act_for_tenants=self.may_act_for_tenants,
        )
