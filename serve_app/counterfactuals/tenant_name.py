"""The name of the tenant that is left out in a replay, for those who may know it.

A recording calls tenants by names that say nothing, so that it may be passed on. Who asks a scheduler as an
admin may see the receipt of a request of that tenant, and with it the name.
"""

from collections.abc import Mapping
from typing import Any


def request_of_tenant(told: Mapping[str, Any]) -> str:
    """The id of a request by whose receipt the tenant can be named; empty where no tenant was left out."""
    return next((each["example"] for each in told["changes"] if each["kind"] == "tenant"), "")


def named(told: Mapping[str, Any], tenant: str) -> dict[str, Any]:
    """What `what_if` has told, with the tenant's name in place of the one that says nothing."""
    alias = next(each["value"] for each in told["changes"] if each["kind"] == "tenant")

    def label(text: str) -> str:
        return f"{text.removesuffix(alias)}{tenant}" if text.endswith(f" {alias}") else text

    changes = [
        {
            **each,
            "label": label(each["label"]),
            "value": tenant if each["kind"] == "tenant" else each["value"],
        }
        for each in told["changes"]
    ]
    return {**told, "changes": changes, "best": label(told["best"])}
