"""Changes and reads the mode of a model of a served application."""

import json
import urllib.request
from typing import Any

from experiments.common.application import Application

OBSERVE, ACTIVE = 0.0, 1.0


def set_mode(served: Application, model: str, active_share: float) -> None:
    """Schedule this share of a model's requests from now on."""
    body = json.dumps({"active_share": active_share, "model": model}).encode()
    request = urllib.request.Request(  # noqa: S310 - our own
        f"{served.url}/admin/mode",
        body,
        {**served.admin_headers(), "content-type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=10):  # noqa: S310 - see above
        pass


def mode_of(served: Application, model: str) -> dict[str, Any]:
    """How a model's requests are treated, and the last forecast."""
    models = json.loads(served.fetched("/admin/mode"))["models"]
    found: dict[str, Any] = next(one for one in models if one["model"] == model)
    return found
