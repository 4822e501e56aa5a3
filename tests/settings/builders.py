"""Application arguments as in a settings file, and parser results for them."""

from typing import Any

import pytest

from serve_app.errors import SettingsError
from serve_app.settings.application import ApplicationSettings, settings_of


def emulated(**limits: Any) -> dict[str, Any]:
    return {"emulated": limits}


def pool(name: str, **changes: Any) -> dict[str, Any]:
    limits = {"short": 2_048, "long": 8_192}
    return {"name": name, "engine": emulated(max_model_len=limits[name]), **changes}


def model(**changes: Any) -> dict[str, Any]:
    return {"name": "demo", "pools": [pool("short"), pool("long")], **changes}


def parse(*models: dict[str, Any], **changes: Any) -> ApplicationSettings:
    return settings_of({"models": list(models) or [model()], **changes})


def rejection(*models: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(*models, **changes)
    return str(caught.value)
